"""Distillation: a converted model learns from the original, in the Trainer of transformers."""

import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import kl_div, log_softmax
from torch.utils.checkpoint import checkpoint

from dynorm.arguments import check_count, check_positive, upcast
from dynorm.batches import Batch, cycled, iterate, token_masks, valid_tokens
from dynorm.errors import ArgumentError, CalibrationWarning, require_library
from dynorm.fit.refine import unexplained_share
from dynorm.layers import AnnealedNorm
from dynorm.outputs import output_tensor, sample_vectors
from dynorm.plain import Plain
from dynorm.ranks import BATCH, Ranks
from dynorm.recipe import Recipe
from dynorm.replace.converted import require_layers
from dynorm.table import Table
from dynorm.train.objective import Distillation, Loss, largest_tensor
from dynorm.wrappers import gathered

# Logits per chunk of the loss: they stay in the cache of a CPU core.
_CHUNK = 1 << 20
# If a time is given instead of a number of steps, this many steps are timed before the schedule is
# made. Their batches are taken evenly by size from the first ones.
_TIMED = 8
_LOOKED_AT = 64
# The largest share of the given time that may be spent on timing.
_TIMING_SHARE = 0.1
# The optimizer and the Trainer take time on top of the timed loss and gradients.
_OVERHEAD = 1.15
# The batches whose loss decides whether the training helped.
_MEASURED = 4
# With fewer steps a distillation can hardly help.
FEW = 20
# Measured at 384 channels (docs/quality.md). A step of Adam changes the output of a matrix in
# proportion to its width.
_RATE = 1.5e-4
_WIDTH = 384


@dataclass(frozen=True)
class DistillationReport(Plain):
    """The course of a distillation.

    Args:
        steps: how many optimizer steps were taken.
        lr: the highest learning rate.
        seconds: how long it took.
        samples: how many samples were seen, repeats counted.
        loss_before: the loss of the first batches before training; it can be negative. None for an
            annealed model, because it is still a norm then.
        loss_after: the same after training.
        kept: whether the trained weights are kept; False if the weights from before were better.
        losses: the loss curve: pairs of a step and the mean loss since the pair before.
        resumed: the step of the checkpoint at which the training resumed; 0 if it began.
        interrupted: whether Ctrl-C ended it early, with ``keep_on_interrupt``.
    """

    steps: int
    lr: float
    seconds: float
    samples: int
    loss_before: float | None = None
    loss_after: float | None = None
    kept: bool = True
    losses: Sequence[tuple[int, float]] = ()
    resumed: int = 0
    interrupted: bool = False

    def __str__(self) -> str:
        """Return the course in some lines, without the curve."""
        title = f"{self.steps:,} steps of distillation in {self.seconds:.0f} s, at a rate of {self.lr:.2g}"
        if self.loss_before is not None and self.loss_after is not None:
            title += f": loss {self.loss_before:.3f} -> {self.loss_after:.3f}"
        notes = []
        if not self.kept:
            notes.append("the weights from before were better, and are put back")
        if self.resumed:
            notes.append(f"resumed at step {self.resumed:,} of a checkpoint")
        if self.interrupted:
            notes.append("ended early by Ctrl-C")
        return str(Table((), (), notes, title=title))


def distill_(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    teacher: nn.Module | None = None,
    loss: Loss | None = None,
    steps: int | None = Recipe.steps,
    minutes: float | None = Recipe.minutes,
    lr: float | None = Recipe.lr,
    seed: int = Recipe.seed,
    bf16: bool = Recipe.bf16,
    accumulate: int = Recipe.accumulate,
    checkpoints: str | os.PathLike[str] | None = Recipe.checkpoints,
    report_to: str | Iterable[str] | None = Recipe.report_to,
    keep_on_interrupt: bool = Recipe.keep_on_interrupt,
    quiet: bool = False,
    callbacks: Sequence[Any] = (),
) -> DistillationReport:
    """Train all weights of a converted model so that its outputs approach the original's, in place.

    The loss is the mean over the sites of ``e + log(max(e, 1e-4)) / 10``, ``e = |f(x) - y|^2 / |y -
    mean y|^2`` with y the outputs of the teacher's norms, plus the loss of the outputs,
    :func:`output_loss`. Small errors of early sites grow through the network, and the logarithm
    gives them weight. Each batch is one step of the Trainer of transformers, without dropout. If
    training made the loss of the first batches larger, or was interrupted, the weights from before
    are put back. The model is left in eval mode.

    Under ``torchrun`` or ``accelerate launch``, call it on every rank, each with its share of the
    data. A step is then one batch per rank and its loss the mean over the ranks, as if one process
    accumulated these batches. A plain model is wrapped in DDP. For FSDP2, call ``fully_shard`` on
    the model and the teacher first.

    Args:
        model: a converted and calibrated model.
        batches: tensors, tuples or dicts, as for :func:`calibrate_`, in the order of training. They
            are repeated if there are more steps, and an iterable may shuffle at each pass.
        teacher: the original model; it is put into eval mode, and its weights no longer require
            gradients. None takes a copy of the model with its norms put back, before any weight
            moves; a loaded model has no norms to put back. Layers whose norm is not known stay in
            the copy, with a warning, and are trained by the outputs only.
        loss: a function of the model's output, the teacher's output and the batch that returns a
            scalar. None takes :func:`output_loss`.
        steps: how many steps to take. Give this or ``minutes``.
        minutes: how long to train. A few steps are timed first, so that the schedule ends when the
            time does.
        lr: the highest learning rate. The first twentieth of the steps, or the first ten steps,
            warm up to it; then it falls to 0 as a cosine, over the steps or, if they end sooner,
            the minutes. None starts from :func:`distillation_rate` and halves it, at most eight
            times, while a trial step at a quarter of that rate keeps lowering the loss of the first
            batch. If no trial step lowers it, the next of the first four batches is tried.
        seed: the seed for models and callbacks that draw random numbers.
        bf16: run both models under ``torch.autocast`` in bfloat16; the weights keep their dtype. On
            a processor with bfloat16 instructions a step takes a third of the time.
        accumulate: how many consecutive batches make a step; its loss is the mean over them.
        checkpoints: a folder for the Trainer's checkpoints: ten per run, of which the last is kept.
            If it holds a checkpoint of this model, teacher and rate, training continues from there;
            the number of steps may be larger. None saves no checkpoints.
        report_to: where the Trainer logs loss and rate, such as "tensorboard", "wandb", or a list of
            such names; it is passed to ``TrainingArguments``. None means nowhere.
        keep_on_interrupt: at Ctrl-C finish the step, save a checkpoint if there is a folder for them,
            and return with the weights trained so far, if they are better than before. A second
            Ctrl-C stops as usual. If False, Ctrl-C puts the weights from before back.
        quiet: hide the progress bar.
        callbacks: more callbacks for the Trainer, such as an :class:`AnnealCallback` for an
            annealed model.

    Returns:
        Steps, time, and the loss before and after.

    Raises:
        ArgumentError: neither or both of ``steps`` and ``minutes`` are given; or a number is not
            positive and finite, or a count not an integer; or ``minutes`` is given with batches
            that can be read only once; or ``loss`` is not a function or does not return a scalar;
            or ``callbacks`` or ``checkpoints`` are of another kind.
        DataError: there is no batch, a wrong one, or a one-shot iterator with fewer batches than
            steps; or the outputs hold nothing to compare; or another rank failed. The weights are
            then as they were, on every rank.
        ModelError: the model has no point-wise layer, or nothing to train, or is loaded or sharded
            and has no teacher; the teacher lacks the module of a layer, is converted itself, or
            shares weights with the model; another rank's layers differ; or the environment does not
            name the processes of the group as torchrun does.
        StorageError: the checkpoint in the folder is of another model or recipe, or damaged.

    Warns:
        CalibrationWarning: the weights from before are put back, the minutes allow fewer than 20
            steps, or the copy that teaches has layers whose norm is not known.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
        >>> _ = dynorm.convert_(model, dynorm.find_norms(model, torch.randn(4, 8)))
        >>> data = [torch.randn(64, 8) for _ in range(4)]
        >>> _ = dynorm.calibrate_(model, data)
        >>> dynorm.distill_(model, data, steps=8, quiet=True).steps
        8
    """
    _check(steps, minutes, lr, accumulate, seed)
    if not (loss is None or callable(loss)):
        raise ArgumentError(
            f"loss must be a function of both outputs and the batch, or None, got {loss!r}"
        )
    if not isinstance(checkpoints, str | os.PathLike | None):
        raise ArgumentError(
            f"checkpoints must be the path of a folder, or None, got {checkpoints!r}"
        )
    if minutes is not None and isinstance(batches, Iterator):
        raise ArgumentError(
            "batches must be a list, or able to begin again, when minutes are given, because some "
            "are timed first: pass a list"
        )
    folder = None if checkpoints is None else Path(checkpoints)
    require_library("transformers", "its Trainer", "transformers")
    require_library("accelerate", "the Trainer of transformers", "transformers")
    from dynorm.train.trainer import (
        DistillationTrainer,
        Interrupt,
        check_callbacks,
        check_report_to,
        progress_bar,
        training_arguments,
    )

    check_callbacks(callbacks)
    check_report_to(report_to)
    started = time.perf_counter()
    ranks = Ranks()
    # In inference mode nothing has a gradient.
    with torch.inference_mode(False), ranks.sharing_errors():
        objective = Distillation(model, teacher, loss or output_loss, bf16, ranks)
        if folder is not None:
            objective.recipe = _recipe(objective, lr)
        if steps is None:
            assert minutes is not None
            steps = _steps_in(minutes * 60, objective, batches, accumulate)
            if steps < FEW:
                _warn(
                    f"{minutes:g} minutes allow {steps} steps of distillation, which can hardly "
                    "help: give more time"
                )
        first = list(islice(iterate(batches), _MEASURED))
        if isinstance(batches, Iterator):
            # The batches that were measured are trained on too.
            batches = chain(first, batches)
        # A sharded model runs only where all ranks run it.
        first = first[: min(ranks.exchange(len(first)))]
        # An annealed model is still its teacher: it has no error that a step could make smaller.
        annealed = any(isinstance(module, AnnealedNorm) for module in model.modules())
        loss_before = None if annealed else objective.measure(first)
    weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    if lr is None:
        lr = distillation_rate(model)
        if not annealed:
            try:
                with torch.inference_mode(False), ranks.sharing_errors():
                    lr = objective.rate(lr, first, weights)
            finally:
                model.load_state_dict(weights)
    with (
        torch.inference_mode(False),
        tempfile.TemporaryDirectory(prefix="dynorm-") as scratch,
        progress_bar(quiet or ranks.rank > 0) as progress,
    ):
        arguments = training_arguments(
            objective,
            folder or scratch,
            steps,
            seed,
            accumulate,
            save=folder is not None,
            report_to=report_to,
        )
        elapsed_share = None if minutes is None else _elapsed_share(started + 60 * minutes)
        stop = Interrupt(ranks)
        if keep_on_interrupt:
            callbacks = [*callbacks, stop]
        trainer = DistillationTrainer(
            objective,
            cycled(batches, steps * accumulate),
            arguments,
            lr,
            callbacks,
            progress,
            elapsed_share,
        )
        try:
            with stop.listening(keep_on_interrupt):
                resumed = trainer.run(folder)
        except BaseException:
            model.load_state_dict(weights)
            raise
        finally:
            model.eval()
            model.zero_grad(set_to_none=True)
    steps_taken = int(trainer.state.global_step)
    losses = []
    for entry in trainer.state.log_history:
        if "loss" in entry:
            losses.append((int(entry["step"]), float(entry["loss"])))
    loss_after = None
    kept = True
    if loss_before is not None:
        with ranks.sharing_errors():
            loss_after = objective.measure(first)
        # A loss of NaN is worse, too.
        kept = loss_after <= loss_before
    if not kept:
        model.load_state_dict(weights)
        _warn(
            f"{steps_taken} steps at a rate of {lr:.2g} made the loss {loss_after:.3f}, which was "
            f"{loss_before:.3f}: the weights from before are put back; give more steps, or a lower "
            "rate"
        )
    seconds = time.perf_counter() - started
    samples = sum(ranks.exchange(trainer.samples))
    return DistillationReport(
        steps=steps_taken,
        lr=lr,
        seconds=seconds,
        samples=samples,
        loss_before=loss_before,
        loss_after=loss_after,
        kept=kept,
        losses=losses,
        resumed=resumed,
        interrupted=stop.pressed,
    )


def _warn(message: str) -> None:
    warnings.warn(message, CalibrationWarning, stacklevel=3)


def distillation_rate(model: nn.Module) -> float:
    """Return the default learning rate of a distillation: 1.5e-4 at 384 channels, else 0.0576 / C.

    Args:
        model: a converted model; C is the median number of channels of its point-wise layers.

    Raises:
        ModelError: it has no point-wise layer.
    """
    return _RATE * _WIDTH / median(layer.channels for layer in require_layers(model).values())


def output_loss(ours: Any, theirs: object, batch: Batch) -> Tensor:
    """Return the error of a model's output, the default loss of :func:`distill_`.

    Logits (B, classes) or (B, T, classes): the Kullback-Leibler divergence of the distributions, in
    nats per row or token. A ``last_hidden_state`` (B, T, D): one minus the mean cosine of the
    mean-pooled embeddings. Any other tensor, or the class token of images: ``|f - y|^2 / |y - mean
    y|^2``. Padding is left out.

    Args:
        ours: the model's output.
        theirs: the teacher's; its ``logits`` are compared, else its ``last_hidden_state``, else its
            first tensor.
        batch: the input.

    Raises:
        DataError: there is no floating point tensor in the output.
    """
    name, target = output_tensor(theirs, batch)
    _, output = output_tensor(ours, batch)
    if name == "logits" and target.dim() in (2, 3) and target.shape[-1] > 1:
        return _mean_divergence(target, output, batch)
    hidden = name == "last_hidden_state"
    y = sample_vectors(target, batch, pooled=hidden)
    f = sample_vectors(output, batch, pooled=hidden)
    if hidden and target.dim() == 3:
        return (1 - (y * f).sum(-1)).mean()
    return unexplained_share(f, y)


def _mean_divergence(theirs: Tensor, ours: Tensor, batch: Batch) -> Tensor:
    """Return the mean divergence of the rows of logits (..., classes) that are not padding."""
    valid = valid_tokens(theirs.shape, -1, token_masks(batch))
    target_rows = theirs.flatten(0, -2)
    output_rows = ours.flatten(0, -2)
    if valid is None:
        valid = torch.ones(len(target_rows), dtype=torch.bool, device="cpu")
    padding = ~valid.to(ours.device)[:, None]
    size = max(1, _CHUNK // theirs.shape[-1])
    # In chunks that are computed again for the gradient: all logits at once would be held in
    # float32 six times over.
    sums = [
        checkpoint(_divergence, *chunk, use_reentrant=False, preserve_rng_state=False)
        for chunk in zip(
            torch.split(target_rows, size),
            torch.split(output_rows, size),
            torch.split(padding, size),
            strict=True,
        )
    ]
    return torch.stack(sums).sum() / valid.sum()


def _divergence(theirs: Tensor, ours: Tensor, padding: Tensor) -> Tensor:
    """Return the sum of the rows' divergences; at padding it is 0, because both are made equal."""
    p = log_softmax(upcast(theirs).masked_fill(padding, 0), -1)
    q = log_softmax(upcast(ours).masked_fill(padding, 0), -1)
    return kl_div(q, p, log_target=True, reduction="sum")


def _check(
    steps: int | None, minutes: float | None, lr: float | None, accumulate: int, seed: int
) -> None:
    """Refuse numbers outside their domains."""
    if (steps is None) == (minutes is None):
        raise ArgumentError(
            f"one of steps and minutes must be given, got steps={steps!r}, minutes={minutes!r}"
        )
    if minutes is not None:
        check_positive("minutes", minutes)
    if lr is not None:
        check_positive("lr", lr)
    if check_count("seed", seed, 0) >= 2**32:
        raise ArgumentError(f"seed must be from 0 to 2**32 - 1, got {seed}")
    if steps is not None:
        check_count("steps", steps)
    check_count("accumulate", accumulate)


def _steps_in(
    seconds: float, objective: Distillation, batches: Iterable[Batch], accumulate: int
) -> int:
    """Return how many steps fit into the time: a few batches are timed, without any step."""
    source = iterate(batches)
    candidates = list(islice(source, _TIMED))
    sizes = {largest_tensor(batch).numel() for batch in candidates}
    # The samples of a batch are about equally long: short in one batch, long in another. Batches of
    # images or blocks have one size and take long to read, so a few are enough.
    if len(sizes) > 1:
        candidates += islice(source, _LOOKED_AT - _TIMED)
    candidates.sort(key=lambda batch: largest_tensor(batch).numel())
    # Middle sizes first, because there may be time for only a few.
    order = sorted(range(_TIMED), key=lambda i: abs(i - _TIMED // 2))
    timed = [candidates[(2 * i + 1) * len(candidates) // (2 * _TIMED)] for i in order]
    begun = time.perf_counter()
    # The first run is not counted: it allocates memory and chooses kernels.
    objective(timed[0]).backward()
    warm = time.perf_counter()
    count = 0
    for batch in timed:
        objective(batch).backward()
        now = time.perf_counter()
        count += 1
        is_over = now - begun > _TIMING_SHARE * seconds
        # All ranks stop together: a sharded model runs only where all ranks run it.
        if any(objective.ranks.exchange(is_over)):
            break
    objective.model.zero_grad(set_to_none=True)
    step = accumulate * (now - warm) / count
    seconds_left = seconds - (now - begun)
    steps = max(1, int(seconds_left / (_OVERHEAD * step)))
    return min(objective.ranks.exchange(steps))


def _elapsed_share(end: float) -> Callable[[], float]:
    """Return a function that gives the share of the time from now to ``end`` that is over."""
    begun = time.perf_counter()
    seconds = max(end - begun, 1e-9)
    return lambda: (time.perf_counter() - begun) / seconds


def _recipe(objective: Distillation, lr: float | None) -> dict[str, object]:
    """Return the layers, the rate that was asked for, and the sum of the teacher's |weights|."""
    # Notice a failed rank before the sums.
    objective.ranks.exchange(BATCH)
    sizes = [
        float(gathered(p.abs().sum(dtype=torch.float64))) for p in objective.teacher.parameters()
    ]
    layers = {}
    for path, layer in require_layers(objective.model).items():
        layers[path] = f"{type(layer).__name__} {layer.config()}"
    return {"layers": str(layers), "rate": lr, "teacher": f"{sum(sizes):.6g}"}
