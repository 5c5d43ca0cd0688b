"""The reference functions against independent formulas, at their edges, and under torch's transforms."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

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
# bias in NumPy. Only dyisru_general has a center.
POINTWISE: dict[str, tuple[Callable[..., Tensor], Callable[[Array, Array, Array, int], Array]]] = {
    "dyt": (
        lambda x, a, w, b, c, dim=-1: F.dyt(x, a, w, b, scale=1.5, dim=dim),
        lambda x, a, c, n: 1.5 * np.tanh(a * x),
    ),
    "scaled_dyt": (
        lambda x, a, w, b, c, dim=-1: F.scaled_dyt(x, a, w, b, dim=dim),
        lambda x, a, c, n: np.sqrt(n - 1) * np.tanh(a * x),
    ),
    "dyisru": (
        lambda x, a, w, b, c, dim=-1: F.dyisru_general(x, a, c, w, b, dim=dim),
        lambda x, a, c, n: np.sqrt(n - 1) * (x - c) / np.sqrt(a + (x - c) ** 2),
    ),
    "derf": (
        lambda x, a, w, b, c, dim=-1: F.derf(x, a, 0.25, w, b, scale=1.5, dim=dim),
        lambda x, a, c, n: 1.5 * np.vectorize(math.erf, otypes=[float])(a * x + 0.25),
    ),
    "linear": (
        lambda x, a, w, b, c, dim=-1: F.linear(x, a, w, b, dim=dim),
        lambda x, a, c, n: a * x,
    ),
}
# Functions of (x, constant): odd, and all but the last two bounded by 1.
CORES: dict[str, Callable[..., Tensor]] = {
    "dyt": F.dyt,
    "dyisru": lambda x, beta: F.dyisru(x, beta, scale=1.0),
    "derf": F.derf,
    "isru": F.isru,
    "linear": F.linear,
}
with_every_function = pytest.mark.parametrize(
    ("function", "formula"), POINTWISE.values(), ids=POINTWISE
)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def arguments(channels: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Return one constant, weight, bias and centre per channel."""
    constant, weight, bias, center = randn(4, channels, seed=1, dtype=dtype)
    return [constant.abs() + 0.5, weight, bias, center]


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_are_torchs(dtype: torch.dtype) -> None:
    x = (3 * randn(4, 37) + 1).to(dtype)
    weight, bias = randn(2, 37, seed=1, dtype=dtype)
    theirs = torch_functional.layer_norm(x, (37,), weight, bias, 1e-3)
    assert_close(F.layer_norm(x, weight, bias, 1e-3), theirs)
    rms = torch_functional.rms_norm(x.double(), (37,), weight.double(), 1e-3)
    assert_close(F.rms_norm(x, weight, bias, 1e-3), (rms + bias.double()).to(dtype))
    assert_close(F.layer_norm(x), torch_functional.layer_norm(x, (37,)))
    assert_close(F.rms_norm(x), torch_functional.rms_norm(x, (37,), eps=1e-6))


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("dim", [-1, 0, 1])
def test_statistics(dim: int, keepdim: bool) -> None:
    x = randn(3, 4, 5)
    expected = x.square().mean(dim, keepdim)
    assert_close(F.mean_square(x, dim, keepdim), expected)
    assert_close(F.rms(x, dim, 0.5, keepdim), (expected + 0.5).sqrt())
    assert_close(F.center(x, dim), x - x.mean(dim, keepdim=True))


def test_statistics_of_half_precision_are_computed_in_single() -> None:
    assert F.mean_square(torch.full((4096,), 4.0, dtype=torch.float16)).item() == 16
    ones = torch.ones(8, dtype=torch.float16)
    assert_close(F.rms_norm(6e4 * ones), ones)


def test_centering_matrix_centres_and_projects() -> None:
    matrix, x = F.centering_matrix(7, dtype=torch.float64), randn(3, 7)
    assert_close(x @ matrix, F.center(x))
    assert_close(matrix @ matrix, matrix)
    assert F.centering_matrix(2, dtype=torch.float16, device="meta").dtype == torch.float16


@with_every_function
@pytest.mark.parametrize("dtype", DTYPES)
def test_value(function: Any, formula: Any, dtype: torch.dtype) -> None:
    x = (3 * randn(4, 37)).to(dtype)
    a, w, b, c = arguments(37, dtype)
    got = function(x, a, w, b, c)
    assert got.dtype == dtype
    x, a, w, b, c = (p.double().numpy() for p in (x, a, w, b, c))
    expected = w * formula(x, a, c, 37) + b
    eps = max(torch.finfo(dtype).eps / 2, torch.finfo(torch.float32).eps * (dtype != torch.float64))
    magnitude = np.abs(expected - b) + np.abs(b) + 1
    assert np.all(np.abs(got.double().numpy() - expected) <= 8 * eps * magnitude)


@with_every_function
def test_low_precision_is_rounded_once(function: Any, formula: Any) -> None:
    x = randn(4, 37, dtype=torch.bfloat16)
    given = arguments(37, torch.bfloat16)
    expected = function(x.float(), *[p.float() for p in given]).bfloat16()
    assert torch.equal(function(x, *given), expected)
    # Parameters of higher precision are not rounded to that of x.
    weight = torch.tensor([1 + 2**-8])
    one = torch.ones(1, dtype=torch.bfloat16)
    assert torch.equal(F.linear(one, 3.0, weight), (weight * 3.0).bfloat16())


@with_every_function
def test_absent_parameters_are_neutral(function: Any, formula: Any) -> None:
    x, one = randn(4, 7), torch.ones(7, dtype=torch.float64)
    assert_close(function(x, 0.7, None, None, None), function(x, 0.7, one, 0 * one, 0.0))


@with_every_function
def test_constants_of_every_shape(function: Any, formula: Any) -> None:
    x = randn(2, 3, 5)
    expected = function(x, 0.5, None, None, 0.25)
    for shape in ((), (1,), (5,), (2, 3, 1), (1, 3, 5), (2, 3, 5)):
        a, c = (torch.full(shape, value, dtype=torch.float64) for value in (0.5, 0.25))
        assert_close(function(x, a, None, None, c), expected)


def test_scale_and_shift_may_be_tensors() -> None:
    x, scale = randn(2, 5), torch.arange(1.0, 6.0, dtype=torch.float64)
    for function in (F.dyt, F.dyisru, F.derf):
        assert_close(function(x, 0.5, scale=scale), function(x, 0.5, scale=1.0) * scale)
    assert_close(F.derf(x, 0.5, scale), torch.erf(0.5 * x + scale))


@with_every_function
def test_dims_and_memory(function: Any, formula: Any) -> None:
    x, given = randn(2, 3, 4), arguments(3)
    last = function(x.movedim(1, -1).contiguous(), *given)
    version = x._version
    for dim in (1, -2):
        assert_close(function(x, *given, dim=dim), last.movedim(-1, 1))
    assert_close(function(x.movedim(1, -1), *given), last)
    assert x._version == version
    for shape in ((0, 3), (2, 0, 3), (1, 1), (3, 0)):
        ones = torch.ones(shape[-1])
        assert function(torch.ones(shape), 0.5, ones, ones, 0.5).shape == shape


def test_isru() -> None:
    x, alpha = randn(3, 4, 5), randn(4, seed=1).abs() + 0.1
    assert_close(F.isru(x, alpha, dim=1), x / torch.sqrt(1 + alpha[:, None] * x * x))


def test_one_channel_has_bound_zero() -> None:
    assert F.dyisru(torch.tensor([5.0]), 1.0).item() == 0
    assert F.scaled_dyt(torch.tensor([5.0]), 1.0).item() == 0


@with_every_function
def test_nan_stays_where_it_is(function: Any, formula: Any) -> None:
    x = randn(4, 7, dtype=torch.float32)
    poison = torch.zeros(4, 7, dtype=torch.bool)
    poison[1, 2] = poison[3, 6] = True
    got = function(x.masked_fill(poison, NAN), 0.5, None, None, 0.5)
    assert torch.equal(got.isnan(), poison)
    assert torch.equal(got[~poison], function(x, 0.5, None, None, 0.5)[~poison])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["dyt", "dyisru", "derf", "isru"])
def test_saturation(name: str, dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    got = CORES[name](torch.tensor([-INF, -largest, largest, INF, 0.0, -0.0], dtype=dtype), 1.0)
    assert got.dtype == dtype
    assert got.tolist() == [-1, -1, 1, 1, 0, 0]


@pytest.mark.parametrize("beta", [1e-30, 1e-6, 4.0, 1e6, 1e28])
def test_dyisru_saturates_where_the_square_overflows(beta: float) -> None:
    x = torch.tensor([-INF, -3.4e38, -1e30, 1e25, 1e38, INF])
    for constant in (beta, torch.tensor([beta])):
        assert F.dyisru_general(x, constant, 1.5, scale=3.0).tolist() == [-3, -3, -3, 3, 3, 3]
    assert F.dyisru(x.double() * 1e200, 1e250, scale=3.0).tolist() == [-3, -3, -3, 3, 3, 3]


@pytest.mark.parametrize("log_beta", [-60.0, 0.0, 5.9, 60.0])
def test_dyisru_accuracy(log_beta: float) -> None:
    beta = torch.tensor([log_beta]).exp()
    exponents = torch.cat([torch.linspace(-8, 8, 100_000), torch.linspace(-1, 5, 100_000)])
    x = (beta.sqrt() * 10**exponents).float()
    exact = x.double() / torch.sqrt(beta.double() + x.double() ** 2)
    error = (F.dyisru(x, beta, scale=1.0).double() - exact).abs() / exact
    assert error.max() <= 2 * torch.finfo(torch.float32).eps
    tiny = torch.tensor([1e-44, 1e-38, -1e-20])
    assert_close(F.dyisru(tiny, 4.0, scale=1.0), tiny / 2, rtol=1e-6, atol=1e-45)
    half = torch.tensor([-65504.0, 300.0, 65504.0, 6e-8], dtype=torch.float16)
    exact = math.sqrt(3) * half.double() / torch.sqrt(9e4 + half.double() ** 2)
    assert_close(F.dyisru(half, 9e4), exact.half(), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_dyisru_gradient_at_the_edges(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    values = [-INF, -largest, -1e30, 0.0, 1e-30, 1.0, -5.0, 1e3, 1e19, 1e30, largest, INF]
    x = torch.tensor(values, dtype=dtype, requires_grad=True)
    beta = torch.full_like(x, 4.0).requires_grad_()
    of_x, of_beta = torch.autograd.grad(F.dyisru(x, beta, scale=3.0).sum(), (x, beta))
    # Clamped in float64, so that the expected squares do not overflow. What autograd subtracts are
    # terms of the size of 1 / root, so its rounding is a few units in the last place of that.
    exact = x.detach().double().clamp(-1e100, 1e100)
    root = torch.sqrt(4 + exact**2)
    rounding = 12 * torch.finfo(dtype).eps / root + 2 * torch.finfo(dtype).tiny
    assert ((of_x.double() - 12 / root**3).abs() <= rounding).all()
    assert ((of_beta.double() + 1.5 * exact / root**3).abs() <= rounding).all()


@pytest.mark.parametrize("value", [1e-30, 1e30])
def test_dyisru_gradient_of_tiny_and_huge_beta(value: float) -> None:
    x = torch.tensor([-INF, -1e30, -1.0, 0.0, 1e-15, 1e30, INF], requires_grad=True)
    beta = torch.tensor([value], requires_grad=True)
    of_x, of_beta = torch.autograd.grad(F.dyisru(x, beta, scale=1.0).sum(), (x, beta))
    assert of_x.isfinite().all()
    assert of_beta.isfinite().all()
    assert of_x[3].item() == pytest.approx(value**-0.5)


POSITIVE = st.floats(2**-10, 2**10, width=32)
quickly = settings(deadline=None, derandomize=True, max_examples=60)


@pytest.mark.parametrize("name", CORES)
@quickly
@given(values=st.lists(st.floats(-1e6, 1e6, width=32), min_size=2, max_size=16), constant=POSITIVE)
def test_odd_monotone_and_bounded(name: str, values: list[float], constant: float) -> None:
    x = torch.tensor(values, dtype=torch.float64).sort().values
    y = CORES[name](x, constant)
    assert torch.equal(CORES[name](-x, constant), -y)
    assert (y.diff() >= -1e-15 * y.abs().max()).all()
    if name not in ("isru", "linear"):
        assert (y.abs() <= 1).all()


# torch's forward mode imports decompositions that it still scripts.
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@with_every_function
def test_transforms_and_derivatives_of_all_arguments(function: Any, formula: Any) -> None:
    inputs = [p.requires_grad_() for p in (randn(3, 5), *arguments(5))]
    assert gradcheck(function, inputs, check_forward_ad=True)
    assert gradgradcheck(function, inputs)
    x, *given = [p.detach() for p in inputs]
    y = function(x, *given)
    assert_close(torch.func.vmap(lambda v: function(v, *given))(x), y)
    assert_close(torch.compile(function, fullgraph=True, backend="eager")(x, *given), y)


def test_derivatives_of_norms_isru_scale_and_shift() -> None:
    x, alpha, w, b, shift = (p.requires_grad_() for p in (randn(3, 5), *arguments(5)))
    for norm in (F.layer_norm, F.rms_norm):
        assert gradcheck(norm, (x, w, b))
        assert gradgradcheck(norm, (x, w, b))
    assert gradcheck(F.isru, (x, alpha))
    assert gradcheck(lambda *p: F.derf(p[0], p[1], p[2], scale=p[3]), (x, alpha, shift, w))
    assert gradcheck(lambda *p: F.dyisru(p[0], p[1], scale=p[2]), (x, alpha, w))


X = torch.ones(2, 3)
ERRORS: list[tuple[Callable[[], object], str]] = [
    (lambda: F.dyt(torch.ones(3, dtype=torch.int64), 0.5), "x.*floating.*int64"),
    (lambda: F.center([1.0, 2.0]), "^x.*got list"),
    (lambda: F.dyt(X, 0.5, dim=2), "dim.*got 2.*-2 to 1"),
    (lambda: F.rms(X, dim=(0, 1)), r"dim.*one dimension.*got \(0, 1\)"),
    (lambda: F.isru(torch.tensor(1.0), 0.5), "axis of channels"),
    (lambda: F.dyisru(X, 0.0), r"beta.*got 0\.0"),
    (lambda: F.dyisru_general(X, NAN, 0.0), "beta.*got nan"),
    (lambda: F.dyisru(X, None), "beta.*got None"),
    (lambda: F.dyisru(X, 1.0, witnesses=[0]), r"witnesses.*tensor.*got \[0\]"),
    (lambda: F.dyisru_general(X, 1.0, INF), "center.*finite"),
    (lambda: F.isru(X, 0.0), "alpha.*positive"),
    (lambda: F.dyt(X, NAN), "alpha.*finite"),
    (lambda: F.dyt(X, 0.5, scale=INF), "scale.*finite"),
    (lambda: F.derf(X, 0.5, INF), "shift.*finite"),
    (lambda: F.linear(X, INF), "slope.*finite"),
    (lambda: F.dyt(X, torch.ones(2)), r"alpha.*\(3,\).*\(2, 3\), got \(2,\)"),
    (lambda: F.dyt(X, torch.ones(1, 2, 3)), r"alpha.*got \(1, 2, 3\)"),
    (lambda: F.dyisru(X, torch.ones(3, dtype=torch.int32)), "beta.*floating.*int32"),
    (lambda: F.dyt(X, 0.5, torch.ones(1)), r"weight.*shape \(3,\).*got \(1,\)"),
    (lambda: F.dyt(X, 0.5, torch.ones(3), dim=0), r"weight.*shape \(2,\)"),
    (lambda: F.dyt(X, 0.5, None, 1.0), "bias.*got float"),
    (lambda: F.layer_norm(X, None, torch.ones(2)), "bias.*shape"),
    (lambda: F.rms_norm(X, torch.ones(2, 3)), "weight.*shape"),
    (lambda: F.layer_norm(X, eps=-1e-5), "eps.*got -1e-05"),
    (lambda: F.rms(X, eps=INF), "eps.*negative"),
    (lambda: F.centering_matrix(0), "channels.*1, got 0"),
]


@pytest.mark.parametrize(("call", "message"), ERRORS)
def test_error(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        call()


def test_all_lists_the_public_functions() -> None:
    functions = inspect.getmembers(F, inspect.isfunction)
    assert set(F.__all__) == {n for n, f in functions if f.__module__ == F.__name__ and n[0] != "_"}


def test_a_constant_may_vary_or_be_a_size_under_compile() -> None:
    x = torch.linspace(-3, 3, 12).reshape(3, 4)
    of_number = torch.compile(F.dyisru, fullgraph=True, dynamic=True, backend="eager")
    for beta in (1.5, 2.5):
        assert_close(of_number(x, beta), F.dyisru(x, beta))
    of_size = torch.compile(
        lambda x: F.dyisru(x, x.shape[-1] / 2),
        fullgraph=True,
        dynamic=True,
        backend="eager",
    )
    assert_close(of_size(x), F.dyisru(x, 2.0))
