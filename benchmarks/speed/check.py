"""No time without a right result: every contender against the definition in float64."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks.speed.cases import REFERENCES, Case
from benchmarks.speed.contenders import Contender
from dynorm.errors import DynormError

# Relative to 1 + |value|; the eager definitions round after every operation.
TOLERANCES = {"float64": 1e-10, "float32": 2e-5, "bfloat16": 2**-5, "float16": 2**-8}
# Elements of x that are looked at together: what float64 makes of them stays in the cache.
CHUNK = 1 << 18
# The gradients of LayerNorm's parameters are off as if torch summed them in the dtype itself: n
# roundings, each of half a unit of a sum of about sqrt(n), add up to n or so; the worst of
# thousands of channels to 1.1 times that.
EPSILONS = {"float64": 0.0, "float32": 0.0, "bfloat16": 2**-6, "float16": 2**-9}


class WrongResultError(DynormError):
    """A contender's result is not the definition's, so its time would mean nothing."""


def check(case: Case, contenders: Sequence[Contender]) -> int:
    """Compare what contenders compute with the definition in float64, in chunks of rows.

    Values and the gradient of x may be off by the dtype's tolerance times ``1 + |value|``; the
    gradient of a parameter, a sum of n terms, by the tolerance times ``sqrt(n) + |value|``; those
    of torch's LayerNorm in bfloat16 and float16 by 2 n roundings more.

    Returns the number of tensors. A value that is off, not finite, or of another shape or dtype is
    a :class:`WrongResultError`; nothing may be timed then.
    """
    compared = 0
    for function in dict.fromkeys(contender.function for contender in contenders):
        mine = [contender for contender in contenders if contender.function == function]
        results = {contender.name: contender.results() for contender in mine}
        for name, result in results.items():
            _check_kind(case, name, result)
        _check_function(case, function, results)
        compared += sum(map(len, results.values()))
    return compared


def _check_function(case: Case, function: str, results: dict[str, dict[str, Tensor]]) -> None:
    gradients = any(set(result) - {"y"} for result in results.values())
    parameters = {
        # float64 would be the very tensor that the contenders were given.
        name: value.double().clone().requires_grad_(gradients and function != "copy")
        for name, value in case.parameters.items()
    }
    step = max(1, CHUNK // case.channels)
    for start in range(0, case.rows, step):
        part = slice(start, min(start + step, case.rows))
        x = case.x[part].double().requires_grad_(gradients)
        with torch.set_grad_enabled(gradients):
            y = REFERENCES[function](x, parameters)
        if gradients:
            # Into x.grad, and summed over the chunks for the parameters.
            torch.autograd.backward(y, case.grad[part].double())
        for name, result in results.items():
            for key, exact in (("y", y.detach()), ("x", x.grad)):
                if key in result:
                    assert exact is not None
                    _compare(case, name, key, result[key][part], exact, 1.0)
    for name, result in results.items():
        for key, found in result.items():
            if key not in ("y", "x"):
                exact = parameters[key].grad
                assert exact is not None
                # Signs differ, so that n terms add up to about sqrt(n).
                terms = case.x.numel() / found.numel()
                slack = (
                    terms * EPSILONS[case.dtype] / TOLERANCES[case.dtype]
                    if function == "layer_norm"
                    else 0.0
                )
                _compare(case, name, key, found, exact, terms**0.5 + slack)


def _check_kind(case: Case, name: str, result: dict[str, Tensor]) -> None:
    for key, found in result.items():
        shape = case.x.shape if key in ("y", "x") else case.parameters[key].shape
        if found.shape != shape or found.dtype != case.x.dtype:
            raise WrongResultError(
                f"{name} must give {_called(key)} of shape {tuple(shape)} and dtype "
                f"{case.x.dtype}, got "
                f"{tuple(found.shape)} and {found.dtype}: nothing was timed"
            )


def _compare(case: Case, name: str, key: str, found: Tensor, exact: Tensor, size: float) -> None:
    tolerance = TOLERANCES[case.dtype]
    error = (found.double() - exact).abs()
    allowed = tolerance * (size + exact.abs())
    # NaN is not below anything.
    if not bool((error <= allowed).all()):
        worst = float((error / allowed).nan_to_num(torch.inf).max())
        raise WrongResultError(
            f"{name} must give {_called(key)} of {case.rows} x {case.channels} {case.dtype} as the "
            "definition does in "
            f"float64, but it is off by {worst * tolerance:.2g} where {tolerance:.2g} is allowed: "
            "nothing was timed"
        )


def _called(key: str) -> str:
    return {"y": "the output", "x": "the gradient of x"}.get(key, f"the gradient of {key}")
