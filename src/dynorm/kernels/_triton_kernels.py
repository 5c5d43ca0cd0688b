"""The family as two Triton kernels, forward and backward; the function is a compile-time choice.

With the channels last, a tile is tokens x channels; with channels first, channels x positions. The
channel then varies along one axis only: parameters are loaded once per tile, and nothing is divided
per element.
"""

# Triton's language has Python's syntax, not its types, and its constants are in capitals.
# mypy: ignore-errors
# ruff: noqa: N803, N806

import triton
import triton.language as tl

from dynorm.kernels._triton_functions import (
    by_total,
    centered,
    clamped,
    derivatives,
    limit,
    of_few,
    of_many,
    of_sum,
    parameter,
    shared,
    terms_of,
    unit_of,
    value,
    without,
)


@triton.jit
def forward_kernel(
    x_ptr,
    constant_ptr,
    shift_ptr,
    center_ptr,
    weight_ptr,
    bias_ptr,
    witness_ptr,
    log_gain_ptr,
    term_gain_ptr,
    sums_ptr,
    y_ptr,
    rows,
    columns,
    channels,
    scale: tl.float64,
    FUNCTION: tl.constexpr,
    CHANNELS_LAST: tl.constexpr,
    PER_CHANNEL: tl.constexpr,
    WITNESSES: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    ELEMENTS: tl.constexpr,
):
    """Compute one tile of ``y = weight * scale * f(x - center) + bias``.

    x is a matrix of ``rows`` x ``columns``: tokens x channels, or (samples and channels) x
    positions.
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
        channel, inside = (
            ((first % channels).to(tl.int32) + tl.arange(0, BLOCK_ROWS)[:, None]) % channels,
            row < rows,
        )

    # 64 bits: an input may have more than 2**31 elements.
    offset = row * columns + column
    u = centered((x_ptr, center_ptr), offset, mask, channel, inside, PER_CHANNEL, COMPUTE)
    constant, shift, gain = shared(
        (constant_ptr, shift_ptr, weight_ptr), channel, inside, scale, PER_CHANNEL, COMPUTE
    )
    if WITNESSES > 0:
        unit, constant, _ = of_few(
            *(constant, (x_ptr, center_ptr, witness_ptr, log_gain_ptr)),
            *((row, rows, columns), channel, WITNESSES, FUNCTION, PER_CHANNEL, COMPUTE),
        )
        u = clamped(u) * unit
    elif term_gain_ptr is not None:
        term_gain = tl.load(term_gain_ptr + channel, inside, other=0.0)
        unit, constant, _ = of_many(constant, u, term_gain, row, rows, sums_ptr, FUNCTION)
        u = clamped(u) * unit
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
    witness_ptr,
    log_gain_ptr,
    grad_x_ptr,
    partial_ptr,
    rows_ptr,
    term_gain_ptr,
    sums_ptr,
    outer,
    channels,
    inner,
    steps,
    all_steps,
    scale: tl.float64,
    FUNCTION: tl.constexpr,
    CHANNELS_LAST: tl.constexpr,
    PER_CHANNEL: tl.constexpr,
    WITNESSES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Compute the gradient of x in ``steps`` tiles, and the parameters' sums over them.

    A program keeps to its channels, so that parameters are loaded once and sums stay in registers.

    The sums go to ``partial[chunk, kind, channel]``; the kinds are constant, shift, center, weight
    and bias. With few witnesses the gradient by T of these channels goes to ``rows[block, token]``:
    the rest is :func:`witness_kernel`'s. With many, :func:`rows_kernel` has added it up in
    ``sums``, and there is a sixth kind: the gradient of the logarithm of each channel's gain.
    """
    COMPUTE: tl.constexpr = tl.float64 if x_ptr.dtype.element_ty == tl.float64 else tl.float32
    NARROW: tl.constexpr = x_ptr.dtype.element_ty.primitive_bitwidth < 32
    SUMMED: tl.constexpr = 0 if CHANNELS_LAST else 1
    BLOCK_CHANNELS: tl.constexpr = BLOCK_COLUMNS if CHANNELS_LAST else BLOCK_ROWS
    KINDS: tl.constexpr = 5 if term_gain_ptr is None else 6
    blocks = tl.cdiv(channels, BLOCK_CHANNELS)
    program = tl.program_id(0).to(tl.int64)
    chunk = program // blocks
    channel_list = (program % blocks) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    channel = tl.expand_dims(channel_list, SUMMED)
    inside = channel < channels
    constant, shift, gain = shared(
        (constant_ptr, shift_ptr, weight_ptr), channel, inside, scale, PER_CHANNEL, COMPUTE
    )
    if term_gain_ptr is not None:
        term_gain = tl.load(term_gain_ptr + channel, inside, other=0.0)

    # One accumulator per element of the tile, added up after the last step: no exchange between
    # threads on the way.
    sum_constant = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], COMPUTE)
    sum_shift = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], COMPUTE)
    sum_slope = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], COMPUTE)
    sum_value = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], COMPUTE)
    sum_grad = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], COMPUTE)
    sum_seen = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], COMPUTE)
    sum_gain = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], COMPUTE)
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
        u = centered((x_ptr, center_ptr), offset, mask, channel, inside, PER_CHANNEL, COMPUTE)
        bounded, of_row = u, constant
        if WITNESSES > 0:
            unit, of_row, root = of_few(
                *(constant, (x_ptr, center_ptr, witness_ptr, log_gain_ptr)),
                *((token, outer, channels), channel, WITNESSES, FUNCTION, PER_CHANNEL, COMPUTE),
            )
        elif term_gain_ptr is not None:
            unit, of_row, root = of_many(constant, u, term_gain, token, outer, sums_ptr, FUNCTION)
        if WITNESSES > 0 or term_gain_ptr is not None:
            bounded = clamped(u) * unit
        # Computed again from x, because f was not saved.
        f, slope, by_constant, by_shift = derivatives(bounded, of_row, shift, FUNCTION, NARROW)
        if WITNESSES > 0 or term_gain_ptr is not None:
            by_this_total = grad * (gain * by_total(by_constant, of_row, FUNCTION))
            by_constant = by_constant * root * root * root * (unit * unit)
            within = tl.abs(u) <= limit(u)
            slope = tl.where(within, slope * unit, 0.0)
        if WITNESSES > 0:
            if FUNCTION == 0:
                # A witness is not in its own sum: witness_kernel does these one by one.
                for i in tl.static_range(WITNESSES):
                    is_witness = channel == tl.load(witness_ptr + i)
                    by_this_total = tl.where(is_witness, 0.0, by_this_total)
            row_sum = tl.expand_dims(tl.sum(by_this_total, 1), 1)
            tl.store(rows_ptr + (program % blocks) * outer + token, row_sum, token < outer)
        elif term_gain_ptr is not None:
            token_inside = token < outer
            all_others = tl.load(sums_ptr + 3 * outer + token, token_inside, other=0.0)
            if FUNCTION == 0:
                rest = tl.load(sums_ptr + 2 * outer + token, token_inside, other=0.0)
                by_rest = tl.load(sums_ptr + 4 * outer + token, token_inside, other=0.0)
                dominates = terms_of(bounded, term_gain) > rest
                all_others = tl.where(dominates, by_rest, all_others - by_this_total)
            # By where: a product with 0 would make NaN of a sum that is not finite.
            half = tl.where(mask & (term_gain != 0), term_gain * bounded * all_others, 0.0)
            seen = tl.where(within, 2.0 * half * unit, 0.0)
        if grad_x_ptr is not None:
            of_x = grad * (gain * slope)
            if term_gain_ptr is not None:
                of_x += seen
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
            if term_gain_ptr is not None:
                sum_seen += seen
                sum_gain += half * bounded

    # Partial sums and a second kernel rather than atomics, whose order, and so whose rounding,
    # differs in every run.
    if partial_ptr is not None:
        valid = channel_list < channels
        target = partial_ptr + chunk * KINDS * channels + channel_list
        # Weight and scale do not vary along a sum: they are multiplied in once.
        gain = tl.full([], scale, COMPUTE)
        if weight_ptr is not None:
            tl.store(target + 3 * channels, tl.sum(sum_value, SUMMED) * gain, valid)
            gain = gain * parameter(weight_ptr, channel_list, valid, True, COMPUTE)
        tl.store(target, tl.sum(sum_constant, SUMMED) * gain, valid)
        if shift_ptr is not None:
            tl.store(target + channels, tl.sum(sum_shift, SUMMED) * gain, valid)
        if center_ptr is not None:
            of_center = -tl.sum(sum_slope, SUMMED) * gain
            if term_gain_ptr is not None:
                of_center -= tl.sum(sum_seen, SUMMED)
            tl.store(target + 2 * channels, of_center, valid)
        if term_gain_ptr is not None:
            tl.store(target + 5 * channels, tl.sum(sum_gain, SUMMED), valid)
        tl.store(target + 4 * channels, tl.sum(sum_grad, SUMMED), valid)


@triton.jit
def sum_many(
    tensors,
    place,
    unit,
    PER_CHANNEL: tl.constexpr,
    COMPUTE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Sum the terms of some rows, multiplied by ``unit**2``: in all, and without the largest."""
    x_ptr, center_ptr, term_gain_ptr = tensors
    row, rows, channels = place
    largest = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], COMPUTE)
    rest = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], COMPUTE)
    column = tl.arange(0, BLOCK_COLUMNS)[None, :]
    for first in range(0, channels, BLOCK_COLUMNS):
        channel = first + column
        inside = channel < channels
        u = centered(
            *((x_ptr, center_ptr), row * channels + channel, (row < rows) & inside),
            *(channel, inside, PER_CHANNEL, COMPUTE),
        )
        gain = tl.load(term_gain_ptr + channel, inside, other=0.0)
        term = terms_of(clamped(u) * unit, gain)
        # NaN is not larger, and so comes to the rest.
        larger = term > largest
        rest += tl.where(larger, largest, term)
        largest = tl.where(larger, term, largest)
    at_largest = tl.expand_dims(tl.argmax(largest, 1), 1)
    other = tl.where(column == at_largest, 0.0, largest)
    of_rest = tl.expand_dims(tl.sum(rest + other, 1), 1)
    return of_rest + tl.expand_dims(tl.max(largest, 1), 1), of_rest


@triton.jit
def rows_kernel(
    grad_ptr,
    x_ptr,
    constant_ptr,
    shift_ptr,
    center_ptr,
    weight_ptr,
    term_gain_ptr,
    sums_ptr,
    rows,
    channels,
    scale: tl.float64,
    FUNCTION: tl.constexpr,
    PER_CHANNEL: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Add up along each row, of many witnesses; no row is divided over programs.

    ``sums[kind, row]`` gets the unit by which u is multiplied, so that no square overflows; T, and T
    without its largest term; and with ``grad`` the gradient by T of all channels, and that of all but
    the one with the largest term, if this is more than half of T.
    """
    COMPUTE: tl.constexpr = tl.float64 if x_ptr.dtype.element_ty == tl.float64 else tl.float32
    NARROW: tl.constexpr = x_ptr.dtype.element_ty.primitive_bitwidth < 32
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    tensors, place = (x_ptr, center_ptr, term_gain_ptr), (row, rows, channels)
    one = tl.full([BLOCK_ROWS, 1], 1.0, COMPUTE)
    total, rest = sum_many(tensors, place, one, PER_CHANNEL, COMPUTE, BLOCK_ROWS, BLOCK_COLUMNS)
    unit = unit_of(total)
    if tl.min(tl.min(unit, 1), 0) < 1.0:
        total, rest = sum_many(
            tensors, place, unit, PER_CHANNEL, COMPUTE, BLOCK_ROWS, BLOCK_COLUMNS
        )
    tl.store(sums_ptr + row, unit, row < rows)
    tl.store(sums_ptr + rows + row, total, row < rows)
    tl.store(sums_ptr + 2 * rows + row, rest, row < rows)
    if grad_ptr is not None:
        by_rest = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], COMPUTE)
        by_largest = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], COMPUTE)
        for first in range(0, channels, BLOCK_COLUMNS):
            channel = first + tl.arange(0, BLOCK_COLUMNS)[None, :]
            inside = channel < channels
            mask = (row < rows) & inside
            offset = row * channels + channel
            grad = tl.load(grad_ptr + offset, mask, other=0.0).to(COMPUTE)
            u = centered((x_ptr, center_ptr), offset, mask, channel, inside, PER_CHANNEL, COMPUTE)
            u = clamped(u) * unit
            term = terms_of(u, tl.load(term_gain_ptr + channel, inside, other=0.0))
            constant, shift, gain = shared(
                (constant_ptr, shift_ptr, weight_ptr), channel, inside, scale, PER_CHANNEL, COMPUTE
            )
            of_this = without(term, total, rest) if FUNCTION == 0 else total
            of_row, _ = of_sum(constant, of_this, unit, FUNCTION)
            _, _, by_constant, _ = derivatives(u, of_row, shift, FUNCTION, NARROW)
            by_this_total = tl.where(
                mask, grad * (gain * by_total(by_constant, of_row, FUNCTION)), 0.0
            )
            by_rest += tl.where(term > rest, 0.0, by_this_total)
            by_largest += tl.where(term > rest, by_this_total, 0.0)
        of_rest = tl.expand_dims(tl.sum(by_rest, 1), 1)
        of_all = of_rest + tl.expand_dims(tl.sum(by_largest, 1), 1)
        tl.store(sums_ptr + 3 * rows + row, of_all, row < rows)
        tl.store(sums_ptr + 4 * rows + row, of_rest, row < rows)


@triton.jit
def witness_kernel(
    grad_ptr,
    x_ptr,
    constant_ptr,
    shift_ptr,
    center_ptr,
    weight_ptr,
    witness_ptr,
    log_gain_ptr,
    grad_x_ptr,
    partial_ptr,
    rows_ptr,
    outer,
    channels,
    blocks,
    steps,
    all_steps,
    scale: tl.float64,
    FUNCTION: tl.constexpr,
    PER_CHANNEL: tl.constexpr,
    WITNESSES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WITNESSES: tl.constexpr,
):
    """Complete the gradients at the witnesses: every channel of a token depends on them through T.

    The gradient of x at a witness gets the terms of all other channels. The sums go to
    ``partial[chunk, kind, witness]``; the kinds are the gradient of the gains' logarithms, and the
    part that is subtracted from the gradient of the centres.
    """
    COMPUTE: tl.constexpr = tl.float64 if x_ptr.dtype.element_ty == tl.float64 else tl.float32
    NARROW: tl.constexpr = x_ptr.dtype.element_ty.primitive_bitwidth < 32
    chunk = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK_WITNESSES)[None, :]
    inside = place < WITNESSES
    channel = tl.load(witness_ptr + place, inside, other=0)
    constant, shift, factor = shared(
        (constant_ptr, shift_ptr, weight_ptr), channel, inside, scale, PER_CHANNEL, COMPUTE
    )
    gain = tl.where(inside, tl.full([], 1.0, COMPUTE), 0.0)
    if log_gain_ptr is not None:
        gain = gain * tl.exp(tl.load(log_gain_ptr + place, inside, other=0.0).to(COMPUTE))
    sum_gain = tl.zeros([BLOCK_ROWS, BLOCK_WITNESSES], COMPUTE)
    sum_center = tl.zeros([BLOCK_ROWS, BLOCK_WITNESSES], COMPUTE)
    first = chunk * steps
    for step in range(first, tl.minimum(first + steps, all_steps)):
        token = step * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
        mask = (token < outer) & inside
        offset = token * channels + channel
        grad = tl.load(grad_ptr + offset, mask, other=0.0).to(COMPUTE)
        u = centered((x_ptr, center_ptr), offset, mask, channel, inside, PER_CHANNEL, COMPUTE)
        unit, of_row, _ = of_few(
            *(constant, (x_ptr, center_ptr, witness_ptr, log_gain_ptr)),
            *((token, outer, channels), channel, WITNESSES, FUNCTION, PER_CHANNEL, COMPUTE),
        )
        bounded = clamped(u) * unit
        _, slope, by_constant, _ = derivatives(bounded, of_row, shift, FUNCTION, NARROW)
        by_this_total = grad * (factor * by_total(by_constant, of_row, FUNCTION))
        row, part = tl.zeros([BLOCK_ROWS, 1], COMPUTE), rows_ptr + token
        for _ in range(blocks):
            row += tl.load(part, token < outer, other=0.0)
            part += outer
        all_others = row + tl.zeros([BLOCK_ROWS, BLOCK_WITNESSES], COMPUTE)
        if FUNCTION == 0:
            for i in tl.static_range(WITNESSES):
                one = tl.expand_dims(tl.sum(tl.where(place == i, by_this_total, 0.0), 1), 1)
                all_others = all_others + tl.where(place == i, 0.0, one)
        half = gain * bounded * all_others
        within = tl.abs(u) <= limit(u)
        seen = tl.where(within, 2.0 * half * unit, 0.0)
        if grad_x_ptr is not None:
            of_x = grad * (factor * tl.where(within, slope * unit, 0.0)) + seen
            tl.store(grad_x_ptr + offset, of_x.to(grad_x_ptr.dtype.element_ty), mask)
        sum_gain += tl.where(mask, half * bounded, 0.0)
        sum_center += tl.where(mask, seen, 0.0)
    target = partial_ptr + chunk * 2 * WITNESSES + tl.arange(0, BLOCK_WITNESSES)
    valid = tl.arange(0, BLOCK_WITNESSES) < WITNESSES
    tl.store(target, tl.sum(sum_gain, 0), valid)
    tl.store(target + WITNESSES, tl.sum(sum_center, 0), valid)


@triton.jit
def reduce_kernel(
    partial_ptr,
    sums_ptr,
    chunks,
    channels,
    PRESENT: tl.constexpr,
    KINDS: tl.constexpr,
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
            source = partial_ptr + (chunk * KINDS + kind) * channels + channel[None, :]
            total += tl.load(source, (chunk < chunks) & valid[None, :], other=0.0)
    tl.store(sums_ptr + kind.to(tl.int64) * channels + channel, tl.sum(total, 0), valid)
