"""Every instruction set of this processor; files that test_triton.py runs in separate processes are not collected."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dynorm.kernels import _cpu

collect_ignore_glob = ["triton_*.py", "product_*.py"]
SETS = ("cpu-avx512", "cpu-avx2", "cpu-portable")


def supported() -> list[str]:
    """The instruction sets of this processor, the best first."""
    return list(SETS[SETS.index(_cpu.name()) :]) if _cpu.name() != "torch" else []


@pytest.fixture(params=supported())
def instructions(request: pytest.FixtureRequest) -> Iterator[str]:
    native = _cpu._native()
    best = native.name()
    native.choose(request.param)
    yield request.param
    native.choose(best)
