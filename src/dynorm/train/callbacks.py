"""Callbacks for the Trainer of transformers: annealing, and the monitor."""

from statistics import fmean

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState

from dynorm.layers import AnnealedNorm
from dynorm.train.anneal import AnnealSchedule, AnnealStart, annealed_layers, set_anneal_
from dynorm.train.monitor import Monitor


class AnnealCallback(TrainerCallback):  # type: ignore[misc]
    """A callback that anneals the norms of a model while the Trainer trains it.

    Convert the model with ``to="annealed"`` (or ``"annealed_linear"``, ...) first. Up to step
    ``start`` it trains with its norms. The activations of step ``start`` set the constants, over
    all ranks and without padding. Then t rises to 1 over ``length`` steps, and the rest of the run
    trains the point-wise model; call :func:`dynorm.finalize_` at the end. A run that is resumed
    from a checkpoint continues at its t. While it watches step ``start`` nothing runs compiled: if
    an error of your own Trainer ends that step, call ``cancel_()``.

    Args:
        start, length: those of :class:`dynorm.AnnealSchedule`.

    Raises:
        ArgumentError: an argument is outside its domain; or, when training begins, the annealing
            does not fit the run.
        ModelError: when training begins, the model has no annealed layer.

    Example:
        >>> callback = AnnealCallback(start=0.6, length=0.3)
        >>> callback.schedule.steps(1000)
        (600, 300)
    """

    def __init__(self, start: float = 0.6, length: float = 0.3) -> None:
        self.schedule = AnnealSchedule(start, length)
        self._start: AnnealStart | None = None

    def on_step_begin(
        self,
        args: object,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module,
        **kwargs: object,
    ) -> None:
        """Move t, and watch the activations of the step at which the annealing begins."""
        # A step that raised an error: its activations no longer fit the model.
        self.cancel_()
        set_anneal_(model, self.schedule.at(state.global_step, state.max_steps))
        start, _ = self.schedule.steps(state.max_steps)
        if state.global_step == start:
            self._start = AnnealStart(model)

    def on_step_end(
        self,
        args: object,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module,
        **kwargs: object,
    ) -> None:
        """Set the constants when the annealing begins."""
        if self._start is not None:
            self._start.finish_()
            self._start = None

    def cancel_(self) -> None:
        """Stop watching a step that an error has ended; a second call has no effect."""
        if self._start is not None:
            self._start.cancel_()
            self._start = None

    def on_log(
        self,
        args: object,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module,
        logs: dict[str, float] | None = None,
        **kwargs: object,
    ) -> None:
        """Add the mean t to the logs that are printed, and to the history of the Trainer."""
        if not any(isinstance(module, AnnealedNorm) for module in model.modules()):
            # The model has been finalized, and this is the log of an evaluation.
            return
        t = round(fmean(layer.position for layer in annealed_layers(model).values()), 4)
        if logs is not None:
            logs["t"] = t
        if state.log_history:
            state.log_history[-1]["t"] = t


class MonitorCallback(TrainerCallback):  # type: ignore[misc]
    """A callback that watches the point-wise layers in training, and warns when one saturates.

    At each log the figures of :class:`dynorm.Monitor` go into ``trainer.state.log_history``, and the
    largest share of saturated outputs is printed with the loss.

    Raises:
        ModelError: when training begins, the model has no point-wise layer.

    Example:
        >>> from transformers import Trainer, TrainingArguments
        >>> model = nn.Sequential(nn.Linear(4, 8), dynorm.DyISRU(8))
        >>> arguments = TrainingArguments(getfixture("tmp_path"), report_to=[], use_cpu=True)
        >>> from dynorm.train.callbacks import MonitorCallback
        >>> trainer = Trainer(model, arguments, callbacks=[MonitorCallback()])
    """

    def __init__(self) -> None:
        self._monitor: Monitor | None = None

    def on_train_begin(
        self,
        args: object,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module,
        **kwargs: object,
    ) -> None:
        """Watch the model, and no longer the one of a run that an error interrupted."""
        self.on_train_end(args, state, control)
        self._monitor = Monitor(model)

    def on_train_end(
        self, args: object, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Stop watching the model."""
        if self._monitor is not None:
            self._monitor.close()
            self._monitor = None

    def on_log(
        self,
        args: object,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: object,
    ) -> None:
        """Add the figures to the history of the Trainer, and the worst one to its printed logs."""
        figures = self._monitor.read() if self._monitor is not None else {}
        if not figures:
            return
        state.log_history[-1].update(figures)
        if logs is not None:
            shares = [value for name, value in figures.items() if name.startswith("saturated/")]
            logs["saturated"] = max(shares)
