"""The Trainer that distills a model. It imports transformers, so import it only when needed."""

import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_model, save_model
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, IterableDataset
from transformers import PrinterCallback, Trainer, TrainerState, TrainingArguments

from dynorm.arguments import upcast
from dynorm.batches import Batch
from dynorm.errors import ModelError, StorageError
from dynorm.files import read_json
from dynorm.train.objective import Distillation
from dynorm.wrappers import gathered

_WARM_UP = 10
_STATE = "trainer_state.json"
RUN = "run.json"
"""The file next to the checkpoints that says of which run they are."""
LOSS = "loss of the first batches"
"""The name of the number of a run that may differ a little when it is resumed."""
_WEIGHTS = "model.safetensors"
# About that of the matrices of an encoder.
_LEAST_SIZE = 0.06


class BatchStream(IterableDataset[dict[str, Batch]]):
    """The batches of a distillation, each under the name of the argument of the objective."""

    def __init__(self, batches: Iterable[Batch]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[dict[str, Batch]]:
        for batch in self._batches:
            yield {"batch": batch}


class DistillationTrainer(Trainer):  # type: ignore[misc]
    """A Trainer whose loss is that of a distillation."""

    def __init__(
        self,
        objective: Distillation,
        batches: Iterable[Batch],
        arguments: TrainingArguments,
        lr: float,
        callbacks: Sequence[Any],
    ) -> None:
        groups = relative_rates(objective.model, lr)
        # Fused, a step over 22 M parameters takes a twentieth of the time on a CPU.
        optimizer = torch.optim.AdamW(groups, fused=True)
        schedule = LambdaLR(optimizer, lambda step: rate_factor(step, arguments.max_steps))
        super().__init__(
            objective,
            arguments,
            train_dataset=BatchStream(batches),
            optimizers=(optimizer, schedule),
            callbacks=list(callbacks),
        )
        # Without its bar the Trainer prints its log instead.
        self.remove_callback(PrinterCallback)
        # How many steps were left out.
        self.skipped = 0
        self._is_finite = True
        optimizer.register_step_pre_hook(self._skip_unless_finite)

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return the batches, not prepared by accelerate, which would split each over the ranks."""
        # As they are: torch would make tuples lists, and arrays tensors.
        return DataLoader(self.train_dataset, batch_size=None, collate_fn=lambda batch: batch)

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        # The model moves them to its device.
        return inputs

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], *args: object, **kwargs: object
    ) -> Tensor:
        """Return the loss of a batch in eval mode."""
        # The Trainer turns dropout on; here it would only be noise between teacher and student.
        model.eval()
        loss: Tensor = model(inputs["batch"])
        return loss

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the loss of a batch, and note whether its gradients are finite, before they are clipped."""
        loss: Tensor = super().training_step(*args, **kwargs)
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        norm = gathered(torch.nn.utils.get_total_norm(gradients))
        # Clipped by a norm that overflows they would be 0.
        self._is_finite = bool(norm.isfinite())
        return loss

    def mean_loss(self, batches: Sequence[Batch]) -> float:
        """Return the mean loss of the batches of all processes."""
        with torch.no_grad():
            loss = torch.stack([self.model(batch) for batch in batches]).mean()
        return float(self.accelerator.reduce(loss, reduction="mean"))

    def _skip_unless_finite(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Leave the weights as they are where a gradient is not finite: the step would make them all NaN.

        A line has no bound, so a single text can overflow.
        """
        if not self._is_finite:
            optimizer.zero_grad()
            self.skipped += 1

    def train_from(self, step: int) -> None:
        """Train, from the checkpoint of a step unless it is 0."""
        if not step:
            self.train()
            return
        last = Path(self.args.output_dir, f"checkpoint-{step}")
        try:
            state = TrainerState.load_from_json(str(last / _STATE))
            if state.global_step < self.args.max_steps:
                self.train(resume_from_checkpoint=str(last))
            else:
                # The Trainer would take one more step.
                self._load_from_checkpoint(str(last))
                self.state = state
        # Groups of another optimizer are a ValueError.
        except (RuntimeError, OSError, ValueError, SafetensorError) as error:
            raise StorageError(
                f"the checkpoint must be of this model, but {last} is not: "
                f"{str(error).splitlines()[-1]:.300}: remove it, or give another folder"
            ) from error

    def _save(
        self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None
    ) -> None:
        # The Trainer's own cannot save tied weights of a model that is not one of transformers.
        folder = Path(output_dir or self.args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        save_model(self.model, str(folder / _WEIGHTS))

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        # The Trainer's own takes what fits, and goes on.
        load_model(self.model, Path(resume_from_checkpoint, _WEIGHTS))


def relative_rates(model: nn.Module, lr: float) -> list[dict[str, Any]]:
    """Return groups of an optimizer by which one step of Adam moves each matrix by the share ``lr`` of its size.

    The size is the root mean square, as in Adafactor (arXiv 1804.04235, section 8). Weights of
    trained models differ in it by a factor of 50, and one rate for all would tear some apart while it
    hardly moves others.
    """
    groups = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            size = float(gathered(upcast(parameter.detach()).square().mean().sqrt()))
            # A bias may be 0, and so may a matrix before its training.
            if parameter.ndim < 2 or size == 0:
                size = max(size, _LEAST_SIZE)
            groups.append({"params": [parameter], "lr": lr * size, "weight_decay": 0.0})
    return groups


def rate_factor(step: int, steps: int) -> float:
    """Return the learning rate of a step over the highest one: a warm-up, then a cosine to 0."""
    warm_up = max(steps // 20, min(steps, _WARM_UP))
    if step < warm_up:
        # At a rate of 0 the first step would be wasted.
        return max(step, 1) / warm_up
    progress = (step - warm_up) / max(1, steps - warm_up)
    return 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def training_arguments(
    folder: str | Path, device: torch.device, steps: int, save: bool, **options: Any
) -> TrainingArguments:
    """Return the arguments of the Trainer; ModelError if the environment names other processes."""
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        logging_steps=max(1, steps // 50),
        save_strategy="steps" if save else "no",
        save_steps=max(1, steps // 10),
        save_total_limit=1,
        disable_tqdm=not sys.stderr.isatty(),
        # The buffers are alike on all ranks, because nothing is in training mode.
        ddp_broadcast_buffers=False,
        use_cpu=device.type == "cpu",
        **options,
    )
    # One process uses one GPU. The Trainer would copy the model to all of them, without its hooks.
    arguments._n_gpu = min(arguments.n_gpu, 1)
    processes = 1
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        processes = torch.distributed.get_world_size()
    if arguments.world_size != processes:
        raise ModelError(
            f"the environment must name the {processes} processes of the group, but names "
            f"{arguments.world_size}: start them with torchrun or accelerate launch"
        )
    return arguments


def steps_done(folder: Path, run: Mapping[str, float]) -> int:
    """Return the step of the last checkpoint in a folder, 0 without one; refuse one of another run.

    ``run`` has the numbers by which it is known, or those of them that are known yet.
    """
    done = 0
    # The Trainer's state is the last file of a checkpoint.
    for state in folder.glob(f"checkpoint-*/{_STATE}"):
        number = state.parent.name.removeprefix("checkpoint-")
        if number.isdecimal():
            done = max(done, int(number))
    if not done:
        return 0
    file = folder / RUN
    try:
        saved = read_json(file)
        known = {name: float(saved[name]) for name in run}
    # A StorageError is an OSError.
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise StorageError(
            f"a checkpoint must come with {RUN}, which says of which run it is, but: {error}: remove "
            f"the checkpoints in {folder}, or give another folder"
        ) from error
    for name, value in run.items():
        # The loss depends on the machine, too.
        tolerance = 1e-3 if name == LOSS else 0.0
        if not math.isclose(known[name], value, rel_tol=tolerance, abs_tol=tolerance / 10):
            raise StorageError(
                f"the checkpoint in {folder} must be of this run, but its {name} is {known[name]:.4g}, "
                f"where this run has {value:.4g}: remove it, give another folder, or the batches in the "
                "order of that run"
            )
    return done
