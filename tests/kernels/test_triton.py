"""The Triton kernels, where Triton is installed: in its interpreter, compiled for a GPU, and on a GPU if there is one.

Each in a process of its own: whether Triton interprets is settled when it is first imported, and
other tests may have.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from dynorm.kernels._triton import available
from tests.fresh import run

PYTEST = """
import sys, pytest
assert "triton" not in sys.modules
sys.exit(pytest.main(["-p", "no:cacheprovider", "-p", "no:xdist", *sys.argv[1:]]))
"""


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed: pip install triton"
)
@pytest.mark.parametrize(
    ("name", "interpret"),
    [
        pytest.param("values", "1", id="interpreted"),
        pytest.param("compiled", "0", id="compiled"),
        pytest.param(
            "values",
            "0",
            id="on a GPU",
            marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
        ),
    ],
)
def test_triton_kernels(name: str, interpret: str, tmp_path: Path) -> None:
    files = (Path(__file__).with_name(f"{file}_{name}.py") for file in ("triton", "product"))
    environment = {
        "TRITON_INTERPRET": interpret,
        "TRITON_CACHE_DIR": str(tmp_path),
        # With the numbers of lines the compiler takes a fifth longer.
        "TRITON_DISABLE_LINE_INFO": "1",
    }
    said = run(PYTEST, *files, imported="torch", environment=environment, seconds=600)
    assert " passed" in said
    assert "skipped" not in said


def test_without_triton_the_kernels_are_not_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert not available()
