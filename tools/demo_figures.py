"""Print the figures of ``make demo`` next to the committed ones.

``python tools/demo_figures.py minilm build/demo/report.json``
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from dynorm.table import Table

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
# The demos whose report is committed.
COMMITTED = {"minilm": RESULTS / "demo.json"}
# The fields of the recipe that each stage depends on, in addition to those of the stages before.
DEPENDS = {
    "calibrate": ("to", "witnesses", "calibration", "max_length", "seed"),
    "distill": ("batch", "bf16", "lr"),
}
TITLES = {"calibrate": "calibrated", "distill": "and distilled"}
FIGURES = {
    "cosine_mean": "mean cosine",
    "cosine_min": "worst cosine",
    "spearman": "Spearman",
    "neighbours": "same nearest neighbour",
}
Report = dict[str, Any]
Row = tuple[object, ...]


def comparison(measured: Report, expected: Report) -> str:
    """Return the measured and the expected figures as text.

    Stages are compared up to the first one whose options differ, because later figures are not
    comparable. The figures of the whole held-out set are compared only if no option differs.
    """
    rows = []
    remark = ""
    for stage, fields in DEPENDS.items():
        remark = _difference(measured, expected, fields)
        if remark:
            remark = f"The figures after this are not comparable: {remark}."
            break
        ours = measured["meta"]["stages"][stage]["output"]
        theirs = expected["meta"]["stages"][stage]["output"]
        if ours["samples"] != theirs["samples"]:
            remark = "The figures are not comparable: other samples were held out."
            break
        rows += _rows(f"{TITLES[stage]}, {ours['samples']} samples", ours, theirs)
    if not remark:
        ours = measured["output"]
        theirs = expected["output"]
        rows += _rows(f"at the end, {ours['samples']} samples", ours, theirs)
    columns = ["", "", "measured", "expected"]
    notes = [remark] if remark else []
    return str(Table(columns, rows, notes, "The figures of this run, and those of the pages"))


def _difference(measured: Report, expected: Report, fields: tuple[str, ...]) -> str:
    """Return in words which options differ between two reports, or ""."""
    ours = measured["meta"]["recipe"]
    theirs = expected["meta"]["recipe"]
    differing = []
    if fields == DEPENDS["distill"]:
        steps = _steps(measured)
        expected_steps = _steps(expected)
        if steps != expected_steps:
            differing.append(f"steps is {steps} instead of {expected_steps}")
    for name in fields:
        if ours.get(name) != theirs.get(name):
            differing.append(f"{name} is {ours.get(name)} instead of {theirs.get(name)}")
    return ", ".join(differing)


def _steps(report: Report) -> int:
    """Return the steps that distillation took."""
    stage = report["meta"]["stages"].get("distill", {})
    steps: int = stage.get("steps", 0)
    return steps


def _rows(title: str, ours: Report, theirs: Report) -> list[Row]:
    """Return one row per figure that both have; only the first has the title."""
    rows: list[Row] = []
    for name, words in FIGURES.items():
        measured = ours.get(name)
        expected = theirs.get(name)
        if measured is None or expected is None:
            continue
        rows.append((title, words, f"{measured:.4f}", f"{expected:.4f}"))
        title = ""
    return rows


def main(model: str, report: str) -> None:
    """Print the comparison, or that there is none for the model."""
    if model not in COMMITTED:
        print("No report of this demo is committed; docs/quality.md has figures of some models.")
        return
    measured = json.loads(Path(report).read_text("utf-8"))
    expected = json.loads(COMMITTED[model].read_text("utf-8"))
    print(comparison(measured, expected))


if __name__ == "__main__":
    main(*sys.argv[1:])
