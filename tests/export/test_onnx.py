"""ONNX: exported with dynamic sizes, run by onnxruntime in a process that imports no torch, without reductions."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.testing import assert_close

import dynorm
from benchmarks.compiled import converted, first, inputs, tiny_model
from dynorm.layers import PointwiseNorm
from tests.export.fresh import run_fresh

pytest.importorskip("transformers")
pytest.importorskip("onnxscript")
onnxruntime = pytest.importorskip("onnxruntime")
LAYERS = [dynorm.DyISRU, dynorm.DyT, dynorm.Derf, dynorm.LinearControl]
SHAPES = [(2, 8), (3, 13), (1, 2), (7, 64)]
# The exporter's own.
pytestmark = pytest.mark.filterwarnings("ignore:.isinstance.treespec:FutureWarning")

RUN = """
import sys, numpy, onnxruntime
for folder in sys.argv[1:]:
    session = onnxruntime.InferenceSession(folder + "/model.onnx", providers=["CPUExecutionProvider"])
    (name,) = [node.name for node in session.get_inputs()]
    given = numpy.load(folder + "/examples.npz")
    found = {key: session.run(None, {name: given[key]})[0] for key in given.files}
    numpy.savez(folder + "/results.npz", **found)
print("torch" in sys.modules, "dynorm" in sys.modules)
"""


def exported(model: nn.Module, example: dict[str, Tensor]) -> torch.onnx.ONNXProgram:
    shapes = {name: {0: Dim.DYNAMIC, 1: Dim.DYNAMIC} for name in example}
    program = torch.onnx.export(
        model, (), kwargs=example, dynamo=True, dynamic_shapes=shapes, verbose=False
    )
    assert program is not None
    return program


def operators(program: torch.onnx.ONNXProgram) -> Counter[str]:
    """All operators, those inside of functions too."""
    proto = program.model_proto
    return Counter(node.op_type for part in [proto.graph, *proto.functions] for node in part.node)


def reductions(found: Counter[str]) -> list[str]:
    return [
        name for name in found if name.startswith("Reduce") or "Norm" in name or name == "CumSum"
    ]


def layer_of(cls: type[PointwiseNorm], dtype: torch.dtype = torch.float32) -> PointwiseNorm:
    layer = cls(6, center=True, dtype=dtype).eval()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.uniform_(0.2, 1.5)
    return layer


def saved(kind: str, folder: Path) -> list[Tensor]:
    """Save a model and examples in a folder, and return the outputs of the model."""
    if kind in ("bert", "gpt2"):
        examples = [inputs(kind, *shape) for shape in SHAPES]
        model = converted(tiny_model(kind), examples[0])
    else:
        model = layer_of(getattr(dynorm, kind))
        examples = [{"x": torch.randn(*shape, 6)} for shape in SHAPES]
    program = exported(model, examples[0])
    # The position ids of GPT-2's mask are a sum over tokens of whole numbers, not a norm's.
    assert [
        name for name in reductions(operators(program)) if (kind, name) != ("gpt2", "CumSum")
    ] == []
    folder.mkdir()
    program.save(str(folder / "model.onnx"))
    given = {str(i): next(iter(example.values())).numpy() for i, example in enumerate(examples)}
    np.savez(folder / "examples.npz", **given)
    with torch.no_grad():
        return [first(model(**example)) for example in examples]


@pytest.mark.slow
def test_save_and_run_in_a_fresh_process(tmp_path: Path) -> None:
    expected = {
        kind: saved(kind, tmp_path / kind) for kind in ("DyISRU", "DyT", "Derf", "bert", "gpt2")
    }
    said = run_fresh(RUN, *(tmp_path / kind for kind in expected))
    assert said.split() == ["False", "False"]
    for kind, tensors in expected.items():
        results = np.load(tmp_path / kind / "results.npz")
        for i, tensor in enumerate(tensors):
            assert_close(torch.from_numpy(results[str(i)]), tensor, rtol=1e-5, atol=1e-5)


def test_the_norms_were_reductions_before() -> None:
    example = inputs("bert", 2, 8)
    plain = operators(exported(tiny_model("bert"), example))
    assert plain["LayerNormalization"] == 3
    assert reductions(plain)


class Several(nn.Module):
    """Layers of one input, between casts where that has another dtype: NumPy, onnxruntime's way in, has no bfloat16."""

    def __init__(self, layers: list[PointwiseNorm], dtype: torch.dtype) -> None:
        super().__init__()
        self.layers, self.dtype = nn.ModuleList(layers), dtype

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(layer(x.to(self.dtype)).to(x.dtype) for layer in self.layers)


# The exporter writes Python's floats, as the layer's scale, in float32.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


# As DyISRU's limit, 1e153 in float64, which is infinite then.
@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_dtypes(dtype: torch.dtype) -> None:
    if dtype == torch.float64 and torch.__version__.startswith("2.10."):
        pytest.skip("torch 2.10 cannot promote the types of float64 layers")
    # Of Derf in float64 the next test speaks.
    layers = [
        layer_of(cls, dtype) for cls in LAYERS if (cls, dtype) != (dynorm.Derf, torch.float64)
    ]
    given = torch.float32 if dtype == torch.bfloat16 else dtype
    model = Several(layers, dtype).eval()
    program = exported(model, {"x": torch.randn(2, 8, 6, dtype=given)})
    assert reductions(operators(program)) == []
    session = onnxruntime.InferenceSession(
        program.model_proto.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    x = torch.randn(3, 5, 6, dtype=given)
    tolerance = TOLERANCE[dtype]
    for got, y in zip(session.run(None, {"x": x.numpy()}), model(x), strict=True):
        assert_close(torch.from_numpy(got), y.detach(), rtol=tolerance, atol=tolerance)
    assert program.model_proto.opset_import[0].version >= 18


def test_derf_in_float64_is_exported_and_not_run() -> None:
    """onnxruntime's CPU provider has no kernel for its erf."""
    program = exported(
        layer_of(dynorm.Derf, torch.float64), {"x": torch.randn(2, 8, 6, dtype=torch.float64)}
    )
    assert reductions(operators(program)) == []
    with pytest.raises(Exception, match=r"implementation.*Erf"):
        onnxruntime.InferenceSession(
            program.model_proto.SerializeToString(), providers=["CPUExecutionProvider"]
        )


@pytest.mark.parametrize("opset", [18, 20, 21])
def test_opsets(opset: int) -> None:
    layer = layer_of(dynorm.DyISRU)
    program = torch.onnx.export(
        layer,
        (torch.randn(2, 6),),
        dynamo=True,
        opset_version=opset,
        dynamic_shapes=({0: Dim.DYNAMIC},),
        verbose=False,
    )
    assert program is not None
    assert program.model_proto.opset_import[0].version == opset
    session = onnxruntime.InferenceSession(
        program.model_proto.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    x = torch.randn(5, 6)
    (got,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    assert_close(torch.from_numpy(got), layer(x).detach(), rtol=1e-5, atol=1e-5)
