"""Witness channels in DyISRU's reference: against a loop, its derivatives, its two ends, its edges."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck
from torch.testing import assert_close

import dynorm.functional as F  # noqa: N812
from dynorm.errors import ArgumentError

C = 7
WITNESSES, GAIN = (5, 0, 2), (0.3, 20.0, 1.0)


def sample(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def parameters() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One beta, centre, weight and bias per channel."""
    beta, center, weight, bias = sample(4, C, seed=1)
    return beta.abs() + 0.5, center, weight, bias


def witnesses() -> dict[str, Tensor]:
    return {"witnesses": torch.tensor(WITNESSES), "gain": torch.tensor(GAIN, dtype=torch.float64)}


def by_loop(x: Tensor, beta: Tensor, center: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The definition, one number at a time."""
    y = torch.empty_like(x)
    for token, out in zip((x - center).tolist(), y, strict=True):
        for i, u in enumerate(token):
            total = float(beta[i])
            for k, g in zip(WITNESSES, GAIN, strict=True):
                if k != i:
                    total += g * token[k] ** 2
            out[i] = weight[i] * 1.5 * u / math.sqrt(total + u * u) + bias[i]
    return y


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_value(dtype: torch.dtype) -> None:
    x = 3 * sample(5, C).to(dtype)
    found = F.dyisru_general(x, *parameters(), scale=1.5, **witnesses())
    assert found.dtype == dtype
    tolerance = {torch.float64: 1e-14, torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
    wanted = by_loop(x.double(), *parameters())
    assert_close(found.double(), wanted, rtol=tolerance, atol=tolerance)


def test_dims_and_none() -> None:
    x, given = sample(4, C, 3), parameters()
    wanted = F.dyisru_general(x.movedim(1, -1), *given, **witnesses()).movedim(-1, 1)
    assert torch.equal(F.dyisru_general(x, *given, dim=1, **witnesses()), wanted)
    # Without witnesses it is the function of one channel, bit for bit.
    none, no_gain = torch.empty(0, dtype=torch.int64), torch.empty(0)
    found = F.dyisru_general(x, *given, dim=1, witnesses=none, gain=no_gain)
    assert torch.equal(found, F.dyisru_general(x, *given, dim=1))


@pytest.mark.parametrize("eps", [0.0, 1e-5])
def test_with_all_channels_dyisru_is_rms_norm(eps: float) -> None:
    x = sample(4, 3, 6)
    # One value larger than all others together.
    x[0, 1, 2] = 1e6
    beta = torch.full((1,), 6 * eps, dtype=x.dtype)
    found = F.dyisru(x, beta, scale=6**0.5, witnesses=torch.arange(6))
    assert_close(found, F.rms_norm(x, eps=eps), rtol=1e-14, atol=0)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_derivatives() -> None:
    inputs = [t.requires_grad_() for t in (sample(2, C), *parameters(), witnesses()["gain"])]

    def call(*leaves: Tensor) -> Tensor:
        *given, gain = leaves
        return F.dyisru_general(*given, witnesses=torch.tensor(WITNESSES), gain=gain)

    assert gradcheck(call, inputs, check_forward_ad=True)


def test_the_jacobian_is_the_closed_form() -> None:
    x, index, gain = sample(C), torch.tensor(WITNESSES), torch.tensor(GAIN, dtype=torch.float64)

    def function(x: Tensor) -> Tensor:
        return F.dyisru(x, 2.0, scale=1.5, witnesses=index, gain=gain)

    found = torch.autograd.functional.jacobian(function, x)
    column = torch.zeros(C, dtype=torch.float64).index_put((index,), gain)
    for i in range(C):
        # One's own channel is left out.
        gains = column.index_fill(0, torch.tensor(i), 0)
        constant = 2.0 + gains @ x.square()
        row = -gains * x[i] * x
        row[i] = constant
        assert_close(found[i], 1.5 * row * (constant + x[i] ** 2) ** -1.5, rtol=1e-13, atol=1e-15)
    others = [k for k in range(C) if k not in WITNESSES]
    assert not (found - found.diag().diag())[:, others].any()


def test_an_infinite_witness_makes_no_nan() -> None:
    for value in (math.inf, -math.inf, 3e38):
        x = torch.tensor([[1.0, value, -2.0]], requires_grad=True)
        y = F.dyisru(x, torch.ones(()), witnesses=torch.tensor([1]), gain=torch.ones(1))
        y.sum().backward()
        assert y.isfinite().all()
        assert x.grad is not None
        assert x.grad.isfinite().all()
    x = torch.tensor([[1.0, math.nan, 2.0]])
    assert F.dyisru(x, 1.0, witnesses=torch.tensor([1]))[:, 0].isnan()


@pytest.mark.parametrize("value", [1e3, 1e12, 1e16, 1e18])
def test_gradients_of_a_massive_witness_are_those_of_double_precision(value: float) -> None:
    found = []
    for dtype in (torch.float64, torch.float32):
        x = torch.tensor([[1.0, -2.0, value], [0.5, 1.0, -2.0]], dtype=dtype)
        beta, gain = (torch.full((1,), size, dtype=dtype).requires_grad_() for size in (4.0, 1.0))
        y = F.dyisru(x, beta, scale=1.5, witnesses=torch.tensor([2]), gain=gain)
        # Of the large token alone, and with a small factor, as in a mean.
        gradients = torch.autograd.grad(1e-6 * y[0].sum(), (beta, gain))
        found.append([1e6 * gradient.double() for gradient in gradients])
    for wanted, got in zip(*found, strict=True):
        assert_close(got, wanted, rtol=1e-4, atol=1e-6)


def test_transforms() -> None:
    x, given = sample(5, C), parameters()

    def call(x: Tensor) -> Tensor:
        return F.dyisru_general(x, *given, **witnesses())

    assert_close(torch.vmap(call)(x), call(x))
    assert_close(torch.compile(call, fullgraph=True, backend="eager")(x), call(x))


X = torch.ones(2, 3)
ERRORS: list[tuple[Callable[[], object], str]] = [
    (
        lambda: F.dyisru(X, 1.0, witnesses=torch.ones(1)),
        r"witnesses.*integer.*float32.*\(1,\)",
    ),
    (
        lambda: F.dyisru(X, 1.0, witnesses=torch.tensor([2, 0, 2])),
        r"twice: \(2, 0, 2\)",
    ),
    (lambda: F.dyisru(X, 1.0, witnesses=torch.tensor([3])), "0 to 2.*3.*range"),
    (
        lambda: F.dyisru(X, 1.0, witnesses=torch.arange(4)),
        r"3 channels.*got.*\(4,\)",
    ),
    (
        lambda: F.dyisru(X, 1.0, witnesses=torch.arange(2), gain=torch.ones(1)),
        r"gain.*\(2,\), got \(1,\)",
    ),
    (
        lambda: F.dyisru(X, 1.0, witnesses=torch.arange(2), gain=torch.arange(2)),
        "gain.*floating",
    ),
    (
        lambda: F.dyisru(X, 1.0, gain=torch.ones(2)),
        r"gain.*witnesses, got \(2,\)",
    ),
]


@pytest.mark.parametrize(("call", "message"), ERRORS)
def test_error(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        call()
