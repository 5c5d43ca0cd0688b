"""Export converted models by torch.export, AOTInductor and ONNX: errors, operators, and the dtypes that run.

``python -m benchmarks.deploy`` writes the figures.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from itertools import product
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
# A number whose root is not exact in floating point.
CHANNELS = 48


class InFloat32(nn.Module):
    """A layer in another dtype, with inputs and outputs in float32.

    onnxruntime takes and returns arrays of NumPy, which does not support bfloat16.
    """

    def __init__(self, layer: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer = layer
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        """Cast, apply, cast back."""
        y = first(self.layer(x.to(self.dtype)))
        return y.float()


# torchao's integer product, which torch's exporter does not support.
INT8 = {torch.ops.aten._int_mm.default: lambda a, b: opset18.MatMulInteger(a, b)}


def dynamic_shapes(example: dict[str, Tensor]) -> dict[str, dict[int, Any]]:
    """Let the batch and the length of each input vary."""
    return {name: {0: Dim.DYNAMIC, 1: Dim.DYNAMIC} for name in example}


def onnx_program(model: nn.Module, example: dict[str, Tensor]) -> torch.onnx.ONNXProgram:
    """Export a model whose inputs have a batch and a length that may vary."""
    program = torch.onnx.export(
        model,
        (),
        kwargs=example,
        dynamic_shapes=dynamic_shapes(example),
        dynamo=True,
        verbose=False,
        custom_translation_table=INT8,
    )
    assert program is not None
    return program


def onnx_session(program: torch.onnx.ONNXProgram) -> onnxruntime.InferenceSession:
    """Load an exported model into onnxruntime's CPU provider."""
    return onnxruntime.InferenceSession(
        program.model_proto.SerializeToString(), providers=["CPUExecutionProvider"]
    )


def operators(program: torch.onnx.ONNXProgram) -> list[str]:
    """Return the operators of an exported model, one for each node."""
    return [node.op_type for node in program.model_proto.graph.node]


def dtypes() -> list[dict[str, Any]]:
    """Return the largest error of onnxruntime, or its message, for each layer and dtype."""
    rows = []
    for cls, dtype in product(LAYERS, DTYPES):
        row = _dtype_row(cls, dtype)
        rows.append(row)
        print(row, flush=True)
    return rows


def _dtype_row(cls: type[nn.Module], dtype: torch.dtype) -> dict[str, Any]:
    torch.manual_seed(0)
    layer: nn.Module = cls(CHANNELS, center=True, dtype=dtype).eval()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.uniform_(0.2, 1.5)
    model = layer
    input_dtype = dtype
    if dtype == torch.bfloat16:
        model = InFloat32(layer, dtype).eval()
        input_dtype = torch.float32
    x = torch.randn(4, 16, CHANNELS, dtype=input_dtype)
    program = onnx_program(model, {"x": x})
    row: dict[str, Any] = {
        "layer": cls.__name__,
        "dtype": str(dtype).removeprefix("torch."),
        "operators": operators(program),
        "opset": program.model_proto.opset_import[0].version,
    }
    other = torch.randn_like(x[:3])
    try:
        session = onnx_session(program)
        (array,) = session.run(None, {"x": other.numpy()})
        difference = torch.from_numpy(array) - model(other)
        row["error"] = float(difference.abs().max())
    # onnxruntime's own class of errors is not public.
    except Exception as error:
        message = str(error).split(" : ")[-1]
        row["refused"] = message.split(" node with name")[0]
    return row


@torch.no_grad()
def parity() -> list[dict[str, Any]]:
    """Return the largest error of each kind of export over several sizes, for converted BERT and GPT-2."""
    rows: list[dict[str, Any]] = []

    def add(row: dict[str, Any]) -> None:
        rows.append(row)
        print(row, flush=True)

    for kind in KINDS:
        example = inputs(kind, 2, 8)
        plain = tiny_model(kind, 2)
        model = converted(plain, example)
        onnx = onnx_program(model, example)
        for road, run in _roads(model, example, onnx).items():
            errors = []
            for shape in SHAPES:
                ids = inputs(kind, *shape)["input_ids"]
                difference = run(ids) - first(model(input_ids=ids))
                errors.append(float(difference.abs().max()))
            add({"model": kind, "road": road, "error": max(errors)})
        programs = {"before": onnx_program(plain, example), "after": onnx}
        for state, program in programs.items():
            nodes = operators(program)
            norms = 0
            for name in nodes:
                if name == "LayerNormalization" or name.startswith("Reduce"):
                    norms += 1
            add(
                {
                    "model": kind,
                    "onnx": state,
                    "nodes": len(nodes),
                    "norms_and_reductions": norms,
                }
            )
    return rows


def _roads(
    model: nn.Module,
    example: dict[str, Tensor],
    onnx: torch.onnx.ONNXProgram,
) -> dict[str, Callable[[Tensor], Tensor]]:
    """Return the exported model as a function of token ids, for each kind of export."""
    shapes = dynamic_shapes(example)
    program = torch.export.export(model, (), kwargs=example, dynamic_shapes=shapes)
    exported = program.module()
    session = onnx_session(onnx)
    with tempfile.TemporaryDirectory() as folder:
        package = torch._inductor.aoti_compile_and_package(
            program, package_path=str(Path(folder) / "model.pt2")
        )
        compiled = torch._inductor.aoti_load_package(package)

    def by_onnx(ids: Tensor) -> Tensor:
        outputs = session.run(None, {"input_ids": ids.numpy()})
        return torch.from_numpy(outputs[0])

    return {
        "torch.export": lambda ids: first(exported(input_ids=ids)),
        "AOTInductor": lambda ids: first(compiled(input_ids=ids)),
        "ONNX": by_onnx,
    }
