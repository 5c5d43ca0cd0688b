"""A matrix product whose epilogue adds the residual and applies a layer, on tiles in registers.

A norm with statistics cannot do this, because it needs all of a row before it can write the first
element.
"""

# Triton's language has Python's syntax, not its types, and its constants are in capitals.
# mypy: ignore-errors
# ruff: noqa: N803, N806

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from dynorm.kernels._form import Fields, Numbers
from dynorm.kernels._triton import ceil_divide, choices, processors
from dynorm.kernels._triton_functions import by_channel
from dynorm.kernels._triton_kernels import layer_of

# The elements of a tile that are finished together.
_PART = tl.constexpr(8192)
# The interpreter multiplies the bits of bfloat16; in float32 the products are right.
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


class Tile(NamedTuple):
    """The sizes of a tile, its warps and stages; programs on a multiprocessor; and its speed, of at most 1."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    programs: int = 2
    speed: float = 1.0

    @property
    def memory(self) -> int:
        """The bytes that a program shares: its stages and a part of the result, with some to spare."""
        stage = 2 * (self.rows + self.columns) * self.depth
        return self.stages * stage + 2048 * self.warps + 8192


# The larger a tile, the less is read twice; the smallest are for few rows, as in decoding. The speeds
# are those of full multiprocessors, on an H100.
TILES = (
    Tile(128, 256, 64, 8, 3, programs=1),
    Tile(128, 128, 64, 8, 4, programs=1, speed=0.9),
    Tile(64, 128, 64, 4, 4, speed=0.75),
    Tile(64, 64, 64, 4, 5, speed=0.6),
    Tile(64, 16, 256, 4, 3, programs=1, speed=0.3),
    Tile(16, 32, 256, 4, 3, speed=0.2),
)


@lru_cache
def tile_for(rows: int, channels: int, device: torch.device) -> Tile:
    """Return the tile for a product. Nothing is timed, so that a CUDA graph can be captured at once."""

    def time(tile: Tile) -> float:
        tiles = ceil_divide(rows, tile.rows) * ceil_divide(channels, tile.columns)
        # Multiprocessors without a tile wait for the others.
        rounds = ceil_divide(tiles, processors(device))
        return rounds * tile.rows * tile.columns / tile.speed

    # Enough in the interpreter.
    memory = 1 << 20
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    return min((tile for tile in TILES if tile.memory <= memory), key=time)


def can_multiply(*tensors: Tensor | None) -> bool:
    """Return whether the kernel takes a product's tensors: rows of 16 bits that the copy engine can load."""
    for tensor in tensors:
        if tensor is None:
            continue
        is_aligned = tensor.is_contiguous() and tensor.data_ptr() % 16 == 0
        if not is_aligned or tensor.shape[-1] % 8 or tensor.element_size() != 2:
            return False
    return True


def product(
    x: Tensor,
    weight: Tensor,
    transposed: bool,
    pointers: Sequence[Tensor | None],
    parameters: Numbers,
    form: Fields,
    total: Tensor | None,
    y: Tensor,
) -> None:
    """Write ``total = (x @ weight.T + bias) * factor + residual``, and its function to ``y``.

    ``pointers`` are bias, factor and residual. The weight is ``(N, K)``, or with ``transposed``
    ``(K, N)``. Sums are in float32; the total is rounded once, and y, its function, once.
    """
    channels = y.shape[-1]
    a = x.view(-1, x.shape[-1])
    rows, depth = a.shape

    tile = tile_for(rows, channels, x.device)
    tiles = ceil_divide(rows, tile.rows) * ceil_divide(channels, tile.columns)
    block = [tile.depth, tile.columns] if transposed else [tile.columns, tile.depth]
    with torch.cuda.device_of(x):
        # A program computes several tiles.
        product_kernel[(min(tile.programs * processors(x.device), tiles),)](
            TensorDescriptor.from_tensor(a, [tile.rows, tile.depth]),
            TensorDescriptor.from_tensor(weight, block),
            *(*pointers, *parameters, total, y, rows, depth),
            FORM=choices(form, channels),
            TRANSPOSED=transposed,
            BLOCK_M=tile.rows,
            BLOCK_N=tile.columns,
            BLOCK_K=tile.depth,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )


@triton.jit
def product_kernel(
    a,
    b,
    product_bias_ptr,
    factor_ptr,
    residual_ptr,
    constant_ptr,
    shift_ptr,
    weight_ptr,
    bias_ptr,
    total_ptr,
    y_ptr,
    rows,
    depth,
    FORM: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Compute tiles of a product and of its function; a and b are loaded by the copy engine.

    A program computes several tiles, so that the next one loads while this one is finished.
    """
    GROUP: tl.constexpr = 8
    tiles_m = tl.cdiv(rows, BLOCK_M)
    tiles_n = tl.cdiv(FORM.channels, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=True):
        # Go down the columns of GROUP rows of tiles, so that the values stay in the cache.
        group_tiles = GROUP * tiles_n
        first = (tile // group_tiles) * GROUP
        height = tl.minimum(tiles_m - first, GROUP)
        in_group = tile % group_tiles
        m = (first + in_group % height) * BLOCK_M
        n = (in_group // height) * BLOCK_N
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k in range(0, depth, BLOCK_K):
            left = a.load([m, k])
            right = b.load([k, n]) if TRANSPOSED else b.load([n, k]).T
            if _INTERPRETED:
                left = left.to(tl.float32)
                right = right.to(tl.float32)
            total = tl.dot(left, right, total)

        pointers = (product_bias_ptr, factor_ptr, residual_ptr, total_ptr, y_ptr)
        parameters = (constant_ptr, shift_ptr, weight_ptr, bias_ptr, None)
        finish_parts(total, m, n, rows, pointers, parameters, FORM)


@triton.jit
def finish_parts(total, m, n, rows, pointers, parameters, FORM: tl.constexpr):
    """Finish a tile, a large one half by half: they need fewer registers and less shared memory."""
    M: tl.constexpr = total.shape[0]
    N: tl.constexpr = total.shape[1]
    if M * N > _PART:
        left, right = tl.split(tl.permute(tl.reshape(total, (M, 2, N // 2)), (0, 2, 1)))
        finish_parts(left, m, n, rows, pointers, parameters, FORM)
        finish_parts(right, m, n + N // 2, rows, pointers, parameters, FORM)
    else:
        finish(total, m, n, rows, pointers, parameters, FORM)


@triton.jit
def finish(total, m, n, rows, pointers, parameters, FORM: tl.constexpr):
    """Finish a part whose first element is (m, n), and store it and its function."""
    product_bias_ptr, factor_ptr, residual_ptr, total_ptr, y_ptr = pointers
    row = tl.arange(0, total.shape[0])[:, None]
    column = tl.arange(0, total.shape[1])[None, :]
    channel = n + column
    inside = channel < FORM.channels
    mask = (m + row < rows) & inside
    # 64 bits for where the tile begins, because a product may have more than 2**31 elements, and 32
    # bits within it.
    start = m.to(tl.int64) * FORM.channels + n
    offset = row * FORM.channels + column
    if product_bias_ptr is not None:
        total += by_channel(product_bias_ptr, channel, inside, tl.float32)
    if factor_ptr is not None:
        total *= by_channel(factor_ptr, channel, inside, tl.float32)
    if residual_ptr is not None:
        total += tl.load(residual_ptr + start + offset, mask, other=0.0).to(tl.float32)
    # Rounded first, so that y is the function of the total that is returned.
    rounded = total.to(y_ptr.dtype.element_ty)
    if total_ptr is not None:
        tl.store(total_ptr + start + offset, rounded, mask)
    tl.store(y_ptr + start + offset, layer_of(rounded, parameters, channel, inside, FORM), mask)
