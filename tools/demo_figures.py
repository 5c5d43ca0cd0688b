"""Print the figures of ``make demo`` next to the committed ones.

``python tools/demo_figures.py minilm build/demo/report.json``
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from dynorm.table import Column, Table

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
# The demos whose report is committed.
COMMITTED = {"minilm": RESULTS / "demo.json"}
# The fields of the recipe that each stage depends on, in addition to those of the stages before.
DEPENDS = {
    "calibrate": ("to", "per_channel", "witnesses", "lean", "calibration", "max_length", "seed"),
    "refine": ("refine", "batch"),
    "distill": ("bf16", "lr", "accumulate"),
}
TITLES = {"calibrate": "calibrated", "refine": "and refined", "distill": "and distilled"}
FIGURES = {
    "cosine_mean": "mean cosine",
    "cosine_min": "worst cosine",
    "spearman": "Spearman",
    "neighbours": "same nearest neighbour",
}
Report = dict[str, Any]


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
        samples = _output(measured, stage)["samples"]
        if samples != _output(expected, stage)["samples"]:
            remark = "The figures are not comparable: other samples were held out."
            break
        rows += _rows(
            f"{TITLES[stage]}, {samples} samples",
            _output(measured, stage),
            _output(expected, stage),
        )
    if not remark:
        samples = measured["output"]["samples"]
        rows += _rows(f"at the end, {samples} samples", measured["output"], expected["output"])
    columns = ["", "", Column("measured", ".4f"), Column("expected", ".4f")]
    notes = [remark] if remark else []
    return str(Table(columns, rows, notes, "The figures of this run, and those of the pages"))


def _difference(measured: Report, expected: Report, fields: tuple[str, ...]) -> str:
    """Return in words which options differ between two reports, or ""."""
    ours = measured["meta"]["recipe"]
    theirs = expected["meta"]["recipe"]
    differing = []
    if fields == DEPENDS["distill"]:
        # The steps that were taken, which count also if minutes were given.
        taken = [report["meta"]["stages"].get("distill", {}) for report in (measured, expected)]
        steps, expected_steps = (stage.get("steps", 0) for stage in taken)
        if steps != expected_steps:
            differing.append(f"steps is {steps} instead of {expected_steps}")
    for name in fields:
        if ours.get(name) != theirs.get(name):
            differing.append(f"{name} is {ours.get(name)} instead of {theirs.get(name)}")
    return ", ".join(differing)


def _output(report: Report, stage: str) -> dict[str, Any]:
    output: dict[str, Any] = report["meta"]["stages"][stage]["output"]
    return output


def _rows(title: str, ours: dict[str, Any], theirs: dict[str, Any]) -> list[tuple[object, ...]]:
    """Return one row per figure that both have; only the first has the title."""
    rows: list[tuple[object, ...]] = []
    for name, words in FIGURES.items():
        if ours.get(name) is None or theirs.get(name) is None:
            continue
        rows.append(("" if rows else title, words, ours[name], theirs[name]))
    return rows


def main(model: str, report: str) -> None:
    """Print the comparison, or that there is none for the model."""
    if model not in COMMITTED:
        print("No report of this demo is committed; docs/models.md has figures of the model.")
        return
    measured = json.loads(Path(report).read_text("utf-8"))
    expected = json.loads(COMMITTED[model].read_text("utf-8"))
    print(comparison(measured, expected))


if __name__ == "__main__":
    main(*sys.argv[1:])
