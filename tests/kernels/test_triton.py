"""The Triton kernels, where Triton is installed: in its interpreter, compiled for a GPU, and on a GPU if there is one.

Each in a process of its own: whether Triton interprets is settled when it is first imported, and
other tests may have.
"""

from __future__ import annotations

import importlib.util
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dynorm.kernels import _triton
from dynorm.kernels._triton import available


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
    environment = os.environ | {"TRITON_INTERPRET": interpret, "TRITON_CACHE_DIR": str(tmp_path)}
    # The workers of this run are no business of the one that it starts.
    environment = {
        key: value for key, value in environment.items() if not key.startswith("PYTEST_")
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        *(
            str(Path(__file__).parents[1] / f"{file}_{name}.py")
            for file in ("kernels/triton", "benchmarks/gemm")
        ),
    ]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert " passed" in run.stdout
    assert "skipped" not in run.stdout


def test_the_fastest_configuration_is_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def milliseconds(call: Callable[[], object]) -> float:
        call()
        return {1: 3.0, 2: 1.0, 3: math.inf}[tried[-1]]

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(_triton, "_chosen", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(_triton, "_milliseconds", milliseconds)
    assert [_triton.choose("a", (1, 2, 3), tried.append) for _ in range(2)] == [2, 2]
    assert tried == [1, 2, 3]
    assert _triton.choose("b", (1, 3), tried.append) == 1


@pytest.mark.parametrize("interpret", ["1", "0"])
def test_nothing_is_timed_in_the_interpreter_or_while_a_graph_is_captured(
    interpret: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", interpret)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(_triton, "_chosen", {})
    assert _triton.choose("a", (1, 2), pytest.fail) == 1


def test_without_triton_the_kernels_are_not_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert not available()
