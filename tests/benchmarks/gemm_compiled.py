"""The product with its epilogue, compiled for GPUs that need not be here; run by tests/kernels/test_triton.py."""

from __future__ import annotations

import re
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget

from benchmarks.gemm import TILES, Tile, gemm_add_kernel
from benchmarks.static import AMPERE, EVEN, HOPPER, compiled, pointers


def uses_64_bits(kernel: Any, dtype: str) -> bool:
    """Return whether the offsets that are added to pointers of ``dtype``, tile by tile, have 64 bits."""
    pattern = rf"tt\.addptr .*: tensor<[^!]*!tt\.ptr<{dtype}>>, tensor<[^>]*?(i\d+)>"
    return set(re.findall(pattern, kernel.asm["ttir"])) == {"i64"}


def product(target: GPUTarget, dtype: str, tile: Tile, descriptors: bool, by_columns: bool) -> Any:
    m, n, k = tile.rows, tile.columns, tile.depth
    left = f"tensordesc<{dtype}[{m},{k}]>" if descriptors else f"*{dtype}"
    right = (
        f"tensordesc<{dtype}[{n if by_columns else k},{k if by_columns else n}]>"
        if descriptors
        else left
    )
    return compiled(
        gemm_add_kernel,
        target,
        tile.warps,
        tile.stages,
        a=(left, 1 if descriptors else 16),
        b=(right, 1 if descriptors else 16),
        **pointers(dtype, residual=True, y=True, h=True),
        **pointers("fp32", gemm_bias=True, bias=True),
        **pointers("fp32", constant=True, shift=False, center=True, weight=True),
        FUNCTION=0,
        PER_CHANNEL=True,
        **dict.fromkeys(("M", "N", "K"), EVEN),
        a_by_m=EVEN,
        a_by_k=1,
        b_by_k=1 if by_columns else EVEN,
        b_by_n=EVEN if by_columns else 1,
        scale=("fp32", 1),
        DESCRIPTORS=descriptors,
        B_BY_COLUMNS=by_columns,
        # A wrapper, because this text is not a type.
        PRECISION=triton.language.constexpr("ieee"),
        BLOCK_M=m,
        BLOCK_N=n,
        BLOCK_K=k,
        GROUP=8,
        HALVES=tile.halves,
    )


@pytest.mark.parametrize("tile", TILES[2][:5])
def test_product_uses_hopper_s_tensor_cores_and_copy_engine(tile: Tile) -> None:
    ptx = product(HOPPER, "bf16", tile, descriptors=True, by_columns=True).asm["ptx"]
    assert "wgmma.mma_async" in ptx
    assert "cp.async.bulk.tensor" in ptx


@pytest.mark.parametrize(
    ("target", "dtype", "width", "by_columns"),
    [(HOPPER, "fp16", 2, False), (AMPERE, "bf16", 2, True), (AMPERE, "fp32", 4, False)],
)
def test_product_compiles_with_pointers(
    target: GPUTarget, dtype: str, width: int, by_columns: bool
) -> None:
    kernel = product(target, dtype, TILES[width][-1], False, by_columns)
    assert uses_64_bits(kernel, dtype.replace("fp", "f"))
