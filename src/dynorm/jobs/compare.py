"""``dynorm compare``: several reports of conversions in one table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dynorm.errors import ArgumentError, StorageError
from dynorm.table import Column, JsonObject, Plain, Table

# The figures of an output that are compared, with their titles.
_FIGURES = {
    "loss_difference": "loss",
    "kl": "KL",
    "agreement": "same class",
    "error": "error",
    "cosine_mean": "cosine",
    "cosine_min": "worst",
    "spearman": "Spearman",
    "neighbours": "neighbour",
}
# The options that are always shown; others are shown where they differ.
_SHOWN = ("to", "witnesses")
# They differ from run to run, and change no figure.
_LEFT_OUT = ("checkpoints", "report_to", "keep_on_interrupt", "minutes", "steps")


@dataclass(frozen=True)
class Comparison(Plain):
    """Several reports, one row each; ``recipes`` has the options that differ, or are always shown."""

    reports: list[str]
    recipes: list[JsonObject]
    figures: list[JsonObject]
    remarks: list[str]

    def __str__(self) -> str:
        """Return the table."""
        figures = []
        for name in self.figures[0]:
            if any(row[name] is not None for row in self.figures):
                figures.append(name)
        columns: list[str | Column] = ["report", *self.recipes[0]]
        for name in figures:
            form = "" if name in ("steps", "seconds") else ".3f"
            columns.append(Column(_FIGURES.get(name, name), form))
        rows = []
        for report, recipe, values in zip(self.reports, self.recipes, self.figures, strict=True):
            options = ["default" if value is None else str(value) for value in recipe.values()]
            rows.append([report, *options, *(values[name] for name in figures)])
        return str(Table(columns, rows, self.remarks, f"{len(rows)} conversions"))


def compare_reports(paths: Sequence[str | Path]) -> Comparison:
    """Return several reports of ``dynorm convert`` in one table.

    Args:
        paths: files ``report.json``, or the folders that have one; at least two.

    Raises:
        ArgumentError: there are fewer than two.
        StorageError: a file cannot be read, or is not a report of a conversion.
    """
    if len(paths) < 2:
        raise ArgumentError(f"there must be at least two reports to compare, got {len(paths)}")
    files = []
    for path in map(Path, paths):
        files.append(path / "report.json" if path.is_dir() else path)
    reports = [_read(file) for file in files]
    recipes = [report["meta"]["recipe"] for report in reports]
    names = list(_SHOWN)
    for name in recipes[0]:
        values = [json.dumps(recipe.get(name)) for recipe in recipes]
        if len(set(values)) > 1 and name not in names and name not in _LEFT_OUT:
            names.append(name)
    rows = []
    for report in reports:
        rows.append({name: report["meta"]["recipe"].get(name) for name in names})
    return Comparison(
        [str(path) for path in paths], rows, list(map(_figures, reports)), _remarks(reports)
    )


def _read(file: Path) -> JsonObject:
    """Return a report; StorageError if the file does not hold one."""
    try:
        report: JsonObject = json.loads(file.read_text("utf-8"))
        # A report of a fold or an inspection lacks these.
        _ = (report["output"], report["sites"], report["meta"]["recipe"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise StorageError(
            f"{file} must be the report.json that dynorm convert writes, but cannot be read as one: "
            f"{error!r}. Give folders of dynorm convert; dynorm.save writes no report"
        ) from error
    return report


def _figures(report: JsonObject) -> JsonObject:
    """Return the figures of a row."""
    output = report["output"]
    meta = report["meta"]
    values: JsonObject = {name: output.get(name) for name in _FIGURES}
    errors = [site["error_now"] for site in report["sites"] if site["error_now"] is not None]
    values["worst site"] = max(errors, default=None)
    values["steps"] = meta.get("stages", {}).get("distill", {}).get("steps", 0)
    values["seconds"] = round(sum(meta.get("seconds", {}).values()))
    return values


def _remarks(reports: Sequence[JsonObject]) -> list[str]:
    """Return a line for each reason why the figures of different rows cannot be compared."""
    remarks = []
    names = [str(report["meta"].get("model", report["model"])) for report in reports]
    if len(set(names)) > 1:
        remarks.append(f"The models differ: {', '.join(names)}.")
    samples = []
    for report in reports:
        meta = report["meta"]
        sources = [meta.get(noun) for noun in ("texts", "images", "audio")]
        samples.append(json.dumps([sources, report["output"]["samples"], meta["recipe"]["seed"]]))
    if len(set(samples)) > 1:
        remarks.append("The held-out samples differ, so the figures cannot be compared exactly.")
    return remarks
