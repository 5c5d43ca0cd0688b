"""What every docstring example may use without importing it."""

from typing import Any

import pytest
import torch

import dynorm

# Importing these takes triton; tests/kernels runs them in its interpreter.
collect_ignore_glob = ["src/dynorm/kernels/_triton_*.py"]


@pytest.fixture(autouse=True)
def _example_names(doctest_namespace: dict[str, Any]) -> None:
    doctest_namespace.update(torch=torch, nn=torch.nn, dynorm=dynorm)
