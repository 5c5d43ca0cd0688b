"""Results that grow row by row, so that a run that is stopped goes on from there."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dynorm.distill.pretrained import library_versions
from dynorm.files import write_text

Row = dict[str, Any]


def rows_so_far(results: Path) -> list[Row]:
    """Return what earlier runs have measured; delete the file to measure all anew."""
    return list(json.loads(results.read_text("utf-8"))["rows"]) if results.exists() else []


def add_rows(results: Path, about: dict[str, Any], new: list[Row], order: Callable[[Row], Any] | None = None) -> None:
    """Add rows, each with what it was made with; a write that fails leaves the old file.

    Args:
        results: the file.
        about: what holds for all rows.
        new: the rows.
        order: the key by which all rows are sorted; None leaves them as they came.
    """
    made_with = library_versions() | {"processor": platform.machine(), "threads": torch.get_num_threads()}
    rows = rows_so_far(results) + [row | {"made_with": made_with} for row in new]
    if order is not None:
        rows.sort(key=order)
    results.parent.mkdir(exist_ok=True)
    write_text(results, json.dumps(about | {"rows": rows}, indent=1) + "\n")
