"""Results that grow row by row, so that a run that is stopped goes on from there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dynorm.files import write_text

Row = dict[str, Any]


def rows_so_far(results: Path) -> list[Row]:
    """Return what earlier runs have measured; delete the file to measure all anew."""
    return list(json.loads(results.read_text("utf-8"))["rows"]) if results.exists() else []


def write_rows(results: Path, about: dict[str, Any], rows: list[Row]) -> None:
    """Write what the rows hold for, and all of them; a write that fails leaves the old file."""
    results.parent.mkdir(exist_ok=True)
    write_text(results, json.dumps(about | {"rows": rows}, indent=1) + "\n")
