"""The family on a GPU: plain functions over raw tensors that launch the Triton kernels; no autograd inside.

``y = weight * scale * f(x - center) + bias``, with f chosen by number: 0 DyISRU ``u / sqrt(constant + u^2)``, 1 DyT
``tanh(constant u)``, 2 Derf ``erf(constant u + shift)``, 3 linear ``constant u``. x is contiguous and seen as (outer,
channels, inner). Triton is imported at the first call, not with this file.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from dynorm.errors import ArgumentError
from dynorm.kernels._triton_tuning import choose, interpreted, on_device

__all__ = ["add_backward", "add_forward", "available", "backward", "forward"]

# Triton for NVIDIA says that it needs this much.
_CAPABILITY = (8, 0)
# Elements of a forward tile, and the warps that share them; the first is for what is too small to be worth timing.
_FORWARD = ((2048, 4), (1024, 4), (4096, 4), (4096, 8), (8192, 8))
_WORTH_TIMING = 2**20
# Programs of a backward pass: a fixed number, so that sums do not depend on the device that adds them.
_PROGRAMS = 1024
_BACKWARD_TILE, _WIDEST = 2048, 512


def available() -> bool:
    """Say whether the kernels can run: Triton is there, and a GPU that it serves, or its interpreter is on.

    In the interpreter (``TRITON_INTERPRET=1`` before Triton is first imported) tensors may be on the CPU.

    Example:
        >>> available() in (True, False)
        True
    """
    if importlib.util.find_spec("triton") is None:
        return False
    if interpreted():
        return True
    if not torch.cuda.is_available():
        return False
    return torch.version.hip is not None or torch.cuda.get_device_capability() >= _CAPABILITY


def forward(
    function: int,
    x: Tensor,
    constant: Tensor,
    shift: Tensor | None,
    center: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    scale: float,
    channels: int,
    inner: int,
    out: Tensor | None = None,
) -> Tensor:
    """Compute ``y = weight * scale * f(x - center) + bias`` in one pass.

    Args:
        function: 0 DyISRU, 1 DyT, 2 Derf, 3 linear.
        x: contiguous, of any floating dtype, ``outer * channels * inner`` elements.
        constant: beta, alpha or slope, of 1 or ``channels`` elements.
        shift: Derf's, of 1 or ``channels`` elements, or None for 0.
        center: subtracted from x, of 1 or ``channels`` elements, or None for 0.
        weight: of ``channels`` elements, or None for 1.
        bias: of ``channels`` elements, or None for 0.
        scale: the fixed factor.
        channels: C.
        inner: elements from one channel to the next, 1 where channels come last.
        out: where y goes, contiguous, of x's shape and dtype; a new tensor when None.

    Returns:
        y, of the shape and dtype of x; computed in float32, in float64 for float64, and rounded once.

    Raises:
        ArgumentError: sizes, layout or devices do not fit.
    """
    y = torch.empty_like(x) if out is None else out
    _check(x, (y,), (constant, shift, center), (weight, bias), channels, inner)
    _launch_forward(function, x, None, constant, shift, center, weight, bias, y, None, scale, channels, inner)
    return y


def add_forward(
    function: int,
    x: Tensor,
    residual: Tensor,
    constant: Tensor,
    shift: Tensor | None,
    center: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    scale: float,
    channels: int,
    inner: int,
) -> tuple[Tensor, Tensor]:
    """Compute ``h = x + residual`` and ``y = weight * scale * f(h - center) + bias`` in one pass.

    Args:
        function: as for :func:`forward`.
        x: as for :func:`forward`.
        residual: of x's shape and dtype, contiguous.
        constant: as for :func:`forward`.
        shift: as for :func:`forward`.
        center: as for :func:`forward`.
        weight: as for :func:`forward`.
        bias: as for :func:`forward`.
        scale: as for :func:`forward`.
        channels: as for :func:`forward`.
        inner: as for :func:`forward`.

    Returns:
        y and h, of the shape and dtype of x; y is the function of h as rounded to that dtype.

    Raises:
        ArgumentError: sizes, layout or devices do not fit.
    """
    y, h = torch.empty_like(x), torch.empty_like(x)
    _check(x, (residual,), (constant, shift, center), (weight, bias), channels, inner)
    _launch_forward(function, x, residual, constant, shift, center, weight, bias, y, h, scale, channels, inner)
    return y, h


def backward(
    function: int,
    grad: Tensor,
    x: Tensor,
    constant: Tensor,
    shift: Tensor | None,
    center: Tensor | None,
    weight: Tensor | None,
    scale: float,
    channels: int,
    inner: int,
    need_x: bool,
    need_parameters: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Compute the gradients of :func:`forward` from x, in one pass and a small second one.

    Args:
        function: as for :func:`forward`.
        grad: the gradient of y, contiguous, of x's shape.
        x: as for :func:`forward`.
        constant: as for :func:`forward`.
        shift: as for :func:`forward`.
        center: as for :func:`forward`.
        weight: as for :func:`forward`.
        scale: as for :func:`forward`.
        channels: as for :func:`forward`.
        inner: as for :func:`forward`.
        need_x: whether the gradient of x is wanted.
        need_parameters: whether the sums are wanted.

    Returns:
        The gradient of x, of its dtype, and the sums ``(5, channels)`` over all but the channels, of the gradients of
        constant, shift, center, weight and bias (0 for a part that is None), in float32, or float64 for float64; the
        same bits at every call. None for what is not wanted.

    Raises:
        ArgumentError: sizes, layout or devices do not fit.
    """
    _check(x, (grad,), (constant, shift, center), (weight,), channels, inner)
    return _launch_backward(
        function, grad, None, x, constant, shift, center, weight, scale, channels, inner, need_x, need_parameters
    )


def add_backward(
    function: int,
    grad: Tensor,
    grad_h: Tensor | None,
    h: Tensor,
    constant: Tensor,
    shift: Tensor | None,
    center: Tensor | None,
    weight: Tensor | None,
    scale: float,
    channels: int,
    inner: int,
    need_x: bool,
    need_parameters: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Compute the gradients of :func:`add_forward` from h, which is all that it need save.

    Args:
        function: as for :func:`forward`.
        grad: the gradient of y, contiguous, of h's shape.
        grad_h: the gradient that comes to h from elsewhere, contiguous, or None.
        h: the sum that :func:`add_forward` returned.
        constant: as for :func:`forward`.
        shift: as for :func:`forward`.
        center: as for :func:`forward`.
        weight: as for :func:`forward`.
        scale: as for :func:`forward`.
        channels: as for :func:`forward`.
        inner: as for :func:`forward`.
        need_x: whether the gradient of x and residual is wanted.
        need_parameters: whether the sums are wanted.

    Returns:
        The gradient of x, which is also that of residual, and the sums of :func:`backward`.

    Raises:
        ArgumentError: sizes, layout or devices do not fit.
    """
    _check(h, (grad, grad_h), (constant, shift, center), (weight,), channels, inner)
    return _launch_backward(
        function, grad, grad_h, h, constant, shift, center, weight, scale, channels, inner, need_x, need_parameters
    )


def _launch_forward(
    function: int,
    x: Tensor,
    residual: Tensor | None,
    constant: Tensor,
    shift: Tensor | None,
    center: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    y: Tensor,
    h: Tensor | None,
    scale: float,
    channels: int,
    inner: int,
) -> None:
    if not x.numel():
        return
    from dynorm.kernels._triton_kernels import forward_kernel

    last = inner == 1
    columns = channels if last else inner
    rows = x.numel() // columns
    block = min(power_of_2(columns), _WIDEST)

    def launch(configuration: tuple[int, int]) -> None:
        elements, warps = configuration
        forward_kernel[(ceil_divide(rows, elements // block) * ceil_divide(columns, block),)](
            x,
            residual,
            constant,
            shift,
            center,
            weight,
            bias,
            y,
            h,
            rows,
            columns,
            channels,
            scale,
            FUNCTION=function,
            CHANNELS_LAST=last,
            CONSTANTS=per_channel(constant),
            SHIFTS=per_channel(shift),
            CENTERS=per_channel(center),
            BLOCK_COLUMNS=block,
            ELEMENTS=elements,
            num_warps=warps,
        )

    configuration = _FORWARD[0]
    with on_device(x):
        # Timing runs the kernel again and again, which over its own input would not be the same again.
        if x.numel() >= _WORTH_TIMING and y.data_ptr() != x.data_ptr():
            key = (x.device, x.dtype, function, columns, last, residual is None, x.numel().bit_length() // 3)
            configuration = choose(key, _FORWARD, launch)
        launch(configuration)


def _launch_backward(
    function: int,
    grad: Tensor,
    grad_h: Tensor | None,
    x: Tensor,
    constant: Tensor,
    shift: Tensor | None,
    center: Tensor | None,
    weight: Tensor | None,
    scale: float,
    channels: int,
    inner: int,
    need_x: bool,
    need_parameters: bool,
) -> tuple[Tensor | None, Tensor | None]:
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    grad_x = torch.empty_like(x) if need_x else None
    if not x.numel() or not (need_x or need_parameters):
        return grad_x, torch.zeros(5, channels, dtype=dtype, device=x.device) if need_parameters else None
    from dynorm.kernels._triton_kernels import backward_kernel, reduce_kernel

    outer = x.numel() // (channels * inner)
    block_rows, block_columns, blocks, all_steps = _backward_tiles(outer, channels, inner)
    steps = ceil_divide(all_steps, max(_PROGRAMS // blocks, 1))
    chunks = ceil_divide(all_steps, steps)
    partial = torch.empty(chunks, 5, channels, dtype=dtype, device=x.device) if need_parameters else None
    with on_device(x):
        backward_kernel[(chunks * blocks,)](
            grad,
            grad_h,
            x,
            constant,
            shift,
            center,
            weight,
            grad_x,
            partial,
            outer,
            channels,
            inner,
            steps,
            all_steps,
            scale,
            FUNCTION=function,
            CHANNELS_LAST=inner == 1,
            CONSTANTS=per_channel(constant),
            SHIFTS=per_channel(shift),
            CENTERS=per_channel(center),
            BLOCK_ROWS=block_rows,
            BLOCK_COLUMNS=block_columns,
            num_warps=4,
        )
        if partial is None:
            return grad_x, None
        sums = torch.empty(5, channels, dtype=dtype, device=x.device)
        reduce_kernel[(ceil_divide(channels, 64), 5)](
            partial,
            sums,
            chunks,
            channels,
            WITH_SHIFT=shift is not None,
            WITH_CENTER=center is not None,
            WITH_WEIGHT=weight is not None,
            BLOCK_CHUNKS=32,
            BLOCK_CHANNELS=64,
            num_warps=4,
        )
    return grad_x, sums


def _backward_tiles(outer: int, channels: int, inner: int) -> tuple[int, int, int, int]:
    """Return a tile's rows and columns, how many tiles lie side by side, and how many are walked for each.

    Not tuned by timing: the order of the sums depends on it, and they shall be the same in every process.
    """
    if inner == 1:
        columns = min(power_of_2(channels), _WIDEST // 2)
        rows = min(_BACKWARD_TILE // columns, power_of_2(outer))
        return rows, columns, ceil_divide(channels, columns), ceil_divide(outer, rows)
    columns = min(power_of_2(inner), _WIDEST)
    rows = min(_BACKWARD_TILE // columns, power_of_2(channels))
    return rows, columns, ceil_divide(channels, rows), outer * ceil_divide(inner, columns)


def _check(
    x: Tensor,
    alike: tuple[Tensor | None, ...],
    constants: tuple[Tensor | None, ...],
    affine: tuple[Tensor | None, ...],
    channels: int,
    inner: int,
) -> None:
    """Refuse what the kernels would read or write out of bounds."""
    if not x.is_contiguous() or channels < 1 or inner < 1 or channels >= 2**31 or x.numel() % (channels * inner):
        raise ArgumentError(
            f"x must be contiguous, of a multiple of channels * inner elements, got shape {tuple(x.shape)}, strides "
            f"{x.stride()}, channels {channels} and inner {inner}: call .contiguous(), and give the sizes of x"
        )
    for other in alike:
        if other is not None and (other.shape != x.shape or other.device != x.device or not other.is_contiguous()):
            raise ArgumentError(
                f"residual, gradients and out must be contiguous, of x's shape {tuple(x.shape)} and on {x.device}, "
                f"got {tuple(other.shape)} with strides {other.stride()} on {other.device}: call .contiguous()"
            )
    check_parameters(x, constants, affine, channels)


def check_parameters(
    x: Tensor, constants: tuple[Tensor | None, ...], affine: tuple[Tensor | None, ...], channels: int
) -> None:
    """Refuse parameters of a wrong size, layout or device."""
    for parameter, sizes in [(p, (1, channels)) for p in constants] + [(p, (channels,)) for p in affine]:
        if parameter is None:
            continue
        if parameter.numel() not in sizes or parameter.device != x.device or not parameter.is_contiguous():
            raise ArgumentError(
                f"a parameter must be contiguous, on {x.device} and of {' or '.join(map(str, sizes))} elements, got "
                f"{tuple(parameter.shape)} with strides {parameter.stride()} on {parameter.device}"
            )


def per_channel(parameter: Tensor | None) -> bool:
    """Say whether a constant has an element a channel."""
    return parameter is not None and parameter.numel() > 1


def ceil_divide(n: int, by: int) -> int:
    """Divide and round up."""
    return -(-n // by)


def power_of_2(n: int) -> int:
    """Return the least power of 2 that is not less than ``n``."""
    return 1 << (n - 1).bit_length()
