"""The kernels called by themselves, without layer and autograd: with the output given, and the backward pass alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from dynorm import kernels
from dynorm.bench.definitions import EPS
from dynorm.bench.inputs import Case
from dynorm.kernels import _cpu, _triton

__all__ = ["backward_call", "forward_call", "layer_norm_backward_call"]

# Name: the kernel's number, and which of the case's parameters is its constant.
KERNELS = {
    "dyisru": (kernels.DYISRU, "log_beta"),
    "dyt": (kernels.DYT, "alpha"),
    "derf": (kernels.DERF, "alpha"),
    "linear": (kernels.LINEAR, "log_beta"),
}


def forward_call(case: Case, function: str) -> Callable[[], Tensor] | None:
    """Return the forward kernel's call into ``case.out``, or None where plain torch serves this device."""
    parts = _parts(case, function)
    if parts is None:
        return None
    number, scale, constant, shift, logarithmic = parts
    weight, bias = case.parameters["weight"], case.parameters["bias"]
    arguments = (number, case.x, constant, shift, None, weight, bias, scale, case.channels, 1)
    if case.x.is_cpu:
        return partial(_cpu.forward, *arguments, out=case.out, logarithmic=logarithmic)
    return partial(_triton.forward, *arguments, out=case.out)


def backward_call(case: Case, function: str) -> Callable[[], dict[str, Tensor]] | None:
    """Return the backward kernel's call for all gradients, or None where plain torch serves this device."""
    parts = _parts(case, function)
    if parts is None or not case.x.is_cpu:
        # On a GPU its sums are per channel: not what a layer needs in the end.
        return None
    number, scale, constant, shift, logarithmic = parts
    parameters = (constant, shift, None, case.parameters["weight"], case.parameters["bias"])
    needed = (True, True, shift is not None, False, True, True)
    inputs, asked = (case.x, *parameters), (False, *needed)
    rest = (parameters, needed, scale, case.channels, 1, logarithmic)
    roles = ("x", KERNELS[function][1], "shift", "center", "weight", "bias")

    def call() -> dict[str, Tensor]:
        # As autograd does: by the C++ side's own checks, where this torch lets it look at tensors.
        with torch.no_grad():
            served = _cpu.serve_gradients(case.grad, inputs, asked, number, logarithmic, scale, case.channels)
        found = served[1:] if served is not None else _cpu.gradients(number, case.grad, case.x, *rest)
        return {role: g for role, g in zip(roles, found, strict=True) if g is not None}

    return call


def layer_norm_backward_call(case: Case) -> Callable[[], dict[str, Tensor]]:
    """Return the call of LayerNorm's own backward kernel, with the statistics that its forward pass saved."""
    weight, bias = case.parameters["weight"], case.parameters["bias"]
    shape = [case.channels]
    _, mean, rstd = torch.native_layer_norm(case.x, shape, weight, bias, EPS)
    backward = torch.ops.aten.native_layer_norm_backward.default

    def call() -> dict[str, Tensor]:
        found = backward(case.grad, case.x, shape, mean, rstd, weight, bias, [True, True, True])
        return dict(zip(("x", "weight", "bias"), found, strict=True))

    return call


def _parts(case: Case, function: str) -> tuple[int, float, Tensor, Tensor | None, bool] | None:
    """Return number, scale, constant, shift, and whether the constant is the logarithm."""
    served = kernels.backend(case.x.device)
    if served == "torch":
        return None
    number, name = KERNELS[function]
    constant, logarithmic = case.parameters[name], name == "log_beta"
    scale = case.channels**0.5 if logarithmic else 1.0
    shift = case.parameters["shift"] if function == "derf" else None
    if served == "triton" and logarithmic:
        value = constant.float()
        constant, logarithmic = ((-0.5 * value).exp() if function == "linear" else value.exp()), False
    return number, scale, constant, shift, logarithmic
