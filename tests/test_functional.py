"""The reference functions against independent formulas, at their edges, and under torch's transforms."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
import torch.nn.functional as torch_functional
from hypothesis import given, settings
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.testing import assert_close

import dynorm.functional as F  # noqa: N812
from dynorm.errors import ArgumentError

INF, NAN = math.inf, math.nan
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
Array = NDArray[np.float64]

# name: the function of (x, constant, weight, bias, center, dim), and the formula without weight and
# bias in NumPy.
POINTWISE: dict[str, tuple[Callable[..., Tensor], Callable[[Array, Array, Array, int], Array]]] = {
    "dyt": (
        lambda x, a, w, b, c, dim=-1: F.dyt(x, a, w, b, center=c, scale=1.5, dim=dim),
        lambda x, a, c, n: 1.5 * np.tanh(a * (x - c)),
    ),
    "scaled_dyt": (
        lambda x, a, w, b, c, dim=-1: F.scaled_dyt(x, a, w, b, center=c, dim=dim),
        lambda x, a, c, n: np.sqrt(n - 1) * np.tanh(a * (x - c)),
    ),
    "dyisru_general": (
        lambda x, a, w, b, c, dim=-1: F.dyisru_general(x, a, c, w, b, dim=dim),
        lambda x, a, c, n: np.sqrt(n - 1) * (x - c) / np.sqrt(a + (x - c) ** 2),
    ),
    "dyisru": (
        lambda x, a, w, b, c, dim=-1: F.dyisru(x - c, a, w, b, scale=0.75, dim=dim),
        lambda x, a, c, n: 0.75 * (x - c) / np.sqrt(a + (x - c) ** 2),
    ),
    "derf": (
        lambda x, a, w, b, c, dim=-1: F.derf(x, a, 0.25, w, b, center=c, scale=1.5, dim=dim),
        lambda x, a, c, n: 1.5 * np.vectorize(math.erf, otypes=[float])(a * (x - c) + 0.25),
    ),
    "linear": (
        lambda x, a, w, b, c, dim=-1: F.linear(x, a, w, b, center=c, dim=dim),
        lambda x, a, c, n: a * (x - c),
    ),
}
NAMES = list(POINTWISE)
# The same, without centre or affine part, as functions of (x, constant): odd, and all but the last
# two bounded by 1.
CORES: dict[str, Callable[..., Tensor]] = {
    "dyt": F.dyt,
    "dyisru": lambda x, beta: F.dyisru(x, beta, scale=1.0),
    "derf": F.derf,
    "isru": F.isru,
    "linear": F.linear,
}


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).to(dtype)


def arguments(
    channels: int, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Constant, weight, bias and centre, one of each for a channel."""
    return (
        randn(channels, seed=1, dtype=dtype).abs() + 0.5,
        randn(channels, seed=2, dtype=dtype),
        randn(channels, seed=3, dtype=dtype),
        randn(channels, seed=4, dtype=dtype),
    )


def numpy64(x: Tensor) -> Array:
    return x.detach().double().numpy()


@pytest.mark.parametrize("dtype", DTYPES)
def test_layer_norm_is_torchs(dtype: torch.dtype) -> None:
    x, weight, bias = (
        (3 * randn(4, 37) + 1).to(dtype),
        randn(37, seed=1, dtype=dtype),
        randn(37, seed=2, dtype=dtype),
    )
    assert_close(
        F.layer_norm(x, weight, bias, 1e-3),
        torch_functional.layer_norm(x, (37,), weight, bias, 1e-3),
    )
    assert_close(F.layer_norm(x), torch_functional.layer_norm(x, (37,)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_is_torchs(dtype: torch.dtype) -> None:
    x, weight, bias = (
        (3 * randn(4, 37) + 1).to(dtype),
        randn(37, seed=1, dtype=dtype),
        randn(37, seed=2, dtype=dtype),
    )
    expected = torch_functional.rms_norm(x.double(), (37,), weight.double(), 1e-3)
    assert_close(F.rms_norm(x, weight, None, 1e-3), expected.to(dtype))
    assert_close(F.rms_norm(x, weight, bias, 1e-3), (expected + bias.double()).to(dtype))
    assert_close(F.rms_norm(x), torch_functional.rms_norm(x, (37,), eps=1e-6))


def test_default_eps_acts() -> None:
    x = torch.tensor([1e-3, -1e-3], dtype=torch.float64)
    assert_close(F.layer_norm(x), x / math.sqrt(1.1e-5))
    assert_close(F.rms_norm(x), x / math.sqrt(2e-6))


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("dim", [-1, 0, (0, 2), (2, 0)])
def test_statistics(dim: int | tuple[int, ...], keepdim: bool) -> None:
    x = randn(3, 4, 5)
    expected = np.mean(numpy64(x) ** 2, axis=dim, keepdims=keepdim)
    assert_close(F.mean_square(x, dim, keepdim).numpy(), expected)
    assert_close(F.rms(x, dim, 0.5, keepdim).numpy(), np.sqrt(expected + 0.5))
    assert_close(F.rms(x, dim, keepdim=keepdim).numpy(), np.sqrt(expected))
    assert_close(
        F.center(x, dim).numpy(), numpy64(x) - np.mean(numpy64(x), axis=dim, keepdims=True)
    )


def test_statistics_of_half_precision_are_computed_in_single() -> None:
    x = torch.full((4096,), 4.0, dtype=torch.float16)
    assert F.mean_square(x).item() == 16
    assert_close(
        F.rms_norm(torch.full((8,), 6e4, dtype=torch.float16)), torch.ones(8, dtype=torch.float16)
    )


def test_centering_matrix_centres_and_projects() -> None:
    matrix = F.centering_matrix(7, dtype=torch.float64)
    x = randn(3, 7)
    assert_close(x @ matrix, F.center(x))
    assert_close(matrix @ matrix, matrix)
    assert F.centering_matrix(2, dtype=torch.float16, device="meta").dtype == torch.float16


@pytest.mark.parametrize("norm", [F.layer_norm, F.rms_norm])
def test_norm_derivatives(norm: Callable[..., Tensor]) -> None:
    inputs = tuple(p.requires_grad_() for p in (randn(3, 5), randn(5, seed=1), randn(5, seed=2)))
    assert gradcheck(norm, inputs)
    assert gradgradcheck(norm, inputs)


@pytest.mark.parametrize("norm", [F.layer_norm, F.rms_norm])
def test_norm_dims(norm: Callable[..., Tensor]) -> None:
    x, weight, bias = randn(2, 3, 4, 5), randn(3, seed=1), randn(3, seed=2)
    last = norm(x.movedim(1, -1), weight, bias)
    assert_close(norm(x, weight, bias, dim=1), last.movedim(-1, 1))
    weight, bias = randn(4, 5, seed=1), randn(4, 5, seed=2)
    flat = norm(x.flatten(2), weight.flatten(), bias.flatten()).unflatten(2, (4, 5))
    assert_close(norm(x, weight, bias, dim=(2, 3)), flat)
    assert_close(norm(x, weight.T, bias.T, dim=(-1, 2)), flat)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_value(name: str, dtype: torch.dtype) -> None:
    function, formula = POINTWISE[name]
    x = (3 * randn(4, 37)).to(dtype)
    a, w, b, c = arguments(37, dtype)
    # The test itself centres in front of dyisru, which has no centre: exactly, or half precision
    # would show.
    c = c.round() if name == "dyisru" else c
    x = x.round() if name == "dyisru" else x
    expected = numpy64(w) * formula(numpy64(x), numpy64(a), numpy64(c), 37) + numpy64(b)
    got = function(x, a, w, b, c)
    assert got.dtype == dtype
    tolerance = 8 * max(
        torch.finfo(dtype).eps / 2, torch.finfo(torch.float32).eps * (dtype != torch.float64)
    )
    magnitude = np.abs(expected - numpy64(b)) + np.abs(numpy64(b)) + 1
    assert np.all(np.abs(numpy64(got) - expected) <= tolerance * magnitude)


@pytest.mark.parametrize("name", NAMES)
def test_half_precision_is_single_precision_rounded_once(name: str) -> None:
    function, _ = POINTWISE[name]
    x = randn(4, 37, dtype=torch.bfloat16).round()
    a, w, b, c = (p.round() + 1 for p in arguments(37, torch.bfloat16))
    expected = function(x.float(), a.float(), w.float(), b.float(), c.float()).bfloat16()
    assert torch.equal(function(x, a, w, b, c), expected)


def test_parameters_of_higher_precision_are_not_rounded_to_the_inputs() -> None:
    x, weight = torch.ones(1, dtype=torch.bfloat16), torch.tensor([1 + 2**-8])
    expected = (x.float() * weight * 3.0).bfloat16()
    assert torch.equal(F.linear(x, 3.0, weight), expected)
    assert not torch.equal(F.linear(x, 3.0, weight.bfloat16()), expected)


@pytest.mark.parametrize("name", NAMES)
def test_absent_parameters_are_neutral(name: str) -> None:
    function, _ = POINTWISE[name]
    x, one, zero = (
        randn(4, 7),
        torch.ones(7, dtype=torch.float64),
        torch.zeros(7, dtype=torch.float64),
    )
    assert_close(function(x, 0.7, None, None, 0.0), function(x, 0.7, one, zero, 0.0))
    assert_close(F.dyt(x, 0.7), F.dyt(x, 0.7, center=0.0, scale=1.0))
    assert_close(F.dyisru(x, 0.7), F.dyisru_general(x, 0.7, 0.0, scale=math.sqrt(6)))
    assert_close(F.derf(x, 0.7), F.derf(x, 0.7, 0.0, scale=torch.ones(1, dtype=torch.float64)))


@pytest.mark.parametrize("name", NAMES)
def test_constants_of_every_shape(name: str) -> None:
    function, _ = POINTWISE[name]
    x = randn(2, 3, 5)
    expected = function(x, 0.5, None, None, 0.25)
    for shape in ((), (1,), (5,), (1, 1, 1), (2, 3, 1), (1, 3, 5), (2, 3, 5)):
        a, c = (torch.full(shape, value, dtype=torch.float64) for value in (0.5, 0.25))
        assert_close(function(x, a, None, None, 0.25), expected)
        if name != "dyisru":
            assert_close(function(x, 0.5, None, None, c), expected)


def test_scale_and_shift_may_be_tensors() -> None:
    x, scale = randn(2, 5), torch.arange(1.0, 6.0, dtype=torch.float64)
    for function in (F.dyt, F.dyisru, F.derf):
        assert_close(function(x, 0.5, scale=scale), function(x, 0.5, scale=1.0) * scale)
    assert_close(F.derf(x, 0.5, scale), torch.erf(0.5 * x + scale))


@pytest.mark.parametrize("name", NAMES)
def test_dims(name: str) -> None:
    function, _ = POINTWISE[name]
    x = randn(2, 3, 4)
    a, w, b, c = arguments(3)
    centre: float | Tensor = 0.5 if name == "dyisru" else c
    last = function(x.movedim(1, -1), a, w, b, centre)
    assert_close(function(x, a, w, b, centre, dim=1), last.movedim(-1, 1))
    assert_close(function(x, a, w, b, centre, dim=-2), last.movedim(-1, 1))
    a, w, b, c = arguments(12)
    centre = 0.5 if name == "dyisru" else c.view(3, 4)
    flat_centre = 0.5 if name == "dyisru" else c
    flat = function(x.flatten(1), a, w, b, flat_centre).unflatten(1, (3, 4))
    a, w, b = (p.view(3, 4) for p in (a, w, b))
    assert_close(function(x, a, w, b, centre, dim=(1, 2)), flat)
    centre = centre.T if isinstance(centre, Tensor) else centre
    assert_close(function(x, a.T, w.T, b.T, centre, dim=(-1, 1)), flat)


def test_isru() -> None:
    x, alpha = randn(3, 4, 5), randn(4, seed=1).abs() + 0.1
    expected = x / torch.sqrt(1 + alpha[:, None] * x * x)
    assert_close(F.isru(x, alpha, dim=1), expected)
    assert_close(F.isru(x, 0.3), x / torch.sqrt(1 + 0.3 * x * x))
    assert_close(F.isru(x, 0.3) * math.sqrt(0.3), F.dyisru(x, 1 / 0.3, scale=1.0))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(0, 5), (2, 0, 5), (1, 1), (3, 0)])
def test_empty_and_tiny(name: str, shape: tuple[int, ...]) -> None:
    function, _ = POINTWISE[name]
    got = function(torch.ones(shape), 0.5, torch.ones(shape[-1]), torch.ones(shape[-1]), 0.5)
    assert got.shape == shape


def test_one_channel_has_bound_zero() -> None:
    assert F.dyisru(torch.tensor([5.0]), 1.0).item() == 0
    assert F.scaled_dyt(torch.tensor([5.0]), 1.0).item() == 0


@pytest.mark.parametrize("name", NAMES)
def test_non_contiguous_input_is_left_alone(name: str) -> None:
    function, _ = POINTWISE[name]
    a, w, b, c = arguments(5)
    stored = randn(5, 8)
    x, copy, version = stored.T[::2], stored.clone(), stored._version
    assert not x.is_contiguous()
    assert_close(function(x, a, w, b, c), function(x.contiguous(), a, w, b, c))
    assert stored._version == version
    assert torch.equal(stored, copy)


@pytest.mark.parametrize("name", NAMES)
def test_nan_stays_where_it_is(name: str) -> None:
    function, _ = POINTWISE[name]
    x = randn(4, 7, dtype=torch.float32)
    poison = torch.zeros(4, 7, dtype=torch.bool)
    poison[1, 2] = poison[3, 6] = True
    got = function(x.masked_fill(poison, NAN), 0.5, torch.ones(7), torch.ones(7), 0.5)
    assert torch.equal(got.isnan(), poison)
    assert torch.equal(got[~poison], function(x, 0.5, torch.ones(7), torch.ones(7), 0.5)[~poison])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["dyt", "dyisru", "derf", "isru"])
def test_saturation(name: str, dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    x = torch.tensor([-INF, -largest, largest, INF, NAN, 0.0, -0.0], dtype=dtype)
    got = CORES[name](x, 1.0)
    assert got.dtype == dtype
    assert got[:4].tolist() == [-1, -1, 1, 1]
    assert got[4].isnan()
    assert got[5:].tolist() == [0, 0]
    # The shift of derf, 0.0, turns -0.0 into 0.0.
    assert got[5:].signbit().tolist() == [False, name != "derf"]


@pytest.mark.parametrize("beta", [1e-30, 1e-6, 4.0, 1e6, 1e28])
def test_dyisru_saturates_where_the_square_overflows(beta: float) -> None:
    x = torch.tensor([-INF, -3.4e38, -1e30, 1e25, 1e38, INF])
    for constant in (beta, torch.tensor([beta])):
        assert F.dyisru(x, constant, scale=3.0).tolist() == [-3, -3, -3, 3, 3, 3]
        assert F.dyisru_general(x, constant, 1.5, scale=3.0).tolist() == [-3, -3, -3, 3, 3, 3]
    assert F.dyisru(x.double() * 1e200, 1e250, scale=3.0).tolist() == [-3, -3, -3, 3, 3, 3]


def test_dyisru_of_half_precision_extremes() -> None:
    x = torch.tensor([-65504.0, 300.0, 65504.0, 6e-8], dtype=torch.float16)
    expected = math.sqrt(3) * x.double() / torch.sqrt(9e4 + x.double() ** 2)
    assert_close(F.dyisru(x, 9e4), expected.half(), rtol=0, atol=0)


def test_dyisru_of_small_numbers_is_linear() -> None:
    x = torch.tensor([1e-44, 1e-38, 1e-30, -1e-20, 1e-10])
    assert_close(F.dyisru(x, 4.0, scale=1.0), x / 2, rtol=1e-6, atol=1e-45)


@pytest.mark.parametrize("log_beta", [-60.0, -3.3, 0.0, 1.7, 5.9, 12.0, 60.0])
def test_dyisru_accuracy(log_beta: float) -> None:
    beta = torch.tensor([log_beta]).exp()
    exponents = torch.cat([torch.linspace(-8, 8, 100_000), torch.linspace(-1, 5, 100_000)])
    x = (beta.sqrt() * 10**exponents).float()
    for scale in (1.0, math.sqrt(383)):
        exact = scale * x.double() / torch.sqrt(beta.double() + x.double() ** 2)
        error = (F.dyisru(x, beta, scale=scale).double() - exact).abs() / exact
        assert error.max() <= 2 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_dyisru_gradient_at_the_edges(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    middle = [0.0, 1e-30, 1.0, -5.0, 1e3]
    values = [-INF, -largest, -1e30, *middle, 1e19, 1e30, largest, INF]
    x = torch.tensor(values, dtype=dtype, requires_grad=True)
    beta = torch.full_like(x, 4.0).requires_grad_()
    F.dyisru(x, beta, scale=3.0).sum().backward()
    assert x.grad is not None
    assert beta.grad is not None
    # Clamped in float64, so that the expected squares do not overflow. What autograd subtracts are
    # terms of the size of 1 / root, so its rounding is a few units in the last place of that.
    exact = x.detach().double().clamp(-1e100, 1e100)
    root = torch.sqrt(4 + exact**2)
    rounding = 12 * torch.finfo(dtype).eps / root + 2 * torch.finfo(dtype).tiny
    assert ((x.grad.double() - 12 / root**3).abs() <= rounding).all()
    assert ((beta.grad.double() + 1.5 * exact / root**3).abs() <= rounding).all()


def test_dyisru_gradient_of_tiny_and_huge_beta() -> None:
    x = torch.tensor([-INF, -1e30, -1.0, 0.0, 1e-15, 1.0, 1e30, INF])
    for value in (1e-30, 1e30):
        point, beta = x.clone().requires_grad_(), torch.tensor([value], requires_grad=True)
        F.dyisru(point, beta, scale=1.0).sum().backward()
        assert point.grad is not None
        assert beta.grad is not None
        assert point.grad.isfinite().all()
        assert beta.grad.isfinite().all()
        assert point.grad[3].item() == pytest.approx(value**-0.5)


REAL = st.floats(-1e6, 1e6, width=32)
POSITIVE = st.floats(2**-10, 2**10, width=32)
quickly = settings(deadline=None, derandomize=True, max_examples=60)


@pytest.mark.parametrize("name", CORES)
@quickly
@given(values=st.lists(REAL, min_size=1, max_size=8), constant=POSITIVE)
def test_odd(name: str, values: list[float], constant: float) -> None:
    x = torch.tensor(values)
    assert torch.equal(CORES[name](-x, constant), -CORES[name](x, constant))


@pytest.mark.parametrize("name", CORES)
@quickly
@given(values=st.lists(REAL, min_size=2, max_size=16), constant=POSITIVE)
def test_monotone(name: str, values: list[float], constant: float) -> None:
    x = torch.tensor(values, dtype=torch.float64).sort().values
    y = CORES[name](x, constant)
    assert (y.diff() >= -1e-15 * y.abs().max()).all()


@quickly
@given(
    values=st.lists(st.floats(width=32, allow_nan=False), min_size=2, max_size=8),
    constant=POSITIVE,
    weight=REAL,
    bias=REAL,
)
@pytest.mark.parametrize("name", ["dyt", "scaled_dyt", "dyisru", "derf"])
def test_bounded(
    name: str, values: list[float], constant: float, weight: float, bias: float
) -> None:
    x = torch.tensor(values)
    y = getattr(F, name)(
        x, constant, weight=x.new_full(x.shape, weight), bias=x.new_full(x.shape, bias)
    )
    bound = 1 if name in ("dyt", "derf") else math.sqrt(len(values) - 1)
    assert (y.abs() <= (bound * abs(weight) + abs(bias)) * (1 + 1e-6)).all()


@quickly
@given(value=st.floats(-1e3, 1e3), constant=POSITIVE)
@pytest.mark.parametrize(
    ("name", "derivative"),
    [
        ("dyt", lambda x, a: a / math.cosh(min(abs(a * x), 300)) ** 2),
        ("dyisru", lambda x, b: b / (b + x * x) ** 1.5),
        ("derf", lambda x, a: 2 * a / math.sqrt(math.pi) * math.exp(-((a * x) ** 2))),
        ("isru", lambda x, a: (1 + a * x * x) ** -1.5),
        ("linear", lambda x, a: a),
    ],
)
def test_derivative(
    name: str, derivative: Callable[[float, float], float], value: float, constant: float
) -> None:
    x = torch.tensor([value], dtype=torch.float64, requires_grad=True)
    CORES[name](x, constant).backward()
    assert x.grad is not None
    slope = derivative(0.0, constant)
    assert x.grad.item() == pytest.approx(derivative(value, constant), rel=1e-9, abs=1e-14 * slope)


# torch's forward mode imports decompositions that it still scripts.
FORWARD_MODE = pytest.mark.filterwarnings(
    "ignore:`torch.jit.script` is deprecated:DeprecationWarning"
)


@FORWARD_MODE
@pytest.mark.parametrize("name", NAMES)
def test_derivatives_of_all_arguments(name: str) -> None:
    function, _ = POINTWISE[name]
    inputs = tuple(p.requires_grad_() for p in (randn(3, 5), *arguments(5)))
    assert gradcheck(function, inputs, check_forward_ad=True)
    assert gradgradcheck(function, inputs)


def test_derivatives_of_isru_scale_and_shift() -> None:
    x, alpha, w, _, shift = (p.requires_grad_() for p in (randn(3, 5), *arguments(5)))
    assert gradcheck(F.isru, (x, alpha))
    assert gradgradcheck(F.isru, (x, alpha))
    assert gradcheck(lambda *p: F.derf(p[0], p[1], p[2], scale=p[3]), (x, alpha, shift, w))
    assert gradcheck(lambda *p: F.dyisru(p[0], p[1], scale=p[2]), (x, alpha, w))


@FORWARD_MODE
@pytest.mark.parametrize("name", NAMES)
def test_vmap_and_jvp(name: str) -> None:
    function, _ = POINTWISE[name]
    x, t, (a, w, b, c) = randn(4, 3, 5), randn(4, 3, 5, seed=9), arguments(5)
    assert_close(torch.func.vmap(lambda v: function(v, a, w, b, c))(x), function(x, a, w, b, c))
    by_constant = torch.func.vmap(lambda k: function(x, k, w, b, c))(a)
    assert_close(by_constant, torch.stack([function(x, float(k), w, b, c) for k in a]))
    value, tangent = torch.func.jvp(lambda v: function(v, a, w, b, c), (x,), (t,))
    leaf = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(function(leaf, a, w, b, c).sum(), leaf)
    assert_close(value, function(x, a, w, b, c))
    assert_close(tangent, slope * t)


TRACED: dict[str, Callable[..., Tensor]] = {
    **{name: function for name, (function, _) in POINTWISE.items()},
    "isru": lambda x, a, w, b, c: F.isru(x, a),
    "layer_norm": lambda x, a, w, b, c: F.layer_norm(x, w, b),
    "rms_norm": lambda x, a, w, b, c: F.rms_norm(x, w, b),
    "center": lambda x, a, w, b, c: F.center(x),
    "rms": lambda x, a, w, b, c: F.rms(x, eps=0.5),
    "mean_square": lambda x, a, w, b, c: F.mean_square(x),
}


@pytest.mark.parametrize("name", TRACED)
def test_compiles_to_one_graph(name: str) -> None:
    function, arrays = TRACED[name], (randn(4, 5), *arguments(5))
    leaves = [p.clone().requires_grad_() for p in arrays]
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    got = compiled(*leaves)
    assert_close(got, function(*arrays))
    got.square().sum().backward()
    gradients = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    function(*leaves).square().sum().backward()
    for gradient, leaf in zip(gradients, leaves, strict=True):
        assert (gradient is None) == (leaf.grad is None)
        if gradient is not None:
            assert_close(gradient, leaf.grad)


@pytest.mark.parametrize("name", NAMES)
def test_compiles_with_numbers_and_shapes_that_change(name: str) -> None:
    function, _ = POINTWISE[name]
    compiled = torch.compile(function, fullgraph=True, backend="eager", dynamic=True)
    for shape, constant in (((2, 5), 0.5), ((3, 7), 0.75), ((4, 9), 1.25)):
        x = randn(*shape)
        assert_close(
            compiled(x, constant, None, None, 0.25), function(x, constant, None, None, 0.25)
        )


@pytest.mark.parametrize("name", TRACED)
def test_values_are_never_looked_at(name: str) -> None:
    meta = [p.to("meta") for p in (randn(4, 5), *arguments(5))]
    assert TRACED[name](*meta).device.type == "meta"


X = torch.ones(2, 3)
ERRORS: list[tuple[Callable[[], object], str]] = [
    (
        lambda: F.dyt(torch.ones(3, dtype=torch.int64), 0.5),
        "x.*floating.*int64",
    ),
    (
        lambda: F.dyt(torch.ones(3, dtype=torch.complex64), 0.5),
        "x.*floating.*complex64",
    ),
    (lambda: F.center([1.0, 2.0]), "^x.*got list"),
    (lambda: F.dyt(X, 0.5, dim=2), "dim.*got 2.*-2 to 1"),
    (lambda: F.rms(X, dim=(0, -3)), r"dim.*name.*got \(0, -3\)"),
    (lambda: F.center(X, dim=()), r"dim.*name.*got \(\)"),
    (lambda: F.isru(torch.tensor(1.0), 0.5), "dim.*which has 0"),
    (lambda: F.layer_norm(X, dim=(1, -1)), r"dim.*repeat.*got \(1, -1\)"),
    (lambda: F.dyisru(X, 0.0), r"beta.*got 0\.0"),
    (lambda: F.dyisru(X, -1.0), "beta.*positive"),
    (lambda: F.dyisru_general(X, NAN, 0.0), "beta.*got nan"),
    (lambda: F.dyisru_general(X, INF, 0.0), "beta.*got inf"),
    (lambda: F.dyisru_general(X, 1.0, INF), "center.*finite"),
    (lambda: F.isru(X, 0.0), "alpha.*positive"),
    (lambda: F.dyt(X, NAN), "alpha.*finite"),
    (lambda: F.dyt(X, 0.5, scale=INF), "scale.*finite"),
    (lambda: F.dyt(X, 0.5, center=NAN), "center.*finite"),
    (lambda: F.derf(X, 0.5, INF), "shift.*finite"),
    (lambda: F.linear(X, INF), "slope.*finite"),
    (lambda: F.dyt(X, torch.ones(2)), r"alpha.*\(3,\).*\(2, 3\), got \(2,\)"),
    (lambda: F.linear(X, torch.ones(2)), r"slope.*got \(2,\)"),
    (lambda: F.dyt(X, torch.ones(4, 3)), r"alpha.*got \(4, 3\)"),
    (lambda: F.dyt(X, torch.ones(1, 2, 3)), r"alpha.*got \(1, 2, 3\)"),
    (
        lambda: F.dyisru(X, torch.ones(3, dtype=torch.int32)),
        "beta.*floating.*int32",
    ),
    (lambda: F.dyt(X, 0.5, torch.ones(2)), r"weight.*shape \(3,\).*got \(2,\)"),
    (lambda: F.dyt(X, 0.5, torch.ones(1)), r"weight.*shape \(3,\).*got \(1,\)"),
    (lambda: F.dyt(X, 0.5, torch.ones(3), dim=0), r"weight.*shape \(2,\)"),
    (
        lambda: F.dyt(X, 0.5, torch.ones(3, dtype=torch.int64)),
        "weight.*floating",
    ),
    (lambda: F.dyt(X, 0.5, None, 1.0), "bias.*got float"),
    (lambda: F.layer_norm(X, torch.ones(2)), "weight.*shape"),
    (lambda: F.layer_norm(X, None, torch.ones(2)), "bias.*shape"),
    (lambda: F.rms_norm(X, None, torch.ones(2, 3)), "bias.*shape"),
    (lambda: F.layer_norm(X, eps=-1e-5), "eps.*got -1e-05"),
    (lambda: F.rms_norm(X, eps=NAN), "eps.*negative"),
    (lambda: F.rms(X, eps=INF), "eps.*negative"),
    (lambda: F.centering_matrix(0), "channels.*1, got 0"),
]


@pytest.mark.parametrize(("call", "message"), ERRORS)
def test_error(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        call()


def test_all_lists_the_public_functions() -> None:
    public = {
        n
        for n, f in inspect.getmembers(F, inspect.isfunction)
        if f.__module__ == F.__name__ and n[0] != "_"
    }
    assert set(F.__all__) == public
