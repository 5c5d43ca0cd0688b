"""Lines about a distillation for a reader without a terminal. It imports transformers."""

import sys
import time
from collections.abc import Callable

from transformers import TrainerCallback, TrainerState

# How often a line is said.
_LINES = 10


class Progress(TrainerCallback):  # type: ignore[misc]
    """Say the loss and the time that is left, ten times in a training; a terminal has a bar."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._first = 0
        self._begun = 0.0

    def on_train_begin(self, *_: object, **kwargs: object) -> None:
        """Say how to read the losses that follow."""
        self._say(
            "distillation: its loss has logarithms of the layer errors, so it can be below 0; less "
            "is better"
        )

    def on_step_end(self, args: object, state: TrainerState, *_: object, **kwargs: object) -> None:
        """Say a line at each tenth of the steps."""
        now = time.perf_counter()
        # The first step is not timed: it allocates memory.
        if not self._first:
            self._first = state.global_step
            self._begun = now
            return
        every = max(1, state.max_steps // _LINES)
        is_last = state.global_step == state.max_steps
        if sys.stderr.isatty() or state.global_step % every or is_last:
            return
        seconds = (now - self._begun) / (state.global_step - self._first)
        left = seconds * (state.max_steps - state.global_step)
        losses = [entry["loss"] for entry in state.log_history if "loss" in entry]
        loss = f", loss {losses[-1]:.3f}" if losses else ""
        self._say(
            f"distillation: step {state.global_step:,} of {state.max_steps:,}{loss}, about "
            f"{left / 60:.1f} minutes left"
        )
