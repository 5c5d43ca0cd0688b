"""Callbacks of a run: the watch, the log, the early end, and the constants' warm-up."""

from __future__ import annotations

import math
import time
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from studies.data import Data
from studies.models import remeasure_, writers
from studies.runs import Record, RunFiles
from studies.settings import Settings

DIVERGED = 10.0
# Names of the Trainer, and of our log. Rates and times are left out: the settings and
# the result have them.
_COLUMNS = {
    "loss": "loss",
    "grad_norm": "grad_norm",
    "eval_mean": "held_out",
    "eval_accuracy": "accuracy",
    "beta": "beta",
    "t": "t",
}


class Watch(TrainerCallback):  # type: ignore[misc]
    """Takes the time of the steps, writes the log, and ends a run that diverges.

    Args:
        files: of the run.
    """

    def __init__(self, files: RunFiles) -> None:
        self.files = files
        self.before = 0.0
        self._started = self._step_started = time.perf_counter()
        self._steps: list[float] = []

    def times(self) -> Record:
        """Return the seconds of the run, those before a kill too, and of a step since the last call."""
        seconds = self.before + time.perf_counter() - self._started
        step = median(self._steps) if self._steps else math.nan
        self._steps = []
        return {"seconds": round(seconds, 2), "step_seconds": round(step, 5)}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Go on with the time of the checkpoint."""
        self.before = max((entry.get("seconds", 0.0) for entry in state.log_history), default=0.0)
        self._started = time.perf_counter()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the watch."""
        self._step_started = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop the watch; after the last step evaluate, which transformers 5.0 leaves out, and save nothing."""
        self._steps.append(time.perf_counter() - self._step_started)
        if state.global_step >= state.max_steps:
            control.should_save = False
            control.should_evaluate = True

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the log, and stop where the loss is lost."""
        if state.is_world_process_zero:
            self.files.write_log(lines(state.log_history))
        if diverged(state.log_history):
            control.should_training_stop = True
            control.should_save = control.should_evaluate = False


class WarmUp(TrainerCallback):  # type: ignore[misc]
    """Sets the constants anew ten times while the rate warms up, each time from another batch.

    Args:
        settings: of the run.
        data: of the run.
    """

    def __init__(self, settings: Settings, data: Data) -> None:
        self.settings, self.data = settings, data
        self.steps = frozenset(settings.warmup * time // 10 for time in range(1, 11))

    def on_step_begin(
        self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any
    ) -> None:
        """Set them before the step, so that a run resumed here does the same."""
        if state.global_step in self.steps:
            unwrapped = getattr(model, "module", model)
            remeasure_(unwrapped, self.settings, self.data, draw=state.global_step)


class FixedWriters(TrainerCallback):  # type: ignore[misc]
    """Holds the Frobenius norm of each matrix that writes to the stream at that of the start."""

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any
    ) -> None:
        """Measure the norms; those of a checkpoint are the same, to rounding."""
        self._writers: list[Tensor] = writers(model)
        self._norms = [weight.detach().norm() for weight in self._writers]

    @torch.no_grad()
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Put them back after the optimizer's step."""
        for weight, norm in zip(self._writers, self._norms, strict=True):
            weight.mul_(norm / weight.norm())


def diverged(history: list[Record]) -> bool:
    """Whether a logged loss is no number or above 10 nats; to guess bytes at random costs 5.5."""
    seen = [entry[key] for entry in history for key in ("loss", "eval_mean") if key in entry]
    return any(not value <= DIVERGED for value in seen)


def lines(history: list[Record]) -> list[Record]:
    """Return a line a logged step: what training and what evaluation said of it."""
    found: dict[int, Record] = {}
    for entry in history:
        line = {new: entry[old] for old, new in _COLUMNS.items() if old in entry}
        if line:
            found.setdefault(entry["step"], {"step": entry["step"]}).update(line)
    return [{key: _short(value) for key, value in line.items()} for line in found.values()]


def _short(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value
