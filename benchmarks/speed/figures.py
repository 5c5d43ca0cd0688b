"""Compute the figures of contenders timed together, and compare the main ratios with goals.json."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.speed.timing import Spread, ratio, spread

# Each ratio has two bounds, "goal" and the harder "better". They are the least value if the unit is
# "times as fast", and the largest one otherwise.
_GOALS_FILE = Path(__file__).with_name("goals.json")
GOALS: list[dict[str, Any]] = json.loads(_GOALS_FILE.read_text("utf-8"))
COPY = "copy, output given"
# The contender that the others of each pass are compared with.
NORMS = {"forward": "F.layer_norm", "backward": "nn.LayerNorm", "both": "nn.LayerNorm"}
# The least number of tensors that a pass reads and writes, over the two of a copy.
FLOORS = {"forward": 1.0, "backward": 1.5, "both": 2.5}
Row = dict[str, Any]


@dataclass(frozen=True)
class Group:
    """The times of one pass over one input, by contender: seconds per call in each round."""

    rows: int
    channels: int
    dtype: str
    threads: int
    stage: str
    times: dict[str, list[float]]
    outputs: dict[str, str]
    repetitions: dict[str, int]

    def ratio(self, above: str, below: str) -> Spread:
        """Return the time of one over that of another in the same rounds."""
        return ratio(self.times[above], self.times[below])

    def to_dict(self) -> Row:
        """Return median and quartiles, in microseconds, and ratios, as plain values."""
        return {
            "rows": self.rows,
            "channels": self.channels,
            "dtype": self.dtype,
            "threads": self.threads,
            "pass": self.stage,
            "rounds": len(self.times[COPY]),
            "floor_over_copy": FLOORS[self.stage],
            "contenders": {name: self._entry(name) for name in self.times},
        }

    def _entry(self, name: str) -> Row:
        """Return the figures of one contender."""
        norm = NORMS[self.stage]
        entry: Row = {
            "output": self.outputs[name],
            "microseconds": spread(self.times[name]).scaled(1e6).rounded(),
            "over_copy": self.ratio(name, COPY).rounded(),
            "times_as_fast_as_layer_norm": self.ratio(norm, name).rounded(),
            "repetitions": self.repetitions[name],
        }
        # Such as "DyT" of "DyT, output given" and of "DyT compiled".
        function = name.split(" ")[0].rstrip(",")
        eager = f"{function} eager"
        if eager in self.times and eager != name:
            entry["times_as_fast_as_eager"] = self.ratio(eager, name).rounded()
        return entry


@dataclass(frozen=True)
class ModelGroup:
    """The times of a model, by variant: seconds per call in each round."""

    name: str
    batch: str
    norms: int
    threads: int
    compiled: bool
    times: dict[str, list[float]]
    repetitions: dict[str, int]

    def share(self, variant: str) -> Spread:
        """Return the share of the norms: the time over that with identities, less 1."""
        quotient = ratio(self.times[variant], self.times["identities"])
        return Spread(quotient.median - 1, quotient.lower - 1, quotient.upper - 1)

    def to_dict(self) -> Row:
        """Return median and quartiles, in milliseconds, and shares, as plain values."""
        variants = {}
        for name, times in self.times.items():
            variants[name] = {
                "milliseconds": spread(times).scaled(1e3).rounded(),
                "share_over_identities": self.share(name).rounded(3),
                "repetitions": self.repetitions[name],
            }
        return {
            "model": self.name,
            "batch": self.batch,
            "norms": self.norms,
            "threads": self.threads,
            "compiled": self.compiled,
            "rounds": len(self.times["identities"]),
            "variants": variants,
        }


def ratios(
    groups: Sequence[Group],
    models: Sequence[ModelGroup],
    threads: int,
    device: str = "cpu",
) -> list[Row]:
    """Return one row per goal for one number of threads.

    A ratio that was not measured is None, and the note says why. A GPU's figures are not compared
    with a CPU's goals, nor a CPU's with a GPU's.
    """
    rows = []
    for goal in GOALS:
        measured: Spread | None = None
        note = "not in this run"
        if goal["device"] == device:
            if "model" in goal:
                measured, note = _model_share(goal, models, threads)
            else:
                measured, note = _ratio(goal, groups, threads)
        row: Row = {
            "what": goal["what"],
            "unit": goal["unit"],
            "measured": None,
            "note": note,
        }
        if measured is not None:
            row["measured"] = measured.rounded()
        rows.append(row)
    return rows


def reached(row: Row, bound: str = "goal") -> bool | None:
    """Return whether the median of a row reaches its goal; None if nothing was measured."""
    if row["measured"] is None:
        return None
    limits = {goal["what"]: goal[bound] for goal in GOALS}
    limit = limits[row["what"]]
    median = row["measured"][0]
    if row["unit"] == "times as fast":
        return bool(median >= limit)
    return bool(median <= limit)


def _ratio(
    goal: Row,
    groups: Sequence[Group],
    threads: int,
) -> tuple[Spread | None, str]:
    """Return the ratio that a goal is about, and a note."""
    matching = []
    for group in groups:
        if [group.rows, group.channels, group.dtype, group.stage] == goal["group"]:
            matching.append(group)
    if not matching or matching[0].threads != threads:
        return None, "not in this run"
    group = matching[0]
    above, below = goal["of"]
    # The floor is the least time that memory traffic allows, as a number of copies.
    below_name = COPY if below == "floor" else below
    for name in (above, below_name):
        if name not in group.times:
            return None, f"{name} not in this run"
    measured = group.ratio(above, below_name)
    if below == "floor":
        measured = measured.scaled(1 / FLOORS[group.stage])
    note = goal["note"] if goal["device"] == "cpu" else torch.cuda.get_device_name()
    return measured, note


def _model_share(
    goal: Row, models: Sequence[ModelGroup], threads: int
) -> tuple[Spread | None, str]:
    """Return the share of DyISRU in a model that a goal is about, and LayerNorm's as a note."""
    for group in models:
        if [group.name, group.batch] != goal["model"]:
            continue
        if group.threads == threads and not group.compiled:
            return group.share("DyISRU"), f"LayerNorm's: {group.share('norms').median:.1%}"
    return None, "no model of this name in this run"
