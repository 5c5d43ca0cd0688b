"""A matrix product with the residual sum and the function in its epilogue, as one Triton kernel."""

# Triton's language has Python's syntax, not its types, and its constants are in capitals.
# mypy: ignore-errors
# ruff: noqa: N803, N806

import triton
import triton.language as tl

from dynorm.kernels._triton_functions import parameter, value

# The interpreter multiplies bfloat16 by its bits; in float32 the products are the same, and right.
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def gemm_add_kernel(
    a,
    b,
    residual_ptr,
    gemm_bias_ptr,
    constant_ptr,
    shift_ptr,
    center_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    h_ptr,
    M,
    N,
    K,
    a_by_m,
    a_by_k,
    b_by_k,
    b_by_n,
    scale,
    FUNCTION: tl.constexpr,
    CONSTANTS: tl.constexpr,
    SHIFTS: tl.constexpr,
    CENTERS: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    B_BY_COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    HALVES: tl.constexpr,
):
    """Compute tiles of ``h = a @ b + gemm_bias + residual`` and ``y = weight * scale * f(h - center) + bias``.

    With ``DESCRIPTORS`` a and b are tensor descriptors, loaded by the copy engine, and a program computes several
    tiles, so that the next one loads while this one is finished; else they are pointers with any strides.
    """
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=DESCRIPTORS):
        # Groups of GROUP rows of tiles, walked down the columns, so that what is read stays in the cache.
        first = (tile // (GROUP * tiles_n)) * GROUP
        height = tl.minimum(tiles_m - first, GROUP)
        in_group = tile % (GROUP * tiles_n)
        m, n = (first + in_group % height) * BLOCK_M, (in_group // height) * BLOCK_N
        rows = m.to(tl.int64) + tl.arange(0, BLOCK_M)
        columns = n.to(tl.int64) + tl.arange(0, BLOCK_N)
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k in range(0, K, BLOCK_K):
            if DESCRIPTORS:
                left = a.load([m, k])
                right = b.load([n, k]).T if B_BY_COLUMNS else b.load([k, n])
            else:
                depth = k + tl.arange(0, BLOCK_K)
                # Rows and columns outside are wrapped around, for they are not stored: only the depth needs a mask.
                left_offset = (rows % M)[:, None] * a_by_m + depth[None, :].to(tl.int64) * a_by_k
                right_offset = depth[:, None].to(tl.int64) * b_by_k + (columns % N)[None, :] * b_by_n
                left = tl.load(a + left_offset, depth[None, :] < K, other=0.0)
                right = tl.load(b + right_offset, depth[:, None] < K, other=0.0)
            if _INTERPRETED:
                left, right = left.to(tl.float32), right.to(tl.float32)
            total = tl.dot(left, right, total, input_precision=PRECISION)

        parameters = (constant_ptr, shift_ptr, center_ptr, weight_ptr, bias_ptr)
        if HALVES:
            # One half after the other, so that they need half the registers and shared memory.
            halves = tl.permute(tl.reshape(total, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1))
            upper, lower = tl.split(halves)
            columns = n.to(tl.int64) + tl.arange(0, BLOCK_N // 2)
            finish(upper, rows, columns, M, N, residual_ptr, gemm_bias_ptr, parameters, y_ptr, h_ptr, scale,
                   FUNCTION, CONSTANTS, SHIFTS, CENTERS)  # fmt: skip
            finish(lower, rows, columns + BLOCK_N // 2, M, N, residual_ptr, gemm_bias_ptr, parameters, y_ptr, h_ptr,
                   scale, FUNCTION, CONSTANTS, SHIFTS, CENTERS)  # fmt: skip
        else:
            finish(total, rows, columns, M, N, residual_ptr, gemm_bias_ptr, parameters, y_ptr, h_ptr, scale,
                   FUNCTION, CONSTANTS, SHIFTS, CENTERS)  # fmt: skip


@triton.jit
def finish(
    total,
    rows,
    columns,
    M,
    N,
    residual_ptr,
    gemm_bias_ptr,
    parameters,
    y_ptr,
    h_ptr,
    scale,
    FUNCTION: tl.constexpr,
    CONSTANTS: tl.constexpr,
    SHIFTS: tl.constexpr,
    CENTERS: tl.constexpr,
):
    """Add the bias and the residual to a tile of the product, store it, and its function."""
    constant_ptr, shift_ptr, center_ptr, weight_ptr, bias_ptr = parameters
    channel, inside = columns[None, :], (columns < N)[None, :]
    mask = (rows < M)[:, None] & inside
    offset = rows[:, None] * N + channel
    if gemm_bias_ptr is not None:
        total += parameter(gemm_bias_ptr, channel, inside, True, tl.float32)
    total += tl.load(residual_ptr + offset, mask, other=0.0).to(tl.float32)
    # Rounded first, so that y is the function of the h that is returned.
    h = total.to(h_ptr.dtype.element_ty)
    tl.store(h_ptr + offset, h, mask)
    u = h.to(tl.float32)
    if center_ptr is not None:
        u -= parameter(center_ptr, channel, inside, CENTERS, tl.float32)
    shift = 0.0
    if shift_ptr is not None:
        shift = parameter(shift_ptr, channel, inside, SHIFTS, tl.float32)
    NARROW: tl.constexpr = h_ptr.dtype.element_ty.primitive_bitwidth < 32
    constant = parameter(constant_ptr, channel, inside, CONSTANTS, tl.float32)
    y = value(u, constant, shift, FUNCTION, NARROW) * scale
    if weight_ptr is not None:
        y *= parameter(weight_ptr, channel, inside, True, tl.float32)
    if bias_ptr is not None:
        y += parameter(bias_ptr, channel, inside, True, tl.float32)
    tl.store(y_ptr + offset, y.to(y_ptr.dtype.element_ty), mask)
