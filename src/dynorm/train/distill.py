"""Distillation: a converted model learns from the original, in the Trainer of transformers."""

import json
import math
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import torch
from torch import nn

from dynorm.arguments import (
    check_count,
    check_items,
    check_module,
    check_path,
    check_positive,
    check_seed,
)
from dynorm.batches import Batch, cycled
from dynorm.errors import (
    CalibrationWarning,
    DataError,
    ModelError,
    require_library,
)
from dynorm.files import require_writable, write_text
from dynorm.guard import (
    copies_of,
    edited_parts,
    in_eval_mode,
    kept_random_states,
    require_values,
    unchanged_on_error,
    undisturbed,
    usable_bf16,
)
from dynorm.layers import AnnealedNorm
from dynorm.plain import Plain
from dynorm.recipe import Recipe, defaults_of
from dynorm.replace.converted import dynorm_layers
from dynorm.table import Table
from dynorm.train.objective import Distillation, output_loss

__all__ = ["DistillationReport", "distill_", "output_loss"]

# The batches whose loss decides whether the training helped.
_MEASURED = 4


@dataclass(frozen=True)
class DistillationReport(Plain):
    """The outcome of a distillation.

    Args:
        steps: how many optimizer steps were taken, those before a checkpoint counted.
        lr: the highest learning rate, as a share of the root mean square of a tensor.
        seconds: how long it took.
        loss_before: the loss of the first batches before training; it can be negative. None for an
            annealed model, because it is still a norm then.
        loss_after: the same after training.
        kept: whether the trained weights are kept; False if the weights from before were better.
        resumed: the step of the checkpoint that it continued from; 0 without one.
    """

    steps: int
    lr: float
    seconds: float
    loss_before: float | None = None
    loss_after: float | None = None
    kept: bool = True
    resumed: int = 0

    def __str__(self) -> str:
        """Return the outcome in a line."""
        title = f"{self.steps:,} steps of distillation in {self.seconds:.0f} s, at a rate of {self.lr:.2g}"
        if self.loss_before is not None and self.loss_after is not None:
            title += f": loss {self.loss_before:.3f} -> {self.loss_after:.3f}"
        notes = []
        if self.resumed:
            notes.append(f"continued from the checkpoint of step {self.resumed}")
        if not self.kept:
            notes.append("the weights from before were better, and are put back")
        return str(Table((), (), notes, title=title))


def distill_(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    teacher: nn.Module,
    steps: int,
    lr: float | None = Recipe.lr,
    seed: int = 0,
    bf16: bool = False,
    checkpoints: str | os.PathLike[str] | None = None,
    callbacks: Sequence[Any] = (),
) -> DistillationReport:
    """Train all weights of a converted model so that its outputs approach the original's, in place.

    The loss is the mean over the sites of ``e + log(max(e, 1e-4)) / 10``, ``e = |f(x) - y|^2 / |y -
    mean y|^2`` with y the outputs of the teacher's norms, plus the loss of the outputs,
    :func:`output_loss`. Small errors of early sites grow through the network, and the logarithm
    gives them weight. Each batch is one step of the Trainer of transformers, without dropout
    and with gradients clipped to a norm of 1. If training made the loss of the first batches larger,
    the weights from before are put back, with a warning; after an error or Ctrl-C too. Otherwise the
    replacement is final: the layers forget their norms.

    Under ``torchrun`` or ``accelerate launch``, call it on every rank, each with its share of the
    data. A step is then one batch per rank and its loss the mean over the ranks. The Trainer wraps
    the model in DDP. For FSDP2, call ``fully_shard`` on the model and the teacher first.

    Args:
        model: a converted and calibrated model.
        batches: tensors, tuples or dicts, as for :func:`calibrate_`, in the order of training. They
            are repeated if there are more steps, and an iterable may shuffle at each pass.
        teacher: the original model, such as a copy from before ``convert_``. It stays as it is.
        steps: how many steps to take.
        lr: the highest learning rate, as a share: a step of Adam moves each matrix by at most about
            this share of its root mean square, and a vector as one of at least 0.06. The first
            twentieth of the steps, or the first ten steps, warm up to it; then it falls to 0 as a
            cosine. None takes 6e-4 for a model of images, and 2.5e-3 for others.
        seed: the seed for models and callbacks that draw random numbers. The random states of the
            caller are put back at the end.
        bf16: run both models under ``torch.autocast`` in bfloat16; the weights keep their dtype. A
            processor without bfloat16 instructions runs in float32, with a warning.
        checkpoints: a folder for the Trainer's checkpoints: ten per run, of which the last is kept.
            If it holds one of the same run, by steps, rate, seed and the loss of the same first batches
            before training, training continues from there. None saves no checkpoints.
        callbacks: callbacks of the Trainer, such as an :class:`AnnealCallback` for an annealed
            model, or the ``WandbCallback`` of transformers, which logs loss and rate.

    Returns:
        Steps, time, and the loss before and after.

    Raises:
        ArgumentError: the teacher is not a module, a number is not positive and finite, a count not an
            integer, a callback not one of transformers, or ``checkpoints`` not a path.
        DataError: ``batches`` is empty, has a wrong one, or is a one-shot iterator with fewer batches than
            steps; the outputs hold nothing to compare; or the loss of the first batches is not finite.
        ModelError: the model has no point-wise layer, or nothing to train; the teacher lacks the
            module of a layer, is converted itself, or shares weights with the model; one of them is
            offloaded or on the meta device; a sharded model is to have checkpoints; or the
            environment does not name the processes of the group as torchrun does.
        StorageError: the checkpoint in the folder is of another run or model, or damaged.

    Warns:
        CalibrationWarning: the weights from before are put back, steps are left out because a gradient is
            not finite, bfloat16 is not used, or an annealed model has no :class:`AnnealCallback`.

    Example:
        >>> import copy
        >>> original = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
        >>> model = copy.deepcopy(original)
        >>> _ = dynorm.convert_(model, dynorm.find_norms(model, torch.randn(4, 8)))
        >>> data = [torch.randn(64, 8) for _ in range(4)]
        >>> _ = dynorm.calibrate_(model, data)
        >>> dynorm.distill_(model, data, teacher=original, steps=8).steps
        8
    """
    if lr is None:
        lr = defaults_of(model).lr
    _check(model, teacher, steps, lr, seed)
    from transformers import TrainerCallback

    from dynorm.train.callbacks import AnnealCallback
    from dynorm.train.trainer import LOSS, RUN, DistillationTrainer, steps_done, training_arguments

    check_items(
        "callbacks", callbacks, TrainerCallback, "make them first, as in [AnnealCallback()]"
    )
    folder = None if checkpoints is None else check_path("checkpoints", checkpoints)
    started = time.perf_counter()
    resumed = 0
    objective = Distillation(model, teacher, bf16 and usable_bf16(model))
    if folder is not None and objective.sharded:
        raise ModelError(
            "checkpoints must be None for a model that is sharded by fully_shard: save it with "
            "torch.distributed.checkpoint in a callback"
        )
    # An annealed model is still its teacher: it has no error that a step could make smaller.
    annealed = any(
        isinstance(layer, AnnealedNorm) and layer.position < 1
        for layer in dynorm_layers(model).values()
    )
    has_schedule = any(isinstance(callback, AnnealCallback) for callback in callbacks)
    if annealed and not has_schedule:
        warnings.warn(
            "an annealed model stays a norm in part, because no AnnealCallback is among the callbacks: "
            "pass callbacks=[AnnealCallback()], unless one of yours calls set_anneal_",
            CalibrationWarning,
            stacklevel=2,
        )
    if folder is not None:
        require_writable(folder / RUN, overwrite=True)
    with (
        # In inference mode nothing has a gradient.
        torch.inference_mode(False),
        undisturbed(teacher, evaluate=True),
        # ``undisturbed`` turns gradients off.
        torch.enable_grad(),
        kept_random_states(torch.cuda.is_available()),
        in_eval_mode(model),
        tempfile.TemporaryDirectory(prefix="dynorm-") as scratch,
    ):
        first, stream = _with_first(batches, steps)
        arguments = training_arguments(
            folder or scratch,
            next(model.parameters()).device,
            steps,
            save=folder is not None,
            seed=seed,
            report_to="none",
        )
        trainer = DistillationTrainer(objective, stream, arguments, lr, callbacks)
        with _restorable(model) as put_back:
            try:
                loss_before = trainer.mean_loss(first)
                if not math.isfinite(loss_before):
                    raise DataError(
                        f"the loss of the first batches must be finite, got {loss_before}: look for values in "
                        "them, or outputs of either model, that are NaN or overflow"
                    )
                if folder is not None:
                    run = {"steps": steps, "lr": lr, "seed": seed, LOSS: loss_before}
                    resumed = steps_done(folder, run)
                    if not resumed and trainer.is_world_process_zero():
                        write_text(folder / RUN, json.dumps(run))
                trainer.train_from(resumed)
                trainer.model.eval()
                loss_after = trainer.mean_loss(first)
            finally:
                model.zero_grad()
                for callback in callbacks:
                    if isinstance(callback, AnnealCallback):
                        callback.cancel_()
            # A loss of NaN is worse, too.
            kept = loss_after <= (math.inf if annealed else loss_before)
            if not kept:
                put_back()
    taken = int(trainer.state.global_step)
    if trainer.skipped:
        warnings.warn(
            f"{trainer.skipped} steps of this call were left out, because a gradient was not finite: look for "
            "a batch that overflows, or give a lower rate if it is more than a few",
            CalibrationWarning,
            stacklevel=2,
        )
    if kept:
        for layer in dynorm_layers(model).values():
            layer.__dict__.pop("replaced", None)
    else:
        before_it = "" if annealed else f", which was {loss_before:.3f}"
        warnings.warn(
            f"{taken} steps at a rate of {lr:.2g} made the loss {loss_after:.3f}{before_it}: the weights "
            "from before are put back; give more steps, or a lower rate",
            CalibrationWarning,
            stacklevel=2,
        )
    seconds = time.perf_counter() - started
    return DistillationReport(
        taken, lr, seconds, None if annealed else loss_before, loss_after, kept, resumed
    )


def _check(model: nn.Module, teacher: nn.Module, steps: int, lr: float, seed: int) -> None:
    """Check the arguments of :func:`distill_`, and that the Trainer is installed."""
    for module, name in ((model, "the model"), (teacher, "the teacher")):
        check_module(module, name)
        require_values(module)
    check_count("steps", steps)
    check_seed(seed)
    check_positive("lr", lr)
    require_library("transformers", "its Trainer")
    require_library("accelerate", "the Trainer of transformers")


@contextmanager
def _restorable(model: nn.Module) -> Iterator[Callable[[], None]]:
    """Give a model its layers, buffers and weights back after an error, or when its context is called."""
    # By name and not by tensor: fully_shard replaces parameters, and its hooks put the shards in place.
    weights = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, nn.Parameter):
            weights[name] = tensor.detach().clone()

    def put_weights_back() -> None:
        model.load_state_dict(weights, strict=False)

    try:
        with unchanged_on_error(edited_parts(model), copies_of(model.buffers())) as put_layers_back:

            def put_back() -> None:
                put_layers_back()
                put_weights_back()

            yield put_back
    except BaseException:
        put_weights_back()
        raise


def _with_first(batches: Iterable[Batch], count: int) -> tuple[list[Batch], Iterator[Batch]]:
    """Return the batches to measure on, the first of a pass, and ``count`` batches to train on."""
    first = list(cycled(batches, min(count, _MEASURED)))
    if isinstance(batches, Iterator):
        # It has lost its first ones.
        return first, chain(first, cycled(islice(batches, count - len(first)), count - len(first)))
    return first, cycled(batches, count)
