"""The family as Triton kernels: forward, backward, and the sums of the parameters' gradients.

Compile-time choices are the parameters that exist, ``FORM`` (a :class:`dynorm.kernels._triton.Choices`)
and ``WANTED``, the bits of the gradients that are wanted.
"""

# Triton's language has Python's syntax, not its types, and its constants are in capitals.
# mypy: ignore-errors
# ruff: noqa: N803, N806

import triton
import triton.language as tl

from dynorm.kernels import _form
from dynorm.kernels._triton_functions import (
    DYISRU,
    LINEAR,
    by_channel,
    compute,
    constant_of,
    derivatives,
    plus_tokens,
    shift_of,
    value,
)

# Bits of WANTED. They come first in an expression: in the interpreter WANTED is a plain number.
OF_X = tl.constexpr(_form.OF_X)
OF_CONSTANT = tl.constexpr(_form.OF_CONSTANT)
OF_SHIFT = tl.constexpr(_form.OF_SHIFT)
OF_WEIGHT = tl.constexpr(_form.OF_WEIGHT)
OF_BIAS = tl.constexpr(_form.OF_BIAS)
OF_TOKENS = tl.constexpr(_form.OF_TOKENS)
# The places of the sums; that of the constant is 0.
SHIFT = tl.constexpr(1)
WEIGHT = tl.constexpr(2)
BIAS = tl.constexpr(3)
TOKENS = tl.constexpr(4)


@triton.jit
def forward_kernel(
    x_ptr,
    residual_ptr,
    total_ptr,
    y_ptr,
    constant_ptr,
    shift_ptr,
    weight_ptr,
    bias_ptr,
    token_ptr,
    numel,
    FORM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute ``BLOCK`` elements of ``y = weight * scale * f(x + residual) + bias``.

    With a residual, ``x + residual`` is stored too.
    """
    CHANNELS: tl.constexpr = FORM.channels
    # 64 bits: an input may have more than 2**31 elements.
    start = tl.program_id(0).to(tl.int64) * BLOCK
    index = tl.arange(0, BLOCK)
    mask = index < numel - start
    place = (start % CHANNELS).to(tl.int32) + index
    channel = place % CHANNELS
    if CHANNELS % 8 == 0:
        # Parameters are loaded as vectors.
        channel = tl.max_contiguous(tl.multiple_of(channel, 8), 8)

    x = tl.load(x_ptr + start + index, mask, other=0.0)
    if residual_ptr is not None:
        # Rounded first, so that y is the function of the sum that is returned.
        residual = tl.load(residual_ptr + start + index, mask, other=0.0)
        x = (x.to(compute(x)) + residual.to(compute(x))).to(x.dtype)
        tl.store(total_ptr + start + index, x, mask)
    if token_ptr is not None:
        token_ptr += start // CHANNELS + place // CHANNELS
    parameters = (constant_ptr, shift_ptr, weight_ptr, bias_ptr, token_ptr)
    tl.store(y_ptr + start + index, layer_of(x, parameters, channel, mask, FORM), mask)


@triton.jit
def layer_of(x, parameters, channel, mask, FORM: tl.constexpr):
    """Return ``weight * scale * f(x) + bias`` in the dtype of x."""
    constant_ptr, shift_ptr, weight_ptr, bias_ptr, token_ptr = parameters
    COMPUTE: tl.constexpr = compute(x)
    constant = constant_of(constant_ptr, COMPUTE, FORM)
    if token_ptr is not None:
        constant = plus_tokens(constant, token_ptr, mask, FORM.function)
    shift = shift_of(shift_ptr, COMPUTE)
    y = value(x.to(COMPUTE), constant, shift, FORM.function, x.dtype.primitive_bitwidth < 32)
    y *= tl.full([], FORM.scale, COMPUTE)
    if weight_ptr is not None:
        y *= by_channel(weight_ptr, channel, mask, COMPUTE)
    if bias_ptr is not None:
        y += by_channel(bias_ptr, channel, mask, COMPUTE)
    return y.to(x.dtype)


@triton.jit(do_not_specialize=["rows", "chunks"])
def backward_kernel(
    grad_ptr,
    x_ptr,
    grad_total_ptr,
    constant_ptr,
    shift_ptr,
    weight_ptr,
    token_ptr,
    buffer_ptr,
    partial_offset,
    rows,
    chunks,
    FORM: tl.constexpr,
    WANTED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Compute the gradient of x, and partial sums of the other gradients, in one part of x.

    The part is a block of channels in every ``chunks``-th group of rows. ``grad_total`` is the gradient
    of ``x + residual`` from its other uses, if there are any.

    The buffer begins with the gradient of x. At ``partial_offset`` follow the partial sums of the
    other gradients, in float32 or float64: four regions of ``chunks * channels`` numbers, of which
    the constant and the shift use one number per program, then ``(blocks, rows)`` for the tokens.
    """
    FUNCTION: tl.constexpr = FORM.function
    CHANNELS: tl.constexpr = FORM.channels
    COMPUTE: tl.constexpr = compute(x_ptr)
    NARROW: tl.constexpr = x_ptr.dtype.element_ty.primitive_bitwidth < 32
    BLOCKS: tl.constexpr = (CHANNELS + BLOCK_COLUMNS - 1) // BLOCK_COLUMNS
    partial_ptr = (buffer_ptr + partial_offset).to(tl.pointer_type(COMPUTE))
    # A program has a block of channels, and in it the tiles chunk, chunk + chunks, ...
    program = tl.program_id(0)
    chunk = program // BLOCKS
    block = program % BLOCKS
    channel = block * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)[None, :]
    inside = channel < CHANNELS
    constant = constant_of(constant_ptr, COMPUTE, FORM)
    if FUNCTION == DYISRU:
        # Outside of the rows and channels u is 0, and 0 / sqrt(0) would make the sums NaN.
        constant = tl.where(constant == 0.0, 1.2e-38, constant)
    shift = shift_of(shift_ptr, COMPUTE)
    scale = tl.full([], FORM.scale, COMPUTE)
    factor = scale
    if weight_ptr is not None:
        factor *= by_channel(weight_ptr, channel, inside, COMPUTE)

    # The size of one region of partial sums.
    region = chunks.to(tl.int64) * CHANNELS

    # One sum per element of the tile, added up after the last step: no exchange between threads
    # on the way. Those that are not wanted are never added to, and take no registers.
    zeros = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], COMPUTE)
    sum_constant, sum_shift, sum_weight, sum_bias = zeros, zeros, zeros, zeros
    # The next tiles are on their way while this one is computed.
    for step in tl.range(chunk, tl.cdiv(rows, BLOCK_ROWS), chunks, num_stages=3):
        row = step * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
        mask = (row < rows) & inside
        # 64 bits: an input may have more than 2**31 elements.
        offset = row.to(tl.int64) * CHANNELS + channel
        grad = tl.load(grad_ptr + offset, mask, other=0.0).to(COMPUTE)
        u = tl.load(x_ptr + offset, mask, other=0.0).to(COMPUTE)
        row_constant = constant
        if token_ptr is not None:
            row_constant = plus_tokens(constant, token_ptr + row, row < rows, FUNCTION)
        # Computed again from x, because f was not saved.
        f, slope, by_constant, by_shift = derivatives(u, row_constant, shift, FUNCTION, NARROW)
        if OF_TOKENS & WANTED:
            by_token = tl.sum(grad * (factor * by_constant), 1, keep_dims=True)
            target = partial_ptr + TOKENS * region + block.to(tl.int64) * rows + row
            tl.store(target, by_token, row < rows)
        if OF_X & WANTED:
            grad_x = grad * (factor * slope)
            if grad_total_ptr is not None:
                grad_x += tl.load(grad_total_ptr + offset, mask, other=0.0).to(COMPUTE)
            tl.store(buffer_ptr + offset, grad_x.to(buffer_ptr.dtype.element_ty), mask)
        if OF_CONSTANT & WANTED:
            sum_constant += grad * by_constant
        if OF_SHIFT & WANTED:
            sum_shift += grad * by_shift
        if OF_WEIGHT & WANTED:
            sum_weight += grad * f
        if OF_BIAS & WANTED:
            sum_bias += grad

    # Weight, scale and beta do not vary along a sum: they are multiplied in once.
    if FORM.logarithmic:
        # d beta = beta d log(beta); d slope = -slope / 2 d log(beta).
        sum_constant *= constant * (-0.5 if FUNCTION == LINEAR else 1.0)
    if OF_CONSTANT & WANTED:
        tl.store(partial_ptr + program, tl.sum(sum_constant * factor))
    if OF_SHIFT & WANTED:
        tl.store(partial_ptr + SHIFT * region + program, tl.sum(sum_shift * factor))
    columns = chunk * CHANNELS + channel
    if OF_WEIGHT & WANTED:
        by_weight = tl.sum(sum_weight * scale, 0, keep_dims=True)
        tl.store(partial_ptr + WEIGHT * region + columns, by_weight, inside)
    if OF_BIAS & WANTED:
        by_bias = tl.sum(sum_bias, 0, keep_dims=True)
        tl.store(partial_ptr + BIAS * region + columns, by_bias, inside)


@triton.jit(do_not_specialize=["rows", "chunks"])
def sum_kernel(
    buffer_ptr,
    partial_offset,
    gradients_ptr,
    rows,
    chunks,
    FORM: tl.constexpr,
    WANTED: tl.constexpr,
    BLOCKS: tl.constexpr,
    SLOT: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    BLOCK_NUMBERS: tl.constexpr,
):
    """Add up the partial sums of one parameter, or of the tokens, and round the result once.

    The order is always the same, where that of atomics, and so their rounding, differs in every run.
    """
    CHANNELS: tl.constexpr = FORM.channels
    COMPUTE: tl.constexpr = compute(buffer_ptr)
    place = tl.program_id(1)
    parts, numbers = chunks, CHANNELS
    if place < WEIGHT:
        parts, numbers = chunks * BLOCKS, 1
    if place == TOKENS:
        parts, numbers = BLOCKS, rows
    first = tl.program_id(0) * BLOCK_NUMBERS
    # The bits of WANTED are that of x, and then those of the places in their order.
    if (((WANTED >> place) & OF_CONSTANT) != 0) & (first < numbers):
        number = first + tl.arange(0, BLOCK_NUMBERS)
        valid = number < numbers
        partial_ptr = (buffer_ptr + partial_offset).to(tl.pointer_type(COMPUTE))
        partial_ptr += place.to(tl.int64) * chunks * CHANNELS
        total = tl.zeros([BLOCK_PARTS, BLOCK_NUMBERS], COMPUTE)
        for start in range(0, parts, BLOCK_PARTS):
            part = (start + tl.arange(0, BLOCK_PARTS)[:, None]).to(tl.int64)
            mask = (part < parts) & valid[None, :]
            total += tl.load(partial_ptr + part * numbers + number[None, :], mask, other=0.0)
        result = tl.sum(total, 0).to(gradients_ptr.dtype.element_ty)
        tl.store(gradients_ptr + place.to(tl.int64) * SLOT + number, result, valid)
