"""The family as two Triton kernels, forward and backward; the function is a compile-time choice.

Channels last, a tile is tokens x channels; channels first, it is channels x positions. Either way the channel varies
along one axis only: parameters are loaded once a tile, and nothing is divided per element.
"""

# Triton's language has Python's syntax, not its types, and its constants are in capitals.
# mypy: ignore-errors
# ruff: noqa: N803, N806

import triton
import triton.language as tl

from dynorm.kernels._triton_functions import derivatives, parameter, value


@triton.jit
def forward_kernel(
    x_ptr,
    constant_ptr,
    shift_ptr,
    center_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    rows,
    columns,
    channels,
    scale: tl.float64,
    FUNCTION: tl.constexpr,
    CHANNELS_LAST: tl.constexpr,
    CONSTANTS: tl.constexpr,
    SHIFTS: tl.constexpr,
    CENTERS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    ELEMENTS: tl.constexpr,
):
    """Compute one tile of ``y = weight * scale * f(x - center) + bias``.

    x is a matrix of ``rows`` x ``columns``: tokens x channels, or (samples and channels) x positions.
    """
    BLOCK_ROWS: tl.constexpr = ELEMENTS // BLOCK_COLUMNS
    COMPUTE: tl.constexpr = tl.float64 if x_ptr.dtype.element_ty == tl.float64 else tl.float32
    NARROW: tl.constexpr = x_ptr.dtype.element_ty.primitive_bitwidth < 32
    blocks = tl.cdiv(columns, BLOCK_COLUMNS)
    program = tl.program_id(0).to(tl.int64)
    first = (program // blocks) * BLOCK_ROWS
    row = first + tl.arange(0, BLOCK_ROWS)[:, None]
    column = (program % blocks) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)[None, :]
    mask = (row < rows) & (column < columns)
    if CHANNELS_LAST:
        channel, inside = column, column < columns
    else:
        channel, inside = ((first % channels).to(tl.int32) + tl.arange(0, BLOCK_ROWS)[:, None]) % channels, row < rows

    # 64 bits: an input may have more than 2**31 elements.
    offset = row * columns + column
    u = tl.load(x_ptr + offset, mask, other=0.0).to(COMPUTE)
    if center_ptr is not None:
        u -= parameter(center_ptr, channel, inside, CENTERS, COMPUTE)
    shift = 0.0
    if shift_ptr is not None:
        shift = parameter(shift_ptr, channel, inside, SHIFTS, COMPUTE)
    gain = tl.full([], scale, COMPUTE)
    if weight_ptr is not None:
        gain = gain * parameter(weight_ptr, channel, inside, True, COMPUTE)
    y = value(u, parameter(constant_ptr, channel, inside, CONSTANTS, COMPUTE), shift, FUNCTION, NARROW) * gain
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
    grad_x_ptr,
    partial_ptr,
    outer,
    channels,
    inner,
    steps,
    all_steps,
    scale: tl.float64,
    FUNCTION: tl.constexpr,
    CHANNELS_LAST: tl.constexpr,
    CONSTANTS: tl.constexpr,
    SHIFTS: tl.constexpr,
    CENTERS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Walk ``steps`` tiles of the same channels: the gradient of x, and sums over the tiles for the parameters.

    A program keeps to its channels, so that parameters are loaded once and sums stay in registers.

    The sums go to ``partial[chunk, kind, channel]``; the kinds are constant, shift, center, weight and bias.
    """
    COMPUTE: tl.constexpr = tl.float64 if x_ptr.dtype.element_ty == tl.float64 else tl.float32
    NARROW: tl.constexpr = x_ptr.dtype.element_ty.primitive_bitwidth < 32
    SUMMED: tl.constexpr = 0 if CHANNELS_LAST else 1
    BLOCK_CHANNELS: tl.constexpr = BLOCK_COLUMNS if CHANNELS_LAST else BLOCK_ROWS
    blocks = tl.cdiv(channels, BLOCK_CHANNELS)
    program = tl.program_id(0).to(tl.int64)
    chunk = program // blocks
    channel_list = (program % blocks) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    channel = tl.expand_dims(channel_list, SUMMED)
    inside = channel < channels
    constant = parameter(constant_ptr, channel, inside, CONSTANTS, COMPUTE)
    shift = 0.0
    if shift_ptr is not None:
        shift = parameter(shift_ptr, channel, inside, SHIFTS, COMPUTE)
    gain = tl.full([], scale, COMPUTE)
    if weight_ptr is not None:
        gain = gain * parameter(weight_ptr, channel, inside, True, COMPUTE)

    # One accumulator per element of the tile, added up after the last step: no exchange between threads on the way.
    sum_constant = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], COMPUTE)
    sum_shift = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], COMPUTE)
    sum_slope = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], COMPUTE)
    sum_value = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], COMPUTE)
    sum_grad = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], COMPUTE)
    first = chunk * steps
    for step in range(first, tl.minimum(first + steps, all_steps)):
        if CHANNELS_LAST:
            token = step * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
            mask = (token < outer) & inside
            offset = token * channels + channel
        else:
            inner_blocks = tl.cdiv(inner, BLOCK_COLUMNS)
            position = (step % inner_blocks) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)[None, :]
            mask = inside & (position < inner)
            offset = ((step // inner_blocks) * channels + channel) * inner + position
        grad = tl.load(grad_ptr + offset, mask, other=0.0).to(COMPUTE)
        u = tl.load(x_ptr + offset, mask, other=0.0).to(COMPUTE)
        if center_ptr is not None:
            u -= parameter(center_ptr, channel, inside, CENTERS, COMPUTE)
        # Anew from x, for f was not saved.
        f, slope, by_constant, by_shift = derivatives(u, constant, shift, FUNCTION, NARROW)
        if grad_x_ptr is not None:
            tl.store(grad_x_ptr + offset, (grad * (gain * slope)).to(grad_x_ptr.dtype.element_ty), mask)
        if partial_ptr is not None:
            sum_constant += grad * by_constant
            sum_grad += grad
            if shift_ptr is not None:
                sum_shift += grad * by_shift
            if center_ptr is not None:
                sum_slope += grad * slope
            if weight_ptr is not None:
                sum_value += grad * f

    # Partial sums and a second kernel rather than atomics, whose order, and so whose rounding, differs in every run.
    if partial_ptr is not None:
        valid = channel_list < channels
        target = partial_ptr + chunk * 5 * channels + channel_list
        # Weight and scale do not vary along a sum: they are multiplied in once.
        gain = tl.full([], scale, COMPUTE)
        if weight_ptr is not None:
            tl.store(target + 3 * channels, tl.sum(sum_value, SUMMED) * gain, valid)
            gain = gain * parameter(weight_ptr, channel_list, valid, True, COMPUTE)
        tl.store(target, tl.sum(sum_constant, SUMMED) * gain, valid)
        if shift_ptr is not None:
            tl.store(target + channels, tl.sum(sum_shift, SUMMED) * gain, valid)
        if center_ptr is not None:
            tl.store(target + 2 * channels, -tl.sum(sum_slope, SUMMED) * gain, valid)
        tl.store(target + 4 * channels, tl.sum(sum_grad, SUMMED), valid)


@triton.jit
def reduce_kernel(
    partial_ptr,
    sums_ptr,
    chunks,
    channels,
    WITH_SHIFT: tl.constexpr,
    WITH_CENTER: tl.constexpr,
    WITH_WEIGHT: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
):
    """Add up one kind of partial sums, always in the same order; a kind that is not wanted is 0."""
    kind = tl.program_id(1)
    channel = tl.program_id(0) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    valid = channel < channels
    total = tl.zeros([BLOCK_CHUNKS, BLOCK_CHANNELS], sums_ptr.dtype.element_ty)
    wanted = (kind == 0) | ((kind == 1) & WITH_SHIFT) | ((kind == 2) & WITH_CENTER) | ((kind == 3) & WITH_WEIGHT)
    if wanted | (kind == 4):
        for first in range(0, chunks, BLOCK_CHUNKS):
            chunk = (first + tl.arange(0, BLOCK_CHUNKS)[:, None]).to(tl.int64)
            source = partial_ptr + (chunk * 5 + kind) * channels + channel[None, :]
            total += tl.load(source, (chunk < chunks) & valid[None, :], other=0.0)
    tl.store(sums_ptr + kind.to(tl.int64) * channels + channel, tl.sum(total, 0), valid)
