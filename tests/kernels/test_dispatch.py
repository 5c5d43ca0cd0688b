"""Where a kernel serves and where the definition is traced; autograd, transforms, modes."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.func import functional_call, jacrev, vmap
from torch.nn.utils import parametrize
from torch.testing import assert_close

import dynorm
from dynorm import Derf, DyISRU, DyT, LinearControl
from dynorm.arguments import MOST_CHOSEN
from dynorm.errors import ArgumentError
from dynorm.kernels import _cpu, _dispatch, backend
from dynorm.kernels._form import Form, FunctionCode, Parameters
from dynorm.layers import PointwiseNorm
from tests.kernels.definition import TOLERANCES, every_pair

LAYERS = [DyISRU, DyT, Derf, LinearControl]
FORM = Form(FunctionCode.DYT, False, 1.0, 4, 1)
needs_kernels = pytest.mark.skipif(
    _cpu.name() == "torch", reason="the CPU kernels are not built: make setup"
)


@pytest.fixture(autouse=True)
def _enabled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels on, whatever DYNORM_KERNELS says; where they are not built, torch serves."""
    monkeypatch.setattr(_dispatch, "ENABLED", True)


@pytest.fixture(params=LAYERS, ids=lambda kind: kind.__name__)
def kind(request: pytest.FixtureRequest) -> type[PointwiseNorm]:
    return request.param


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels called, in order."""
    called: list[str] = []
    for name in ("forward", "gradients"):
        real = getattr(_cpu, name)

        def record(*args: Any, real: Any = real, name: str = name, **kwargs: Any) -> Any:
            called.append(name)
            return real(*args, **kwargs)

        monkeypatch.setattr(_cpu, name, record)
    serve = _cpu.serve

    def record_served(*args: Any) -> Any:
        found = serve(*args)
        if isinstance(found, Tensor):
            called.append("forward")
        return found

    monkeypatch.setattr(_cpu, "serve", record_served)
    serve_gradients = _cpu.serve_gradients

    def record_gradients(*args: Any) -> Any:
        found = serve_gradients(*args)
        if found is not None:
            called.append("gradients")
        return found

    monkeypatch.setattr(_cpu, "serve_gradients", record_gradients)
    return called


def build(kind: type[PointwiseNorm], *args: Any, **options: Any) -> PointwiseNorm:
    layer = kind(*args, **options)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(0.5, 0.2)
    return layer


def plainly(monkeypatch: pytest.MonkeyPatch, layer: PointwiseNorm, x: Tensor) -> list[Tensor]:
    """Value and gradients without kernels."""
    with monkeypatch.context() as patch:
        patch.setattr(_dispatch, "ENABLED", False)
        return with_gradients(layer, x)


def with_gradients(layer: PointwiseNorm, x: Tensor) -> list[Tensor]:
    x = x.detach().requires_grad_()
    y = layer(x)
    grad = torch.linspace(-1, 1, y.numel()).reshape(y.shape).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, [x, *layer.parameters()], grad)]


OPTIONS: list[dict[str, Any]] = [
    {},
    {"per_channel": True, "center": True},
    {"elementwise_affine": False},
    {"witnesses": (47, 3), "center": True},
    {"witnesses": 1, "elementwise_affine": False},
    {"witnesses": tuple(range(40, 6, -1)), "center": True},
    {"witnesses": 17, "elementwise_affine": False},
]


@needs_kernels
@pytest.mark.parametrize(
    ("layer_class", "dtype", "options"), every_pair(LAYERS, TOLERANCES, OPTIONS)
)
def test_layers_run_on_the_kernels(
    layer_class: type[PointwiseNorm],
    dtype: torch.dtype,
    options: dict[str, Any],
    calls: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer = build(layer_class, 48, **options, dtype=dtype)
    x = torch.randn(5, 7, 48).to(dtype)
    got = with_gradients(layer, x)
    assert calls == ["forward", "gradients"]
    tolerance = {
        torch.float64: 1e-12,
        torch.float32: 1e-5,
        torch.bfloat16: 1e-2,
        torch.float16: 2e-3,
    }[dtype]
    for a, b in zip(got, plainly(monkeypatch, layer, x), strict=True):
        assert a.dtype == b.dtype
        assert_close(a, b, rtol=tolerance, atol=20 * tolerance)
    assert calls == ["forward", "gradients"]


@needs_kernels
@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("exchange", [False, True])
def test_both_ways_into_the_kernels(
    kind: type[PointwiseNorm],
    gradient: bool,
    exchange: bool,
    calls: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With torch's DLPack interface, and as where there is none: the same numbers, no definition."""
    if not exchange:
        monkeypatch.setattr(_cpu, "serve", lambda *_: None)
        monkeypatch.setattr(_cpu, "serve_gradients", lambda *_: None)
    layer = build(kind, (3, 5), per_channel=True, center=True).requires_grad_(gradient)
    x = torch.randn(4, 3, 5)
    want = plainly(monkeypatch, layer, x)[0] if gradient else None
    calls.clear()
    y = layer(x)
    assert y.requires_grad == gradient
    assert calls == ["forward"]
    if want is not None:
        assert_close(y.detach(), want, rtol=1e-5, atol=1e-5)


@needs_kernels
def test_what_gradients_the_exchange_leaves_to_the_slow_way() -> None:
    weight, x, grad, one = torch.ones(4), torch.randn(3, 4), torch.randn(3, 4), torch.ones(1)

    def serve(
        grad: Any = grad,
        x: Any = x,
        constant: Any = one,
        weight: Any = weight,
        needed: Any = (True,) * 8,
    ) -> Any:
        with torch.no_grad():
            inputs = (x, *Parameters(constant, weight=weight))
            return _cpu.serve_gradients(FORM, grad, inputs, needed)

    found = serve()
    want = _cpu.gradients(FORM, grad, x, Parameters(one, weight=weight), (True,) * 7)
    assert found[0] is None
    for a, b in zip(found[1:], want, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)
    only = serve(needed=(False, False, True, True, False, False, False, False))
    assert [g is not None for g in only] == [False, False, True, False, False, False, False, False]
    assert torch.equal(only[2], found[2])
    refused: list[Any] = [
        grad.t(), grad[:, :2], grad.double(), grad[:1].expand(3, 4), grad.to("meta"), grad.as_subclass(Wrapped),
        torch._neg_view(grad), None,
    ]  # fmt: skip
    assert [serve(value) for value in refused] == [None] * len(refused)
    assert serve(x=x.t().contiguous().t()) is None
    assert serve(weight=torch.ones(1)) is None
    assert serve(constant=torch.ones(2)) is None
    with torch.enable_grad():
        assert _cpu.serve_gradients(FORM, grad, (x, *Parameters(one)), (True,) * 8) is None
    with forward_ad.dual_level():
        assert serve() is None
    with pytest.raises(TypeError):
        serve(needed=(True,))
    assert serve(constant=torch._neg_view(-one)) is None
    text: Any = "4"
    with torch.no_grad(), pytest.raises(TypeError):
        _cpu.serve_gradients(
            FORM._replace(channels=text), grad, (x, *Parameters(one, weight=weight)), (True,) * 8
        )


@needs_kernels
def test_large_inputs_and_many_threads_get_the_same_gradients(kind: type[PointwiseNorm]) -> None:
    """Python's lock is released in the middle."""
    layer = build(kind, 64)
    inputs = [torch.randn(700, 64) for _ in range(4)]

    def run(x: Tensor) -> list[Tensor]:
        return list(
            torch.autograd.grad(layer(leaf := x.clone().requires_grad_()).sum() * 2, [leaf])
        )

    want = [run(x) for x in inputs]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            for got, expected in zip(pool.map(run, inputs), want, strict=True):
                assert torch.equal(got[0], expected[0])


@pytest.mark.parametrize("exchange", [False, True])
def test_zeros_without_memory_and_hidden_signs(
    kind: type[PointwiseNorm], exchange: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Autograd's ZeroTensor, which has no memory, and a sign that is a bit of the tensor."""
    if not exchange:
        monkeypatch.setattr(_cpu, "serve", lambda *_: None)
        monkeypatch.setattr(_cpu, "serve_gradients", lambda *_: None)
    layer = build(kind, 4)
    x = torch.randn(3, 4, requires_grad=True)
    zeros: Tensor = torch._efficientzerotensor(3, 4)
    (grad,) = torch.autograd.grad(layer(x), x, zeros)
    assert torch.equal(grad + 0, torch.zeros(3, 4))
    assert_close(layer(zeros) + 0, layer(torch.zeros(3, 4)))
    name = layer.constants[0]
    constant = getattr(layer, name).detach().clone()
    want = layer(x).detach()
    del layer._parameters[name]
    layer.register_parameter(name, None)
    hidden: Any = torch._neg_view(-constant)
    layer._parameters[name] = hidden
    assert_close(layer(x).detach(), want)


def test_the_numbers_of_functions_are_those_of_the_kernels() -> None:
    source = Path(_dispatch.__file__).with_name("csrc").joinpath("types.h").read_text()
    listed = re.search(r"enum Function \{ (.*?), kNamed,", source)
    assert listed is not None
    names = [name.strip().removeprefix("k").upper() for name in listed[1].split(",")]
    names[0] = names[0].removesuffix(" = 0")
    assert {code.name: code.value for code in FunctionCode} == {
        name: number for number, name in enumerate(names)
    }


def test_the_kernels_take_as_many_witnesses_one_by_one_as_the_definition() -> None:
    source = Path(_dispatch.__file__).with_name("csrc").joinpath("types.h").read_text()
    (number,) = re.findall(r"constexpr int kMostFew = (\d+),", source)
    assert int(number) == MOST_CHOSEN


def test_a_gradient_is_wanted_if_any_tensor_requires_it_and_autograd_records() -> None:
    x, one, trained = torch.ones(3, 4), torch.ones(1), torch.ones(4, requires_grad=True)
    assert not _dispatch.wants_gradient(x, Parameters(one))
    assert _dispatch.wants_gradient(x.clone().requires_grad_(), Parameters(one))
    assert _dispatch.wants_gradient(x, Parameters(one, bias=trained))
    assert _dispatch.wants_gradient(x, Parameters(one, log_gain=trained))
    with torch.no_grad():
        assert not _dispatch.wants_gradient(x, Parameters(one, bias=trained))


def test_which_sizes_the_kernels_take_for_each_parameter() -> None:
    x, one, four, two = torch.ones(3, 4), torch.ones(1), torch.ones(4), torch.ones(2)

    def fits(witnesses: int = 0, **parameters: Tensor) -> bool:
        return _dispatch.fits(x, Parameters(**{"constant": one} | parameters), (4,), witnesses)

    assert fits()
    assert fits(constant=four, shift=four, center=one, weight=four, bias=four)
    assert fits(witnesses=2, log_gain=two)
    assert not fits(constant=two)
    assert not fits(weight=one)
    assert not fits(bias=two)
    assert not fits(witnesses=2, log_gain=one)
    assert not fits(witnesses=2, log_gain=four)
    with pytest.raises(ArgumentError, match="one device"):
        fits(weight=four.to("meta"))


@needs_kernels
def test_what_the_exchange_leaves_to_the_slow_way() -> None:
    weight, x = torch.ones(4), torch.randn(3, 4)
    one = torch.ones(1)

    def serve(
        x: Any, constant: Any = one, center: Any = None, weight: Any = weight, shape: Any = (4,)
    ) -> Any:
        return _cpu.serve(
            x, Parameters(constant, None, center, weight), FunctionCode.DYT, False, 1.0, shape
        )

    assert isinstance(serve(x), Tensor)
    assert serve(x.clone().requires_grad_()) is True
    with torch.no_grad():
        assert isinstance(serve(x.clone().requires_grad_()), Tensor)
    refused: list[Any] = [
        x.t(), x[:, ::2], x.int(), x.to("meta"), x.to_sparse(), torch.tensor(1.0), x.as_subclass(Wrapped),
        torch._neg_view(x), None, 3,
    ]  # fmt: skip
    assert [serve(value) for value in refused] == [None] * len(refused)
    assert serve(x, weight=torch.ones(8)[::2]) is None
    assert serve(x, weight=torch.ones(1)) is None
    assert serve(x, weight=torch.ones(4, dtype=torch.int32)) is None
    assert serve(x, constant=torch.ones(2)) is None
    assert serve(x, center=torch.ones(4, device="meta")) is None
    assert serve(x, shape=(3,)) is None
    with forward_ad.dual_level():
        assert serve(x) is None
    with pytest.raises(TypeError):
        serve(x, shape=4)
    with pytest.raises(TypeError, match="serve got 1 arguments"):
        _cpu._native().serve(x)


LAYOUTS: dict[str, tuple[Any, Any, Callable[[], Tensor], int]] = {
    "every second": (6, -1, lambda: torch.randn(4, 12)[:, ::2], 1),
    "transposed": (6, -1, lambda: torch.randn(6, 4).t(), 1),
    "channels first": (6, 1, lambda: torch.randn(2, 6, 3, 5), 1),
    "channels last in memory": (6, 1, lambda: torch.randn(2, 3, 5, 6).movedim(-1, 1), 1),
    "channels first, every second": (6, -3, lambda: torch.randn(2, 6, 3, 10)[..., ::2], 1),
    "one axis": (6, 0, lambda: torch.randn(6), 1),
    "empty": (6, -1, lambda: torch.randn(0, 6), 1),
    "two axes": ((3, 5), -1, lambda: torch.randn(2, 3, 5), 1),
    # No kernel for axes that lie apart.
    "axes apart": ((6, 5), (1, 3), lambda: torch.randn(2, 6, 3, 5), 0),
}


# Which way a layout takes does not depend on the function.
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
    shape, dim, make, count = LAYOUTS[layout]
    layer = build(layer_class, shape, dim=dim, per_channel=True, center=True, witnesses=witnesses)
    x = make()
    # A row's witnesses are found where channels come last in memory.
    count = 0 if witnesses and dim in (1, -3) and not x.movedim(dim, -1).is_contiguous() else count
    got = with_gradients(layer, x)
    assert calls == ["forward", "gradients"] * count
    for a, b in zip(got, plainly(monkeypatch, layer, x), strict=True):
        assert_close(a, b, rtol=1e-5, atol=1e-5)


@needs_kernels
@pytest.mark.parametrize(
    ("dim", "make"),
    [
        (-1, lambda: torch.randn(30)),
        (-1, lambda: torch.randn(0, 30)),
        (-1, lambda: torch.randn(4, 60)[:, ::2]),
        (-1, lambda: torch.randn(30, 4).t()),
        (1, lambda: torch.randn(2, 3, 5, 30).permute(0, 3, 1, 2)),
    ],
    ids=["one row", "empty", "every second", "transposed", "channels last in memory"],
)
@pytest.mark.parametrize(("layer_class", "count"), [(DyISRU, 17), (Derf, 30)])
def test_many_witnesses_in_any_layout(
    layer_class: type[PointwiseNorm],
    count: int,
    dim: int,
    make: Any,
    calls: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Up to all channels, in no order."""
    witnesses = tuple(torch.randperm(30)[:count].tolist())
    layer = build(layer_class, 30, dim=dim, per_channel=True, center=True, witnesses=witnesses)
    x = make()
    got = with_gradients(layer, x)
    assert calls == ["forward", "gradients"]
    for a, b in zip(got, plainly(monkeypatch, layer, x), strict=True):
        assert_close(a, b, rtol=1e-5, atol=1e-5)


@needs_kernels
def test_an_old_build_of_the_kernels_leaves_many_witnesses_to_the_definition(
    calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_cpu, "most_witnesses", lambda: 16)
    x = torch.randn(3, 20)
    for count, served in ((16, ["forward"]), (17, [])):
        layer = build(DyISRU, 20, witnesses=tuple(range(count)))
        with torch.no_grad():
            layer(x)
        assert calls == served
        calls.clear()


# torch's own forward mode scripts its decompositions.
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.parametrize(
    "options",
    [{}, {"per_channel": True, "center": True, "dim": 1}, {"witnesses": (2, 0), "center": True}],
    ids=str,
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


def test_nothing_but_x_and_parameters_is_saved(kind: type[PointwiseNorm]) -> None:
    layer = build(kind, 8, center=True)
    x = torch.randn(4, 8, requires_grad=True)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        layer(x)
    if _cpu.name() != "torch":
        own = {t.data_ptr() for t in (x, *layer.parameters())}
        assert {t.data_ptr() for t in saved} == own
    x.grad = None
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
    with torch.no_grad():
        assert not layer(x).requires_grad


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


class Wrapped(Tensor):
    pass


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


def test_compiled_graph_holds_the_definition(kind: type[PointwiseNorm], calls: list[str]) -> None:
    graphs: list[str] = []

    def keep(module: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(str(module.graph))
        return module.forward

    layer = build(kind, 8)
    x = torch.randn(3, 8)
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend=keep, fullgraph=True)
    got = compiled(x)
    assert calls == []
    assert len(graphs) == 1
    assert "dynorm" not in graphs[0]
    assert_close(got, layer(x))


def test_autocast_and_checkpoint(kind: type[PointwiseNorm]) -> None:
    from torch.utils.checkpoint import checkpoint

    layer = build(kind, 8)
    x = torch.randn(4, 8, requires_grad=True)
    want = with_gradients(layer, x)
    y = checkpoint(layer, x, use_reentrant=False)
    grad = torch.linspace(-1, 1, y.numel()).reshape(y.shape)
    for a, b in zip(torch.autograd.grad(y, [x, *layer.parameters()], grad), want[1:], strict=True):
        assert_close(a, b, rtol=0, atol=0)
    with torch.autocast("cpu", torch.bfloat16):
        half = layer(x.bfloat16())
        assert half.dtype == torch.bfloat16
        assert layer(x).dtype == torch.float32
    half.float().sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in layer.parameters())


def test_parametrized_parameters_are_seen(kind: type[PointwiseNorm]) -> None:
    class Double(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return 2 * weight

    layer = build(kind, 8, bias=False)
    x = torch.randn(4, 8)
    want = 2 * layer(x).detach()
    parametrize.register_parametrization(layer, "weight", Double())
    assert_close(layer(x).detach(), want)


def test_second_derivatives_through_backward(kind: type[PointwiseNorm]) -> None:
    layer = build(kind, 4, dtype=torch.float64)
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(layer(x).sum(), x, create_graph=True)
    slope.square().sum().backward()
    # The slope of a line does not depend on x.
    assert (x.grad is None) == (kind is LinearControl)
    assert all(
        (p.grad is None) == (name == "bias")
        for name, p in layer.named_parameters()
        if name != "shift"
    )


def test_switched_off_by_the_environment() -> None:
    script = "import torch, dynorm.kernels as k; print(k.backend())"
    environment = {"DYNORM_KERNELS": "0", "PATH": "/usr/bin:/bin"}
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment
    )
    assert run.stdout.strip() == "torch"


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("device", ["gpu", "", None])
def test_a_device_that_torch_does_not_know_is_refused(
    device: Any, enabled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_dispatch, "ENABLED", enabled)
    with pytest.raises(ArgumentError, match=f"device.*got {device!r}"):
        backend(device)


def test_backend_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    _dispatch.serving.cache_clear()
    with caplog.at_level(logging.INFO, logger="dynorm"):
        backend()
        backend("cpu")
        DyISRU(4)(torch.randn(2, 4))
    (record,) = caplog.records
    assert backend() in record.getMessage()


def test_without_a_built_module_torch_serves(
    kind: type[PointwiseNorm], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    layer = build(kind, 4)
    x = torch.randn(2, 4)
    want = layer(x)
    with monkeypatch.context() as patch:
        patch.setattr(_cpu, "_native", lambda: None)
        _dispatch.serving.cache_clear()
        assert backend() == "torch"
        assert_close(layer(x), want)
        layer(x)
    _dispatch.serving.cache_clear()
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "python -m dynorm.kernels._build" in warnings[0]


def test_devices_that_differ_are_refused(kind: type[PointwiseNorm]) -> None:
    if _cpu.name() == "torch":
        pytest.skip("without kernels torch refuses, in its own words")
    layer = build(kind, 4)
    layer.weight = nn.Parameter(torch.empty(4, device="meta"))
    with pytest.raises(ArgumentError, match=r"device.*meta"):
        layer(torch.randn(2, 4))


def test_annealed_layers_end_on_the_kernels(calls: list[str]) -> None:
    layer = dynorm.layers.AnnealedDyISRU(8, t=1.0)
    layer(torch.randn(2, 8))
    assert calls == ["forward"] * (_cpu.name() != "torch")
