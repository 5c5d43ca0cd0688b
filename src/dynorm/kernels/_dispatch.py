"""Which kernel serves a layer's call in eager mode, and its gradients.

``y = weight * scale * f(x - center) + bias``, with f of :data:`FUNCTIONS`. :func:`pointwise` is what the layers call:
straight to the kernel, because a trip through torch's dispatcher costs more than a small input's arithmetic. Where no
kernel serves, the plain definition in ``dynorm.functional`` does, and it gives second derivatives everywhere.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from dynorm import functional
from dynorm.errors import ArgumentError
from dynorm.kernels import _cpu

__all__ = ["DERF", "DYISRU", "DYT", "FUNCTIONS", "LINEAR", "Form", "Parameters", "backend", "pointwise", "traced"]

FUNCTIONS = ("dyisru", "dyt", "derf", "linear")
DYISRU, DYT, DERF, LINEAR = range(4)
ENABLED = os.environ.get("DYNORM_KERNELS", "1") != "0"
_log = logging.getLogger("dynorm")
_PLAIN_TYPES = (Tensor, Parameter)
Parameters = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]


class Form(NamedTuple):
    """All of a call but its tensors; the channel of flat element i of x is ``(i // inner) % channels``."""

    function: int
    logarithmic: bool
    scale: float
    channels: int
    inner: int


def backend(device: torch.device | str = "cpu") -> str:
    """Say what computes the point-wise layers in eager mode on a device.

    Args:
        device: a device or its type.

    Returns:
        "cpu-avx512", "cpu-avx2" or "cpu-portable" for the C++ kernels, "triton" for the GPU's, "torch" for the plain
        definition: where the kernels are not built, not supported, or switched off with ``DYNORM_KERNELS=0``.

    Example:
        >>> backend("cpu") in ("cpu-avx512", "cpu-avx2", "cpu-portable", "torch")
        True
        >>> backend("meta")
        'torch'
    """
    return serving(torch.device(device).type) if ENABLED else "torch"


def pointwise(
    function: int,
    x: Tensor,
    parameters: Parameters,
    scale: float,
    shape: tuple[int, ...],
    dim: int | tuple[int, ...],
    *,
    logarithmic: bool = False,
) -> Tensor | None:
    """Compute a layer by a kernel, or return None where the plain definition has to serve.

    Args:
        function: one of DYISRU, DYT, DERF and LINEAR.
        x: the input, whose sizes at ``dim`` are ``shape``.
        parameters: constant, shift, center, weight and bias; the first three of one element or of ``shape``, the last
            two of ``shape``.
        scale: the layer's factor.
        shape: the normalised shape.
        dim: where in x it lies, an axis or several.
        logarithmic: the constant is log(beta); the linear slope is then ``1 / sqrt(beta)``.

    Returns:
        y, of the shape and dtype of x; None under a tracer, a transform or a mode, for subclasses of Tensor, for
        layouts with no kernel, and for whatever the plain definition refuses.

    Raises:
        ArgumentError: x and the parameters are on different devices.
    """
    if not ENABLED or torch.compiler.is_compiling():
        return None
    last = dim == -1 or (not isinstance(dim, int) and dim == tuple(range(-len(dim), 0)))
    if last:
        found = _cpu.serve(x, parameters, function, logarithmic, scale, shape)
        if found is True:
            form = _form(function, logarithmic, scale, shape[0] if len(shape) == 1 else math.prod(shape), 1)
            differentiable: Any = _Pointwise.apply
            y: Tensor = differentiable(form, x, *parameters)
            return y
        if found is not None:
            serving("cpu")
            return found
    if traced(x) or serving(x.device.type) == "torch":
        return None
    fit = _fit(x, parameters, shape)
    if fit is None:
        return None
    call = _Pointwise.apply if fit else compute
    if last:
        form = _form(function, logarithmic, scale, shape[0] if len(shape) == 1 else math.prod(shape), 1)
        return call(form, x if x.is_contiguous() else x.contiguous(), *parameters)
    if not isinstance(dim, int):
        return None
    moved = x.movedim(dim, -1)
    if moved.is_contiguous():
        return call(_form(function, logarithmic, scale, shape[0], 1), moved, *parameters).movedim(-1, dim)
    inner = math.prod(x.shape[dim % x.ndim + 1 :])
    return call(_form(function, logarithmic, scale, shape[0], inner), x.contiguous(), *parameters)


def traced(*tensors: Tensor) -> bool:
    """Say whether something watches operations one by one, so that the plain definition must be what it sees.

    That is torch.compile, torch.export and torch.jit.trace; vmap, grad and the other transforms of torch.func;
    forward-mode AD; modes, such as FakeTensorMode; and subclasses of Tensor, such as DTensor.
    """
    return (
        torch.compiler.is_compiling()
        or not all(type(t) in _PLAIN_TYPES for t in tensors)
        # Zeros of autograd's that have no memory.
        or any(t._is_zerotensor() for t in tensors)
        or any(bool(watching()) for watching in _cpu.WATCHERS)
        or forward_ad._current_level >= 0
    )


def _fit(x: Tensor, parameters: Parameters, shape: tuple[int, ...]) -> bool | None:
    """Say whether a gradient is wanted; None where the kernels do not take these tensors.

    The plain definition then has the words for what is wrong.
    """
    # Each of these questions costs some 70 ns, so they are asked once.
    if x.dtype not in _cpu.DTYPES or x.layout is not torch.strided or x.is_neg() or not x.ndim:
        return None
    device, gradient = x.device, x.requires_grad
    for place, p in enumerate(parameters):
        if p is None:
            continue
        size = p.shape
        if type(p) not in _PLAIN_TYPES or p.dtype not in _cpu.DTYPES or not p.is_contiguous():
            return None
        if p.is_neg() or p._is_zerotensor():
            return None
        if size != shape and (place > 2 or size != (1,)):
            return None
        if p.device != device:
            raise ArgumentError(
                f"x and the parameters must be on one device, got {device} and {p.device}: move one of them"
            )
        gradient = gradient or p.requires_grad
    return gradient and torch.is_grad_enabled()


@lru_cache(maxsize=1024)
def _form(function: int, logarithmic: bool, scale: float, channels: int, inner: int) -> Form:
    return Form(function, logarithmic, scale, channels, inner)


class _Pointwise(torch.autograd.Function):
    """Saved for backward: x and the parameters; everything else is computed anew."""

    @staticmethod
    def forward(ctx: Any, form: Form, x: Tensor, *parameters: Any) -> Tensor:
        ctx.form = form
        ctx.save_for_backward(x, *parameters)
        if form.inner == 1:
            y = _cpu.serve(x, parameters, form.function, form.logarithmic, form.scale, (form.channels,))
            if isinstance(y, Tensor):
                return y
        return compute(form, x, *parameters)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        inputs = ctx.saved_tensors
        function, logarithmic, scale, channels, inner = ctx.form
        if inner == 1:
            found = _cpu.serve_gradients(grad, inputs, ctx.needs_input_grad, function, logarithmic, scale, channels)
            if found is not None:
                return found
        x, *parameters = inputs
        needed = ctx.needs_input_grad[1:]
        # A second derivative is asked for, or something watches; is_grads_batched brings tensors without memory.
        batched = torch._C._functorch.is_legacy_batchedtensor(grad)
        if torch.is_grad_enabled() or batched or traced(grad, x):
            return (None, *plain_gradients(ctx.form, grad, x, tuple(parameters), needed))
        return (None, *_gradients(ctx.form, grad.contiguous(), x, tuple(parameters), needed))


def compute(
    form: Form,
    x: Tensor,
    constant: Tensor,
    shift: Tensor | None,
    center: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    """Compute y of contiguous x; by the kernel of x's device."""
    function, logarithmic, scale, channels, inner = form
    if x.is_cpu:
        # fmt: off
        return _cpu.forward(
            function, x, constant, shift, center, weight, bias, scale, channels, inner, logarithmic=logarithmic
        )
        # fmt: on
    if x.numel() == 0:
        return torch.empty_like(x)
    from dynorm.kernels import _triton

    return _triton.forward(function, x, _constant(form, constant), shift, center, weight, bias, scale, channels, inner)


def _gradients(
    form: Form, grad: Tensor, x: Tensor, parameters: Parameters, needed: tuple[bool, ...]
) -> Sequence[Tensor | None]:
    """Return the gradients of x and of each parameter, in their dtypes; None where not needed."""
    function, logarithmic, scale, channels, inner = form
    if x.is_cpu:
        return _cpu.gradients(function, grad, x, parameters, needed, scale, channels, inner, logarithmic)
    grad_x, sums = compute_sums(form, grad, x, parameters, needed[0], any(needed[1:]))
    found: list[Tensor | None] = [grad_x]
    for role, (parameter, need) in enumerate(zip(parameters, needed[1:], strict=True)):
        if parameter is None or not need or sums is None:
            found.append(None)
            continue
        row = sums[role] if parameter.numel() > 1 else sums[role].sum()
        found.append(row.reshape(parameter.shape).to(parameter.dtype))
    return found


def compute_sums(
    form: Form, grad: Tensor, x: Tensor, parameters: Parameters, need_x: bool, need_parameters: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradient of x and the per-channel sums of shape (5, C), of the constant as it was given."""
    function, logarithmic, scale, channels, inner = form
    given = (*parameters[1:4], scale, channels, inner, need_x, need_parameters)
    if x.is_cpu:
        return _cpu.backward(function, grad, x, parameters[0], *given, logarithmic=logarithmic)
    from dynorm.kernels import _triton

    if x.numel() == 0:
        zeros = torch.zeros((5, channels), dtype=_cpu.compute_dtype(x.dtype), device=x.device)
        return (torch.empty_like(x) if need_x else None), (zeros if need_parameters else None)
    constant = _constant(form, parameters[0])
    grad_x, sums = _triton.backward(function, grad, x, constant, *given)
    if logarithmic and sums is not None:
        # d beta = beta d log(beta); d slope = -slope / 2 d log(beta).
        sums[0] *= (-0.5 * constant if function == LINEAR else constant).reshape(-1).to(sums.dtype)
    return grad_x, sums


def _constant(form: Form, constant: Tensor) -> Tensor:
    """Return the constant in at least float32, not its logarithm."""
    value = constant if constant.dtype in (torch.float32, torch.float64) else constant.float()
    if not form.logarithmic:
        return value
    return (-0.5 * value).exp() if form.function == LINEAR else value.exp()


def plain(form: Form, x: Tensor, parameters: Parameters) -> Tensor:
    """The definition, on x seen as (outer, channels, inner)."""
    constant = _constant(form, parameters[0]).reshape(-1)
    shift, center, weight, bias = [None if p is None else p.reshape(-1) for p in parameters[1:]]
    z = x.reshape(-1, form.channels, form.inner)
    if form.function == DYISRU:
        y = functional.dyisru_general(z, constant, center, weight, bias, scale=form.scale, dim=1)
    elif form.function == DYT:
        y = functional.dyt(z, constant, weight, bias, center=center, scale=form.scale, dim=1)
    elif form.function == DERF:
        none = 0.0 if shift is None else shift
        y = functional.derf(z, constant, none, weight, bias, center=center, scale=form.scale, dim=1)
    else:
        y = functional.linear(z, form.scale * constant, weight, bias, center=center, dim=1)
    return y.reshape(x.shape)


def plain_gradients(
    form: Form, grad: Tensor, x: Tensor, parameters: Parameters, needed: tuple[bool, ...]
) -> Sequence[Tensor | None]:
    """The gradients by the definition, which can be differentiated again."""
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        tensors = (x, *parameters)
        wanted = [t for t, need in zip(tensors, needed, strict=True) if need and t is not None]
        y = plain(form, x, parameters)
        found = iter(torch.autograd.grad(y, wanted, grad, create_graph=again, materialize_grads=True))
    return [next(found) if need and t is not None else None for t, need in zip(tensors, needed, strict=True)]


@lru_cache
def serving(device: str) -> str:
    """Find what serves a device, and say so once."""
    found = "torch"
    if device == "cpu":
        found = _cpu.name()
    elif device == "cuda":
        from dynorm.kernels import _triton

        found = "triton" if _triton.available() else "torch"
    if device in ("cpu", "cuda"):
        missing = (device, found) == ("cpu", "torch")
        hint = " (to build the kernels: python -m dynorm.kernels._build)" if missing else ""
        _log.info("point-wise layers on %s: %s%s", device, found, hint)
    return found
