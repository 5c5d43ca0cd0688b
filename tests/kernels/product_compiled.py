"""The product with its epilogue, compiled for GPUs that need not be here; run by test_triton.py."""

from __future__ import annotations

import re
from typing import Any

import pytest

from benchmarks.static import AMPERE, HOPPER, product_kernel, spilled_by
from dynorm.kernels._triton_product import TILES, Tile


@pytest.mark.parametrize("tile", TILES[:-1])
def test_product_uses_hopper_s_tensor_cores_and_copy_engine(tile: Tile) -> None:
    kernel = product_kernel(HOPPER, "bf16", tile, transposed=False)
    assert spilled_by(kernel) == 0
    # A multiprocessor shares 228 KiB, and each program needs one more.
    shared = kernel.metadata.shared
    assert shared <= tile.memory
    assert tile.programs * (shared + 1024) <= 228 * 1024
    ptx = kernel.asm["ptx"]
    assert "wgmma.mma_async" in ptx
    assert "cp.async.bulk.tensor" in ptx


@pytest.mark.parametrize(
    ("target", "dtype", "tile", "transposed"),
    [
        (HOPPER, "fp16", TILES[-1], True),
        (AMPERE, "bf16", TILES[-2], False),
        (AMPERE, "fp16", TILES[1], True),
    ],
)
def test_every_kind_compiles_with_64_bit_offsets(
    target: Any, dtype: str, tile: Tile, transposed: bool
) -> None:
    kernel = product_kernel(target, dtype, tile, transposed=transposed)
    assert spilled_by(kernel) == 0
    assert re.search(r"arith\.muli .* : i64", kernel.asm["ttir"])
