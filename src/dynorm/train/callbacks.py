"""The callbacks for transformers' Trainer: annealing, and the monitor."""

from statistics import fmean
from typing import Any

from torch import nn
from transformers import Trainer, TrainerCallback
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from dynorm.arguments import check_share
from dynorm.errors import ArgumentError
from dynorm.layers import AnnealedNorm
from dynorm.train.anneal import AnnealSchedule, Curve, Order, annealed_layers
from dynorm.train.monitor import Monitor
from dynorm.train.start import AnnealStart, require_same_anneal


class AnnealCallback(TrainerCallback):  # type: ignore[misc]
    """A callback that anneals the norms of a model while the Trainer trains it.

    Convert the model with ``to="annealed"`` (or ``"annealed_linear"``, ...) first. Up to step
    ``start`` it trains with its norms. The activations of step ``start`` itself set the constants,
    over all ranks and without padding. Then t rises to 1 over ``length`` steps, and the rest of the
    run trains the point-wise model; call :func:`dynorm.finalize_` when it is over. A run that is
    resumed from a checkpoint goes on where it was.

    Args:
        start, length, shape, order: those of :class:`dynorm.AnnealSchedule`.

    Raises:
        ArgumentError: an argument is outside its domain; or, when training begins, the annealing
            does not fit the run.
        ModelError: when training begins, the model has no annealed layer, or ranks disagree.

    Example:
        >>> callback = AnnealCallback(start=0.6, length=0.3)
        >>> callback.schedule.steps(1000)
        (600, 300)
    """

    def __init__(
        self,
        start: float = 0.6,
        length: float = 0.3,
        shape: Curve = "linear",
        order: Order = "together",
    ) -> None:
        self.schedule = AnnealSchedule(start, length, shape, order)
        self._start: AnnealStart | None = None

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any
    ) -> None:
        """Check that the annealing fits, and go to where a resumed run stands."""
        self._cancel()
        require_same_anneal(model)
        self.schedule.apply_(model, state.global_step, state.max_steps)

    def on_step_begin(
        self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any
    ) -> None:
        """Move t, and watch the activations of the step at which the annealing begins."""
        self._cancel()
        self.schedule.apply_(model, state.global_step, state.max_steps)
        if state.global_step == self.schedule.steps(state.max_steps)[0]:
            self._start = AnnealStart(model)

    def on_step_end(
        self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any
    ) -> None:
        """Set the constants when the annealing begins."""
        if self._start is not None:
            self._start.finish_()
            self._start = None

    def on_log(
        self, args: Any, state: Any, control: Any, model: nn.Module, logs: Any = None, **kwargs: Any
    ) -> None:
        """Put t beside the loss, for the callbacks that print it and in the last entry of the Trainer's history."""
        if not any(isinstance(module, AnnealedNorm) for module in model.modules()):
            # The model was finalized since; its evaluation logs too.
            return
        t = {"t": round(fmean(layer.position for layer in annealed_layers(model).values()), 4)}
        if logs is not None:
            logs.update(t)
        if state.log_history:
            state.log_history[-1].update(t)

    def _cancel(self) -> None:
        """Forget a step that raised an error: its activations are no longer those of this model."""
        if self._start is not None:
            self._start.cancel_()
            self._start = None


class MonitorCallback(TrainerCallback):  # type: ignore[misc]
    """A callback that watches the point-wise layers while the Trainer trains, and warns when one saturates.

    At each log the figures of :class:`dynorm.Monitor` go to TensorBoard and all else that
    ``report_to`` names, and into ``trainer.state.log_history``. The largest share of saturated
    outputs is printed beside the loss.

    Args:
        trainer: the one that it is added to.
        warn_at: as for :class:`dynorm.Monitor`.

    Raises:
        ArgumentError: ``trainer`` is no Trainer, or ``warn_at`` not from 0 to 1.
        ModelError: when training begins, the model has no point-wise layer.

    Example:
        >>> from transformers import Trainer, TrainingArguments
        >>> model = nn.Sequential(nn.Linear(4, 8), dynorm.DyISRU(8))
        >>> trainer = Trainer(model, TrainingArguments(getfixture("tmp_path"), report_to=[], use_cpu=True))
        >>> trainer.add_callback(dynorm.MonitorCallback(trainer))
    """

    def __init__(self, trainer: Trainer, warn_at: float = 0.8) -> None:
        if not isinstance(trainer, Trainer):
            raise ArgumentError(
                f"trainer must be a Trainer of transformers, got {type(trainer).__name__}: make it "
                "first, and call "
                "trainer.add_callback(dynorm.MonitorCallback(trainer))"
            )
        self._trainer, self._warn_at = trainer, check_share("warn_at", warn_at)
        self._monitor: Monitor | None = None

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any
    ) -> None:
        """Watch the model; a run that an error broke off is watched no more."""
        self.on_train_end(args, state, control)
        self._monitor = Monitor(model, self._warn_at)
        # Before the callback that prints the loss, which the Trainer had first.
        callbacks = self._trainer.callback_handler.callbacks
        callbacks.sort(key=lambda callback: callback is not self)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave it alone again."""
        if self._monitor is not None:
            self._monitor.close()
            self._monitor = None

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Hand the figures to the services that the Trainer reports to, besides their own logs."""
        figures = self._monitor.read() if self._monitor is not None else {}
        if not figures:
            return
        services: Any = tuple(INTEGRATION_TO_CALLBACK.values())
        for callback in self._trainer.callback_handler.callbacks:
            if isinstance(callback, services):
                callback.on_log(args, state, control, logs=dict(figures), **kwargs)
        state.log_history[-1].update(figures)
        if logs is not None:
            logs["saturated"] = max(
                value for name, value in figures.items() if name.startswith("saturated/")
            )
