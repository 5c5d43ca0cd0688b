"""The ops ``dynorm::pointwise`` and ``dynorm::pointwise_backward``, for those who want one opaque call in a graph.

They are the kernels of :mod:`dynorm.kernels._dispatch` with fake implementations and autograd; the layers call the
kernels themselves. Gradients of parameters are summed for each channel, whatever the parameters' sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dynorm.errors import ArgumentError
from dynorm.kernels import _cpu
from dynorm.kernels._dispatch import (
    DYISRU,
    FUNCTIONS,
    Form,
    Parameters,
    backend,
    compute,
    compute_sums,
    plain,
    plain_gradients,
)

_ARGUMENTS = (
    "int function, Tensor x, Tensor constant, Tensor? shift, Tensor? center, Tensor? weight, Tensor? bias, "
    "float scale, int channels, int inner, bool logarithmic"
)
torch.library.define("dynorm::pointwise", f"({_ARGUMENTS}) -> Tensor")
torch.library.define("dynorm::pointwise_backward", f"(Tensor grad, {_ARGUMENTS}) -> (Tensor, Tensor)")


def _registered(name: str) -> Callable[[Any], Any]:
    """Register the kernel of an op for CPU and CUDA."""

    def register(function: Any) -> Any:
        torch.library.impl(f"dynorm::{name}", "CPU", function)
        torch.library.impl(f"dynorm::{name}", "CUDA", function)
        return function

    return register


@_registered("pointwise")
def _pointwise_op(
    function: int, x: Tensor, constant: Tensor, shift: Tensor | None, center: Tensor | None, weight: Tensor | None,
    bias: Tensor | None, scale: float, channels: int, inner: int, logarithmic: bool,
) -> Tensor:  # fmt: skip
    parameters = (constant, shift, center, weight, bias)
    form, x, parameters = _prepared(Form(function, logarithmic, scale, channels, inner), x, parameters)
    if backend(x.device) == "torch":
        return plain(form, x, parameters).contiguous()
    return compute(form, x, *parameters)


@_registered("pointwise_backward")
def _pointwise_backward_op(
    grad: Tensor, function: int, x: Tensor, constant: Tensor, shift: Tensor | None, center: Tensor | None,
    weight: Tensor | None, bias: Tensor | None, scale: float, channels: int, inner: int, logarithmic: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    parameters = (constant, shift, center, weight, bias)
    form, x, parameters = _prepared(Form(function, logarithmic, scale, channels, inner), x, parameters)
    if grad.shape != x.shape or grad.dtype != x.dtype or grad.device != x.device:
        raise ArgumentError(
            f"grad must have the shape, dtype and device of x, {tuple(x.shape)}, {x.dtype} and {x.device}, "
            f"got {tuple(grad.shape)}, {grad.dtype} and {grad.device}"
        )
    if backend(x.device) == "torch":
        return _plain_sums(form, grad, x, parameters)
    grad_x, sums = compute_sums(form, grad.contiguous(), x, parameters, True, True)
    assert grad_x is not None
    assert sums is not None
    return grad_x, sums


def _plain_sums(form: Form, grad: Tensor, x: Tensor, parameters: Parameters) -> tuple[Tensor, Tensor]:
    """What ``pointwise_backward`` returns, by the definition."""
    dtype = _cpu.compute_dtype(x.dtype)
    defaults = (1.0, 0.0, 0.0, 1.0, 0.0)
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        rows = [
            (torch.full((1,), value, device=x.device) if p is None else p.detach().reshape(-1))
            .to(dtype)
            .expand(form.channels)
            .clone()
            .requires_grad_()
            for p, value in zip(parameters, defaults, strict=True)
        ]
        y = plain(form, leaf, tuple(rows))  # type: ignore[arg-type]
        grad_x, *sums = torch.autograd.grad(y, (leaf, *rows), grad, materialize_grads=True)
    return grad_x.contiguous(), torch.stack(sums)


def _prepared(form: Form, x: Tensor, parameters: Parameters) -> tuple[Form, Tensor, Parameters]:
    """Refuse what the kernels cannot take, before any runs, and make the rest contiguous.

    The sign of DyISRU's constant is looked at on a CPU only: on a GPU it would make the CPU wait.
    """
    if not 0 <= form.function < len(FUNCTIONS):
        raise ArgumentError(f"function must be from 0 to {len(FUNCTIONS) - 1}, got {form.function}")
    if x.dtype not in _cpu.DTYPES:
        raise ArgumentError(f"x must be float64, float32, bfloat16 or float16, got {x.dtype}: convert it")
    if form.channels < 1 or form.inner < 1 or x.numel() % (form.channels * form.inner):
        raise ArgumentError(
            f"channels and inner must be positive, and channels * inner divide the size of x, got {form.channels} and "
            f"{form.inner} for shape {tuple(x.shape)}"
        )
    names = ("constant", "shift", "center", "weight", "bias")
    for name, p in zip(names, parameters, strict=True):
        if p is not None:
            _check_parameter(name, p, x, form.channels, one_will_do=name in names[:3])
    if form.function == DYISRU and not form.logarithmic and x.is_cpu and not bool((parameters[0] > 0).all()):
        raise ArgumentError("DyISRU's constant must be positive, got one that is zero, negative or NaN")
    made = tuple(None if p is None else p.contiguous() for p in parameters)
    return form, x.contiguous(), made  # type: ignore[return-value]


def _check_parameter(name: str, p: Tensor, x: Tensor, channels: int, *, one_will_do: bool) -> None:
    if p.dtype not in _cpu.DTYPES:
        raise ArgumentError(f"{name} must be float64, float32, bfloat16 or float16, got {p.dtype}: convert it")
    if p.device != x.device:
        raise ArgumentError(f"{name} must be on x's device, {x.device}, got {p.device}: move one of them")
    if p.numel() != channels and not (one_will_do and p.numel() == 1):
        raise ArgumentError(
            f"{name} must have {'1 or ' if one_will_do else ''}{channels} elements, one for each channel, "
            f"got shape {tuple(p.shape)}"
        )


def _pointwise_fake(function: int, x: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _pointwise_backward_fake(grad: Tensor, function: int, x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    sums = x.new_empty((5, rest[6]), dtype=_cpu.compute_dtype(x.dtype))
    return torch.empty_like(x, memory_format=torch.contiguous_format), sums


torch.library.register_fake("dynorm::pointwise", _pointwise_fake)
torch.library.register_fake("dynorm::pointwise_backward", _pointwise_backward_fake)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    function, x, constant, shift, center, weight, bias, scale, channels, inner, logarithmic = inputs
    ctx.form = Form(function, logarithmic, scale, channels, inner)
    ctx.save_for_backward(x, constant, shift, center, weight, bias)


def _backward_of_op(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x, *parameters = ctx.saved_tensors
    function, logarithmic, scale, channels, inner = ctx.form
    needed = (ctx.needs_input_grad[1], *ctx.needs_input_grad[2:7])
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        found = plain_gradients(ctx.form, grad, x, tuple(parameters), needed)
    else:
        grad_x, sums = torch.ops.dynorm.pointwise_backward(
            grad, function, x, *parameters, scale, channels, inner, logarithmic
        )
        rows = [
            None if p is None else (row if p.numel() == channels else row.sum()).reshape(p.shape).to(p.dtype)
            for p, row in zip(parameters, sums.unbind(), strict=True)
        ]
        found = [g if need else None for g, need in zip([grad_x, *rows], needed, strict=True)]
    return (None, *found, None, None, None, None)


torch.library.register_autograd("dynorm::pointwise", _backward_of_op, setup_context=_setup)
