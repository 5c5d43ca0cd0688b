"""Choose the simplest layer at each norm of a real encoder; count the linear ones and measure the quality.

``python -m benchmarks.auto`` calibrates all-MiniLM-L6-v2 with ``to="auto"`` at several tolerances,
and writes benchmarks/results/auto.json, in a few minutes. ``python -m benchmarks.auto --add
OUT/report.json`` adds the result of a ``dynorm convert`` that distilled it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import dynorm
from benchmarks.subjects import Row, encoder, fitted, library_versions
from dynorm.files import write_text
from dynorm.replace.converted import dynorm_layers

RESULTS = Path(__file__).parent / "results" / "auto.json"
TOLERANCES = (0.0, 0.02, 0.05, 0.08, 0.2)
WITNESSES = 4


def calibrated(to: str, tolerance: float | None) -> Row:
    """Return the layers that calibration chose at the sites, and the distance from the original."""
    subject = encoder(0)
    options: dict[str, Any] = {"per_channel": True, "witnesses": WITNESSES}
    if tolerance is not None:
        options["tolerance"] = tolerance
    # The first stage is the calibration.
    next(fitted(subject, to, 0, **options))
    figures = subject.figures()
    kinds = []
    for layer in dynorm_layers(subject.pretrained.model).values():
        is_linear = type(layer) is dynorm.LinearControl
        kinds.append(kind_of(is_linear, layer.witness_channels))
    row = {"to": to, "tolerance": tolerance}
    return {**row, **counted(kinds), "spearman": figures["spearman"]}


def kind_of(is_linear: bool, witnesses: Sequence[Any]) -> str:
    """Return the kind of a layer: the name of its count in a row."""
    if not is_linear:
        return "dyisru"
    return "linear with witnesses" if witnesses else "linear"


def counted(kinds: list[str]) -> dict[str, int]:
    """Return the number of layers of each kind."""
    names = ("linear", "linear with witnesses", "dyisru")
    return {name: kinds.count(name) for name in names}


def distilled(report: dict[str, Any]) -> Row:
    """Return the row of a report of ``dynorm convert``."""
    recipe = report["meta"]["recipe"]
    kinds = []
    for site in report["sites"]:
        kinds.append(kind_of(site["layer"] == "linear", site["witnesses"]))
    return {
        "to": recipe["to"],
        # No other layer is chosen by a tolerance.
        "tolerance": recipe["tolerance"] if recipe["to"] == "auto" else None,
        "steps": recipe["steps"],
        "minutes": recipe["minutes"],
        "bf16": recipe["bf16"],
        **counted(kinds),
        "spearman": report["output"]["spearman"],
    }


def is_same_recipe(row: Row, other: Row) -> bool:
    """Return whether two rows are of the same recipe, so that one replaces the other."""
    names = ("to", "tolerance", "steps", "minutes")
    return all(row.get(name) == other.get(name) for name in names)


def main() -> None:
    """Measure, or add a report, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--add", nargs="+", type=Path, default=[], help="reports of dynorm convert")
    arguments = parser.parse_args()
    document: dict[str, Any] = {"distilled": []}
    if RESULTS.exists():
        document = json.loads(RESULTS.read_text("utf-8"))
    if not arguments.add:
        rows = [calibrated("dyisru", None)]
        for tolerance in TOLERANCES:
            rows.append(calibrated("auto", tolerance))
        document["calibrated"] = rows
        document["made_with"] = library_versions()
    for path in arguments.add:
        new = distilled(json.loads(path.read_text("utf-8")))
        kept = [row for row in document["distilled"] if not is_same_recipe(row, new)]
        document["distilled"] = [*kept, new]
    write_text(RESULTS, json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
