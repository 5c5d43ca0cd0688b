"""Random calls of the kernels, and their comparison with the definition in float64."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.testing import assert_close

from dynorm.kernels._form import Form, FunctionCode, Parameters

INF, NAN = float("inf"), float("nan")
TOLERANCES = {torch.float64: 1e-12, torch.float32: 4e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
# Which parameters there are: only a constant, or all; the same with a number for each token.
KINDS = ("bare", "all", "bare of tokens", "all of tokens")
FUNCTIONS = tuple(FunctionCode)


def kinds_of(function: int) -> tuple[str, ...]:
    """Return the kinds of a function's calls: only DyISRU takes numbers of tokens."""
    return KINDS if function == FunctionCode.DYISRU else KINDS[:2]


CASES = [(function, kind) for function in FUNCTIONS for kind in kinds_of(function)]


class Call(NamedTuple):
    """The tensors of a call, with a gradient of y."""

    x: Tensor
    parameters: Parameters
    token_constant: Tensor | None
    grad: Tensor


def make(rows: int, channels: int, dtype: torch.dtype, kind: str, function: int) -> Call:
    """Return random tensors, parameters in at least float32."""
    wide = torch.promote_types(dtype, torch.float32)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=wide)

    parameters = Parameters(normal(1).abs() + 0.3)
    if not kind.startswith("bare"):
        shift = normal(1) if function == FunctionCode.DERF else None
        parameters = Parameters(parameters.constant, shift, normal(channels), normal(channels))
    token_constant = None
    if kind.endswith("tokens"):
        token_constant = 3 * normal(rows).square()
    x = 2 * normal(rows, channels)
    return Call(x.to(dtype), parameters, token_constant, normal(rows, channels).to(dtype))


def results_of(kernels: Any, form: Form, call: Call) -> list[Tensor | None]:
    """Return y and all gradients by the kernels."""
    x, parameters, token_constant, grad = call
    y = kernels.forward(form, x, parameters, token_constant)
    return [y, *kernels.gradients(form, grad, x, parameters, token_constant, (True,) * 6)]


def expected_of(form: Form, call: Call) -> list[Tensor | None]:
    """Return y and all gradients by the definition in float64."""
    leaves: list[Any] = []
    for tensor in (call.x, *call.parameters, call.token_constant):
        leaves.append(None if tensor is None else tensor.detach().double().requires_grad_())
    y = form.definition(leaves[0], Parameters(*leaves[1:5]), leaves[5])
    present = [leaf for leaf in leaves if leaf is not None]
    found = iter(torch.autograd.grad(y, present, call.grad.double(), materialize_grads=True))
    return [y.detach(), *(None if leaf is None else next(found) for leaf in leaves)]


def compare(kernels: Any, form: Form, call: Call) -> None:
    """Compare value and gradients; the sums' errors are seen against the size of their terms."""
    tolerance = TOLERANCES[call.x.dtype]
    given = (call.x, call.x, *call.parameters, call.token_constant)
    pairs = zip(given, results_of(kernels, form, call), expected_of(form, call), strict=True)
    for place, (tensor, got, want) in enumerate(pairs):
        assert (got is None) == (want is None)
        if tensor is None or got is None:
            continue
        assert got.dtype == tensor.dtype
        terms = 1 if place < 2 else max(1, call.x.numel() / max(tensor.numel(), 1)) ** 0.5
        assert_close(got.double(), want, rtol=8 * tolerance, atol=8 * tolerance * terms)
