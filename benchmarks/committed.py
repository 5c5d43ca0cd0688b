"""The committed results, as tables and pictures read them."""

import json
from pathlib import Path
from statistics import mean
from typing import Any

RESULTS = Path(__file__).parent / "results"
LAYERS = {
    "linear": "a line",
    "dyisru": "DyISRU",
    "dyt": "scaled DyT",
    "derf": "scaled Derf",
    "norms": "the norms",
    "moved": "the norms; images moved by one pixel",
}
# How the figures of several seeds become one, where that is not their mean.
WORST = {"cosine_min": min, "kl_worst": max}
Row = dict[str, Any]


def load(name: str) -> Row:
    """Return the committed results of a name."""
    document: Row = json.loads((RESULTS / f"{name}.json").read_text("utf-8"))
    return document


def left_in_place(row: Row) -> str:
    """Say what is left in a norm's place."""
    name = LAYERS[row["to"]]
    if row["witnesses"]:
        name += f", {row['witnesses']} witnesses"
    if row["prefix"]:
        name += " after a constant token"
    return name


def runs_of(model: str) -> list[dict[int, Row]]:
    """Return the rows of each conversion of a model by their steps of distillation."""
    runs: dict[tuple[Any, ...], dict[int, list[Row]]] = {}
    for row in load("quality").get(model, []):
        stages = runs.setdefault((row["to"], row["witnesses"], row["prefix"]), {})
        stages.setdefault(row["steps"], []).append(row)
    found = []
    for stages in runs.values():
        found.append({steps: over_seeds(stages[steps]) for steps in sorted(stages)})
    return found


def over_seeds(rows: list[Row]) -> Row:
    """Return one row of the same conversion with several seeds: its figures are means, or the worst."""
    one = {**rows[0], "seeds": len(rows)}
    for name in ("lr", "batch"):
        if any(row.get(name) != one.get(name) for row in rows):
            raise ValueError(f"rows of {one['steps']} steps must have one {name}")
    for kind in kinds_of(one):
        figures = {}
        for name in one[kind]:
            values = [row[kind][name] for row in rows]
            figures[name] = WORST.get(name, mean)(values)
        one[kind] = figures
    return one


def kinds_of(row: Row) -> list[str]:
    """Return the kinds of data that a row has figures of."""
    return [name for name, value in row.items() if isinstance(value, dict)]
