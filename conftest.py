"""What every docstring example may use without importing it."""

from typing import Any

import pytest

# Importing these takes triton, which tests/kernels runs in its interpreter, or lightning.
collect_ignore_glob = ["src/dynorm/kernels/_triton_*.py", "tests/ecosystem/lightning_run.py"]


@pytest.fixture(autouse=True)
def _example_names(doctest_namespace: dict[str, Any]) -> None:
    # The process that starts xdist's workers runs no test, and they wait for it.
    import torch

    import dynorm

    doctest_namespace.update(torch=torch, nn=torch.nn, dynorm=dynorm)
