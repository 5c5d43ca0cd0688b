"""The monitor as a callback of transformers' Trainer."""

from typing import Any

from torch import nn
from transformers import Trainer, TrainerCallback
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from dynorm.fit.monitor import Monitor


class MonitorCallback(TrainerCallback):  # type: ignore[misc]
    """A callback that watches the point-wise layers while the Trainer trains, and warns when one saturates.

    At each log the figures of :class:`dynorm.Monitor` go to TensorBoard and all else that ``report_to`` names, and into
    ``trainer.state.log_history``. The largest share of saturated outputs is printed beside the loss.

    Args:
        trainer: the one that it is added to.
        warn_at: as for :class:`dynorm.Monitor`.

    Raises:
        ModelError: when training begins, the model has no point-wise layer.

    Example:
        >>> from transformers import Trainer, TrainingArguments
        >>> model = nn.Sequential(nn.Linear(4, 8), dynorm.DyISRU(8))
        >>> trainer = Trainer(model, TrainingArguments(getfixture("tmp_path"), report_to=[], use_cpu=True))
        >>> trainer.add_callback(dynorm.MonitorCallback(trainer))
    """

    def __init__(self, trainer: Trainer, warn_at: float = 0.8) -> None:
        self._trainer, self._warn_at = trainer, warn_at
        self._monitor: Monitor | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any) -> None:
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
            logs["saturated"] = max(value for name, value in figures.items() if name.startswith("saturated/"))
