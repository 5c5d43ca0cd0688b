"""A matrix product whose epilogue adds the residual and applies the function: a norm without a pass of its own.

A norm with statistics cannot do this: it needs the whole row before it can write the first element of it.
"""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dynorm.errors import ArgumentError
from dynorm.kernels._triton import ceil_divide, check_parameters, per_channel
from dynorm.kernels._triton_tuning import choose, interpreted, on_device

__all__ = ["gemm_add_forward"]

# From Hopper on, the copy engine loads tiles by descriptors; it wants addresses and rows aligned to this many bytes.
_COPY_ENGINE, _ALIGNMENT = (9, 0), 16


class Tile(NamedTuple):
    """A configuration: a tile's sizes, who computes it, and whether its columns are finished in two halves."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    halves: bool


# By bytes of an element: float32 tiles need twice the shared memory.
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
    4: (Tile(32, 32, 64, 4, 3, True), Tile(64, 64, 32, 4, 3, False), Tile(128, 64, 32, 4, 3, False)),
}


def gemm_add_forward(
    function: int,
    a: Tensor,
    b: Tensor,
    residual: Tensor,
    gemm_bias: Tensor | None,
    constant: Tensor,
    shift: Tensor | None,
    center: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Compute ``h = a @ b + gemm_bias + residual`` and ``y = weight * scale * f(h - center) + bias``.

    Args:
        function: 0 DyISRU, 1 DyT, 2 Derf, 3 linear.
        a: ``(M, K)``, float32, bfloat16 or float16, of any strides; fastest with rows of a multiple of 16 bytes.
        b: ``(K, N)``, of a's dtype and any strides: an ``nn.Linear``'s ``weight.t()`` will do as it is.
        residual: ``(M, N)``, contiguous, of a's dtype.
        gemm_bias: of N elements, or None for 0.
        constant: beta, alpha or slope, of 1 or N elements.
        shift: Derf's, of 1 or N elements, or None for 0.
        center: of 1 or N elements, or None for 0.
        weight: of N elements, or None for 1.
        bias: of N elements, or None for 0.
        scale: the fixed factor.

    Returns:
        y and h, both ``(M, N)`` and of a's dtype. Sums are in float32 (float32 operands at the precision of
        ``torch.get_float32_matmul_precision()``), h is rounded once, y is the function of the rounded h, rounded once.

    Raises:
        ArgumentError: dtypes, sizes, layout or devices do not fit.
    """
    _check(a, b, residual)
    (m, k), n = a.shape, b.shape[1]
    check_parameters(a, (constant, shift, center), (gemm_bias, weight, bias), n)
    h, y = torch.empty_like(residual), torch.empty_like(residual)
    if not h.numel():
        return y, h
    from dynorm.kernels._triton_gemm_kernel import gemm_add_kernel

    by_columns = b.stride(0) == 1
    described = _has_copy_engine(a) and _can_be_described(a) and _can_be_described(b.t() if by_columns else b)
    programs = _processors(a) if described else m * n

    right = b.t() if by_columns else b
    precision = "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"

    def launch(tile: Tile) -> None:
        tiles = ceil_divide(m, tile.rows) * ceil_divide(n, tile.columns)
        right_block = (tile.columns, tile.depth) if by_columns else (tile.depth, tile.columns)
        gemm_add_kernel[(min(programs, tiles),)](
            _describe(a, (tile.rows, tile.depth)) if described else a,
            _describe(right, right_block) if described else b,
            residual,
            gemm_bias,
            constant,
            shift,
            center,
            weight,
            bias,
            y,
            h,
            m,
            n,
            k,
            *a.stride(),
            *b.stride(),
            scale,
            FUNCTION=function,
            CONSTANTS=per_channel(constant),
            SHIFTS=per_channel(shift),
            CENTERS=per_channel(center),
            DESCRIPTORS=described,
            B_BY_COLUMNS=by_columns,
            PRECISION=precision,
            BLOCK_M=tile.rows,
            BLOCK_N=tile.columns,
            BLOCK_K=tile.depth,
            GROUP=8,
            HALVES=tile.halves,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )

    with on_device(a):
        # Few rows want other tiles than many: timed apart, by powers of 2.
        key = (a.device, a.dtype, m.bit_length(), n, k, described, by_columns, precision)
        launch(choose(key, TILES[a.element_size()], launch))
    return y, h


def _check(a: Tensor, b: Tensor, residual: Tensor) -> None:
    """Refuse what is no product, or what the kernel would read out of bounds."""
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0] or residual.shape != (a.shape[0], b.shape[1]):
        raise ArgumentError(
            f"a, b and residual must be (M, K), (K, N) and (M, N), got {tuple(a.shape)}, {tuple(b.shape)} and "
            f"{tuple(residual.shape)}: flatten the leading dimensions, transpose the weight"
        )
    if a.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ArgumentError(f"a must be float32, bfloat16 or float16, got {a.dtype}: convert it")
    if {b.dtype, residual.dtype} != {a.dtype} or {b.device, residual.device} != {a.device}:
        raise ArgumentError(
            f"a, b and residual must share dtype and device, got {a.dtype}, {b.dtype} and {residual.dtype} on "
            f"{a.device}, {b.device} and {residual.device}: convert them"
        )
    if not residual.is_contiguous():
        raise ArgumentError(f"residual must be contiguous, got strides {residual.stride()}: call .contiguous()")


def _has_copy_engine(a: Tensor) -> bool:
    """Say whether descriptors help: for 16 bits only, float32 products are bound by arithmetic."""
    if a.element_size() != 2:
        return False
    if interpreted():
        return True
    return torch.version.hip is None and torch.cuda.get_device_capability(a.device) >= _COPY_ENGINE


def _can_be_described(matrix: Tensor) -> bool:
    """Say whether a matrix has the layout that the copy engine reads: contiguous rows, aligned."""
    row, column = matrix.stride()
    aligned = matrix.data_ptr() % _ALIGNMENT == 0 and row * matrix.element_size() % _ALIGNMENT == 0
    return matrix.numel() > 0 and column == 1 and row >= matrix.shape[1] and aligned


def _describe(matrix: Tensor, block: tuple[int, int]) -> Any:
    """Return a descriptor by which the copy engine loads blocks of a matrix."""
    # By name, for its types are not there where Triton is not.
    descriptors = importlib.import_module("triton.tools.tensor_descriptor")
    return descriptors.TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), list(block))


def _processors(a: Tensor) -> int:
    """Return how many programs run side by side; a few in the interpreter, so that each has several tiles."""
    return torch.cuda.get_device_properties(a.device).multi_processor_count if a.is_cuda else 2
