"""The family on a GPU: functions over raw tensors that launch the Triton kernels, without autograd.

They compute the same as :mod:`dynorm.kernels._cpu`, from the same arguments. Triton is imported at
the first call, not with this file.
"""

import importlib.util
import os
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from dynorm.kernels._form import (
    DTYPES,
    GRADIENTS,
    OF_TOKENS,
    OF_X,
    PLAIN_TYPES,
    Fields,
    Numbers,
    Parameters,
    UnfitError,
)

# The least that Triton for NVIDIA supports.
_CAPABILITY = (8, 0)
# Elements of a tile of the forward pass: 8 per thread of four warps, 16 bytes of bfloat16.
_TILE = 1024
# Elements of a tile of the backward pass, and its programs on each multiprocessor. The two tiles that
# are on their way then hide the latency of memory: on an H100 smaller tiles took 4 to 20 % longer.
_BACKWARD_TILE, _RESIDENT = 2048, 2
_PARAMETERS = len(Parameters._fields)
_WEIGHT = Parameters._fields.index("weight")
# The gradients of one buffer begin at multiples of this number of elements.
_ALIGNMENT = 16
# The tile in which partial sums are added up.
_PARTS, _NUMBERS = 128, 16


class Choices(NamedTuple):
    """What the kernels of a call are compiled for."""

    function: int
    logarithmic: bool
    scale: float
    channels: int


def available() -> bool:
    """Return whether the kernels can run: with Triton, and a GPU that it supports.

    With its interpreter instead of a GPU (``TRITON_INTERPRET=1`` before Triton is first imported)
    tensors may be on the CPU.
    """
    if importlib.util.find_spec("triton") is None:
        return False
    if interpreted():
        return True
    if not torch.cuda.is_available():
        return False
    return torch.version.hip is None and torch.cuda.get_device_capability() >= _CAPABILITY


def interpreted() -> bool:
    """Return whether Triton's interpreter is on."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")


def forward(
    form: Fields,
    x: Tensor,
    parameters: Numbers,
    token_constant: Tensor | None = None,
    residual: Tensor | None = None,
    total: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return ``y = weight * scale * f(x + residual) + bias`` of x, in one pass.

    It is written to ``out`` if that is given, and ``x + residual`` to ``total``, which comes with a
    residual. Both are computed in float32, in float64 for float64, and rounded once to the dtype of
    x.

    Raises:
        UnfitError: the tensors are not as the kernels take them.
    """
    if not fits(x, parameters, token_constant):
        raise UnfitError
    y = torch.empty_like(x) if out is None else out
    if not x.numel():
        return y
    from dynorm.kernels._triton_kernels import forward_kernel

    # Triton launches on the current device, whatever its arguments are.
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        forward_kernel[(ceil_divide(x.numel(), _TILE),)](
            *(x, residual, total, y, *parameters, token_constant, x.numel()),
            FORM=choices(form, x.shape[-1]),
            BLOCK=_TILE,
            num_warps=4,
        )
    return y


def gradients(
    form: Fields,
    grad: Tensor,
    x: Tensor,
    parameters: Numbers,
    token_constant: Tensor | None,
    needed: Sequence[bool],
    grad_total: Tensor | None = None,
) -> list[Tensor | None]:
    """Return the gradients of x, of the parameters and of the tokens' numbers, each like its tensor.

    A gradient that is not needed is None. The sums have the same bits at every call. With a residual
    ``x`` is ``x + residual``, and ``grad_total`` its gradient by what else uses it, which is added.

    Raises:
        UnfitError: the tensors are not as the kernels take them.
    """
    if not fits(x, parameters, token_constant):
        raise UnfitError
    tensors = (x, *parameters, token_constant)
    wanted = 0
    for bit, tensor, need in zip(GRADIENTS, tensors, needed, strict=True):
        if need and tensor is not None:
            wanted |= bit
    channels = x.shape[-1]
    rows = x.numel() // channels
    slot = _aligned(channels)
    sums = None
    if wanted & ~OF_X:
        dtypes = {tensor.dtype for tensor in tensors[1:] if tensor is not None}
        dtype = dtypes.pop() if len(dtypes) == 1 else _compute_dtype(x)
        numbers = _PARAMETERS * slot + rows * bool(wanted & OF_TOKENS)
        sums = torch.empty(numbers, dtype=dtype, device=x.device)
    grad_x = _backward(form, grad, x, parameters, token_constant, grad_total, wanted, sums)
    results: list[Tensor | None] = [grad_x if wanted & OF_X else None]
    for place, (bit, tensor) in enumerate(zip(GRADIENTS[1:], tensors[1:], strict=True)):
        gradient = None
        if sums is not None and tensor is not None and wanted & bit:
            gradient = sums.as_strided(tensor.shape, tensor.stride(), place * slot)
            gradient = gradient.to(tensor.dtype)
        results.append(gradient)
    return results


def _backward(
    form: Fields,
    grad: Tensor,
    x: Tensor,
    parameters: Numbers,
    token_constant: Tensor | None,
    grad_total: Tensor | None,
    wanted: int,
    sums: Tensor | None,
) -> Tensor:
    """Return the gradient of x, and write those of the parameters and tokens, one in each slot of ``sums``.

    If that of x is not wanted, the memory that is returned has no values.
    """
    channels = x.shape[-1]
    rows = x.numel() // channels
    has_tokens = bool(wanted & OF_TOKENS)
    block_rows, block_columns = tile(channels)
    blocks = ceil_divide(channels, block_columns)
    # All programs run at the same time, and go through the rows with the same stride.
    chunks = max(_RESIDENT * processors(x.device) // blocks, 1)
    chunks = min(chunks, ceil_divide(rows, block_rows))
    # One allocation for the gradient of x and, behind it, the partial sums.
    partial_offset = _aligned(x.numel())
    partial_count = _PARAMETERS * chunks * channels + blocks * rows * has_tokens
    # In elements of x, which may be narrower than a sum.
    size = partial_offset + partial_count * _compute_dtype(x).itemsize // x.element_size()
    buffer = torch.empty(size, dtype=x.dtype, device=x.device)
    from dynorm.kernels._triton_kernels import backward_kernel, sum_kernel

    compiled = choices(form, channels)
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        if rows:
            # No gradient depends on the bias itself.
            backward_kernel[(chunks * blocks,)](
                *(grad, x, grad_total, *parameters[:3], token_constant),
                *(buffer, partial_offset, rows, chunks),
                FORM=compiled,
                WANTED=wanted,
                BLOCK_ROWS=block_rows,
                BLOCK_COLUMNS=block_columns,
                num_warps=4,
            )
        if sums is not None:
            longest = max(channels, rows * has_tokens)
            sum_kernel[(ceil_divide(longest, _NUMBERS), _PARAMETERS + has_tokens)](
                *(buffer, partial_offset, sums, rows, chunks),
                FORM=compiled,
                WANTED=wanted,
                BLOCKS=blocks,
                SLOT=_aligned(channels),
                BLOCK_PARTS=_PARTS,
                BLOCK_NUMBERS=_NUMBERS,
                num_warps=4,
            )
    # The storage keeps its full size. This is no view, so that autograd may add to it in place.
    return buffer.as_strided_(x.shape, x.stride())


def fits(x: Tensor, parameters: Numbers, token_constant: Tensor | None) -> bool:
    """Return whether the kernels take these tensors."""
    for tensor in (x, *parameters):
        if tensor is None:
            continue
        is_plain = type(tensor) in PLAIN_TYPES and tensor.layout is torch.strided
        if not is_plain or tensor.dtype not in DTYPES or tensor.is_neg():
            return False
        if tensor.device != x.device:
            return False
    if not x.ndim or not x.shape[-1] or not _is_dense(x):
        return False
    for place, parameter in enumerate(parameters):
        # Weight and bias have one number per channel.
        shape = (1,) if place < _WEIGHT else x.shape[-1:]
        if parameter is not None and not (parameter.shape == shape and parameter.is_contiguous()):
            return False
    if token_constant is None:
        return True
    strides = tuple(stride // x.shape[-1] for stride in x.stride()[:-1])
    return (
        type(token_constant) is Tensor
        and token_constant.dtype in (torch.float32, torch.float64)
        and token_constant.shape == x.shape[:-1]
        and token_constant.stride() == strides
        and token_constant.device == x.device
    )


def _is_dense(x: Tensor) -> bool:
    """Return whether x fills its memory in some order of its axes, with the channels innermost."""
    if x.is_contiguous():
        return True
    return x.stride(-1) == 1 and torch.empty_like(x, device="meta").stride() == x.stride()


def choices(form: Fields, channels: int) -> Choices:
    """Return the choices that a kernel is compiled for."""
    function, logarithmic, scale = form
    return Choices(int(function), logarithmic, scale, channels)


def tile(channels: int) -> tuple[int, int]:
    """Return the rows and columns of a tile of the backward pass.

    Its columns divide the channels if possible. Nothing is tuned by timing: the order of the sums
    depends on the tile, and has to be the same in every process.
    """
    columns = 256
    while columns > 64 and channels % columns:
        columns //= 2
    columns = min(columns, 1 << (channels - 1).bit_length())
    return _BACKWARD_TILE // columns, columns


@lru_cache
def processors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU; 1 in the interpreter."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which x is computed."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _aligned(elements: int) -> int:
    """Round up, so that a vector can be loaded behind this number of elements."""
    return ceil_divide(elements, _ALIGNMENT) * _ALIGNMENT


def ceil_divide(n: int, by: int) -> int:
    """Divide and round up."""
    return -(-n // by)
