"""The Trainer that distills a model. It imports transformers, so import it only when needed."""

import math
import signal
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import fmean
from threading import current_thread, main_thread
from typing import Any

import torch
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, IterableDataset
from transformers import (
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.integrations.integration_utils import (
    INTEGRATION_TO_CALLBACK,
    get_available_reporting_integrations,
)

from dynorm.batches import Batch
from dynorm.errors import ArgumentError, ModelError, StorageError
from dynorm.layers import param_groups
from dynorm.ranks import BATCH, Ranks
from dynorm.site import as_strings
from dynorm.train.objective import Distillation, largest_tensor

_WARM_UP = 10
# After this many steps the time that is left is said for the first time.
_TIMED = 20


class TimedProgress(TrainerCallback):  # type: ignore[misc]
    """Show the progress of a distillation, and stop it when its time is over.

    ``elapsed_share`` returns the share of the time that is over on this rank.
    """

    def __init__(
        self,
        trainer: "DistillationTrainer",
        progress: Progress,
        elapsed_share: Callable[[], float] | None,
    ) -> None:
        self.mean_share = 0.0  # that of all ranks
        self._trainer = trainer
        self._progress = progress
        self._elapsed_share = elapsed_share

    def on_train_begin(
        self, args: object, state: TrainerState, *_: object, **kwargs: object
    ) -> None:
        """Begin the bar."""
        # The callbacks after this one see the model that is trained, without its teacher.
        self._trainer.callback_handler.model = self._trainer.objective.model
        self._task = self._progress.add_task("distilling", total=state.max_steps)

    def on_step_end(
        self, args: object, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Move the bar, and look at the time."""
        description = f"distilling, loss {float(self._trainer.last_loss):.3f}"
        self._progress.update(self._task, completed=state.global_step, description=description)
        if self._elapsed_share is not None:
            self.mean_share = fmean(self._trainer.objective.ranks.exchange(self._elapsed_share()))
            if self.mean_share > 1:
                control.should_training_stop = True

    def on_train_end(
        self,
        args: object,
        state: TrainerState,
        *_: object,
        **kwargs: object,
    ) -> None:
        """Fill the bar: if the time was over first, the run has no further steps."""
        self._progress.update(self._task, total=state.global_step)


class Interrupt(TrainerCallback):  # type: ignore[misc]
    """End a training after the present step when Ctrl-C is pressed, on all ranks together."""

    def __init__(self, ranks: Ranks) -> None:
        self.pressed = False
        self._ranks = ranks

    @contextmanager
    def listening(self, wanted: bool) -> Iterator[None]:
        """Take the first Ctrl-C; the next one stops the program as usual."""
        # Python delivers Ctrl-C to the main thread, and only that may set a handler.
        if not wanted or current_thread() is not main_thread():
            yield
            return
        before = signal.getsignal(signal.SIGINT)

        def press(number: int, frame: object) -> None:
            self.pressed = True
            signal.signal(signal.SIGINT, before)

        signal.signal(signal.SIGINT, press)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Stop, with a checkpoint if the run has any."""
        self.pressed = any(self._ranks.exchange(self.pressed))
        if self.pressed:
            control.should_training_stop = True
            control.should_save = args.save_strategy != "no"


class Announcer(TrainerCallback):  # type: ignore[misc]
    """Say at which step a distillation resumes, and how long it will take.

    ``say`` is called with a line after the first steps, and again after each quarter, unless a bar
    shows the time.
    """

    def __init__(self, say: Callable[[str], None], has_bar: bool = False) -> None:
        self._say = say
        self._has_bar = has_bar
        self._first = 0
        self._begun = 0.0
        self._due: list[int] = []

    def on_train_begin(
        self, args: object, state: TrainerState, *_: object, **kwargs: object
    ) -> None:
        """Plan the lines; a resumed run has taken steps already."""
        done = state.global_step
        left = state.max_steps - done
        if done:
            self._say(f"distillation resumes at step {done:,} of {state.max_steps:,}")
        # The first step is not timed: it allocates memory.
        self._first = done + 1
        steps = {min(_TIMED, left // 4), left // 4, left // 2, 3 * left // 4}
        self._due = [done + count for count in sorted(steps) if count > 1]

    def on_step_end(self, args: object, state: TrainerState, *_: object, **kwargs: object) -> None:
        """Say how much time is left, at the steps that are due."""
        step = state.global_step
        now = time.perf_counter()
        if step == self._first:
            self._begun = now
        if self._has_bar or step not in self._due:
            return
        seconds = (now - self._begun) / (step - self._first)
        left = in_words(seconds * (state.max_steps - step))
        self._say(f"step {step:,} of {state.max_steps:,}: about {left} of distillation left")


def in_words(seconds: float) -> str:
    """Return a time as a reader says it, such as "40 s", "12 minutes" or "3.5 hours"."""
    if seconds < 99.5:
        return f"{max(seconds, 1):.0f} s"
    if seconds < 99.5 * 60:
        return f"{seconds / 60:.0f} minutes"
    return f"{seconds / 3600:.1f} hours"


class BatchStream(IterableDataset[dict[str, Batch]]):
    """The batches of a distillation, each under the name of the argument of the objective."""

    def __init__(self, objective: Distillation, batches: Iterator[Batch]) -> None:
        self._objective = objective
        self._batches = batches

    def __iter__(self) -> Iterator[dict[str, Batch]]:
        with self._objective.together():
            for batch in self._batches:
                yield {"batch": batch}


class DistillationTrainer(Trainer):  # type: ignore[misc]
    """A Trainer whose loss and checkpoints are those of a distillation."""

    def __init__(
        self,
        objective: Distillation,
        batches: Iterator[Batch],
        arguments: TrainingArguments,
        lr: float,
        callbacks: Sequence[object],
        progress: Progress,
        elapsed_share: Callable[[], float] | None,
    ) -> None:
        self.objective = objective
        self.samples = 0
        self.last_loss = torch.zeros((), dtype=torch.float32, device="cpu")
        timed = TimedProgress(self, progress, elapsed_share)
        # The Trainer keeps both in a wrapper of accelerate; the checkpoints need them unwrapped.
        self._adam = adam(objective.model, lr)
        self._schedule = LambdaLR(
            self._adam, lambda step: rate_factor(step, arguments.max_steps, timed.mean_share)
        )
        super().__init__(
            objective,
            arguments,
            train_dataset=BatchStream(objective, batches),
            optimizers=(self._adam, self._schedule),
            callbacks=[timed, *callbacks],
        )
        # Without its bar the Trainer prints its log instead, in the middle of ours.
        self.remove_callback(PrinterCallback)

    def run(self, checkpoints: str | Path | None) -> int:
        """Train, from the newest checkpoint in the folder if there is one; return its step or 0."""
        newest = None if checkpoints is None else newest_checkpoint(Path(checkpoints))
        if newest is None:
            self.train()
            return 0
        folder, state = newest
        resumed = int(state.global_step)
        if state.global_step < self.args.max_steps:
            self.train(resume_from_checkpoint=folder)
        else:
            # The Trainer would take one more step.
            self._load_from_checkpoint(folder)
            self.state = state
        return resumed

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return the batches, not prepared by accelerate, which would split each over the ranks."""
        # Their memory is not pinned, because they may be on a GPU already.
        return DataLoader(self.train_dataset, batch_size=None)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        *args: object,
        **kwargs: object,
    ) -> Tensor:
        """Return the loss of a batch in eval mode."""
        # The Trainer turns dropout on; here it would only be noise between teacher and student.
        model.eval()
        with self.objective.together():
            loss: Tensor = model(inputs["batch"])
        # Notice a failed rank before the gradients are summed.
        self.objective.ranks.exchange(BATCH)
        self.samples += largest_tensor(inputs["batch"]).shape[0]
        self.last_loss = loss.detach()
        return loss

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model with the state of its optimizer and schedule, on all ranks together."""
        state = self._state()
        # It warns that a single process does not save in parallel.
        with warnings.catch_warnings(action="ignore"):
            save(state, checkpoint_id=output_dir)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Do nothing: they are saved with the model."""

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        """Load all that was saved; the number of ranks may be another."""
        try:
            state = self._state()
            with warnings.catch_warnings(action="ignore"):
                load(state, checkpoint_id=resume_from_checkpoint)
            saved = state["recipe"]
            differing = [
                name for name, value in self.objective.recipe.items() if saved[name] != value
            ]
            if differing:
                raise ValueError(f"it differs in {' and '.join(differing)}")
            set_state_dict(
                self.objective.model,
                self._adam,
                model_state_dict=state["model"],
                optim_state_dict=state["optimizer"],
            )
            self._schedule.load_state_dict(state["schedule"])
        except (Exception, CheckpointException) as error:
            reason = str(error).strip().splitlines()[-1]
            raise StorageError(
                "the checkpoint must be of this model and recipe, but "
                f"{resume_from_checkpoint} is not: {reason:.300}: remove it, or give another folder"
            ) from error

    def _state(self) -> dict[str, Any]:
        """Return all that is saved; loading writes into its tensors and its dicts."""
        weights, moments = get_state_dict(self.objective.model, self._adam)
        return {
            "model": weights,
            "optimizer": moments,
            "schedule": self._schedule.state_dict(),
            "recipe": dict(self.objective.recipe),
        }


def adam(model: nn.Module, lr: float) -> torch.optim.AdamW:
    """Return the optimizer, with a state for every parameter."""
    # Fused, a step over 22 M parameters takes a twentieth of the time on a CPU.
    optimizer = torch.optim.AdamW(param_groups(model, lr=lr, constants_lr=lr), fused=True)
    for group in optimizer.param_groups:
        for p in group["params"]:
            # A parameter that no loss reaches gets a state too, because a checkpoint can only be
            # loaded into an optimizer that is complete.
            optimizer.state[p] = {
                "step": torch.zeros((), device=p.device, dtype=torch.float32),
                "exp_avg": torch.zeros_like(p),
                "exp_avg_sq": torch.zeros_like(p),
            }
    return optimizer


def rate_factor(step: int, steps: int, elapsed_share: float = 0.0) -> float:
    """Return the learning rate of a step over the highest one: a warm-up, then a cosine to 0.

    ``elapsed_share`` is the share of the time that is over. If it is ahead of the steps, because the
    machine is slower than when they were planned, the cosine follows it: a run that is cut off at a
    high rate can be worse than none.
    """
    warm_up = max(steps // 20, min(steps, _WARM_UP))
    if step < warm_up:
        # At a rate of 0 the first step would be wasted.
        return max(step, 1) / warm_up
    progress = max((step - warm_up) / max(1, steps - warm_up), elapsed_share)
    return 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def training_arguments(
    objective: Distillation,
    folder: str | Path,
    steps: int,
    seed: int,
    accumulate: int,
    *,
    save: bool,
    report_to: str | Iterable[str] | None = None,
) -> TrainingArguments:
    """Return the arguments of the Trainer; ModelError if the environment names other processes."""
    names = as_strings(report_to, "report_to", "tensorboard")
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=int(steps),
        gradient_accumulation_steps=int(accumulate),
        logging_steps=max(1, steps // 50),
        save_strategy="steps" if save else "no",
        save_steps=max(1, steps // 10),
        save_total_limit=1,
        report_to=list(names) or "none",
        disable_tqdm=True,
        # The buffers are alike on all ranks, because nothing is in training mode.
        ddp_broadcast_buffers=False,
        seed=int(seed),
        use_cpu=next(objective.model.parameters()).device.type == "cpu",
    )
    # One process uses one GPU. The Trainer would copy the model to all of them, without its hooks.
    arguments._n_gpu = min(arguments.n_gpu, 1)
    if arguments.world_size != objective.ranks.size:
        raise ModelError(
            f"the environment must name the {objective.ranks.size} processes of the group, but names "
            f"{arguments.world_size}: start them with torchrun or accelerate launch, and call "
            "torch.distributed.init_process_group first"
        )
    return arguments


def check_report_to(report_to: str | Iterable[str] | None) -> None:
    """Refuse a logger that transformers does not know, or whose library is not installed."""
    names = as_strings(report_to, "report_to", "tensorboard")
    known = sorted(INTEGRATION_TO_CALLBACK)
    special = ("none", "all")
    for name in names:
        if name not in known and name not in special:
            raise ArgumentError(f"report_to must be one of {', '.join(known)}, got {name!r}")
    available = get_available_reporting_integrations()
    for name in names:
        if name not in available and name not in special:
            raise ArgumentError(
                f"report_to must name a library that is installed, but {name!r} is not: install it"
            )


def newest_checkpoint(folder: Path) -> tuple[str, TrainerState] | None:
    """Return the last complete checkpoint, with the state of the Trainer, which is written last."""
    # By number: 9 comes before 10.
    paths = sorted(folder.glob("checkpoint-*"), key=lambda path: (len(path.name), path.name))
    for path in reversed(paths):
        with suppress(OSError, ValueError, TypeError):
            return str(path), TrainerState.load_from_json(str(path / "trainer_state.json"))
    return None


def check_callbacks(callbacks: Sequence[object]) -> None:
    """Refuse anything but a list of callbacks."""
    is_right = isinstance(callbacks, list | tuple)
    if is_right:
        # The Trainer also takes a class, and makes an instance of it.
        kinds = [c if isinstance(c, type) else type(c) for c in callbacks]
        is_right = all(issubclass(kind, TrainerCallback) for kind in kinds)
    if not is_right:
        raise ArgumentError(
            f"callbacks must be a list of transformers' TrainerCallback, got {callbacks!r:.200}"
        )


def progress_bar(quiet: bool) -> Progress:
    """Return a bar on the standard error, with step, loss and the time that is left."""
    return Progress(
        *Progress.get_default_columns(),
        MofNCompleteColumn(),
        console=Console(stderr=True),
        disable=quiet,
    )
