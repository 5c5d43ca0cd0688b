"""The simplest layer at each norm of a real encoder: how many become linear layers, and the quality that is left.

``python -m benchmarks.auto`` calibrates all-MiniLM-L6-v2 with ``to="auto"`` at several tolerances,
and writes benchmarks/results/auto.json, in a few minutes. ``python -m benchmarks.auto --add
OUT/report.json`` adds the result of a ``dynorm convert`` that distilled it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import dynorm
from benchmarks.subjects import Row, encoder, fitted, library_versions
from dynorm.files import write_text
from dynorm.replace.converted import dynorm_layers

RESULTS = Path(__file__).parent / "results" / "auto.json"
TOLERANCES, WITNESSES = (0.0, 0.02, 0.05, 0.08, 0.2), 4
ARMS = (("dyisru", None), *(("auto", each) for each in TOLERANCES))


def calibrated(to: str, tolerance: float | None) -> Row:
    """Return the layers at the sites of a model after calibration, and its distance from the original."""
    subject = encoder(0)
    # Its first stage is the calibration.
    chosen = {} if tolerance is None else {"tolerance": tolerance}
    next(fitted(subject, to, 0, **chosen, per_channel=True, witnesses=WITNESSES))
    figures = subject.figures()
    layers = dynorm_layers(subject.pretrained.model).values()
    kinds = [
        (type(layer) is dynorm.LinearControl, bool(layer.witness_channels)) for layer in layers
    ]
    return {"to": to, "tolerance": tolerance, **counted(kinds), "spearman": figures["spearman"]}


def counted(kinds: list[tuple[bool, bool]]) -> dict[str, int]:
    """Return how many layers are lines, lines with witnesses, and others, of (linear, with witnesses)."""
    names = {"linear": (True, False), "linear with witnesses": (True, True)}
    found = {name: kinds.count(kind) for name, kind in names.items()}
    return found | {"dyisru": len(kinds) - sum(found.values())}


def distilled(report: dict[str, Any]) -> Row:
    """Return the row of a report of ``dynorm convert``."""
    recipe, sites = report["meta"]["recipe"], report["sites"]
    kinds = [(site["layer"] == "linear", bool(site["witnesses"])) for site in sites]
    names = ("to", "tolerance", "steps", "minutes", "bf16")
    chosen = {
        name: recipe[name] if recipe["to"] == "auto" or name != "tolerance" else None
        for name in names
    }
    return {**chosen, **counted(kinds), "spearman": report["output"]["spearman"]}


def main() -> None:
    """Measure, or add a report, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--add", nargs="+", type=Path, default=[], help="reports of dynorm convert")
    arguments = parser.parse_args()
    found: dict[str, Any] = (
        json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {"distilled": []}
    )
    if not arguments.add:
        found["calibrated"] = [calibrated(*arm) for arm in ARMS]
        found["made_with"] = library_versions()
    for path in arguments.add:
        row = distilled(json.loads(path.read_text("utf-8")))
        same = ("to", "tolerance", "steps", "minutes")
        found["distilled"] = [
            each
            for each in found["distilled"]
            if any(each.get(name) != row.get(name) for name in same)
        ] + [row]
    write_text(RESULTS, json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
