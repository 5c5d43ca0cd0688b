"""Compare every contender with the definition in float64, so that no wrong result is timed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks.speed.cases import REFERENCES, Case
from benchmarks.speed.contenders import Contender, Results
from dynorm.errors import DynormError

# Relative to 1 + |value|; the eager definitions round after every operation.
TOLERANCES = {
    "float64": 1e-10,
    "float32": 2e-5,
    "bfloat16": 2**-5,
    "float16": 2**-8,
}
# Elements of x that are compared together, so that their float64 values stay in the cache.
CHUNK = 1 << 18
# The gradients of LayerNorm's parameters are off as if torch summed them in the dtype itself: n
# roundings, each of half a unit of a sum of about sqrt(n), add up to about n. The worst of
# thousands of channels reaches 1.1 times that.
EPSILONS = {
    "float64": 0.0,
    "float32": 0.0,
    "bfloat16": 2**-6,
    "float16": 2**-9,
}


class WrongResultError(DynormError):
    """A contender's result is not the definition's, so its time would mean nothing."""


def check(case: Case, contenders: Sequence[Contender]) -> int:
    """Compare the results of contenders with the definition in float64, in chunks of rows.

    Values and the gradient of x may be off by the dtype's tolerance times ``1 + |value|``. The
    gradient of a parameter, a sum of n terms, may be off by the tolerance times
    ``sqrt(n) + |value|``, and those of torch's LayerNorm in bfloat16 and float16 by 2 n roundings
    more.

    Returns the number of tensors. A value that is off, not finite, or of another shape or dtype is
    a :class:`WrongResultError`, and nothing may be timed then.
    """
    by_function: dict[str, list[Contender]] = {}
    for contender in contenders:
        by_function.setdefault(contender.function, []).append(contender)
    compared = 0
    for function, rivals in by_function.items():
        results = {contender.name: contender.results() for contender in rivals}
        for name, result in results.items():
            _check_kind(case, name, result)
            compared += len(result)
        _check_function(case, function, results)
    return compared


def _check_function(case: Case, function: str, results: dict[str, Results]) -> None:
    """Compare the results of all contenders for one function, which are by their names."""
    names = set().union(*results.values())
    gradients = bool(names - {"y"})
    parameters = {}
    for name, value in case.parameters.items():
        # In float64 without the clone this would be the tensor that the contenders have.
        parameter = value.double().clone()
        parameters[name] = parameter.requires_grad_(gradients and function != "copy")
    step = max(1, CHUNK // case.channels)
    for start in range(0, case.rows, step):
        part = slice(start, min(start + step, case.rows))
        x = case.x[part].double().requires_grad_(gradients)
        with torch.set_grad_enabled(gradients):
            y = REFERENCES[function](x, parameters)
        if gradients:
            # Fills x.grad, and adds to the gradients of the parameters chunk by chunk.
            torch.autograd.backward(y, case.grad[part].double())
        for name, result in results.items():
            if "y" in result:
                _compare(case, name, "y", result["y"][part], y.detach(), 1.0)
            if "x" in result:
                assert x.grad is not None
                _compare(case, name, "x", result["x"][part], x.grad, 1.0)
    for name, result in results.items():
        for key, gradient in result.items():
            if key in ("y", "x"):
                continue
            exact = parameters[key].grad
            assert exact is not None
            # Signs differ, so that n terms add up to about sqrt(n).
            terms = case.x.numel() / gradient.numel()
            size = terms**0.5
            if function == "layer_norm":
                size += terms * EPSILONS[case.dtype] / TOLERANCES[case.dtype]
            _compare(case, name, key, gradient, exact, size)


def _check_kind(case: Case, name: str, result: Results) -> None:
    """Check the shape and dtype of each result of a contender."""
    for key, tensor in result.items():
        shape = case.x.shape if key in ("y", "x") else case.parameters[key].shape
        if tensor.shape != shape or tensor.dtype != case.x.dtype:
            raise WrongResultError(
                f"{name} must give {_in_words(key)} of shape {tuple(shape)} and dtype "
                f"{case.x.dtype}, got {tuple(tensor.shape)} and {tensor.dtype}: nothing was timed"
            )


def _compare(
    case: Case,
    name: str,
    key: str,
    result: Tensor,
    exact: Tensor,
    size: float,
) -> None:
    """Compare one result with the definition; errors of the tolerance times ``size + |value|`` pass."""
    tolerance = TOLERANCES[case.dtype]
    error = (result.double() - exact).abs()
    allowed = tolerance * (size + exact.abs())
    # NaN is not below anything.
    if not bool((error <= allowed).all()):
        worst = float((error / allowed).nan_to_num(torch.inf).max())
        raise WrongResultError(
            f"{name} must give {_in_words(key)} of {case.rows} x {case.channels} {case.dtype} as "
            f"the definition does in float64, but it is off by {worst * tolerance:.2g} where "
            f"{tolerance:.2g} is allowed: nothing was timed"
        )


def _in_words(key: str) -> str:
    return "the output" if key == "y" else f"the gradient of {key}"
