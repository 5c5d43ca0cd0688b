"""Short distillation: a converted model learns from the original, in the Trainer of transformers."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, kl_div, log_softmax

from dynorm.arguments import check_positive
from dynorm.distill.pretrained import Pretrained, collate, on_device
from dynorm.errors import ArgumentError, DataError
from dynorm.fit.refine import joint_error, recorded
from dynorm.layers import param_groups
from dynorm.replace.specs import require_layers
from dynorm.watch import call, token_masks, valid_tokens

# Steps that are timed before the schedule is made, when a time and not a number of steps is given.
_TIMED = 8
# Measured at 384 channels (docs/quality.md). A step of Adam changes the output of a matrix in proportion to its width.
_RATE, _WIDTH = 1.5e-4, 384


@dataclass(frozen=True)
class DistillationReport:
    """The course of a distillation.

    Args:
        steps: how many optimizer steps were taken.
        lr: the highest learning rate.
        seconds: how long it took.
        texts: how many texts (or blocks) were seen, repeats counted.
        last_loss: the last loss that the Trainer logged.
    """

    steps: int
    lr: float
    seconds: float
    texts: int
    last_loss: float | None

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values that JSON knows."""
        return asdict(self)


def distill_(
    student: Pretrained,
    teacher: nn.Module,
    encoded: Sequence[list[int]],
    *,
    steps: int | None = None,
    minutes: float | None = None,
    batch_size: int = 32,
    lr: float | None = None,
    seed: int = 0,
    checkpoints: str | Path | None = None,
    quiet: bool = False,
    callbacks: Sequence[Any] = (),
) -> DistillationReport:
    """Train all weights of a converted model so that its outputs come close to the original's, in place.

    The loss is the mean relative error of the sites, ``|f(x) - y|^2 / |y - mean y|^2`` with y the teacher's norms (a
    hidden-state loss), plus, for an encoder, one minus the cosine of the mean-pooled embeddings, or, for a language
    model, the Kullback-Leibler divergence of the next-token distributions. Dropout is off in both models.

    Args:
        student: a converted and calibrated model.
        teacher: the original model; it is put into eval mode, and its weights no longer require gradients.
        encoded: training texts as token ids, see :func:`encode`.
        steps: how many steps to take. Give this or ``minutes``.
        minutes: how long to train. A few steps are timed first, so that the schedule ends when the time does.
        batch_size: texts per step.
        lr: the highest learning rate. A twentieth of the steps warm up to it, then it falls to 0 as a cosine. None
            takes :func:`distillation_rate`.
        seed: for the order of the texts.
        checkpoints: a folder for the Trainer's checkpoints: ten in a run, of which the last is kept. Training goes on
            from one that is there. None keeps none.
        quiet: no progress bar.
        callbacks: more callbacks for the Trainer, such as an :class:`AnnealCallback` for an annealed student.

    Returns:
        Steps, time and last loss.

    Raises:
        ArgumentError: neither or both of ``steps`` and ``minutes`` are given; or one, ``lr`` or ``batch_size`` is not
            positive and finite, or steps or batch size no integer.
        DataError: there is no text.
        ModelError: the student has no point-wise layer that replaced a norm.
    """
    _check(steps, minutes, batch_size, lr)
    if not encoded:
        raise DataError("there must be at least one text to learn from, got none")
    rate = distillation_rate(student.model) if lr is None else lr
    started = time.perf_counter()
    teacher.eval().requires_grad_(False)
    if steps is None:
        assert minutes is not None
        steps = _steps_in(minutes * 60, student, teacher, encoded, batch_size)
    with tempfile.TemporaryDirectory(prefix="dynorm-") as scratch:
        arguments = _arguments(Path(checkpoints or scratch), steps, batch_size, seed, checkpoints is not None, quiet)
        arguments.use_cpu = next(student.model.parameters()).device.type == "cpu"
        until = None if minutes is None else started + 60 * minutes
        trainer = _trainer(student, teacher, encoded, arguments, rate, until, callbacks)
        found = checkpoints is not None and any(Path(checkpoints).glob("checkpoint-*"))
        trainer.train(resume_from_checkpoint=found)
    student.model.eval()
    student.model.zero_grad(set_to_none=True)
    done = int(trainer.state.global_step)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    seconds = time.perf_counter() - started
    return DistillationReport(done, rate, seconds, trainer.texts, losses[-1] if losses else None)


def distillation_rate(model: nn.Module) -> float:
    """Return the default learning rate of a distillation: 1.5e-4 at 384 channels, in proportion to 1 / C.

    Args:
        model: a converted model; C is the median of its point-wise layers' channels.

    Raises:
        ModelError: it has no point-wise layer that replaced a norm.
    """
    return _RATE * _WIDTH / median(layer.channels for layer in require_layers(model, with_norms=True).values())


def _check(steps: int | None, minutes: float | None, batch_size: int, lr: float | None) -> None:
    if (steps is None) == (minutes is None):
        raise ArgumentError(f"one of steps and minutes must be given, got steps={steps!r}, minutes={minutes!r}")
    for name, count in (("steps", steps), ("batch_size", batch_size)):
        if count is not None and (not isinstance(count, int) or count < 1):
            raise ArgumentError(f"{name} must be a positive integer, got {count!r}")
    for name, value in (("minutes", minutes), ("lr", lr)):
        if value is not None:
            check_positive(name, value)


def distillation_loss(student: Pretrained, teacher: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the hidden-state loss plus the embedding or logit loss of one batch; see :func:`distill_`."""
    layers = require_layers(student.model, with_norms=True)
    counterparts = {layer: teacher.get_submodule(path) for path, layer in layers.items()}
    with torch.no_grad(), recorded(counterparts) as wanted:
        target = call(teacher, batch)
    with recorded({layer: layer for layer in layers.values()}) as given:
        output = call(student.model, batch)
    masks = token_masks(batch)
    sites = joint_error(wanted, given, masks)
    if not student.language_model:
        mask = batch["attention_mask"].unsqueeze(-1)
        ours, theirs = ((o.last_hidden_state * mask).sum(1) for o in (output, target))
        return sites + (1 - cosine_similarity(ours, theirs, dim=-1)).mean()
    valid = valid_tokens(target.logits.shape, (-1,), masks)
    ours, theirs = (log_softmax(o.logits.flatten(0, -2).float(), -1) for o in (output, target))
    if valid is not None:
        ours, theirs = ours[valid], theirs[valid]
    return sites + kl_div(ours, theirs, log_target=True, reduction="batchmean")


def _steps_in(
    seconds: float, student: Pretrained, teacher: nn.Module, encoded: Sequence[list[int]], batch_size: int
) -> int:
    """Return how many steps fit into the time, from the time of a few whose gradients are thrown away."""
    # The Trainer groups texts by length, so a step's are alike: short in one, long in another.
    by_length = sorted(encoded, key=len)
    middles = [(2 * i + 1) * len(by_length) // (2 * _TIMED) for i in range(_TIMED)]
    starts = [max(0, min(middle - batch_size // 2, len(by_length) - batch_size)) for middle in middles]
    parts = [by_length[start : start + batch_size] for start in starts]
    begun = time.perf_counter()
    # The first is not counted: it allocates, and kernels are chosen.
    _backward(student, teacher, parts[-1])
    started = time.perf_counter()
    for part in parts:
        _backward(student, teacher, part)
    ended = time.perf_counter()
    student.model.zero_grad(set_to_none=True)
    # The optimizer's part and the Trainer's own work come on top of these steps.
    return max(1, int((seconds - (ended - begun)) / (1.15 * (ended - started) / _TIMED)))


def _backward(student: Pretrained, teacher: nn.Module, texts: Sequence[list[int]]) -> None:
    loss = distillation_loss(student, teacher, on_device(collate(student, texts), student.model))
    loss.backward()  # type: ignore[no-untyped-call]


def _arguments(folder: Path, steps: int, batch_size: int, seed: int, save: bool, quiet: bool) -> Any:
    from transformers import TrainingArguments

    return TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=batch_size,
        # The first step of a warm-up has the rate 0: a run of few steps has none.
        warmup_steps=steps // 20,
        lr_scheduler_type="cosine",
        logging_steps=max(1, steps // 20),
        save_strategy="steps" if save else "no",
        save_steps=max(1, steps // 10),
        save_total_limit=1,
        train_sampling_strategy="group_by_length",
        remove_unused_columns=False,
        report_to="none",
        disable_tqdm=quiet,
        dataloader_pin_memory=torch.cuda.is_available(),
        seed=seed,
    )


def _trainer(
    student: Pretrained,
    teacher: nn.Module,
    encoded: Sequence[list[int]],
    arguments: Any,
    lr: float,
    until: float | None,
    callbacks: Sequence[Any],
) -> Any:
    from transformers import PrinterCallback, Trainer, TrainerCallback

    class StopInTime(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if until is not None and time.perf_counter() > until:
                control.should_training_stop = True

    class Distiller(Trainer):  # type: ignore[misc]
        texts = 0

        def compute_loss(self, model: nn.Module, inputs: dict[str, Tensor], *args: Any, **kwargs: Any) -> Tensor:
            # The Trainer turns dropout on; here it would only be noise between teacher and student.
            model.eval()
            self.texts += len(inputs["input_ids"])
            return distillation_loss(student, teacher, inputs)

    # Fused, a step over 22 M parameters takes a twentieth of the time on a CPU.
    optimizer = torch.optim.AdamW(param_groups(student.model, lr=lr, constants_lr=lr), fused=True)
    teacher.to(arguments.device)
    trainer = Distiller(
        model=student.model,
        args=arguments,
        train_dataset=[{"input_ids": ids} for ids in encoded],
        data_collator=lambda items: collate(student, [item["input_ids"] for item in items]),
        optimizers=(optimizer, None),
        callbacks=[StopInTime(), *callbacks],
    )
    # Without its bar the Trainer prints its log instead, in the middle of ours.
    trainer.remove_callback(PrinterCallback)
    return trainer
