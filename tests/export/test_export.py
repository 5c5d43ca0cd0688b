"""Layers without torch's eager mode: compiled, exported, packaged and in ONNX, with no reduction over channels."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

import dynorm
from dynorm.layers import PointwiseNorm
from tests.fresh import run

pytestmark = [
    # torch.export's own, and Inductor's.
    pytest.mark.filterwarnings("ignore:.isinstance.treespec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"),
    # As DyISRU's limit in the exporter's float32.
    pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning"),
]
LAYERS = [dynorm.DyISRU, dynorm.DyT, dynorm.Derf, dynorm.LinearControl]
C, WITNESSES, GAINS = 64, (40, 3), (0.3, 2.0)
SHAPES = [(2, 8), (3, 11), (7, 3)]
REDUCTIONS = ("sum", "mean", "var", "norm", "amax", "cumsum", "bmm", "mm.", "Reduce")
DYNAMIC = {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}

LOAD = """
import sys, torch
folder = sys.argv[1]
programs = [torch.export.load(folder + "/layers.pt2").module()]
programs.append(torch._inductor.aoti_load_package(folder + "/aoti.pt2"))
with torch.no_grad():
    found = [[program(x) for x in torch.load(folder + "/examples.pt")] for program in programs]
torch.save(found, folder + "/results.pt")
print("dynorm" in sys.modules)
"""


class Layers(nn.Module):
    """Layers in one graph. Each has its own input, because a graph shares the nodes of equal ones."""

    def __init__(self, witnesses: tuple[int, ...] = (), dim: int = -1, kinds: Any = LAYERS) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(cls(C, dim=dim) for cls in kinds)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.uniform_(0.2, 1.5)
        for layer in self.layers:
            layer.set_witnesses_(witnesses, GAINS[: len(witnesses)])

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([layer(x - 0.3 * k) for k, layer in enumerate(self.layers)])


def tokens(*shape: int) -> Tensor:
    x = torch.randn(*shape, C, generator=torch.Generator().manual_seed(0))
    x[..., list(WITNESSES)] *= 20
    return x


def reducing(names: Any) -> list[str]:
    """Return the operations that reduce something."""
    return [name for name in names if any(word in name for word in REDUCTIONS)]


def layers_with(witnesses: tuple[int, ...], dim: int = -1) -> Layers:
    """All kinds; with witnesses DyISRU only."""
    return Layers(witnesses, dim, [dynorm.DyISRU] if witnesses else LAYERS)


@pytest.mark.slow
@pytest.mark.parametrize("layer", [dynorm.DyISRU(C), dynorm.Derf(C)])
def test_a_compiled_block_is_one_loop_without_a_reduction(layer: PointwiseNorm) -> None:
    from torch._inductor.utils import run_and_get_code

    torch._dynamo.reset()

    def block(x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.silu(layer(x + y))

    x, y = tokens(2, 8), tokens(2, 8)
    with torch.no_grad():
        found, (code,) = run_and_get_code(torch.compile(block, fullgraph=True), x, y)
    assert_close(found, block(x, y))
    assert code.count("async_compile.cpp_pybinding(") == 1
    assert "reduce" not in code


# Each two of the three choices meet.
@pytest.mark.parametrize(
    ("witnesses", "dim", "strict"),
    [((), -1, False), ((), 1, True), (WITNESSES, -1, True), (WITNESSES, 1, False)],
)
def test_an_exported_graph_reduces_nothing(
    witnesses: tuple[int, ...], dim: int, strict: bool
) -> None:
    model = layers_with(witnesses, dim).eval()
    x = tokens(3, 5).movedim(-1, dim)
    program = torch.export.export(model, (x,), dynamic_shapes=({0: Dim.DYNAMIC},), strict=strict)
    nodes = program.run_decompositions().graph.nodes
    assert not reducing(str(node.target) for node in nodes if node.op == "call_function")
    other = tokens(7, 5).movedim(-1, dim)
    assert_close(program.module()(other), model(other), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_saved_and_run_where_dynorm_is_not_imported(tmp_path: Path) -> None:
    model = layers_with(WITNESSES).eval()
    examples = [tokens(*shape) for shape in SHAPES]
    program = torch.export.export(model, (examples[0],), dynamic_shapes=(DYNAMIC,))
    torch.export.save(program, tmp_path / "layers.pt2")
    # To optimize the C++ code around the loops takes longest, and headers are needed once.
    options = {
        "aot_inductor.compile_wrapper_opt_level": "O0",
        "aot_inductor.precompile_headers": False,
    }
    package = str(tmp_path / "aoti.pt2")
    torch._inductor.aoti_compile_and_package(
        program, package_path=package, inductor_configs=options
    )
    torch.save(examples, tmp_path / "examples.pt")
    assert run(LOAD, tmp_path, imported="libraries").split() == ["False"]
    for results in torch.load(tmp_path / "results.pt"):
        for got, x in zip(results, examples, strict=True):
            assert_close(got, model(x), rtol=1e-5, atol=1e-5)


def onnx_of(model: nn.Module) -> Any:
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    program = torch.onnx.export(
        model, (tokens(2, 8),), dynamo=True, dynamic_shapes=(DYNAMIC,), verbose=False
    )
    assert program is not None
    return program.model_proto


def run_onnx(proto: Any, x: Any) -> Tensor:
    import onnxruntime

    session = onnxruntime.InferenceSession(
        proto.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    (y,) = session.run(None, {session.get_inputs()[0].name: x})
    return torch.from_numpy(y)


Graph = tuple[Layers, Any]


def graph_of(witnesses: tuple[int, ...]) -> Graph:
    """Layers and their graph."""
    model = layers_with(witnesses).eval()
    return model, onnx_of(model)


@pytest.fixture(scope="module")
def graph() -> Graph:
    return graph_of(WITNESSES)


def test_onnx_reduces_nothing(graph: Graph) -> None:
    x = tokens(3, 5)
    for model, proto in (graph, graph_of(())):
        assert not proto.functions
        assert not reducing(node.op_type for node in proto.graph.node)
        assert_close(run_onnx(proto, x.numpy()), model(x).detach(), rtol=1e-5, atol=1e-5)


class RoundedToFloat16(TorchDispatchMode):
    """Round the result of every operation in float32 to float16, as a graph of float16 does."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def rounded(value: Any) -> Any:
            if isinstance(value, Tensor) and value.dtype == torch.float32:
                return value.half().float()
            return value

        return tree_map(rounded, func(*args, **(kwargs or {})))


@pytest.mark.parametrize("size", [1e-3, 1.0, 300.0, 1e4])
def test_a_graph_of_float16_overflows_nowhere(graph: Graph, size: float) -> None:
    """Other tools convert a whole graph."""
    float16 = pytest.importorskip("onnxruntime.transformers.float16")
    model, proto = graph
    x = (torch.randn(3, 8, C, generator=torch.Generator().manual_seed(0)) * size).half().float()
    with torch.no_grad(), RoundedToFloat16():
        # A mode sees the definition, which is also exported.
        found = [model(x)]
    narrow = float16.convert_float_to_float16(copy.deepcopy(proto))
    found.append(run_onnx(narrow, x.numpy().astype(np.float16)))
    exact = copy.deepcopy(model).double()(x.double()).detach()
    for results in found:
        for y, right in zip(results, exact, strict=True):
            assert float((y.double() - right).norm() / right.norm()) <= 2e-3
            assert int((y == 0).sum()) == 0
