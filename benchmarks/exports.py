"""What torch.export, AOTInductor and ONNX make of converted models: parity, operators, and the dtypes that run.

``python -m benchmarks.deploy`` writes the figures.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import onnxruntime
import torch
from onnxscript import opset18
from torch import Tensor, nn
from torch.export import Dim

import dynorm
from benchmarks.compiled import converted, first, inputs, tiny_model

LAYERS = (dynorm.DyISRU, dynorm.DyT, dynorm.Derf, dynorm.LinearControl)
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
SHAPES = ((3, 13), (1, 2), (7, 64))
KINDS = ("bert", "gpt2")
# Its root is no float.
CHANNELS = 48


class InFloat32(nn.Module):
    """A layer in another dtype between casts: NumPy, onnxruntime's way in and out, has no bfloat16."""

    def __init__(self, layer: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer, self.dtype = layer, dtype

    def forward(self, x: Tensor) -> Tensor:
        """Cast, apply, cast back."""
        return first(self.layer(x.to(self.dtype))).float()


# torchao's integer product, which torch's exporter does not know.
INT8 = {torch.ops.aten._int_mm.default: lambda a, b: opset18.MatMulInteger(a, b)}


def onnx_program(model: nn.Module, example: dict[str, Tensor]) -> torch.onnx.ONNXProgram:
    """Export a model whose inputs have a batch and a length that may vary."""
    shapes = {name: {0: Dim.DYNAMIC, 1: Dim.DYNAMIC} for name in example}
    options: dict[str, Any] = {"dynamo": True, "verbose": False, "custom_translation_table": INT8}
    program = torch.onnx.export(model, (), kwargs=example, dynamic_shapes=shapes, **options)
    assert program is not None
    return program


def onnx_session(program: torch.onnx.ONNXProgram) -> onnxruntime.InferenceSession:
    """Load an exported model into onnxruntime's CPU provider."""
    return onnxruntime.InferenceSession(
        program.model_proto.SerializeToString(), providers=["CPUExecutionProvider"]
    )


def dtypes() -> list[dict[str, Any]]:
    """Return, for each layer and dtype, the largest error of onnxruntime, or its message."""
    rows = []
    for cls in LAYERS:
        for dtype in DTYPES:
            torch.manual_seed(0)
            bfloat = dtype == torch.bfloat16
            layer: nn.Module = cls(CHANNELS, center=True, dtype=dtype).eval()
            with torch.no_grad():
                for parameter in layer.parameters():
                    parameter.uniform_(0.2, 1.5)
            model = InFloat32(layer, dtype).eval() if bfloat else layer
            x = torch.randn(4, 16, CHANNELS, dtype=torch.float32 if bfloat else dtype)
            program = onnx_program(model, {"x": x})
            row = {"layer": cls.__name__, "dtype": str(dtype).removeprefix("torch.")}
            row["operators"] = [node.op_type for node in program.model_proto.graph.node]
            row["opset"] = program.model_proto.opset_import[0].version
            other = torch.randn_like(x[:3])
            try:
                (got,) = onnx_session(program).run(None, {"x": other.numpy()})
                row["error"] = float((torch.from_numpy(got) - model(other)).abs().max())
            # Its own class of errors has no public name.
            except Exception as error:
                row["refused"] = str(error).split(" : ")[-1].split(" node with name")[0]
            rows.append(row)
            print(row, flush=True)
    return rows


@torch.no_grad()
def parity() -> list[dict[str, Any]]:
    """Return the largest error of each road over several batches and lengths, for converted BERT and GPT-2."""
    rows = []
    for kind in KINDS:
        example = inputs(kind, 2, 8)
        plain = tiny_model(kind, 2)
        model = converted(plain, example)
        shapes = {name: {0: Dim.DYNAMIC, 1: Dim.DYNAMIC} for name in example}
        program = torch.export.export(model, (), kwargs=example, dynamic_shapes=shapes)
        onnx = onnx_program(model, example)
        session = onnx_session(onnx)
        with tempfile.TemporaryDirectory() as folder:
            package = torch._inductor.aoti_compile_and_package(
                program, package_path=str(Path(folder) / "model.pt2")
            )
            compiled = torch._inductor.aoti_load_package(package)
        flat = program.module()
        roads = {
            "torch.export": lambda ids, run=flat: first(run(input_ids=ids)),
            "AOTInductor": lambda ids, run=compiled: first(run(input_ids=ids)),
            "ONNX": lambda ids, run=session.run: torch.from_numpy(
                run(None, {"input_ids": ids.numpy()})[0]
            ),
        }
        for road, run in roads.items():
            examples = [inputs(kind, *shape)["input_ids"] for shape in SHAPES]
            errors = [
                float((run(ids) - first(model(input_ids=ids))).abs().max()) for ids in examples
            ]
            rows.append({"model": kind, "road": road, "error": max(errors)})
            print(rows[-1], flush=True)
        for state, exported in (("before", onnx_program(plain, example)), ("after", onnx)):
            names = [node.op_type for node in exported.model_proto.graph.node]
            norms = sum(name == "LayerNormalization" or name.startswith("Reduce") for name in names)
            rows.append(
                {"model": kind, "onnx": state, "nodes": len(names), "norms_and_reductions": norms}
            )
            print(rows[-1], flush=True)
    return rows
