"""Where a kernel serves and where the definition is traced; autograd, transforms, modes."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.func import functional_call, jacrev, vmap
from torch.testing import assert_close

from dynorm import Derf, DyISRU, DyT, LinearControl
from dynorm.errors import ArgumentError
from dynorm.kernels import _cpu, _op, _triton, pointwise
from dynorm.kernels._form import Form, FunctionCode, Parameters, UnfitError
from dynorm.layers import PointwiseNorm
from tests.kernels.definition import FUNCTIONS, KINDS, make

LAYERS = [DyISRU, DyT, Derf, LinearControl]
needs_kernels = pytest.mark.skipif(
    _cpu.name() == "torch", reason="the CPU kernels are not built: make setup"
)


@pytest.fixture(autouse=True)
def _enabled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels on, whatever DYNORM_KERNELS says; where they are not built, torch serves."""
    monkeypatch.setattr(_op, "ENABLED", True)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels called, in order."""
    called: list[str] = []
    for name in ("forward", "gradients"):
        real = getattr(_cpu, name)

        def record(*args: Any, real: Any = real, name: str = name) -> Any:
            called.append(name)
            return real(*args)

        monkeypatch.setattr(_cpu, name, record)
    return called


def build(kind: type[PointwiseNorm], *args: Any, **options: Any) -> PointwiseNorm:
    layer = kind(*args, **options)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(0.5, 0.2)
    return layer


def with_gradients(layer: PointwiseNorm, x: Tensor) -> list[Tensor]:
    leaf = x.detach().requires_grad_()
    y = layer(leaf)
    grad = torch.linspace(-1, 1, y.numel()).reshape(y.shape)
    return [y.detach(), *torch.autograd.grad(y, [leaf, *layer.parameters()], grad)]


def test_functions_have_the_numbers_of_the_c_side() -> None:
    source = Path(_op.__file__).with_name("csrc").joinpath("types.h").read_text()
    (names,) = re.findall(r"enum Function { (.*?), kNamed", source)
    numbers = {name: code for code, name in enumerate(names.replace(" = 0", "").split(", "))}
    assert {f"k{code.name.capitalize()}": code.value for code in FunctionCode} == numbers


class Wrapped(Tensor):
    pass


def test_which_tensors_the_kernels_take() -> None:
    x, one, four, two = torch.ones(3, 4), torch.ones(1), torch.ones(4), torch.ones(2)

    def fits(x: Tensor = x, tokens: Tensor | None = None, **parameters: Tensor) -> bool:
        """Both checks, which must agree."""
        named = Parameters(**{"constant": one} | parameters)
        by_python = _triton.fits(x, named, tokens)
        try:
            _cpu.forward((0, False, 1.0), x, named, tokens)
        except UnfitError:
            assert not by_python
        else:
            assert by_python
        return by_python

    assert fits()
    assert fits(shift=one, weight=four, bias=four)
    assert fits(tokens=torch.ones(3))
    assert fits(torch.ones(5, 2, 3, 4).permute(2, 0, 1, 3), torch.ones(5, 2, 3).permute(2, 0, 1))
    refused: list[dict[str, Tensor]] = [
        {"constant": two},
        {"constant": four},
        {"shift": four},
        {"weight": one},
        {"bias": two},
        {"weight": torch.ones(8)[::2]},
        {"weight": torch.ones(4, dtype=torch.int32)},
        {"weight": torch._neg_view(four)},
        {"weight": four.as_subclass(Wrapped)},
        {"tokens": torch.ones(4)},
        {"tokens": torch.ones(3, dtype=torch.bfloat16)},
        {"tokens": torch.ones(3).as_subclass(Wrapped)},
        {"x": torch.ones(2, 3, 4).transpose(0, 1), "tokens": torch.ones(3, 2)},
        {"x": x.int()},
        {"x": x.to(torch.float8_e5m2)},
        {"x": x.to_sparse()},
        {"x": torch.tensor(1.0)},
        {"x": torch._neg_view(x)},
        {"x": torch.ones(3, 0)},
        {"x": torch.ones(4, 3).t()},
        {"x": torch.ones(3, 8)[:, :4]},
        {"x": torch.ones(4).expand(3, 4)},
        {"weight": four.to("meta")},
    ]
    assert [fits(**change) for change in refused] == [False] * len(refused)


LAYOUTS: dict[str, tuple[int, Callable[[], Tensor]]] = {
    "every second": (-1, lambda: torch.randn(4, 12)[:, ::2]),
    "transposed": (-1, lambda: torch.randn(6, 4).t()),
    "channels first": (1, lambda: torch.randn(2, 6, 3, 5)),
    "channels last in memory": (1, lambda: torch.randn(2, 3, 5, 6).movedim(-1, 1)),
    "one axis": (0, lambda: torch.randn(6)),
    "empty": (-1, lambda: torch.randn(0, 6)),
}


@needs_kernels
@pytest.mark.parametrize(("layer_class", "witnesses"), [(Derf, ()), (DyISRU, (5, 0))], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(
    layer_class: type[PointwiseNorm],
    witnesses: tuple[int, ...],
    layout: str,
    calls: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dim, make_x = LAYOUTS[layout]
    layer = build(layer_class, 6, dim=dim, witnesses=witnesses)
    x = make_x()
    got = with_gradients(layer, x)
    assert calls == ["forward", "gradients"]
    monkeypatch.setattr(_op, "ENABLED", False)
    for a, b in zip(got, with_gradients(layer, x), strict=True):
        assert_close(a, b, rtol=1e-5, atol=1e-5)


# torch's own forward mode scripts its decompositions.
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *((kind, options) for kind in LAYERS for options in ({}, {"dim": 1})),
        (DyISRU, {"witnesses": (2, 0)}),
    ],
)
def test_derivatives(kind: type[PointwiseNorm], options: dict[str, Any], calls: list[str]) -> None:
    layer = build(kind, 3, **options, dtype=torch.float64)
    names = [name for name, _ in layer.named_parameters()]

    def call(x: Tensor, *values: Tensor) -> Tensor:
        return functional_call(layer, dict(zip(names, values, strict=True)), (x,))

    leaves = (torch.randn(2, 3, 3, dtype=torch.float64, requires_grad=True), *layer.parameters())
    assert gradcheck(call, leaves, check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(call, leaves)
    assert ("gradients" in calls) == (_cpu.name() != "torch")
    # A gradient that can be differentiated again is that of the definition too.
    x, grad = leaves[0], torch.randn(2, 3, 3, dtype=torch.float64)
    (want,) = torch.autograd.grad(layer.definition(x), x, grad)
    (got,) = torch.autograd.grad(layer(x), x, grad, create_graph=True)
    assert_close(got, want)
    y = layer(x)
    (batched,) = vmap(lambda v: torch.autograd.grad(y, x, v, retain_graph=True))(grad[None])
    assert_close(batched[0], want)


@needs_kernels
@pytest.mark.parametrize("of", KINDS[2:])
def test_derivatives_by_the_numbers_of_tokens(of: str) -> None:
    x, parameters, token_constant, _ = make(3, 4, torch.float64, of, FunctionCode.DYISRU)
    tensors = [x, *parameters, token_constant]
    places = [place for place, tensor in enumerate(tensors) if tensor is not None]

    def call(*leaves: Tensor) -> Tensor:
        given = list(tensors)
        for place, leaf in zip(places, leaves, strict=True):
            given[place] = leaf
        results = pointwise((0, False, 1.5), given[0], None, given[1:5], given[5])
        assert results is not None
        return results[0]

    leaves = [tensors[place].clone().requires_grad_() for place in places]  # type: ignore[union-attr]
    assert gradcheck(call, leaves)
    assert gradgradcheck(call, leaves)


@pytest.mark.parametrize("function", FUNCTIONS[1:])
def test_numbers_of_tokens_are_for_dyisru(function: FunctionCode) -> None:
    x, parameters, token_constant, _ = make(3, 4, torch.float64, "bare of tokens", function)
    form = Form(function, False, 1.5)
    for call in (
        lambda: pointwise(form, x, None, parameters, token_constant),
        lambda: form.definition(x, parameters, token_constant),
        lambda: _op._op(x, None, *parameters, token_constant, *form),
    ):
        with pytest.raises(ArgumentError, match=f"except DyISRU.*came for {function.name}"):
            call()


@needs_kernels
def test_a_gradient_that_is_a_view_with_its_sign_changed() -> None:
    layer, x = DyISRU(4), torch.randn(3, 4, requires_grad=True)
    grad = torch.randn(3, 4)
    (want,) = torch.autograd.grad(layer(x), x, -grad)
    (got,) = torch.autograd.grad(layer(x), x, torch._neg_view(grad))
    assert torch.equal(got, want)


def test_nothing_but_x_and_parameters_is_saved(kind: type[PointwiseNorm]) -> None:
    layer = build(kind, 8)
    x = torch.randn(4, 8, requires_grad=True)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        layer(x)
    if _cpu.name() != "torch":
        own = {t.data_ptr() for t in (x, *layer.parameters())}
        assert {t.data_ptr() for t in saved} == own
    y = layer(x)
    with torch.no_grad():
        x.mul_(2)
    with pytest.raises(RuntimeError, match=r"modified.*operation"):
        y.sum().backward()


def test_only_what_is_asked_for_gets_a_gradient(kind: type[PointwiseNorm]) -> None:
    layer = build(kind, 8).requires_grad_(False)
    x = torch.randn(4, 8)
    assert not layer(x).requires_grad
    layer.weight.requires_grad_()
    layer(x).sum().backward()
    assert layer.weight.grad is not None
    assert all(p.grad is None for p in layer.parameters() if p is not layer.weight)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_transforms_take_the_definition(kind: type[PointwiseNorm], calls: list[str]) -> None:
    layer = build(kind, 4, dtype=torch.float64)
    x = torch.randn(5, 4, dtype=torch.float64)
    want = layer(x).detach()
    calls.clear()
    assert_close(vmap(layer)(x), want)
    jacobian = jacrev(layer)(x[0])
    assert_close(jacobian, jacobian.diagonal().diag(), rtol=0, atol=0)
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(
            layer(forward_ad.make_dual(x[0], torch.ones_like(x[0])))
        ).tangent
    assert_close(tangent, jacobian.diagonal())
    stacked = {name: torch.stack([p, p + 1]) for name, p in layer.named_parameters()}
    both = vmap(lambda p: functional_call(layer, p, (x,)))(stacked)
    assert_close(both[0], want)
    assert calls == []


def leaked(value: Tensor) -> Tensor:
    """The tensor that stood for a value inside two transforms of torch.func."""
    seen: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        seen.append(tensor)
        return tensor.sum()

    derivative = torch.func.grad(keep)
    torch.func.grad(lambda outer: derivative(outer).sum())(value)
    return seen[0]


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("role", ["x", "residual", "weight"])
def test_a_tensor_that_has_left_a_transform_is_computed_with(role: str, trained: bool) -> None:
    layer = build(DyISRU, 4).requires_grad_(trained)
    given = {"x": torch.randn(3, 4), "residual": torch.randn(3, 4), "weight": torch.randn(4)}
    results = []
    for take in (torch.clone, leaked):
        own = given | {role: take(given[role])}
        y, total = functional_call(layer, {"weight": own["weight"]}, (own["x"], own["residual"]))
        results.append([y, total])
        if trained:
            results[-1] += torch.autograd.grad(y.sum(), [layer.bias, layer.log_beta])
    want, got = results
    assert_close(got, want)


@pytest.mark.filterwarnings(
    "ignore:.*torch.jit.*:DeprecationWarning", "ignore::torch.jit.TracerWarning"
)
def test_tracers_modes_and_subclasses_take_the_definition(
    kind: type[PointwiseNorm], calls: list[str]
) -> None:
    from torch._subclasses import FakeTensorMode
    from torch.utils.flop_counter import FlopCounterMode

    layer = build(kind, 4)
    x = torch.randn(2, 4)
    assert isinstance(layer(x.as_subclass(Wrapped)), Wrapped)
    with FlopCounterMode(display=False):
        layer(x)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert layer(mode.from_tensor(x)).shape == x.shape
    with torch.device("cpu"):
        layer(x)
    exported = torch.export.export(layer, (x,), strict=False)
    traced = torch.jit.trace(layer, (x,), check_trace=False)
    assert calls == []
    other = torch.randn(2, 4)
    assert_close(traced(other), layer(other))
    assert_close(exported.module()(other), layer(other))
    assert "dynorm" not in str(exported.graph)


def compiled_graph(layer: nn.Module, *inputs: Tensor) -> str:
    """The one graph of a call under torch.compile, which computes the same."""
    graphs: list[str] = []

    def keep(module: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(str(module.graph))
        return module.forward

    torch._dynamo.reset()
    assert_close(torch.compile(layer, backend=keep, fullgraph=True)(*inputs), layer(*inputs))
    (graph,) = graphs
    return graph


def test_compiled_inference_holds_the_definition(kind: type[PointwiseNorm]) -> None:
    layer, x = build(kind, 8), torch.randn(3, 8)
    with torch.no_grad():
        assert "dynorm.pointwise" not in compiled_graph(layer, x)
    assert "dynorm.pointwise" not in compiled_graph(layer.requires_grad_(False), x)


@needs_kernels
def test_compiled_training_holds_the_op(kind: type[PointwiseNorm]) -> None:
    layer, x = build(kind, 8), torch.randn(3, 8)
    assert compiled_graph(layer, x).count("dynorm.pointwise") == 1
    assert "dynorm.pointwise" not in compiled_graph(layer, x.as_subclass(Wrapped))


@needs_kernels
@pytest.mark.parametrize("of", KINDS)
def test_the_op_is_as_torch_wants_one(of: str) -> None:
    function = FunctionCode.DYISRU if of.endswith("tokens") else FunctionCode.DERF
    x, parameters, token_constant, _ = make(5, 8, torch.float32, of, function)
    residual = None if token_constant is None else torch.randn_like(x)
    for tensor in (x, residual, *parameters, token_constant):
        if tensor is not None:
            tensor.requires_grad_()
    arguments = (x, residual, *parameters, token_constant, int(function), False, 1.5)
    torch.library.opcheck(_op._op, arguments)
    # The definition serves.
    shared = (x.t().contiguous().t(), *arguments[1:])
    torch.library.opcheck(_op._op, shared, test_utils=("test_schema", "test_faketensor"))


@needs_kernels
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method.:DeprecationWarning")
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_training_gives_the_same_gradients_at_every_size(
    backend: str, calls: list[str]
) -> None:
    blocks = nn.Sequential(DyISRU(8, witnesses=2), DyISRU(8), DyT(8, dim=1), Derf(8, bias=False))
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(blocks, backend=counter, fullgraph=True)
    for rows in (3, 5, 9):
        x = torch.randn(rows, 8, 8)
        want = with_gradients(blocks, x)
        calls.clear()
        got = with_gradients(compiled, x)
        # The definition serves witnesses.
        assert calls == ["forward"] * 3 + ["gradients"] * 3
        for a, b in zip(got, want, strict=True):
            assert_close(a, b, rtol=1e-5, atol=1e-5)
    # For the first size, and then for any.
    assert counter.frame_count == 2


@needs_kernels
@pytest.mark.parametrize("rows", [3, 33])
def test_compiled_training_on_a_gpu_takes_the_gradients_of_large_inputs_from_the_kernels(
    rows: int, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The kernels of this processor stand in for those of a GPU.
    monkeypatch.setattr(_op, "is_on_gpu", lambda x: True)
    monkeypatch.setattr(_op, "_LARGE", 33 * 8)
    torch._dynamo.reset()
    layer, x, residual = build(DyISRU, 8), torch.randn(rows, 8), torch.randn(rows, 8)

    def both(leaf: Tensor) -> Tensor:
        y, total = layer(leaf, residual=residual)
        return y + total.square()

    compiled = torch.compile(both, backend="aot_eager", fullgraph=True)
    results = []
    for call in (compiled, both):
        leaf = x.clone().requires_grad_()
        loss = call(leaf).square().sum()
        results.append([loss.detach(), *torch.autograd.grad(loss, [leaf, *layer.parameters()])])
        if call is compiled:
            assert calls == ["gradients"] * (rows == 33)
    for got, want in zip(*results, strict=True):
        assert_close(got, want, rtol=1e-4, atol=1e-4)


@needs_kernels
@pytest.mark.parametrize("on_gpu", [False, True])
def test_transforms_are_compiled(on_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_op, "is_on_gpu", lambda x: on_gpu)
    monkeypatch.setattr(_op, "_LARGE", 1)
    torch._dynamo.reset()
    layer, x = build(DyISRU, 8), torch.randn(3, 8)
    gradient = torch.func.grad(lambda leaf: layer(leaf).square().sum())
    for transformed in (gradient, vmap(layer)):
        assert_close(torch.compile(transformed, backend="aot_eager")(x), transformed(x))


@needs_kernels
def test_layers_compiled_one_by_one_share_their_code() -> None:
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    counter = CompileCounter()
    plain = [build(DyISRU, 8) for _ in range(3)]
    with_witnesses = [build(DyISRU, 8, witnesses=(place, 1)) for place in (5, 0, 7)]
    x = torch.randn(3, 8)
    for layers in (plain, with_witnesses):
        before = counter.frame_count
        for layer in layers:
            compiled = torch.compile(layer, backend=counter, fullgraph=True)
            y = compiled(x)
            y.sum().backward()
            assert_close(y, layer(x))
        assert counter.frame_count == before + 1
