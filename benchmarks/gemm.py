"""Compute a matrix product whose epilogue adds the residual and applies the function, without a second pass.

A norm with statistics cannot do this, because it needs all of a row before it can write the first
element. No layer calls this, because the product belongs to the model. It shows the fusion that a
point-wise layer makes possible; benchmarks.gpu times it.
"""

# Triton's language has Python's syntax, not its types, and its constants are in capitals.
# mypy: ignore-errors
# ruff: noqa: N803, N806

from __future__ import annotations

import importlib
import math
import threading
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import NamedTuple, TypeVar, cast

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from dynorm.errors import ArgumentError
from dynorm.kernels._form import Form, Parameters
from dynorm.kernels._triton import ceil_divide, interpreted, kernel_parameters
from dynorm.kernels._triton_functions import parameter, value

Candidate = TypeVar("Candidate")
_chosen: dict[Hashable, object] = {}
_lock = threading.Lock()
# From Hopper on, the copy engine loads tiles by descriptors.
_COPY_ENGINE = (9, 0)
# It needs addresses and rows that are aligned to this number of bytes.
_ALIGNMENT = 16


class Tile(NamedTuple):
    """The sizes of a tile, its warps and stages, and whether its columns are finished in two halves."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    halves: bool


# By the bytes of an element, because float32 tiles need twice the shared memory.
TILES = {
    2: (
        Tile(64, 64, 64, 4, 5, False),
        Tile(128, 256, 64, 8, 3, True),
        Tile(128, 256, 64, 8, 4, True),
        Tile(256, 128, 64, 8, 3, True),
        Tile(128, 128, 64, 8, 4, False),
        Tile(128, 128, 64, 4, 4, True),
        Tile(64, 128, 64, 4, 4, False),
        Tile(32, 64, 128, 4, 4, False),
    ),
    4: (
        Tile(32, 32, 64, 4, 3, True),
        Tile(64, 64, 32, 4, 3, False),
        Tile(128, 64, 32, 4, 3, False),
    ),
}


def gemm_add_forward(
    form: Form,
    a: Tensor,
    b: Tensor,
    residual: Tensor,
    gemm_bias: Tensor | None,
    parameters: Parameters,
) -> tuple[Tensor, Tensor]:
    """Compute ``h = a @ b + gemm_bias + residual`` and ``y = weight * scale * f(h - center) + bias``.

    Args:
        form: the function, with N channels that come last.
        a: ``(M, K)``, float32, bfloat16 or float16, of any strides; fastest with rows of a multiple
            of 16 bytes.
        b: ``(K, N)``, of a's dtype and any strides: an ``nn.Linear``'s ``weight.t()`` will do as it
            is.
        residual: ``(M, N)``, contiguous, of a's dtype.
        gemm_bias: of N elements, or None for 0.
        parameters: constant, shift, center, weight and bias, as for the layers' kernels.

    Returns:
        y and h, both ``(M, N)`` and of a's dtype. Sums are in float32 (float32 operands at the
        precision of ``torch.get_float32_matmul_precision()``), h is rounded once, y is the function
        of the rounded h, rounded once.

    Raises:
        ArgumentError: dtypes, sizes, layout or devices do not fit.
    """
    _check(a, b, residual)
    m, k = a.shape
    n = b.shape[1]
    check_parameters(a, n, parameters)
    function_parameters = kernel_parameters(form, n, parameters)
    check_parameters(a, n, (None, None, None, gemm_bias))
    h = torch.empty_like(residual)
    y = torch.empty_like(residual)
    if not h.numel():
        return y, h
    b_by_columns = b.stride(0) == 1
    # b as it lies in memory.
    stored = b.t() if b_by_columns else b
    described = _has_copy_engine(a) and _can_be_described(a) and _can_be_described(stored)
    highest = torch.get_float32_matmul_precision() == "highest"
    precision = "ieee" if highest else "tf32"
    processors = _processors(a)

    def launch(tile: Tile) -> None:
        programs = ceil_divide(m, tile.rows) * ceil_divide(n, tile.columns)
        left = a
        right = b
        if described:
            left = _descriptor(a, tile.rows, tile.depth)
            if b_by_columns:
                right = _descriptor(stored, tile.columns, tile.depth)
            else:
                right = _descriptor(stored, tile.depth, tile.columns)
            # One program per processor, which computes several tiles.
            programs = min(processors, programs)
        gemm_add_kernel[(programs,)](
            left,
            right,
            residual,
            gemm_bias,
            *function_parameters,
            y,
            h,
            m,
            n,
            k,
            *a.stride(),
            *b.stride(),
            form.scale,
            FUNCTION=int(form.function),
            PER_CHANNEL=function_parameters[0].numel() > 1,
            DESCRIPTORS=described,
            B_BY_COLUMNS=b_by_columns,
            PRECISION=precision,
            GROUP=8,
            BLOCK_M=tile.rows,
            BLOCK_N=tile.columns,
            BLOCK_K=tile.depth,
            HALVES=tile.halves,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )

    with torch.cuda.device_of(a):
        # The best tile depends on the number of rows, by powers of 2.
        key = (a.device, a.dtype, m.bit_length(), n, k, described, b_by_columns, precision)
        launch(choose(key, TILES[a.element_size()], launch))
    return y, h


def check_parameters(x: Tensor, channels: int, parameters: Sequence[Tensor | None]) -> None:
    """Refuse parameters of a wrong size, layout or device."""
    for role, p in enumerate(parameters):
        sizes = (1, channels) if role < 3 else (channels,)
        if p is not None and (
            p.numel() not in sizes or p.device != x.device or not p.is_contiguous()
        ):
            raise ArgumentError(
                f"a parameter must be contiguous, on {x.device} and of "
                f"{' or '.join(map(str, sizes))} elements, got "
                f"{tuple(p.shape)} with strides {p.stride()} on {p.device}"
            )


def choose(
    key: Hashable, candidates: Sequence[Candidate], launch: Callable[[Candidate], object]
) -> Candidate:
    """Return the fastest candidate, timed when the key, this kind of call, was first seen.

    If nothing can be timed, in the interpreter or while a CUDA graph is captured, it is the first
    one. Triton's own autotuner breaks such a capture, and keeps the arguments of a call on itself,
    so that threads disturb each other.
    """
    if key not in _chosen:
        if interpreted() or torch.cuda.is_current_stream_capturing():
            return candidates[0]
        with _lock:
            # Another thread may have timed it while this one waited.
            if key not in _chosen:
                times = [_milliseconds(partial(launch, candidate)) for candidate in candidates]
                _chosen[key] = candidates[times.index(min(times))]
    return cast(Candidate, _chosen[key])


def _milliseconds(call: Callable[[], object]) -> float:
    """Time a call; infinite if this GPU has too little shared memory or too few registers."""
    # Imported by name, because mypy has no types for them where Triton is not installed.
    testing = importlib.import_module("triton.testing")
    errors = importlib.import_module("triton.runtime.errors")
    try:
        return float(testing.do_bench(call, warmup=5, rep=20, return_mode="median"))
    except errors.OutOfResources:
        return math.inf


def _processors(a: Tensor) -> int:
    """Return the number of multiprocessors of a tensor's GPU; 2 in the interpreter."""
    if not a.is_cuda:
        return 2
    return torch.cuda.get_device_properties(a.device).multi_processor_count


def _descriptor(matrix: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Return the descriptor by which the copy engine loads blocks of a matrix."""
    shape = list(matrix.shape)
    strides = list(matrix.stride())
    return TensorDescriptor(matrix, shape, strides, [rows, columns])


def _check(a: Tensor, b: Tensor, residual: Tensor) -> None:
    """Refuse tensors without a product, and reads out of bounds."""
    is_product = a.ndim == 2 and b.ndim == 2 and a.shape[1] == b.shape[0]
    if not is_product or residual.shape != (a.shape[0], b.shape[1]):
        raise ArgumentError(
            f"a, b and residual must be (M, K), (K, N) and (M, N), got {tuple(a.shape)}, "
            f"{tuple(b.shape)} and {tuple(residual.shape)}: flatten the leading dimensions, "
            "transpose the weight"
        )
    if a.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ArgumentError(f"a must be float32, bfloat16 or float16, got {a.dtype}: convert it")
    same_dtype = a.dtype == b.dtype == residual.dtype
    same_device = a.device == b.device == residual.device
    if not same_dtype or not same_device:
        raise ArgumentError(
            f"a, b and residual must share dtype and device, got {a.dtype}, {b.dtype} and "
            f"{residual.dtype} on {a.device}, {b.device} and {residual.device}: convert them"
        )
    if not residual.is_contiguous():
        raise ArgumentError(
            f"residual must be contiguous, got strides {residual.stride()}: call .contiguous()"
        )


def _has_copy_engine(a: Tensor) -> bool:
    """Return whether descriptors help: only for 16 bits, because float32 is bound by arithmetic."""
    if a.element_size() != 2:
        return False
    if interpreted():
        return True
    return torch.version.hip is None and torch.cuda.get_device_capability(a.device) >= _COPY_ENGINE


def _can_be_described(matrix: Tensor) -> bool:
    """Return whether the copy engine can read a matrix: its rows are contiguous and aligned."""
    if not matrix.numel():
        return False
    row, column = matrix.stride()
    row_bytes = row * matrix.element_size()
    is_aligned = matrix.data_ptr() % _ALIGNMENT == 0 and row_bytes % _ALIGNMENT == 0
    return column == 1 and row >= matrix.shape[1] and is_aligned


# The interpreter multiplies the bits of bfloat16; in float32 the products are right.
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
    PER_CHANNEL: tl.constexpr,
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

    With ``DESCRIPTORS`` a and b are tensor descriptors, which the copy engine loads, and a program
    computes several tiles, so that the next one loads while this one is finished. Otherwise they
    are pointers with any strides.
    """
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    for tile in tl.range(
        tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=DESCRIPTORS
    ):
        # Go down the columns of GROUP rows of tiles, so that the values stay in the cache.
        group_tiles = GROUP * tiles_n
        first = (tile // group_tiles) * GROUP
        height = tl.minimum(tiles_m - first, GROUP)
        in_group = tile % group_tiles
        m = (first + in_group % height) * BLOCK_M
        n = (in_group // height) * BLOCK_N
        rows = m.to(tl.int64) + tl.arange(0, BLOCK_M)
        columns = n.to(tl.int64) + tl.arange(0, BLOCK_N)
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k in range(0, K, BLOCK_K):
            if DESCRIPTORS:
                left = a.load([m, k])
                right = b.load([n, k]).T if B_BY_COLUMNS else b.load([k, n])
            else:
                depth = k + tl.arange(0, BLOCK_K)
                across = depth[None, :]
                down = depth[:, None]
                # Rows and columns outside wrap around, because they are not stored. Only the depth
                # needs a mask.
                left_offset = (rows % M)[:, None] * a_by_m + across.to(tl.int64) * a_by_k
                right_offset = down.to(tl.int64) * b_by_k + (columns % N)[None, :] * b_by_n
                left = tl.load(a + left_offset, across < K, other=0.0)
                right = tl.load(b + right_offset, down < K, other=0.0)
            if _INTERPRETED:
                left = left.to(tl.float32)
                right = right.to(tl.float32)
            total = tl.dot(left, right, total, input_precision=PRECISION)

        parameters = (constant_ptr, shift_ptr, center_ptr, weight_ptr, bias_ptr)
        if HALVES:
            # One half after the other, so that they need half the registers and shared memory.
            halves = tl.reshape(total, (BLOCK_M, 2, BLOCK_N // 2))
            upper, lower = tl.split(tl.permute(halves, (0, 2, 1)))
            columns = n.to(tl.int64) + tl.arange(0, BLOCK_N // 2)
            finish(
                upper,
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
                FUNCTION,
                PER_CHANNEL,
            )
            finish(
                lower,
                rows,
                columns + BLOCK_N // 2,
                M,
                N,
                residual_ptr,
                gemm_bias_ptr,
                parameters,
                y_ptr,
                h_ptr,
                scale,
                FUNCTION,
                PER_CHANNEL,
            )
        else:
            finish(
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
                FUNCTION,
                PER_CHANNEL,
            )


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
    PER_CHANNEL: tl.constexpr,
):
    """Add the bias and the residual to a tile of the product, and store it and its function."""
    constant_ptr, shift_ptr, center_ptr, weight_ptr, bias_ptr = parameters
    channel = columns[None, :]
    inside = channel < N
    mask = (rows < M)[:, None] & inside
    offset = rows[:, None] * N + channel
    if gemm_bias_ptr is not None:
        total += parameter(gemm_bias_ptr, channel, inside, True, tl.float32)
    total += tl.load(residual_ptr + offset, mask, other=0.0).to(tl.float32)
    # Round first, so that y is the function of the h that is returned.
    h = total.to(h_ptr.dtype.element_ty)
    tl.store(h_ptr + offset, h, mask)
    u = h.to(tl.float32)
    if center_ptr is not None:
        u -= parameter(center_ptr, channel, inside, PER_CHANNEL, tl.float32)
    shift = 0.0
    if shift_ptr is not None:
        shift = parameter(shift_ptr, channel, inside, PER_CHANNEL, tl.float32)
    NARROW: tl.constexpr = h_ptr.dtype.element_ty.primitive_bitwidth < 32
    constant = parameter(constant_ptr, channel, inside, PER_CHANNEL, tl.float32)
    y = value(u, constant, shift, FUNCTION, NARROW) * scale
    if weight_ptr is not None:
        y *= parameter(weight_ptr, channel, inside, True, tl.float32)
    if bias_ptr is not None:
        y += parameter(bias_ptr, channel, inside, True, tl.float32)
    tl.store(y_ptr + offset, y.to(y_ptr.dtype.element_ty), mask)
