"""The family as two Triton kernels, forward and backward; the function is a compile-time choice.

A tile is tokens x channels. A third kernel adds up the sums of the parameters' gradients.
"""

# Triton's language has Python's syntax, not its types, and its constants are in capitals.
# mypy: ignore-errors
# ruff: noqa: N803, N806

import triton
import triton.language as tl

from dynorm.kernels._triton_functions import (
    by_total,
    centered,
    derivatives,
    of_token,
    parameter,
    shared,
    value,
)


@triton.jit
def forward_kernel(
    x_ptr,
    constant_ptr,
    shift_ptr,
    center_ptr,
    weight_ptr,
    bias_ptr,
    token_ptr,
    y_ptr,
    rows,
    channels,
    scale: tl.float64,
    FUNCTION: tl.constexpr,
    PER_CHANNEL: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Compute one tile of ``y = weight * scale * f(x - center) + bias``."""
    COMPUTE: tl.constexpr = tl.float64 if x_ptr.dtype.element_ty == tl.float64 else tl.float32
    NARROW: tl.constexpr = x_ptr.dtype.element_ty.primitive_bitwidth < 32
    blocks = tl.cdiv(channels, BLOCK_COLUMNS)
    # 64 bits: an input may have more than 2**31 elements.
    program = tl.program_id(0).to(tl.int64)
    row = (program // blocks) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    channel = (program % blocks) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)[None, :]
    inside = channel < channels
    mask = (row < rows) & inside
    offset = row * channels + channel

    u = centered((x_ptr, center_ptr), offset, mask, channel, inside, PER_CHANNEL, COMPUTE)
    constant, shift, gain = shared(
        (constant_ptr, shift_ptr, weight_ptr), channel, inside, scale, PER_CHANNEL, COMPUTE
    )
    if token_ptr is not None:
        constant, _ = of_token(constant, token_ptr, row, rows, FUNCTION, COMPUTE)
    y = value(u, constant, shift, FUNCTION, NARROW) * gain
    if bias_ptr is not None:
        y += parameter(bias_ptr, channel, inside, True, COMPUTE)
    tl.store(y_ptr + offset, y.to(y_ptr.dtype.element_ty), mask)


@triton.jit
def backward_kernel(
    grad_ptr,
    x_ptr,
    constant_ptr,
    shift_ptr,
    center_ptr,
    weight_ptr,
    token_ptr,
    grad_x_ptr,
    partial_ptr,
    by_token_ptr,
    rows,
    channels,
    steps,
    all_steps,
    scale: tl.float64,
    FUNCTION: tl.constexpr,
    PER_CHANNEL: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Compute the gradient of x in ``steps`` tiles, and the parameters' sums over them.

    A program keeps to its channels, so that parameters are loaded once and sums stay in registers.
    The sums go to ``partial[chunk, kind, channel]``; the kinds are constant, shift, center, weight
    and bias. The gradient by T of these channels goes to ``by_token[block, row]``.
    """
    COMPUTE: tl.constexpr = tl.float64 if x_ptr.dtype.element_ty == tl.float64 else tl.float32
    NARROW: tl.constexpr = x_ptr.dtype.element_ty.primitive_bitwidth < 32
    blocks = tl.cdiv(channels, BLOCK_COLUMNS)
    program = tl.program_id(0).to(tl.int64)
    chunk = program // blocks
    channel_list = (program % blocks) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    channel = channel_list[None, :]
    inside = channel < channels
    constant, shift, gain = shared(
        (constant_ptr, shift_ptr, weight_ptr), channel, inside, scale, PER_CHANNEL, COMPUTE
    )

    # One accumulator per element of the tile, added up after the last step: no exchange between
    # threads on the way.
    sum_constant = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], COMPUTE)
    sum_shift = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], COMPUTE)
    sum_slope = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], COMPUTE)
    sum_value = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], COMPUTE)
    sum_grad = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], COMPUTE)
    first = chunk * steps
    for step in range(first, tl.minimum(first + steps, all_steps)):
        row = step * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
        mask = (row < rows) & inside
        offset = row * channels + channel
        grad = tl.load(grad_ptr + offset, mask, other=0.0).to(COMPUTE)
        u = centered((x_ptr, center_ptr), offset, mask, channel, inside, PER_CHANNEL, COMPUTE)
        of_row = constant
        if token_ptr is not None:
            of_row, root = of_token(constant, token_ptr, row, rows, FUNCTION, COMPUTE)
        # Computed again from x, because f was not saved.
        f, slope, by_constant, by_shift = derivatives(u, of_row, shift, FUNCTION, NARROW)
        if by_token_ptr is not None:
            by_this = grad * (gain * by_total(by_constant, of_row, FUNCTION))
            row_sum = tl.expand_dims(tl.sum(by_this, 1), 1)
            tl.store(by_token_ptr + (program % blocks) * rows + row, row_sum, row < rows)
        if token_ptr is not None:
            by_constant = by_constant * (root * root * root)
        if grad_x_ptr is not None:
            of_x = grad * (gain * slope)
            tl.store(grad_x_ptr + offset, of_x.to(grad_x_ptr.dtype.element_ty), mask)
        if partial_ptr is not None:
            sum_constant += grad * by_constant
            sum_grad += grad
            if shift_ptr is not None:
                sum_shift += grad * by_shift
            if center_ptr is not None:
                sum_slope += grad * slope
            if weight_ptr is not None:
                sum_value += grad * f

    # Partial sums and a second kernel rather than atomics, whose order, and so whose rounding,
    # differs in every run.
    if partial_ptr is not None:
        valid = channel_list < channels
        target = partial_ptr + chunk * 5 * channels + channel_list
        # Weight and scale do not vary along a sum: they are multiplied in once.
        factor = tl.full([], scale, COMPUTE)
        if weight_ptr is not None:
            tl.store(target + 3 * channels, tl.sum(sum_value, 0) * factor, valid)
            factor = factor * parameter(weight_ptr, channel_list, valid, True, COMPUTE)
        tl.store(target, tl.sum(sum_constant, 0) * factor, valid)
        if shift_ptr is not None:
            tl.store(target + channels, tl.sum(sum_shift, 0) * factor, valid)
        if center_ptr is not None:
            tl.store(target + 2 * channels, -tl.sum(sum_slope, 0) * factor, valid)
        tl.store(target + 4 * channels, tl.sum(sum_grad, 0), valid)


@triton.jit
def sum_kernel(
    partial_ptr,
    sums_ptr,
    chunks,
    channels,
    PRESENT: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
):
    """Add up one kind of partial sums, always in the same order.

    A kind whose bit is not in ``PRESENT`` is 0: it has no parameter.
    """
    kind = tl.program_id(1)
    channel = tl.program_id(0) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    valid = channel < channels
    total = tl.zeros([BLOCK_CHUNKS, BLOCK_CHANNELS], sums_ptr.dtype.element_ty)
    if (PRESENT >> kind) & 1 == 1:
        for first in range(0, chunks, BLOCK_CHUNKS):
            chunk = (first + tl.arange(0, BLOCK_CHUNKS)[:, None]).to(tl.int64)
            source = partial_ptr + (chunk * 5 + kind) * channels + channel[None, :]
            total += tl.load(source, (chunk < chunks) & valid[None, :], other=0.0)
    tl.store(sums_ptr + kind.to(tl.int64) * channels + channel, tl.sum(total, 0), valid)
