"""The Trainer of a run: one loss per held-out block, a log with the constants, an early end where it diverges."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

import dynorm
from dynorm.errors import ArgumentError, StorageError
from dynorm.layers.groups import LOG_RATE
from dynorm.train.anneal import annealed_layers
from studies.callbacks import FixedWriters, WarmUp, Watch
from studies.data import Data
from studies.models import StreamScale, constants, embeddings
from studies.muon import MuonAndAdamW
from studies.runs import Record, RunFiles
from studies.settings import Settings

WEIGHT_DECAY = 0.1
LOGGED, LINES = 25, 120


def make_trainer(
    model: nn.Module, data: Data, settings: Settings, files: RunFiles, *, quiet: bool
) -> StudyTrainer:
    """Return the Trainer of a run; under ``accelerate launch`` or ``torchrun`` one of several."""
    arguments = _arguments(settings, files.checkpoints, quiet)
    callbacks: list[TrainerCallback] = [Watch(files)]
    if settings.arm_spec.annealed:
        from dynorm.train.callbacks import AnnealCallback

        callbacks.append(AnnealCallback(settings.path_start, settings.path_length))
    if settings.warmup_constants:
        callbacks.append(WarmUp(settings, data))
    if settings.fixed_writers:
        callbacks.append(FixedWriters())
    trainer = StudyTrainer(
        settings=settings,
        model=model,
        args=arguments,
        train_dataset=data.train,
        eval_dataset=torch.utils.data.Subset(data.held_out, range(settings.size_spec.watched)),
        compute_metrics=lambda outcome: {
            "mean": outcome.predictions.mean(),
            "accuracy": outcome.label_ids.mean(),
        },
        callbacks=callbacks,
    )
    # Without its bar the Trainer prints its log instead.
    trainer.remove_callback(PrinterCallback)
    return trainer


def logged_every(steps: int) -> int:
    """Return after how many steps a line is logged: often enough to see, seldom enough for a small file."""
    return max(1, steps // 5) if steps < 100 else LOGGED * math.ceil(steps / (LOGGED * LINES))


class StudyTrainer(Trainer):  # type: ignore[misc]
    """The Trainer with our loss, our optimizer groups, and a log that can be resumed.

    Args:
        settings: of the run.
        model: a transformers model to train.
        **options: as for ``transformers.Trainer``.
    """

    optimizer: torch.optim.Optimizer | None

    def __init__(self, settings: Settings, model: Any, **options: Any) -> None:
        self.settings = settings
        # By default ViT's weights are saved under older names, which the Trainer cannot load again.
        model.save_pretrained = partial(model.save_pretrained, save_original_format=False)
        super().__init__(model=model, **options)
        # Not in create_optimizer, which the Trainer calls when a checkpoint's weights are in: an
        # alpha's rate goes with its size at the start of the run, and so do the groups.
        assert settings.constants_rate is not None
        rate = (
            None if settings.constants_rate == LOG_RATE else settings.lr * settings.constants_rate
        )
        self._groups = dynorm.param_groups(
            model, lr=settings.lr, weight_decay=WEIGHT_DECAY, constants_lr=rate
        )
        self._scale = StreamScale(model) if settings.scale_loss else None

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Tensor], *args: Any, **kwargs: Any
    ) -> Tensor:
        """Return the mean loss in nats; with the cost of the stream's growth, if the settings bound it."""
        loss = losses(*_forward(model, inputs)).mean()
        return loss if self._scale is None else loss + self.settings.scale_loss * self._scale.loss()

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Tensor], *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the mean loss, and in the places of logits and labels each item's loss and share of hits."""
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            logits, targets = _forward(model, inputs)
            loss = losses(logits, targets)
            hits = (logits.argmax(-1) == targets).float().reshape(len(targets), -1).mean(1)
        return loss.mean(), loss, hits

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Make the settings' optimizer, with decay on matrices only, and the constants' own rate."""
        made = self.optimizer
        if made is None:
            if self.settings.optimizer == "muon":
                made = MuonAndAdamW(self._groups, embeddings(self.model))
            else:
                made = torch.optim.AdamW(self._groups, fused=True)
            self.optimizer = made
        return made

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add time and constants to a line about training; the Trainer keeps it in its checkpoints."""
        if "loss" in logs:
            model = self.accelerator.unwrap_model(self.model)
            extra: Record = self.watch.times()
            if values := constants(model):
                extra["beta"] = [float(f"{value:.4g}") for value in values.values()]
            if self.settings.arm_spec.annealed:
                extra["t"] = round(
                    fmean(layer.position for layer in annealed_layers(model).values()), 4
                )
            logs.update(extra)
        super().log(logs, start_time)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Refuse a checkpoint that does not fit, where the Trainer warns and goes on with fresh weights."""
        lost = set(load_result.missing_keys) - set(
            getattr(self.model, "_tied_weights_keys", None) or ()
        )
        if lost or load_result.unexpected_keys:
            raise StorageError(
                f"the checkpoint must hold every weight, but {len(lost)} are missing and "
                f"{len(load_result.unexpected_keys)} are not the model's: delete "
                f"{self.args.output_dir}"
            )

    @property
    def watch(self) -> Watch:
        """The callback that knows the time."""
        return next(
            callback for callback in self.callback_handler.callbacks if isinstance(callback, Watch)
        )


def losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of each item in nats.

    Args:
        logits: of shape (items, ..., classes).
        targets: of shape (items, ...).
    """
    flat = cross_entropy(logits.flatten(0, -2).float(), targets.flatten(), reduction="none")
    return flat.reshape(len(targets), -1).mean(1)


def _forward(model: nn.Module, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    given = {key: value for key, value in inputs.items() if key != "labels"}
    return model(**given).logits, inputs["labels"]


def _arguments(settings: Settings, folder: Path, quiet: bool) -> TrainingArguments:
    every = logged_every(settings.steps)
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=settings.steps,
        learning_rate=settings.lr,
        warmup_steps=settings.warmup,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": 0.1},
        max_grad_norm=1.0,
        logging_steps=every,
        logging_nan_inf_filter=False,
        eval_strategy="steps",
        eval_steps=4 * every,
        save_strategy="steps",
        save_steps=2 * every,
        save_total_limit=1,
        remove_unused_columns=False,
        report_to="none",
        disable_tqdm=quiet,
        use_cpu=settings.device == "cpu",
        ddp_find_unused_parameters=False,
        bf16=settings.bf16,
        dataloader_pin_memory=settings.device == "cuda",
        seed=settings.seed,
        data_seed=settings.seed,
    )
    batch = settings.size_spec.batch
    if batch % arguments.world_size:
        raise ArgumentError(
            f"the batch of {batch} must divide among the processes, but there are "
            f"{arguments.world_size}: start "
            "another number of them"
        )
    # One process with several GPUs would split each batch among them; the study uses a process a
    # GPU.
    arguments._n_gpu = min(arguments.n_gpu, 1)
    arguments.per_device_train_batch_size = batch // arguments.world_size
    arguments.per_device_eval_batch_size = batch // arguments.world_size
    return arguments
