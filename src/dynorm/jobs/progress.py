"""Lines about a distillation for a reader without a terminal. It imports transformers."""

import sys
import time
from collections.abc import Callable

from transformers import TrainerCallback, TrainerState

# How often a line is said.
_LINES = 10


class Progress(TrainerCallback):  # type: ignore[misc]
    """Say the step and the time that is left, ten times in a training; a terminal has a bar."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._first = 0
        self._begun = 0.0

    def on_train_begin(
        self, args: object, state: TrainerState, *_: object, **kwargs: object
    ) -> None:
        """Note the time, and the step that a checkpoint goes on from."""
        self._first = state.global_step
        self._begun = time.perf_counter()

    def on_step_end(self, args: object, state: TrainerState, *_: object, **kwargs: object) -> None:
        """Say a line at each tenth of the steps."""
        every = max(1, state.max_steps // _LINES)
        if state.global_step % every or sys.stderr.isatty():
            return
        seconds = (time.perf_counter() - self._begun) / (state.global_step - self._first)
        left = seconds * (state.max_steps - state.global_step) / 60
        self._say(
            f"distillation: step {state.global_step:,} of {state.max_steps:,}, about {left:.1f} "
            "minutes left"
        )
