"""Layers inside the products before them: found in models of transformers, with the same outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.testing import assert_close

import dynorm
from benchmarks import fold_models
from benchmarks.gpu_models import Shape, Stack, inputs, norms
from dynorm.kernels import _op
from dynorm.kernels.fused import FuseProducts

transformers = pytest.importorskip("transformers")

OP = torch.ops.dynorm.product.default


class Recorder:
    """A backend of torch.compile that runs a graph after the pass, and keeps its products."""

    def __init__(self) -> None:
        self.products: list[torch.fx.Node] = []

    def __call__(self, module: torch.fx.GraphModule, example: Any) -> Callable[..., Any]:
        FuseProducts()(module.graph)
        module.graph.lint()
        module.recompile()
        self.products += module.graph.find_nodes(op="call_function", target=OP)
        if not torch.is_grad_enabled():
            return module.forward
        runs: Callable[..., Any] = aot_autograd(fw_compiler=lambda graph, _: make_boxed_func(graph))
        return runs(module, example)

    @property
    def keep_total(self) -> list[Any]:
        """Whether each product's sum is used by something else than its layer."""
        return [product.args[6] for product in self.products]


def compare(model: nn.Module, *args: Tensor | None, **inputs: Tensor) -> Recorder:
    """Compare a model with itself after the pass."""
    torch._dynamo.reset()
    recorder = Recorder()
    with torch.no_grad():
        expected = model(*args, **inputs)
        found = torch.compile(model, backend=recorder, fullgraph=True)(*args, **inputs)
    # A model returns its last hidden state first; a stack only this.
    assert_close(found[0], expected[0], rtol=1e-5, atol=1e-6)
    return recorder


def compare_gradients(model: nn.Module, *args: Tensor, **inputs: Tensor) -> Recorder:
    """Compare the gradients of a model with its own after the pass."""
    torch._dynamo.reset()
    recorder = Recorder()
    gradients = []
    for run in (model, torch.compile(model, backend=recorder, fullgraph=True)):
        model.zero_grad()
        outputs = run(*args, **inputs)
        # Of the sum too, where a block returns it.
        tensors = (
            [t for t in outputs if isinstance(t, Tensor)] if isinstance(outputs, tuple) else []
        )
        sum(tensor.square().sum() for tensor in tensors or [outputs[0]]).backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, expected in gradients[0].items():
        size = 0.0 if expected is None else float(expected.abs().max())
        assert_close(gradients[1][name], expected, rtol=1e-4, atol=1e-5 * max(1.0, size), msg=name)
    return recorder


@pytest.mark.parametrize(
    ("name", "fused", "kept"),
    # Two in each block, three in each of a decoder with cross-attention. A post-norm model needs
    # no sum, and neither does the last norm of an encoder or decoder.
    [
        ("gpt2", 4, 3),
        ("llama", 4, 3),
        ("bert", 4, 0),
        ("vit", 4, 3),
        ("dinov2", 4, 3),
        ("whisper", 10, 8),
    ],
)
def test_products_of_a_model_are_found(name: str, fused: int, kept: int) -> None:
    model: Any = fold_models.build(name)
    if name == "bert":
        # Nothing reads its output.
        model.pooler = None
    given = fold_models.inputs(name, model)
    dynorm.convert_(model, dynorm.find_norms(model, given))
    recorder = compare(model, **given)
    assert len(recorder.products) == fused
    assert sum(recorder.keep_total) == kept
    trained = compare_gradients(model.double(), **fold_models.inputs(name, model))
    # The backward pass reads every sum.
    assert trained.keep_total == [True] * fused


@pytest.mark.parametrize("kind", ["pre", "post", "gated"])
@pytest.mark.parametrize("cached", [0, 3])
def test_products_of_the_benchmark_are_found(kind: str, cached: int) -> None:
    shape = Shape(32, 2, 48, 2, 2, 5, kind, cached)
    stack = Stack(shape, norms(shape)["dyisru"]).eval()
    x, cache = inputs(shape)
    assert len(compare(stack, x, cache).products) == 2 * shape.blocks


class Block(nn.Module):
    """A product, what ``between`` does with it, and a layer."""

    def __init__(self, between: Callable[[Tensor, Tensor], Any], **options: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.layer = dynorm.DyISRU(16, **options)
        self.between = between

    def forward(self, x: Tensor) -> Any:
        """Return the layer's output, and the total where ``between`` returns it."""
        total = self.between(self.linear(x), x)
        return self.layer(total), total


@pytest.mark.parametrize(
    ("between", "options"),
    [
        (lambda y, x: y, {}),
        (lambda y, x: y + x, {}),
        (lambda y, x: torch.add(x, y), {"elementwise_affine": False}),
        (lambda y, x: x + 2 * torch.ones(16) * y, {"weight_offset": 1.0}),
    ],
)
def test_forms_of_a_sum_that_are_fused(
    between: Callable[[Tensor, Tensor], Any], options: dict[str, Any]
) -> None:
    recorder = compare(Block(between, **options), torch.randn(3, 5, 16))
    assert recorder.keep_total == [True]


@pytest.mark.parametrize(
    ("between", "options"),
    [
        (lambda y, x: y + x, {"witnesses": 2}),
        (lambda y, x: y + x, {"dim": 1}),
        # The product is used twice, scaled by a number, or added to a row.
        (lambda y, x: y + x + y, {}),
        (lambda y, x: torch.sub(y, x), {}),
        (lambda y, x: torch.add(y, x, alpha=2), {}),
        (lambda y, x: y + x[:1], {}),
        (lambda y, x: (y + x).relu(), {}),
    ],
)
def test_forms_that_are_left(
    between: Callable[[Tensor, Tensor], Any], options: dict[str, Any]
) -> None:
    block, x = Block(between, **options), torch.randn(3, 16, 16)
    assert compare(block, x).products == []
    assert compare_gradients(block, x).products == []


def test_autocast_is_left() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        recorder = compare(Block(lambda y, x: y + x), torch.randn(3, 16))
    assert recorder.products == []


@pytest.mark.parametrize("enabled", [True, False], ids=["kernels", "definition"])
@pytest.mark.parametrize("frozen", ["linear", "layer"])
@pytest.mark.parametrize(
    "between",
    [lambda y, x: y, lambda y, x: y + x, lambda y, x: x + 2 * torch.ones(16, dtype=y.dtype) * y],
)
def test_gradients_of_a_block(
    between: Callable[[Tensor, Tensor], Any],
    frozen: str,
    enabled: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_op, "ENABLED", enabled)
    block = Block(between).double()
    block.get_submodule(frozen).requires_grad_(False)
    x = torch.randn(3, 5, 16, dtype=torch.float64, requires_grad=True)
    assert compare_gradients(block, x).keep_total == [True]


class Residual(Block):
    """A block that gives its residual to the layer."""

    def forward(self, x: Tensor) -> Any:
        """Return the layer's output and the sum."""
        return self.layer(self.linear(x), residual=x)


def test_training_with_a_residual_of_the_layer() -> None:
    block = Residual(lambda y, x: y).double()
    x = torch.randn(3, 5, 16, dtype=torch.float64, requires_grad=True)
    assert compare_gradients(block, x).keep_total == [True]


def test_the_op_is_a_proper_operator() -> None:
    x, weight, constant = torch.randn(3, 8), torch.randn(16, 8), torch.ones(1)
    arguments = (x, weight, False, None, None, None, True, constant, None, None, None)
    torch.library.opcheck(OP, (*arguments, 0, True, 2.0))


@pytest.mark.parametrize("transposed", [False, True])
def test_the_gradients_of_the_op(transposed: bool) -> None:
    def tensor(*shape: int) -> Tensor:
        return torch.rand(shape, dtype=torch.float64, requires_grad=True)

    weight = tensor(3, 4) if transposed else tensor(4, 3)
    inputs = (
        tensor(2, 3),
        weight,
        tensor(4),
        tensor(4),
        tensor(2, 4),
        tensor(1),
        tensor(4),
        tensor(4),
    )

    def op(*tensors: Tensor) -> Any:
        x, weight, bias, factor, residual, constant, layer_weight, layer_bias = tensors
        product = (x, weight, transposed, bias, factor, residual, True)
        return OP(*product, constant, None, layer_weight, layer_bias, 0, True, 2.0)

    assert torch.autograd.gradcheck(op, inputs)


def test_a_number_of_rows_that_depends_on_data(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr(_op, "ENABLED", False)
    layer, x = dynorm.DyISRU(8), torch.randn(6, 8)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(
            lambda x, mask: layer(x[mask]), backend="aot_eager", fullgraph=True
        )
        for trained in (False, True):
            with torch.set_grad_enabled(trained):
                assert_close(compiled(x, x[:, 0] > 0), layer(x[x[:, 0] > 0]))


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
def test_options_of_compile() -> None:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(16, 16), dynorm.DyISRU(16)).requires_grad_(False)
    x = torch.randn(3, 16)
    compiled = torch.compile(model, options=dynorm.compile_options(epilogue_fusion=False))
    assert_close(compiled(x), model(x))


def test_the_gradient_of_one_constant_is_the_sum_of_the_rows_sums(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr(_op, "ENABLED", False)
    sums: list[Any] = []

    def backward(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        for node in graph.graph.find_nodes(
            op="call_function", target=torch.ops.aten.sum.dim_IntList
        ):
            sums.append(node.args[1])
        return make_boxed_func(graph.forward)

    def forward(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=forward, bw_compiler=backward)
    layer = torch.compile(dynorm.DyISRU(8), backend=backend)
    layer(torch.randn(3, 5, 8, requires_grad=True)).sum().backward()
    # Of rows of 8 channels first, then over the 15 rows: for the weight and the bias, and for the constant.
    assert sums.count([2]) == 1
    assert sums.count([0, 1]) == 3
