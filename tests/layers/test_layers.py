"""The layers' functions: values and gradients against formulas written here, shapes, edges and refused arguments."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck
from torch.func import functional_call
from torch.testing import assert_close

import dynorm
from dynorm import Derf, DyISRU, DyT, LinearControl
from dynorm.errors import ArgumentError
from dynorm.layers import PointwiseNorm
from tests.kernels.definition import every_pair

INF, NAN = math.inf, math.nan
Params = dict[str, Tensor]

# The function of u = x - center, before scale and the affine map.
FORMULAS: dict[type[PointwiseNorm], Callable[[Tensor, Params], Tensor]] = {
    DyISRU: lambda u, p: u * (p["log_beta"].exp() + u**2) ** -0.5,
    DyT: lambda u, p: 1 - 2 / (1 + (2 * p["alpha"] * u).exp()),
    Derf: lambda u, p: 1 - torch.special.erfc(p["alpha"] * u + p["shift"]),
    LinearControl: lambda u, p: u / p["log_beta"].exp() ** 0.5,
}
BOUNDED = [DyISRU, DyT, Derf]
TOLERANCES = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.bfloat16: 1.6e-2,
    torch.float16: 2e-3,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no affine": {"elementwise_affine": False},
    "no bias": {"bias": False},
    "center": {"center": True},
    "per channel": {"per_channel": True},
    "all": {"per_channel": True, "center": True, "scale": -1.7},
    "no affine, per channel": {"elementwise_affine": False, "per_channel": True, "center": True},
}
# Name: normalized_shape, dim, shape of x.
LAYOUTS: dict[str, tuple[int | tuple[int, ...], int | tuple[int, ...], tuple[int, ...]]] = {
    "one token": (5, -1, (5,)),
    "last": (5, -1, (3, 4, 5)),
    "last, counted from the front": (5, 2, (3, 4, 5)),
    "tuple of one": ((5,), (-1,), (3, 5)),
    "first": (3, 0, (3, 4)),
    "channels-first": (3, 1, (2, 3, 4, 5)),
    "channels-first, negative": (3, -3, (2, 3, 4, 5)),
    "channels-first, as wide as the last": (5, 1, (2, 5, 4, 5)),
    "last two": ((4, 5), -1, (3, 4, 5)),
    "two apart": ((3, 5), (1, 3), (2, 3, 4, 5)),
    "two in reverse": ((5, 3), (-1, 1), (2, 3, 4, 5)),
    "one channel": (1, -1, (3, 1)),
}


@pytest.fixture(params=FORMULAS, ids=lambda kind: kind.__name__)
def kind(request: pytest.FixtureRequest) -> type[PointwiseNorm]:
    """Each layer class in turn."""
    return request.param


def build(kind: type[PointwiseNorm], *args: Any, **kwargs: Any) -> PointwiseNorm:
    """Return a layer whose parameters have no two values the same."""
    layer = kind(*args, **kwargs)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.uniform_(0.2, 1.5) if name == "alpha" else parameter.normal_(0.2, 0.7)
    return layer


def expected(layer: PointwiseNorm, x: Tensor, params: Params) -> Tensor:
    """Return the layer's formula of float64 tensors, with its channels moved to the end and back."""
    dims = [layer.dim] if isinstance(layer.dim, int) else list(layer.dim)
    last = list(range(-len(dims), 0))
    u = x.movedim(dims, last) - params.get("center", 0)
    y = layer.scale * FORMULAS[type(layer)](u, params) * params.get("weight", 1) + params.get(
        "bias", 0
    )
    return y.movedim(last, dims)


def check(layer: PointwiseNorm, x: Tensor, tolerance: float) -> None:
    """Compare value and all gradients with the formula, evaluated in float64 at the same (rounded) numbers."""
    x.requires_grad_()
    names = [name for name, _ in layer.named_parameters()]
    leaves = [x, *layer.parameters()]
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    y, y_exact = layer(x), expected(layer, exact[0], dict(zip(names, exact[1:], strict=True)))
    assert y.dtype == x.dtype
    assert y.shape == x.shape
    assert_close(y.double(), y_exact, rtol=tolerance, atol=tolerance)
    upstream = torch.randn_like(y)
    gradients = torch.autograd.grad(y, leaves, upstream)
    for name, leaf, got, want in zip(
        ["x", *names],
        leaves,
        gradients,
        torch.autograd.grad(y_exact, exact, upstream.double()),
        strict=True,
    ):
        assert got.dtype == leaf.dtype, name
        assert_close(
            got.double(),
            want,
            rtol=tolerance,
            atol=tolerance,
            msg=lambda text, name=name: f"{name}: {text}",
        )


@pytest.mark.parametrize(
    ("layer_class", "dtype", "options"), every_pair(FORMULAS, TOLERANCES, list(OPTIONS))
)
def test_value_and_gradients(
    layer_class: type[PointwiseNorm], dtype: torch.dtype, options: str
) -> None:
    layer = build(layer_class, 7, **OPTIONS[options], dtype=dtype)
    check(layer, (3 * torch.randn(2, 3, 7)).to(dtype), TOLERANCES[dtype])


@pytest.mark.parametrize(
    ("layer_class", "options"),
    [(DyT, {}), (Derf, {"per_channel": True, "center": True})],
    ids=["scalar", "per channel"],
)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_layouts(layer_class: type[PointwiseNorm], layout: Any, options: dict[str, Any]) -> None:
    """The base lays the parameters along the axes, whatever the function."""
    normalized_shape, dim, shape = layout
    layer = build(layer_class, normalized_shape, **options, dim=dim, dtype=torch.float64)
    check(layer, torch.randn(shape, dtype=torch.float64), 1e-12)


def test_channels_first_is_permute_apply_permute(kind: type[PointwiseNorm]) -> None:
    options: dict[str, Any] = {"per_channel": True, "center": True}
    first = build(kind, 6, **options, dim=1)
    last = kind(6, **options)
    last.load_state_dict(first.state_dict())
    x = torch.randn(2, 6, 3, 5)
    assert_close(first(x), last(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2), rtol=0, atol=0)
    # The same layer serves the other order of memory and any number of positions.
    assert_close(first(x.contiguous(memory_format=torch.channels_last)), first(x), rtol=0, atol=0)
    assert_close(first(x.flatten(2)), first(x).flatten(2), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("layer_class", "dtype", "param_dtype"), every_pair(FORMULAS, TOLERANCES, list(TOLERANCES))
)
def test_mixed_dtypes(
    layer_class: type[PointwiseNorm], dtype: torch.dtype, param_dtype: torch.dtype
) -> None:
    layer = build(layer_class, 7, center=True, dtype=param_dtype)
    # A constant is computed in the parameters' dtype, at least float32.
    tolerance = max(TOLERANCES[dtype], TOLERANCES[param_dtype])
    check(layer, torch.randn(5, 7).to(dtype), tolerance)


def test_bfloat16_input_is_computed_in_float32(kind: type[PointwiseNorm]) -> None:
    layer = build(kind, 64)
    x = torch.randn(32, 64).bfloat16()
    assert_close(layer(x), layer(x.float()).bfloat16(), rtol=0, atol=0)


# torch's own forward mode scripts its decompositions.
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_gradcheck(kind: type[PointwiseNorm]) -> None:
    layer = build(kind, 3, per_channel=True, center=True, dim=1, dtype=torch.float64)
    names = [name for name, _ in layer.named_parameters()]
    x = torch.randn(2, 3, 2, dtype=torch.float64, requires_grad=True)

    def call(x: Tensor, *values: Tensor) -> Tensor:
        return functional_call(layer, dict(zip(names, values, strict=True)), (x,))

    assert gradcheck(call, (x, *layer.parameters()), check_forward_ad=True)
    assert gradgradcheck(call, (x, *layer.parameters()))


def test_defaults() -> None:
    assert dynorm.layers.ELN is DyISRU
    for kind in (DyISRU, LinearControl):
        for layer in (kind(48), kind((6, 8)), kind(48, per_channel=True)):
            assert_close(layer.beta(), torch.full_like(layer.log_beta, 48.0))
            assert layer.scale == math.sqrt(48)
    for other in (DyT(48), Derf(48)):
        assert other.scale == 1.0
        assert_close(other.alpha.data, torch.tensor([0.5]))
    assert_close(Derf(48).shift.data, torch.tensor([0.0]))
    assert_close(DyISRU(4, beta_init=9.0).beta(), torch.tensor([9.0]))
    assert_close(
        DyT(4, alpha_init=0.8, scale=3.0)(torch.ones(4)), torch.full((4,), 3 * math.tanh(0.8))
    )
    assert_close(
        Derf(4, alpha_init=0.8, shift_init=0.1)(torch.ones(4)), torch.full((4,), math.erf(0.9))
    )


def test_unit_variance_passes_with_unit_slope(kind: type[PointwiseNorm]) -> None:
    layer = kind(400, scale=20.0)
    layer.set_slope_(400.0)
    small = torch.linspace(-1e-3, 1e-3, 400)
    assert_close(layer(small), small, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize(
    ("beta", "dtype"),
    [
        (1e-6, torch.float64),
        (3, torch.float32),
        (7.3e9, torch.float32),
        (torch.tensor([2.5]), torch.float64),
        (torch.tensor([0.1, 1.0, 7.0, 1e5]), torch.float32),
    ],
    ids=str,
)
def test_set_slope(kind: type[PointwiseNorm], beta: Any, dtype: torch.dtype) -> None:
    layer = kind(4, per_channel=True, center=True, scale=2.5, dtype=dtype)
    nn.init.normal_(layer.center)
    layer.set_slope_(beta)
    want = torch.as_tensor(beta, dtype=dtype).expand(4)
    tolerance = {"rtol": TOLERANCES[dtype], "atol": 0.0}
    assert_close(layer.beta().detach(), want, **tolerance)
    x = layer.center.detach().clone().requires_grad_()
    (slope,) = torch.autograd.grad(layer(x).sum(), x)
    assert_close(slope, 2.5 * want**-0.5, **tolerance)


def test_set_slope_takes_any_real_tensor_and_keeps_autograd_out(kind: type[PointwiseNorm]) -> None:
    layer = kind(4)
    for beta in (
        torch.tensor(4),
        torch.tensor(4.0, dtype=torch.float16),
        torch.tensor([4.0], requires_grad=True),
    ):
        layer.set_slope_(beta)
        assert_close(layer.beta().detach(), torch.tensor([4.0]))
        assert all(p.is_leaf and p.requires_grad for p in layer.parameters())


@pytest.mark.parametrize(("rows", "channels"), [(0, 7), (1, 1), (1, 257), (13, 2), (13, 33)])
def test_odd_and_empty_sizes(kind: type[PointwiseNorm], rows: int, channels: int) -> None:
    check(
        build(kind, channels, center=True, dtype=torch.float64),
        torch.randn(rows, channels).double(),
        1e-11,
    )


def test_empty_input_gives_zero_gradients(kind: type[PointwiseNorm]) -> None:
    layer = kind(5)
    layer(torch.empty(0, 3, 5)).sum().backward()
    for parameter in layer.parameters():
        assert_close(parameter.grad, torch.zeros_like(parameter))


def test_non_contiguous_input(kind: type[PointwiseNorm]) -> None:
    layer = build(kind, 5, per_channel=True)
    x = torch.randn(10, 6)
    for view in (
        x[::2].t(),
        x.t()[:, 1::2],
        torch.randn(1, 5).expand(3, 5),
        torch.randn(2, 5, 4).transpose(1, 2),
    ):
        before = view.clone()
        assert_close(layer(view), layer(view.contiguous()), rtol=0, atol=0)
        assert torch.equal(view, before)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_zero_infinity_and_huge_values(kind: type[PointwiseNorm], dtype: torch.dtype) -> None:
    layer = kind(4, scale=2.0, dtype=dtype)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([1.0, -2.0, 3.0, 0.5]))
        layer.bias.copy_(torch.tensor([0.0, 1.0, -1.0, 0.25]))
    assert torch.equal(layer(torch.zeros(4, dtype=dtype)), layer.bias)
    assert torch.equal(layer(-torch.zeros(4, dtype=dtype)), layer.bias)
    for size in (INF, torch.finfo(dtype).max):
        for sign in (1, -1):
            x = torch.full((4,), sign * size, dtype=dtype, requires_grad=True)
            y = layer(x)
            if kind in BOUNDED:
                assert_close(y, sign * 2 * layer.weight + layer.bias)
                assert torch.equal(torch.autograd.grad(y.sum(), x)[0], torch.zeros_like(x))
            elif size == INF:
                assert torch.equal(y, sign * INF * layer.weight)


def test_nan_stays_where_it_is(kind: type[PointwiseNorm]) -> None:
    layer = build(kind, 6, per_channel=True, center=True)
    x = torch.randn(3, 6)
    poisoned = x.clone()
    poisoned[1, 2] = NAN
    poisoned.requires_grad_()
    y = layer(poisoned)
    assert torch.equal(y.isnan(), poisoned.isnan())
    assert torch.equal(y[~y.isnan()], layer(x)[~y.isnan()])
    (gradient,) = torch.autograd.grad(y.sum(), poisoned)
    assert torch.equal(gradient.isnan(), poisoned.isnan()) or not gradient.isnan().any()


BAD_ARGUMENTS: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "no channels": ((0,), {}, "normalized_shape.*positive, got 0"),
    "negative size": (((4, -1),), {}, r"normalized_shape.*positive, got \(4, -1\)"),
    "no sizes": (((),), {}, r"normalized_shape.*int.*got \(\)"),
    "float size": ((4.0,), {}, r"normalized_shape.*int.*got 4\.0"),
    "bool size": ((True,), {}, "normalized_shape.*int.*got True"),
    "text": (("4",), {}, "normalized_shape.*int.*got '4'"),
    "float dim": ((4,), {"dim": 1.0}, r"dim.*int.*got 1\.0"),
    "no dim": ((4,), {"dim": ()}, r"dim.*int.*got \(\)"),
    "too many dims": ((4,), {"dim": (1, 2)}, r"dim.*1 different.*got \(1, 2\)"),
    "too few dims": (
        ((4, 5),),
        {"dim": 1},
        r"dim.*2 different.*\(4, 5\), got 1",
    ),
    "repeated dim": (((4, 5),), {"dim": (1, 1)}, r"dim.*2 different.*got \(1, 1\)"),
    "zero scale": ((4,), {"scale": 0}, "scale.*got 0"),
    "nan scale": ((4,), {"scale": NAN}, "scale.*got nan"),
    "infinite scale": ((4,), {"scale": INF}, "scale.*got inf"),
    "a word as scale": (
        (4,),
        {"scale": "a"},
        "scale.*got 'a'",
    ),
    "integer dtype": (
        (4,),
        {"dtype": torch.int64},
        "dtype.*got torch.int64",
    ),
    "complex dtype": (
        (4,),
        {"dtype": torch.complex64},
        "dtype.*floating",
    ),
}


@pytest.mark.parametrize(("args", "kwargs", "message"), BAD_ARGUMENTS.values(), ids=BAD_ARGUMENTS)
def test_refused_arguments(args: Any, kwargs: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        DyISRU(*args, **kwargs)


def test_every_layer_refuses_bad_options(kind: type[PointwiseNorm]) -> None:
    """The base checks them, and every constructor passes them on."""
    for name in ("no channels", "too many dims", "nan scale", "integer dtype"):
        args, kwargs, message = BAD_ARGUMENTS[name]
        with pytest.raises(ArgumentError, match=message):
            kind(*args, **kwargs)


@pytest.mark.parametrize("value", [0, -1.0, NAN, INF, -INF])
def test_refused_constants(kind: type[PointwiseNorm], value: float) -> None:
    name = "alpha_init" if kind in (DyT, Derf) else "beta_init"
    with pytest.raises(ArgumentError, match=f"{name}.*positive.*got {value}"):
        kind(4, **{name: value})
    with pytest.raises(ArgumentError, match=f"beta.*got {value}"):
        kind(4).set_slope_(value)
    layer = build(kind, 4, per_channel=True)
    before = layer.beta()
    with pytest.raises(ArgumentError, match=r"beta.*positive"):
        layer.set_slope_(torch.tensor([1.0, 2.0, value, 4.0]))
    assert torch.equal(layer.beta(), before)


def test_refused_shift() -> None:
    for value in (NAN, INF):
        with pytest.raises(ArgumentError, match=f"shift_init.*finite.*got {value}"):
            Derf(4, shift_init=value)


def test_refused_shapes_of_beta(kind: type[PointwiseNorm]) -> None:
    for options, shape in (
        ({}, (4,)),
        ({"per_channel": True}, (3,)),
        ({"per_channel": True}, (2, 4)),
    ):
        with pytest.raises(ArgumentError, match=r"beta.*constant's"):
            kind(4, **options).set_slope_(torch.ones(shape))


@pytest.mark.parametrize("options", [OPTIONS["plain"], OPTIONS["no affine, per channel"]], ids=str)
def test_refused_sizes_of_the_input(kind: type[PointwiseNorm], options: dict[str, Any]) -> None:
    for shape in ((2, 5), (4, 5), (2, 1), ()):
        with pytest.raises(ArgumentError, match=r"\(4,\) at dim -1, got"):
            kind(4, **options)(torch.ones(shape))
    for shape in ((2, 5, 4), (4,)):
        with pytest.raises(ArgumentError, match=r"\(4,\) at dim 1, got"):
            kind(4, **options, dim=1)(torch.ones(shape))
    with pytest.raises(ArgumentError, match=r"dim \(-2, -1\), got \(4, 2\)"):
        kind((2, 4), **options)(torch.ones(3, 4, 2))
    with pytest.raises(ArgumentError, match=r"dim.*repeat"):
        kind((4, 4), **options, dim=(1, -1))(torch.ones(3, 4))


def test_refused_kinds_of_the_input(kind: type[PointwiseNorm]) -> None:
    layer = kind(4)
    for x in (
        torch.ones(4, dtype=torch.int64),
        torch.ones(4, dtype=torch.bool),
        torch.ones(4, dtype=torch.complex64),
    ):
        with pytest.raises(ArgumentError, match=r"real.*floating"):
            layer(x)
    with pytest.raises(ArgumentError, match=r"tensor.*list"):
        layer([1.0, 2.0, 3.0, 4.0])
