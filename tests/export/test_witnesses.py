"""Layers with witnesses: compiled in one graph, exported and in ONNX, with no reduction over channels.

test_export.py packages them beside the pure ones.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.testing import assert_close

import dynorm
from dynorm.layers import PointwiseNorm

pytestmark = [
    # torch.export's own, and Inductor's.
    pytest.mark.filterwarnings("ignore:.isinstance.treespec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"),
    # As DyISRU's limit in the exporter's float32.
    pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning"),
]
LAYERS: list[type[PointwiseNorm]] = [
    dynorm.DyISRU,
    dynorm.DyT,
    dynorm.Derf,
    dynorm.LinearControl,
]
C, WITNESSES, GAINS = 6, (4, 1), (0.3, 2.0)
WORDS = ("sum", "mean", "var", "norm", "amax", "bmm", "mm.")


def layer_of(cls: type[PointwiseNorm], dim: int = -1) -> PointwiseNorm:
    torch.manual_seed(0)
    layer = cls(C, center=True, dim=dim).eval()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.uniform_(0.2, 1.5)
    layer.set_witnesses_(WITNESSES, GAINS)
    return layer


def tokens(*shape: int) -> Tensor:
    return torch.randn(*shape, C) * torch.tensor([1.0, 30, 1, 1, 9, 1])


@pytest.mark.parametrize("cls", LAYERS)
def test_compiled_in_one_graph_for_every_shape(cls: type[PointwiseNorm]) -> None:
    layer = layer_of(cls)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for shape in [(2, 8), (3, 11), (7, 3)]:
        x, y = (tokens(*shape).requires_grad_() for _ in range(2))
        y.data.copy_(x.data)
        ours, theirs = compiled(x), layer(y)
        assert_close(ours, theirs)
        names, own = zip(*layer.named_parameters(), strict=True)
        found = torch.autograd.grad(ours.square().sum(), [x, *own])
        wanted = torch.autograd.grad(theirs.square().sum(), [y, *own])
        for name, one, other in zip(["x", *names], found, wanted, strict=True):
            assert_close(one, other, rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.parametrize("cls", LAYERS)
@pytest.mark.parametrize("dim", [-1, 1])
def test_an_exported_layer_reduces_nothing(cls: type[PointwiseNorm], dim: int) -> None:
    layer = layer_of(cls, dim)
    x = tokens(3, 5).movedim(-1, dim)
    program = torch.export.export(layer, (x,), dynamic_shapes=({0: Dim.DYNAMIC},))
    calls = [
        str(node.target)
        for node in program.run_decompositions().graph.nodes
        if node.op == "call_function"
    ]
    assert not [name for name in calls if any(word in name for word in WORDS)]
    other = tokens(7, 5).movedim(-1, dim)
    assert_close(program.module()(other), layer(other))


class Several(nn.Module):
    """Layers of one input and as many outputs: one export serves all of them."""

    def __init__(self, layers: list[PointwiseNorm]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(layer(x) for layer in self.layers)


def operators_by_output(graph: Any) -> list[Counter[str]]:
    """Count the operators that each output of an ONNX graph comes from."""
    makers = {name: node for node in graph.node for name in node.output}
    found = []
    for output in graph.output:
        waiting, seen = [output.name], {}
        while waiting:
            node = makers.get(waiting.pop())
            if node is not None and node.output[0] not in seen:
                seen[node.output[0]] = node.op_type
                waiting += node.input
        found.append(Counter(seen.values()))
    return found


def test_onnx_gathers_and_adds_and_reduces_nothing() -> None:
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")
    counts = []
    for witnesses in ((), WITNESSES):
        model = Several([layer_of(cls) for cls in LAYERS]).eval()
        for layer in model.layers:
            layer.set_witnesses_(witnesses, GAINS[: len(witnesses)])
        shapes = {"x": {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}}
        given = {"kwargs": {"x": tokens(2, 8)}, "dynamic_shapes": shapes}
        program = torch.onnx.export(model, (), dynamo=True, verbose=False, **given)
        assert program is not None
        proto = program.model_proto
        assert not proto.functions
        counts.append(operators_by_output(proto.graph))
        session = onnxruntime.InferenceSession(
            proto.SerializeToString(), providers=["CPUExecutionProvider"]
        )
        x = tokens(3, 5)
        for got, layer in zip(session.run(None, {"x": x.numpy()}), model.layers, strict=True):
            assert_close(torch.from_numpy(got), layer(x).detach(), rtol=1e-5, atol=1e-5)
    for pure, told in zip(*counts, strict=True):
        for found in (pure, told):
            assert not [
                name
                for name in found
                if name.startswith("Reduce") or "Norm" in name or name == "CumSum"
            ]
        # The first term needs no addition but that to the constant.
        assert told["Add"] - pure["Add"] == len(WITNESSES)
        assert any(name.startswith("Gather") for name in told)


@pytest.mark.parametrize("layer", LAYERS)
def test_many_witnesses_in_onnx(layer: type[PointwiseNorm], tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")
    torch.manual_seed(0)
    module = layer(48, witnesses=tuple(range(5, 25)), center=True).eval()
    x = torch.randn(9, 48) * torch.randn(9, 1).exp()
    program = torch.onnx.export(
        module, (x,), dynamo=True, verbose=False, dynamic_shapes=({0: Dim.DYNAMIC},)
    )
    assert program is not None
    program.save(tmp_path / "layer.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "layer.onnx")
    (name,) = [value.name for value in session.get_inputs()]
    (y,) = session.run(None, {name: x[:5].numpy()})
    assert_close(torch.from_numpy(y), module(x[:5]).detach(), rtol=1e-5, atol=1e-5)
