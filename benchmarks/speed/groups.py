"""Times that belong together: the contenders of one pass over one input, or the variants of one model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks.speed.timing import Spread, ratio, spread

COPY = "copy, output given"
# What each pass's contenders are compared with.
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
        return {
            "rows": self.rows,
            "channels": self.channels,
            "dtype": self.dtype,
            "threads": self.threads,
            "pass": self.stage,
            "rounds": len(self.times[COPY]),
            "floor_over_copy": FLOORS[self.stage],
            "contenders": found,
        }


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
        return Spread(*(value - 1 for value in ratio(self.times[variant], self.times["identities"])))

    def to_dict(self) -> dict[str, Any]:
        """Return median and quartiles, in milliseconds, and shares, as plain values."""
        return {
            "model": self.name,
            "batch": self.batch,
            "norms": self.norms,
            "threads": self.threads,
            "compiled": self.compiled,
            "rounds": len(self.times["identities"]),
            "variants": {
                name: {
                    "milliseconds": spread(times).scaled(1e3).rounded(),
                    "share_over_identities": self.share(name).rounded(3),
                    "repetitions": self.repetitions[name],
                }
                for name, times in self.times.items()
            },
        }
