"""The ratios that matter most, and whether a run reached the goals that goals.json sets for them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.speed.groups import COPY, FLOORS, Group, ModelGroup
from benchmarks.speed.timing import Spread

# Each ratio with two bounds, "goal" and the harder "better": of a "times as fast" the least, of all else the most.
GOALS: list[dict[str, Any]] = json.loads(Path(__file__).with_name("goals.json").read_text("utf-8"))


def ratios(
    groups: Sequence[Group], models: Sequence[ModelGroup], threads: int, device: str = "cpu"
) -> list[dict[str, Any]]:
    """Return one row per goal for one number of threads; a ratio that was not measured is None, and the note says why.

    A GPU's figures say nothing about a CPU's goals, nor the other way round.
    """
    rows = []
    for goal in GOALS:
        found: tuple[Spread | None, str] = None, "not in this run"
        if goal["device"] == device:
            found = _model_share(goal, models, threads) if "model" in goal else _ratio(goal, groups, threads)
        measured = None if found[0] is None else found[0].rounded()
        rows.append({"what": goal["what"], "unit": goal["unit"], "measured": measured, "note": found[1]})
    return rows


def reached(row: dict[str, Any], bound: str = "goal") -> bool | None:
    """Say whether the median of a row is on the right side of its goal; None where nothing was measured."""
    if row["measured"] is None:
        return None
    limit = next(goal[bound] for goal in GOALS if goal["what"] == row["what"])
    return bool(row["measured"][0] >= limit if row["unit"] == "times as fast" else row["measured"][0] <= limit)


def _ratio(goal: dict[str, Any], groups: Sequence[Group], threads: int) -> tuple[Spread | None, str]:
    group = next((g for g in groups if [g.rows, g.channels, g.dtype, g.stage] == goal["group"]), None)
    if group is None or group.threads != threads:
        return None, "not in this run"
    above, below = goal["of"]
    # The floor is what memory traffic allows at least, in copies.
    names = (above, COPY if below == "floor" else below)
    missing = [name for name in names if name not in group.times]
    if missing:
        return None, f"{missing[0]} not in this run"
    found = group.ratio(*names)
    if below == "floor":
        found = found.scaled(1 / FLOORS[group.stage])
    return found, goal["note"] if goal["device"] == "cpu" else torch.cuda.get_device_name()


def _model_share(goal: dict[str, Any], models: Sequence[ModelGroup], threads: int) -> tuple[Spread | None, str]:
    for group in models:
        if [group.name, group.batch] == goal["model"] and group.threads == threads and not group.compiled:
            return group.share("DyISRU"), f"LayerNorm's: {group.share('norms').median:.1%}"
    return None, "no model of this name in this run"
