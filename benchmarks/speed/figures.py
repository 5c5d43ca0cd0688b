"""The figures of contenders timed together, the ratios that matter most, and their goals (goals.json)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.speed.timing import Spread, ratio, spread

# Each ratio with two bounds, "goal" and the harder "better": of a "times as fast" the least, of all
# else the most.
GOALS: list[dict[str, Any]] = json.loads(Path(__file__).with_name("goals.json").read_text("utf-8"))
COPY = "copy, output given"
# The contender that the others of each pass are compared with.
NORMS = {"forward": "F.layer_norm", "backward": "nn.LayerNorm", "both": "nn.LayerNorm"}
# How many tensors a pass must read and write at least, over the two of a copy.
FLOORS = {"forward": 1.0, "backward": 1.5, "both": 2.5}


@dataclass(frozen=True)
class Group:
    """The times of one pass over one input: seconds per call, one for each round, by contender."""

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

    def to_dict(self) -> dict[str, Any]:
        """Return median and quartiles, in microseconds, and ratios, as plain values."""
        norm = NORMS[self.stage]
        found = {}
        for name in self.times:
            entry: dict[str, Any] = {
                "output": self.outputs[name],
                "microseconds": spread(self.times[name]).scaled(1e6).rounded(),
                "over_copy": self.ratio(name, COPY).rounded(),
                "times_as_fast_as_layer_norm": self.ratio(norm, name).rounded(),
                "repetitions": self.repetitions[name],
            }
            eager = f"{name.split(' ')[0].rstrip(',')} eager"
            if eager in self.times and eager != name:
                entry["times_as_fast_as_eager"] = self.ratio(eager, name).rounded()
            found[name] = entry
        about = {
            "rows": self.rows,
            "channels": self.channels,
            "dtype": self.dtype,
            "threads": self.threads,
        }
        figures = {
            "rounds": len(self.times[COPY]),
            "floor_over_copy": FLOORS[self.stage],
            "contenders": found,
        }
        return about | {"pass": self.stage} | figures


@dataclass(frozen=True)
class ModelGroup:
    """The times of a model's variants: seconds per call, one for each round, by variant."""

    name: str
    batch: str
    norms: int
    threads: int
    compiled: bool
    times: dict[str, list[float]]
    repetitions: dict[str, int]

    def share(self, variant: str) -> Spread:
        """Return the norms' share: the time over that with identities, less 1."""
        return Spread(
            *(value - 1 for value in ratio(self.times[variant], self.times["identities"]))
        )

    def to_dict(self) -> dict[str, Any]:
        """Return median and quartiles, in milliseconds, and shares, as plain values."""
        variants = {
            name: {
                "milliseconds": spread(times).scaled(1e3).rounded(),
                "share_over_identities": self.share(name).rounded(3),
                "repetitions": self.repetitions[name],
            }
            for name, times in self.times.items()
        }
        about = {
            "model": self.name,
            "batch": self.batch,
            "norms": self.norms,
            "threads": self.threads,
        }
        return about | {
            "compiled": self.compiled,
            "rounds": len(self.times["identities"]),
            "variants": variants,
        }


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
            found = (
                _model_share(goal, models, threads)
                if "model" in goal
                else _ratio(goal, groups, threads)
            )
        measured = None if found[0] is None else found[0].rounded()
        rows.append(
            {"what": goal["what"], "unit": goal["unit"], "measured": measured, "note": found[1]}
        )
    return rows


def reached(row: dict[str, Any], bound: str = "goal") -> bool | None:
    """Say whether the median of a row is on the right side of its goal; None where nothing was measured."""
    if row["measured"] is None:
        return None
    limit = next(goal[bound] for goal in GOALS if goal["what"] == row["what"])
    return bool(
        row["measured"][0] >= limit
        if row["unit"] == "times as fast"
        else row["measured"][0] <= limit
    )


def _ratio(
    goal: dict[str, Any], groups: Sequence[Group], threads: int
) -> tuple[Spread | None, str]:
    group = next(
        (g for g in groups if [g.rows, g.channels, g.dtype, g.stage] == goal["group"]), None
    )
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


def _model_share(
    goal: dict[str, Any], models: Sequence[ModelGroup], threads: int
) -> tuple[Spread | None, str]:
    for group in models:
        if (
            [group.name, group.batch] == goal["model"]
            and group.threads == threads
            and not group.compiled
        ):
            return group.share("DyISRU"), f"LayerNorm's: {group.share('norms').median:.1%}"
    return None, "no model of this name in this run"
