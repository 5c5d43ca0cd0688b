"""The Triton kernels compiled for GPUs that need not be here, which the interpreter is not; run by test_triton.py."""

from __future__ import annotations

import re
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dynorm.kernels import _triton_kernels
from tests.kernels.definition import FUNCTIONS

AMPERE, HOPPER = GPUTarget("cuda", 80, 32), GPUTarget("cuda", 90, 32)
DERF = 2
# A size that 16 divides, and one of which nothing is known: they are compiled apart.
EVEN, ANY = ("i32", 16), ("i32", 1)


def compiled(
    kernel: Any, target: GPUTarget, warps: int = 4, stages: int = 3, **arguments: Any
) -> Any:
    """Compile a kernel for arguments given as (type, what divides it), or as the constant itself."""
    types, constants, divisors = {}, {}, {}
    for index, name in enumerate(kernel.arg_names):
        value = arguments[name]
        if isinstance(value, tuple):
            types[name] = value[0]
            if value[1] == 16:
                divisors[(index,)] = [["tt.divisibility", 16]]
        else:
            types[name], constants[(index,)] = "constexpr", value
    source = ASTSource(kernel, types, constants, divisors)
    return triton.compile(source, target=target, options={"num_warps": warps, "num_stages": stages})


def pointers(dtype: str, **present: bool) -> dict[str, Any]:
    """The tensors of a kernel: those present of the dtype, the others None."""
    return {f"{name}_ptr": (f"*{dtype}", 16) if there else None for name, there in present.items()}


def arguments_of(function: int, dtype: str, tokens: bool, size: tuple[str, int]) -> dict[str, Any]:
    constants = pointers(
        "fp32", constant=True, shift=function == DERF, center=tokens, weight=True, token=tokens
    )
    sizes = dict.fromkeys(("rows", "channels"), size)
    options = {"FUNCTION": function, "PER_CHANNEL": tokens, "scale": ("fp64", 1)}
    return constants | sizes | options | pointers(dtype, x=True)


def uses_64_bits(kernel: Any, dtype: str) -> bool:
    """Return whether the offsets that are added to pointers of ``dtype``, tile by tile, have 64 bits."""
    pattern = rf"tt\.addptr .*: tensor<[^!]*!tt\.ptr<{dtype}>>, tensor<[^>]*?(i\d+)>"
    return set(re.findall(pattern, kernel.asm["ttir"])) == {"i64"}


CASES = [(f, d, s) for f in FUNCTIONS for d, s in (("bf16", EVEN), ("fp16", ANY), ("fp64", EVEN))]


@pytest.mark.parametrize(("function", "dtype", "size"), CASES)
@pytest.mark.parametrize("tokens", [False, True])
def test_both_passes_compile_with_64_bit_offsets_and_no_atomics(
    function: int, dtype: str, size: tuple[str, int], tokens: bool
) -> None:
    arguments = arguments_of(function, dtype, tokens, size)
    wide = "fp64" if dtype == "fp64" else "fp32"
    forward = compiled(
        _triton_kernels.forward_kernel,
        HOPPER,
        **arguments,
        **pointers(dtype, y=True),
        **pointers("fp32", bias=True),
        BLOCK_ROWS=4,
        BLOCK_COLUMNS=512,
    )
    backward = compiled(
        _triton_kernels.backward_kernel,
        HOPPER,
        **arguments,
        **pointers(dtype, grad=True, grad_x=True),
        **pointers(wide, partial=True, by_token=tokens),
        **dict.fromkeys(("steps", "all_steps"), ANY),
        BLOCK_ROWS=8,
        BLOCK_COLUMNS=256,
    )
    if dtype != "fp64":
        assert uses_64_bits(forward, dtype.replace("fp", "f"))
        assert uses_64_bits(backward, dtype.replace("fp", "f"))
    assert not re.search(r"\b(atom|red)\.", backward.asm["ptx"])


@pytest.mark.parametrize("dtype", ["fp32", "fp64"])
def test_the_sum_compiles(dtype: str) -> None:
    compiled(
        _triton_kernels.sum_kernel,
        AMPERE,
        **pointers(dtype, partial=True, sums=True),
        chunks=ANY,
        channels=ANY,
        PRESENT=0b11101,
        BLOCK_CHUNKS=32,
        BLOCK_CHANNELS=64,
    )
