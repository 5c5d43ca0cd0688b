"""torch.compile: converted models are one graph, for any batch and length, with fewer passes over the activations."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.testing import assert_close

import dynorm
from benchmarks.compiled import (
    KINDS,
    converted,
    count,
    first,
    fresh_compiler,
    generated_code,
    innermost_loops,
    inputs,
    kernels_of,
    tiny_model,
    written_code,
)

pytest.importorskip("transformers")
# torch's own: importing Inductor warns.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"
)
LAYERS = [dynorm.DyISRU, dynorm.DyT, dynorm.Derf]
SHAPES = [(2, 8), (3, 11), (5, 16), (7, 3)]


def equal_for_every_shape(function: Any, model: nn.Module, kind: str) -> None:
    with torch.no_grad():
        for shape in SHAPES:
            example = inputs(kind, *shape)
            assert_close(first(function(**example)), first(model(**example)), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_one_graph_for_every_shape_where_the_norm_disappears_into_its_neighbours(kind: str) -> None:
    plain, example = tiny_model(kind), inputs(kind, *SHAPES[0])
    model = converted(plain, example)
    with fresh_compiler(), written_code() as codes:
        equal_for_every_shape(torch.compile(model, fullgraph=True, dynamic=True), model, kind)
        assert counters["stats"]["unique_graphs"] == 1
        assert not counters["graph_break"]
    (code,) = codes
    before, after = count(generated_code(plain, example)), count(code)
    assert before.reductions > 0
    assert after.reductions == 0
    assert after.launches <= before.launches
    assert after.library == before.library
    assert after.loops < before.loops


class Block(nn.Module):
    """What surrounds a norm: a residual add before, a point-wise function after."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.silu(self.norm(x + y))


class Blocks(nn.Module):
    """Several blocks, each of inputs of its own, so that g++ is called once for all of them."""

    def __init__(self, blocks: list[Block]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.stack([block(*pair) for block, *pair in zip(self.blocks, x, y, strict=True)])


@pytest.mark.slow
def test_a_block_is_one_loop_and_exact_in_float64() -> None:
    blocks = Blocks([Block(cls(48, center=True, dtype=torch.float64)) for cls in LAYERS])
    with torch.no_grad():
        for parameter in blocks.parameters():
            parameter.uniform_(0.2, 1.5)
    x, y = (
        torch.randn(len(LAYERS), 5, 48, dtype=torch.float64, requires_grad=True) for _ in range(2)
    )

    def everything(function: Any) -> list[Tensor]:
        out = function(x=x, y=y)
        return [
            out,
            *torch.autograd.grad(
                (out * torch.sin(out.detach())).sum(), [x, y, *blocks.parameters()]
            ),
        ]

    for block in blocks.blocks:
        (kernel,) = kernels_of(
            generated_code(block, {"x": x[0].detach(), "y": y[0].detach()})
        ).values()
        assert innermost_loops(kernel) == 1
        assert "reduce" not in kernel
    with fresh_compiler():
        compiled = torch.compile(blocks, fullgraph=True, dynamic=True)
        assert_close(everything(compiled), everything(blocks), rtol=1e-12, atol=1e-12)


@pytest.mark.slow
def test_max_autotune() -> None:
    model = converted(tiny_model("bert"), inputs("bert", 2, 8))
    example = inputs("bert", 2, 8)
    with fresh_compiler(), torch.no_grad():
        function = torch.compile(model, fullgraph=True, mode="max-autotune")
        assert_close(first(function(**example)), first(model(**example)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "to"), [("gpt2", "dyt"), ("llama", "derf"), ("bert", "linear"), ("vit", "dyt")]
)
def test_no_graph_break_and_no_recompilation(kind: str, to: str) -> None:
    model = converted(tiny_model(kind), inputs(kind, 2, 8), to)
    torch._dynamo.reset()
    counters.clear()
    with torch._dynamo.config.patch(error_on_recompile=True):
        equal_for_every_shape(
            torch.compile(model, fullgraph=True, dynamic=True, backend="eager"), model, kind
        )
    assert counters["stats"]["unique_graphs"] == 1


def test_training_step_is_one_graph() -> None:
    model = converted(tiny_model("gpt2"), inputs("gpt2", 2, 8)).train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    torch._dynamo.reset()

    def gradients(function: Any) -> list[Tensor]:
        loss = first(function(**inputs("gpt2", 3, 9))).square().sum()
        return list(torch.autograd.grad(loss, list(model.parameters())))

    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    assert_close(gradients(compiled), gradients(model), rtol=1e-4, atol=3e-5)


def test_symbolic_trace_records_a_call_of_the_layer() -> None:
    for cls in [*LAYERS, dynorm.LinearControl, dynorm.layers.AnnealedDyISRU]:
        model = nn.Sequential(nn.Linear(4, 6), cls(6), nn.Linear(6, 2))
        traced = torch.fx.symbolic_trace(model)
        calls = [(node.op, node.target) for node in traced.graph.nodes]
        assert calls[2] == ("call_module", "1")
        x = torch.randn(3, 4)
        assert torch.equal(traced(x), model(x))
        assert traced.get_submodule("1") is model[1]


def test_symbolic_trace_of_the_layer_itself_is_refused() -> None:
    with pytest.raises(dynorm.errors.ArgumentError, match=r"layer.*itself"):
        torch.fx.symbolic_trace(dynorm.DyISRU(4))
    with pytest.raises(dynorm.errors.ArgumentError, match=r"tensor.*str"):
        dynorm.DyISRU(4)("x")


class SideBySide(nn.Module):
    """Layers, each of an input of its own, so that g++ is called once for all of them and both passes."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, inputs: list[Tensor]) -> list[Tensor]:
        return [layer(x) for layer, x in zip(self.layers, inputs, strict=True)]


@pytest.mark.slow
def test_many_witnesses_compile_with_their_gradients() -> None:
    kinds = [*LAYERS, dynorm.LinearControl]
    layers = [cls(48, witnesses=tuple(range(5, 25)), center=True) for cls in kinds]
    module = SideBySide(layers)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.uniform_(0.2, 1.5)
    with fresh_compiler():
        compiled = torch.compile(module, fullgraph=True)
        # Several times: memory that is written beyond its end shows late.
        for _ in range(4):
            given = [torch.randn(64, 48) * torch.randn(64, 1).exp() for _ in kinds]
            expected = outputs_and_gradients(module, layers, given)
            found = outputs_and_gradients(compiled, layers, given)
            for kind, got, want in zip(kinds, found, expected, strict=True):
                assert_close(
                    got, want, rtol=1e-4, atol=1e-4, msg=lambda text, kind=kind: f"{kind}: {text}"
                )


def outputs_and_gradients(
    function: Any, layers: list[dynorm.layers.PointwiseNorm], given: list[Tensor]
) -> list[list[Tensor]]:
    """Return each layer's output, and its gradients by its input and its parameters."""
    tokens = [x.clone().requires_grad_() for x in given]
    outputs = function(tokens)
    leaves = [[x, *layer.parameters()] for layer, x in zip(layers, tokens, strict=True)]
    losses = [y.sin().sum() for y in outputs]
    gradients = iter(torch.autograd.grad(losses, [leaf for row in leaves for leaf in row]))
    return [
        [y, *itertools.islice(gradients, len(row))] for y, row in zip(outputs, leaves, strict=True)
    ]
