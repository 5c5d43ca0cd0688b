"""A document of a run that takes a second; files that test_triton.py runs in separate processes are not collected."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.speed.run import run
from benchmarks.speed.settings import Settings

collect_ignore_glob = ["gemm_*.py"]
SIZES = ((4, 8), (6, 16))


@pytest.fixture(scope="session")
def document() -> dict[str, Any]:
    settings = Settings(
        sizes=SIZES, dtypes=("float32", "bfloat16"), compiled=False, rounds=3, seconds=0.01
    )
    return run(settings, block=False)
