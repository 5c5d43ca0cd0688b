"""The Triton kernels compiled for GPUs that need not be here, which the interpreter is not; run by test_triton.py."""

from __future__ import annotations

import re
from typing import Any

import pytest

from benchmarks import static
from benchmarks.static import AMPERE, HOPPER
from tests.kernels.definition import FUNCTIONS

DYISRU, DYT, DERF, LINEAR = FUNCTIONS


# Every function in float32 and in float64.
@pytest.mark.parametrize(
    ("function", "dtype", "channels", "parts"),
    [
        (DYISRU, "bf16", 4096, False),
        (DYT, "fp16", 517, True),
        (DERF, "fp16", 517, True),
        (LINEAR, "bf16", 4096, False),
        *((function, "fp64", 768, True) for function in FUNCTIONS),
    ],
)
def test_both_passes_compile_with_64_bit_offsets_and_no_atomics(
    function: int, dtype: str, channels: int, parts: bool
) -> None:
    forward = static.forward_kernel(HOPPER, function, dtype, channels, parts=parts)
    backward = static.backward_kernel(HOPPER, function, dtype, channels, parts=parts)
    assert re.search(r"arith\.muli .* : i64", forward.asm["ttir"])
    assert re.search(r"arith\.muli .* : tensor<\d+x1xi64>", backward.asm["ttir"])
    assert not re.search(r"\b(atom|red)\.", backward.asm["ptx"])


@pytest.mark.parametrize("dtype", ["fp32", "fp64"])
def test_the_sum_compiles(dtype: str) -> None:
    static.sum_kernel(AMPERE, dtype, 4096)


@pytest.mark.parametrize("target", [AMPERE, HOPPER])
def test_the_plain_case_keeps_the_limits(target: Any) -> None:
    backward = static.code_of(static.backward_kernel(target, 0, "bf16", 4096))
    assert static.broken_limits(backward, plain=True) == []
    # Vectors of 16 bytes: of x, weight and bias.
    forward = static.forward_kernel(target, 0, "bf16", 768)
    assert len(re.findall(r"ld\.global\S*\.v4\.b32", forward.asm["ptx"])) == 3


def test_a_broken_limit_is_found() -> None:
    broken = static.broken_limits(static.Code(129, 8, 100, 0), plain=True)
    assert len(broken) == 3
    assert len(static.broken_limits(static.Code(129, 0, 100, 2), plain=False)) == 0


def test_one_pass_launches_three_kernels_and_allocates_twice_for_its_gradients() -> None:
    calls = static.calls_of_one_pass()
    assert calls["launches"] == static.LAUNCHES
    assert calls["backward allocations"] == static.ALLOCATIONS
    # The others change sizes only.
    assert set(calls["backward operators"]) == {
        "aten.empty.memory_format",
        "aten.as_strided_.default",
        "aten.as_strided.default",
    }
