"""The Triton kernels compiled for GPUs that need not be here, which the interpreter is not; run by test_triton.py."""

from __future__ import annotations

import re
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dynorm.kernels import _triton_kernels

AMPERE, HOPPER = GPUTarget("cuda", 80, 32), GPUTarget("cuda", 90, 32)
DYISRU, DYT, DERF, LINEAR = range(4)
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


def constants_of(function: int, per_channel: bool) -> dict[str, Any]:
    parts = pointers("fp32", constant=True, shift=function == DERF, center=per_channel, weight=True)
    return {"FUNCTION": function, "PER_CHANNEL": per_channel, **parts}


MANY = 128


def of_witnesses(count: int, dtype: str) -> dict[str, Any]:
    """The arguments of a kernel of x of a dtype with some witnesses, with many, or without."""
    few, many = 0 < count < MANY, count >= MANY
    return {
        "WITNESSES": count if few else 0,
        "witness_ptr": ("*i64", 16) if few else None,
        **pointers("fp32", log_gain=few),
        **pointers("fp64" if dtype == "fp64" else "fp32", term_gain=many, sums=many),
    }


def offsets_of(kernel: Any, dtype: str) -> set[str]:
    """The types of the offsets that are added to pointers of ``dtype``, tile by tile."""
    found = re.findall(
        rf"tt\.addptr .*: tensor<[^!]*!tt\.ptr<{dtype}>>, tensor<[^>]*?(i\d+)>", kernel.asm["ttir"]
    )
    assert found
    return set(found)


FAMILY = [
    (function, dtype, size, last)
    for function in (DYISRU, DYT, DERF, LINEAR)
    for dtype, size, last in (("bf16", EVEN, True), ("fp16", ANY, False), ("fp64", EVEN, True))
] + [(DYISRU, "fp32", ANY, True), (DYT, "fp32", EVEN, False)]


def counts_of(function: int, dtype: str, last: bool) -> tuple[int, ...]:
    """The numbers of witnesses that a case is compiled with; any only where the channels come last."""
    if not last:
        return (0,)
    # The double precision of each way is seen with one function or another.
    if dtype == "fp64":
        return ((0, 4, MANY)[function % 3],)
    return (0, 4, MANY)


CASES = [(*case, count) for case in FAMILY for count in counts_of(case[0], case[1], case[3])]


@pytest.mark.parametrize(("function", "dtype", "size", "last", "count"), CASES)
def test_forward_compiles_with_64_bit_offsets(
    function: int, dtype: str, size: tuple[str, int], last: bool, count: int
) -> None:
    kernel = compiled(
        _triton_kernels.forward_kernel,
        HOPPER,
        **pointers(dtype, x=True, y=True),
        **pointers("fp32", bias=True),
        **constants_of(function, per_channel=not last),
        **of_witnesses(count, dtype),
        **dict.fromkeys(("rows", "columns", "channels"), size),
        scale=("fp64", 1),
        CHANNELS_LAST=last,
        BLOCK_COLUMNS=512,
        ELEMENTS=1024,
    )
    assert offsets_of(kernel, {"fp16": "f16", "fp32": "f32", "fp64": "f64"}.get(dtype, dtype)) >= {
        "i64"
    }
    if dtype == "bf16":
        assert offsets_of(kernel, "bf16") == {"i64"}
        assert "ld.global.v4.b32" in kernel.asm["ptx"]


@pytest.mark.parametrize(("function", "dtype", "size", "last", "count"), CASES)
def test_backward_compiles_with_64_bit_offsets_and_no_atomics(
    function: int, dtype: str, size: tuple[str, int], last: bool, count: int
) -> None:
    kernel = compiled(
        _triton_kernels.backward_kernel,
        HOPPER,
        **pointers(dtype, grad=True, x=True, grad_x=True),
        **pointers("fp64" if dtype == "fp64" else "fp32", partial=True, rows=0 < count < MANY),
        **constants_of(function, per_channel=not last),
        **of_witnesses(count, dtype),
        **dict.fromkeys(("outer", "channels"), size),
        inner=1 if last else size,
        steps=ANY,
        all_steps=ANY,
        scale=("fp64", 1),
        CHANNELS_LAST=last,
        BLOCK_ROWS=8,
        BLOCK_COLUMNS=256,
    )
    if dtype in ("bf16", "fp16"):
        assert offsets_of(kernel, dtype.replace("fp", "f")) == {"i64"}
    assert not re.search(r"\b(atom|red)\.", kernel.asm["ptx"])


@pytest.mark.parametrize("function", [DYISRU, DYT, DERF, LINEAR])
@pytest.mark.parametrize("dtype", ["bf16", "fp64"])
def test_witnesses_channels_compile_with_64_bit_offsets_and_no_atomics(
    function: int, dtype: str
) -> None:
    kernel = compiled(
        _triton_kernels.witness_kernel,
        HOPPER,
        **pointers(dtype, grad=True, x=True, grad_x=True),
        **pointers("fp64" if dtype == "fp64" else "fp32", partial=True, rows=True),
        **constants_of(function, per_channel=True),
        WITNESSES=3,
        witness_ptr=("*i64", 16),
        **pointers("fp32", log_gain=True),
        **dict.fromkeys(("outer", "channels", "blocks", "steps", "all_steps"), ANY),
        scale=("fp64", 1),
        BLOCK_ROWS=128,
        BLOCK_WITNESSES=4,
    )
    if dtype == "bf16":
        assert offsets_of(kernel, "bf16") == {"i64"}
    assert not re.search(r"\b(atom|red)\.", kernel.asm["ptx"])


@pytest.mark.parametrize("function", [DYISRU, DYT, DERF, LINEAR])
@pytest.mark.parametrize(
    ("dtype", "backward"), [("bf16", True), ("fp32", False), ("fp64", True), ("bf16", False)]
)
def test_sums_of_rows_compile_with_64_bit_offsets_and_no_atomics(
    function: int, dtype: str, backward: bool
) -> None:
    kernel = compiled(
        _triton_kernels.rows_kernel,
        HOPPER,
        **pointers(dtype, grad=backward, x=True),
        **constants_of(function, per_channel=True),
        **pointers("fp64" if dtype == "fp64" else "fp32", term_gain=True, sums=True),
        **dict.fromkeys(("rows", "channels"), EVEN),
        scale=("fp64", 1),
        BLOCK_ROWS=4,
        BLOCK_COLUMNS=512,
    )
    if dtype == "bf16":
        assert offsets_of(kernel, "bf16") == {"i64"}
    assert not re.search(r"\b(atom|red)\.", kernel.asm["ptx"])


@pytest.mark.parametrize("kinds", [5, 6])
@pytest.mark.parametrize("dtype", ["fp32", "fp64"])
def test_reduction_compiles(dtype: str, kinds: int) -> None:
    compiled(
        _triton_kernels.reduce_kernel,
        AMPERE,
        **pointers(dtype, partial=True, sums=True),
        chunks=ANY,
        channels=ANY,
        PRESENT=0b111101,
        KINDS=kinds,
        BLOCK_CHUNKS=32,
        BLOCK_CHANNELS=64,
    )
