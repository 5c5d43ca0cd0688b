"""The closed forms against loops that leave one channel out, against autograd, and against the paper's numbers."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import example, given, settings
from torch import Tensor
from torch.testing import assert_close

import dynorm.functional as F  # noqa: N812
from dynorm import theory
from dynorm.errors import ArgumentError

PER_CHANNEL: dict[str, Callable[..., Tensor]] = {
    "layer_norm_derivative": theory.layer_norm_derivative,
    "channel_beta": theory.channel_beta,
    "leave_one_out_mean": theory.leave_one_out_mean,
    "leave_one_out_variance": theory.leave_one_out_variance,
    "leave_one_out_beta": theory.leave_one_out_beta,
    "leave_one_out_square_sum": theory.leave_one_out_square_sum,
    "layer_norm_as_dyisru": theory.layer_norm_as_dyisru,
    "rms_norm_as_dyisru": theory.rms_norm_as_dyisru,
}
LEAVE_ONE_OUT = {name: f for name, f in PER_CHANNEL.items() if name != "layer_norm_derivative"}
WITH_EPS = (
    "leave_one_out_beta",
    "leave_one_out_square_sum",
    "layer_norm_as_dyisru",
    "rms_norm_as_dyisru",
)
exactly = {"rtol": 1e-12, "atol": 0.0}


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def others(x: Tensor, statistic: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply ``statistic`` to the channels other than i, for each i, in float64: slow and obvious."""
    keep = [[k for k in range(x.shape[-1]) if k != i] for i in range(x.shape[-1])]
    return torch.stack([statistic(x.double()[..., channels]) for channels in keep], -1)


def mean(x: Tensor) -> Tensor:
    return x.mean(-1)


def variance(x: Tensor) -> Tensor:
    return x.var(-1, correction=0)


def square_sum(x: Tensor) -> Tensor:
    return x.square().sum(-1)


@pytest.mark.parametrize("channels", [2, 3, 8, 61])
def test_leave_one_out_statistics(channels: int) -> None:
    x = 3 * randn(5, channels) + 2
    v = others(x, variance)
    assert_close(theory.leave_one_out_mean(x), others(x, mean), rtol=1e-12, atol=1e-14)
    assert_close(theory.leave_one_out_variance(x), v, **exactly)
    assert_close(theory.leave_one_out_square_sum(x), others(x, square_sum), **exactly)
    assert_close(theory.leave_one_out_beta(x), channels * v, **exactly)
    eps = 0.25
    assert_close(
        theory.leave_one_out_square_sum(x, eps=eps),
        others(x, square_sum) + channels * eps,
        **exactly,
    )
    added = eps * channels**2 / (channels - 1)
    assert_close(theory.leave_one_out_beta(x, eps=eps), channels * v + added, **exactly)


@pytest.mark.parametrize("channels", [3, 5, 64])
@pytest.mark.parametrize(
    ("offset", "outliers"),
    [
        (0.0, ()),
        (1e4, ()),
        (-1e4, ()),
        (0.0, (1e8,)),
        (0.0, (-1e15,)),
        (1e3, (1e6,)),
        (0.0, (1e6, -1e6)),
        (0.0, (1e6, 9e5)),
    ],
)
def test_leave_one_out_statistics_do_not_cancel(
    channels: int, offset: float, outliers: tuple[float, ...]
) -> None:
    x = (randn(50, channels) + offset).float()
    for channel, outlier in enumerate(outliers, start=1):
        x[:, channel] += outlier
    rounding = 8 * torch.finfo(torch.float32).eps
    s, v = others(x, square_sum), others(x, variance)
    assert_close(theory.leave_one_out_variance(x).double(), v, rtol=rounding, atol=0)
    assert_close(theory.leave_one_out_square_sum(x).double(), s, rtol=rounding, atol=0)
    error = (theory.leave_one_out_mean(x).double() - others(x, mean)).abs()
    assert (error <= rounding * torch.sqrt(s / (channels - 1))).all()


@pytest.mark.parametrize("value", [0.0, 0.1, -1e4])
def test_variance_of_a_constant_token_is_zero(value: float) -> None:
    x = torch.full((7,), value)
    assert torch.equal(theory.leave_one_out_variance(x), torch.zeros(7))
    assert torch.equal(theory.leave_one_out_mean(x), x)
    assert torch.equal(theory.layer_norm_as_dyisru(x, 1e-5), torch.zeros(7))


@pytest.mark.parametrize("eps", [0.0, 1e-5, 0.5])
@pytest.mark.parametrize("channels", [2, 3, 7, 384])
def test_norms_are_dyisru(channels: int, eps: float) -> None:
    x = 2 * randn(6, channels) + 1
    x[0, 1] += 300
    close = {"rtol": 1e-12, "atol": 1e-14}
    assert_close(theory.layer_norm_as_dyisru(x, eps), F.layer_norm(x, eps=eps), **close)
    assert_close(theory.rms_norm_as_dyisru(x, eps), F.rms_norm(x, eps=eps), **close)


@settings(deadline=None, derandomize=True, max_examples=100)
@given(values=st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=20), eps=st.floats(1e-3, 10))
@example(values=[999999.7] * 13, eps=1e-3)
def test_norms_are_dyisru_for_any_token(values: list[float], eps: float) -> None:
    x = torch.tensor(values, dtype=torch.float64)
    # A mean is rounded in proportion to its size, and LayerNorm divides that by at least sqrt(eps).
    atol = 4 * torch.finfo(x.dtype).eps * max(1.0, float(x.abs().max())) / eps**0.5
    layer_norm = F.layer_norm(x, eps=eps)
    assert_close(theory.layer_norm_as_dyisru(x, eps), layer_norm, rtol=1e-9, atol=atol)
    assert_close(theory.rms_norm_as_dyisru(x, eps), F.rms_norm(x, eps=eps), rtol=1e-12, atol=1e-14)
    assert (theory.leave_one_out_variance(x) >= 0).all()


def test_slope_factor() -> None:
    x = randn(4, 3, 5)
    expected = 1 / (5 * x.std(-1, correction=0))
    assert_close(theory.layer_norm_slope_factor(x), expected, **exactly)
    assert_close(theory.layer_norm_slope_factor(x, keepdim=True), expected[..., None], **exactly)


@pytest.mark.parametrize("name", PER_CHANNEL)
def test_derivatives(name: str) -> None:
    x = (3 * randn(2, 5) + 2).requires_grad_()
    assert torch.autograd.gradcheck(PER_CHANNEL[name], (x,))
    assert torch.autograd.gradgradcheck(PER_CHANNEL[name], (x,))


def test_constants_of_equal_slope() -> None:
    beta, scale = 64 * 0.25, 8.0
    x = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    for y in (
        F.dyisru(x, beta, scale=scale),
        F.dyt(x, theory.scaled_dyt_alpha(beta), scale=scale),
        F.derf(x, theory.derf_alpha(beta), scale=scale),
    ):
        (slope,) = torch.autograd.grad(y.sum(), x)
        # With the scale sqrt(C), that is one over the standard deviation.
        assert slope.item() == pytest.approx(2.0, rel=1e-12)


def test_constants_of_tensors_and_of_floats_agree() -> None:
    values = torch.tensor([0.25, 3.0], dtype=torch.float64)
    functions: tuple[Callable[..., Tensor], ...] = (
        theory.scaled_dyt_alpha,
        theory.derf_alpha,
    )
    for function in functions:
        single = [function(float(v)) for v in values]
        assert isinstance(single[0], float)
        assert_close(function(values), torch.tensor(single, dtype=torch.float64), **exactly)


@pytest.mark.parametrize("name", PER_CHANNEL)
def test_memory_and_transforms(name: str) -> None:
    function, x = PER_CHANNEL[name], randn(2, 3, 4, 5)
    stored = randn(5, 8)
    assert_close(function(stored.T[::2]), function(stored.T[::2].contiguous()))
    assert function(torch.ones(0, 5)).shape == (0, 5)
    assert_close(torch.func.vmap(function)(x), function(x))
    assert_close(torch.compile(function, fullgraph=True, backend="aot_eager")(x), function(x))


@pytest.mark.parametrize("name", PER_CHANNEL)
def test_half_precision_is_single_precision_rounded_once(name: str) -> None:
    function, x = PER_CHANNEL[name], randn(3, 9).bfloat16()
    got = function(x)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, function(x.float()).bfloat16())


@pytest.mark.parametrize("name", LEAVE_ONE_OUT)
@pytest.mark.parametrize("shape", [(3, 1), (3, 0)])
def test_fewer_than_two_channels_are_refused(name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(ArgumentError, match=rf"2 channels.*got {shape[1]}.*\(3, {shape[1]}\)"):
        PER_CHANNEL[name](torch.ones(shape))


@pytest.mark.parametrize("name", WITH_EPS)
@pytest.mark.parametrize("eps", [-1e-5, math.nan, math.inf])
def test_bad_eps_is_refused(name: str, eps: float) -> None:
    with pytest.raises(ArgumentError, match=r"eps.*negative"):
        PER_CHANNEL[name](torch.ones(3), eps=eps)


@pytest.mark.parametrize("name", PER_CHANNEL)
def test_bad_input_is_refused(name: str) -> None:
    with pytest.raises(ArgumentError, match=r"real.*floating"):
        PER_CHANNEL[name](torch.ones(3, dtype=torch.int64))
    with pytest.raises(ArgumentError, match="axis of channels"):
        PER_CHANNEL[name](torch.ones(()))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: theory.layer_norm_slope_factor(torch.ones(3, dtype=torch.int64)),
            "x.*floating",
        ),
        (lambda: theory.scaled_dyt_alpha(0.0), r"beta.*got 0\.0"),
        (lambda: theory.derf_alpha(math.nan), "beta.*got nan"),
        (lambda: theory.derf_alpha([4.0]), r"beta.*got \[4\.0\]"),
    ],
)
def test_error(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        call()


def test_all_lists_the_public_functions() -> None:
    functions = inspect.getmembers(theory, inspect.isfunction)
    assert set(theory.__all__) == {
        n for n, f in functions if f.__module__ == theory.__name__ and n[0] != "_"
    }


def test_the_numerator_and_the_exact_beta_of_a_norm() -> None:
    x = 3 + 2 * torch.randn(5, 7, 64, dtype=torch.float64)
    for kind, norm in (("layernorm", F.layer_norm), ("rmsnorm", F.rms_norm)):
        numerator = theory.norm_numerator(x, kind)
        assert_close(numerator / F.rms(numerator, keepdim=True), norm(x, eps=0.0))
    assert torch.equal(theory.norm_numerator(x, "rmsnorm"), x)
    equal = torch.full((2, 8), 1e4, dtype=torch.float64)
    assert not theory.norm_numerator(equal, "layernorm").any()
    assert torch.equal(
        theory.exact_beta(x, "layernorm", 1e-5), theory.leave_one_out_beta(x, eps=1e-5)
    )
    assert torch.equal(
        theory.exact_beta(x, "rmsnorm", 1e-5), theory.leave_one_out_square_sum(x, eps=1e-5)
    )
