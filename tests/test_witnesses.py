"""Witness channels in the reference functions: against a loop, their derivatives, their two ends, their edges."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck
from torch.testing import assert_close

import dynorm.functional as F  # noqa: N812
from dynorm import theory
from dynorm.errors import ArgumentError

# name: the function of (x, constant, weight, bias, center), f of u and beta, and the constant of a
# beta. Only dyisru_general has a center.
FUNCTIONS: dict[
    str, tuple[Callable[..., Tensor], Callable[[float, float], float], Callable[[Tensor], Tensor]]
] = {
    "dyisru": (
        lambda x, a, w, b, c, **more: F.dyisru_general(x, a, c, w, b, scale=1.5, **more),
        lambda u, beta: u / math.sqrt(beta + u * u),
        lambda beta: beta,
    ),
    "dyt": (
        lambda x, a, w, b, c, **more: F.dyt(x, a, w, b, scale=1.5, **more),
        lambda u, beta: math.tanh(u / math.sqrt(beta)),
        lambda beta: beta**-0.5,
    ),
    "derf": (
        lambda x, a, w, b, c, **more: F.derf(x, a, 0.25, w, b, scale=1.5, **more),
        lambda u, beta: math.erf(math.sqrt(math.pi / beta) / 2 * u + 0.25),
        theory.derf_alpha,
    ),
    "linear": (
        lambda x, a, w, b, c, **more: F.linear(x, a, w, b, scale=1.5, **more),
        lambda u, beta: u / math.sqrt(beta),
        lambda beta: beta**-0.5,
    ),
}
NAMES = list(FUNCTIONS)
C = 7
WITNESSES, GAIN = (5, 0, 2), (0.3, 20.0, 1.0)


def sample(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def parameters(seed: int = 1) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One beta, weight, bias and centre per channel."""
    beta, weight, bias, center = sample(4, C, seed=seed)
    return beta.abs() + 0.5, weight, bias, center


def witnesses() -> dict[str, Tensor]:
    return {"witnesses": torch.tensor(WITNESSES), "gain": torch.tensor(GAIN, dtype=torch.float64)}


def by_loop(
    name: str, x: Tensor, beta: Tensor, weight: Tensor, bias: Tensor, center: Tensor
) -> Tensor:
    """The definition, one number at a time."""
    y = torch.empty_like(x)
    if name != "dyisru":
        center = torch.zeros(C)
    for token, out in zip(x.tolist(), y, strict=True):
        u = [value - c for value, c in zip(token, center.tolist(), strict=True)]
        for i in range(C):
            total = float(beta[i])
            for k, g in zip(WITNESSES, GAIN, strict=True):
                if name != "dyisru" or k != i:
                    total += g * u[k] ** 2
            out[i] = weight[i] * 1.5 * FUNCTIONS[name][1](u[i], total) + bias[i]
    return y


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_value(name: str, dtype: torch.dtype) -> None:
    function, _, constant = FUNCTIONS[name]
    x, (beta, weight, bias, center) = 3 * sample(5, C).to(dtype), parameters()
    found = function(x, constant(beta), weight, bias, center, **witnesses())
    assert found.dtype == dtype
    tolerance = {torch.float64: 1e-14, torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
    wanted = by_loop(name, x.double(), beta, weight, bias, center)
    assert_close(found.double(), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", NAMES)
def test_dims_and_none(name: str) -> None:
    function, _, constant = FUNCTIONS[name]
    x, (beta, weight, bias, center) = sample(4, C, 3), parameters()
    given = (constant(beta), weight, bias, center)
    wanted = function(x.movedim(1, -1), *given, **witnesses()).movedim(-1, 1)
    assert torch.equal(function(x, *given, dim=1, **witnesses()), wanted)
    # Without witnesses it is the function of one channel, bit for bit.
    none, no_gain = torch.empty(0, dtype=torch.int64), torch.empty(0)
    found = function(x, *given, dim=1, witnesses=none, gain=no_gain)
    assert torch.equal(found, function(x, *given, dim=1))


@pytest.mark.parametrize("eps", [0.0, 1e-5])
def test_with_all_channels_dyisru_is_rms_norm(eps: float) -> None:
    x = sample(4, 3, 6)
    # One value larger than all others together.
    x[0, 1, 2] = 1e6
    beta = torch.full((1,), 6 * eps, dtype=x.dtype)
    found = F.dyisru(x, beta, scale=6**0.5, witnesses=torch.arange(6))
    assert_close(found, F.rms_norm(x, eps=eps), rtol=1e-14, atol=0)


def test_with_some_channels_the_linear_map_is_a_partial_rms_norm() -> None:
    x, some = sample(5, 8), torch.tensor([0, 1, 2])
    wanted = x / x[:, :3].square().mean(-1, keepdim=True).sqrt()
    assert_close(F.linear(x, 1e9, scale=3**0.5, witnesses=some), wanted, rtol=1e-14, atol=0)


@pytest.mark.parametrize("name", NAMES)
def test_derivatives(name: str) -> None:
    function, _, constant = FUNCTIONS[name]
    beta, weight, bias, center = parameters()
    index = torch.tensor(WITNESSES)
    inputs = [
        t.requires_grad_()
        for t in (sample(2, C), constant(beta), weight, bias, center, witnesses()["gain"])
    ]
    assert gradcheck(
        lambda x, a, w, b, c, g: function(x, a, w, b, c, witnesses=index, gain=g), inputs
    )


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


@pytest.mark.parametrize("name", NAMES)
def test_an_infinite_witness_makes_no_nan(name: str) -> None:
    function, _, constant = FUNCTIONS[name]
    for value in (math.inf, -math.inf, 3e38):
        x = torch.tensor([[1.0, value, -2.0]], requires_grad=True)
        y = function(
            x,
            constant(torch.ones(())),
            None,
            None,
            0.0,
            witnesses=torch.tensor([1]),
            gain=torch.ones(1),
        )
        y.sum().backward()
        assert y.isfinite().all()
        assert x.grad is not None
        assert x.grad.isfinite().all()
    x = torch.tensor([[1.0, math.nan, 2.0]])
    assert function(x, 1.0, None, None, 0.0, witnesses=torch.tensor([1]))[:, 0].isnan()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [1e3, 1e12, 1e16, 1e18])
def test_gradients_of_a_massive_witness_are_those_of_double_precision(
    name: str, value: float
) -> None:
    function, _, constant = FUNCTIONS[name]
    found = []
    for dtype in (torch.float64, torch.float32):
        x = torch.tensor([[1.0, -2.0, value], [0.5, 1.0, -2.0]], dtype=dtype)
        leaves = [
            t.requires_grad_()
            for t in (constant(torch.full((1,), 4.0, dtype=dtype)), torch.ones(1, dtype=dtype))
        ]
        y = function(x, leaves[0], None, None, None, witnesses=torch.tensor([2]), gain=leaves[1])
        # Of the large token alone, and with a small factor, as in a mean.
        found.append([1e6 * g.double() for g in torch.autograd.grad(1e-6 * y[0].sum(), leaves)])
    for wanted, got in zip(*found, strict=True):
        assert_close(got, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("name", NAMES)
def test_transforms(name: str) -> None:
    function, _, constant = FUNCTIONS[name]
    x, (beta, weight, bias, center) = sample(5, C), parameters()

    def call(x: Tensor) -> Tensor:
        return function(x, constant(beta), weight, bias, center, **witnesses())

    assert_close(torch.vmap(call)(x), call(x))
    tangent = sample(5, C, seed=9)
    _, found = torch.func.jvp(call, (x,), (tangent,))
    moved = (call(x + 1e-6 * tangent) - call(x - 1e-6 * tangent)) / 2e-6
    assert_close(found, moved, rtol=1e-6, atol=1e-6)
    assert_close(torch.compile(call, fullgraph=True, backend="eager")(x), call(x))


X = torch.ones(2, 3)
ERRORS: list[tuple[Callable[[], object], str]] = [
    (
        lambda: F.dyt(X, 0.5, witnesses=torch.ones(1)),
        r"witnesses.*integer.*float32.*\(1,\)",
    ),
    (
        lambda: F.dyisru(X, 1.0, witnesses=torch.tensor(1)),
        r"witnesses.*got torch.int64.*\(\)",
    ),
    (
        lambda: F.dyisru(X, 1.0, witnesses=torch.tensor([2, 0, 2])),
        r"twice: \(2, 0, 2\)",
    ),
    (lambda: F.linear(X, 1.0, witnesses=torch.tensor([3])), "0 to 2.*3.*range"),
    (
        lambda: F.linear(X, 1.0, witnesses=torch.arange(4)),
        r"3 channels.*got.*\(4,\)",
    ),
    (
        lambda: F.derf(X, 0.5, witnesses=torch.arange(2), gain=torch.ones(1)),
        r"gain.*\(2,\), got \(1,\)",
    ),
    (
        lambda: F.dyt(X, 0.5, witnesses=torch.arange(2), gain=torch.arange(2)),
        "gain.*floating",
    ),
    (
        lambda: F.dyt(X, 0.5, gain=torch.ones(2)),
        r"gain.*witnesses, got \(2,\)",
    ),
]


@pytest.mark.parametrize(("call", "message"), ERRORS)
def test_error(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        call()
