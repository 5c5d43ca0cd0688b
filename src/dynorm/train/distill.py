"""Short distillation: a converted model learns from the original, in the Trainer of transformers."""

import copy
import math
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import kl_div, log_softmax
from torch.optim.lr_scheduler import LambdaLR
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset

from dynorm.arguments import check_count, check_positive, require_gathered, upcast
from dynorm.batches import call, cycled, iterate, token_masks, valid_tokens
from dynorm.errors import (
    ArgumentError,
    CalibrationWarning,
    ModelError,
    StorageError,
    require_library,
)
from dynorm.fit.refine import relative_error, site_errors
from dynorm.guard import autocast, recomputing, require_trainable
from dynorm.layers import AnnealedNorm, param_groups
from dynorm.layers.base import gathered
from dynorm.outputs import output_tensor, sample_vectors
from dynorm.ranks import BATCH, Ranks
from dynorm.replace import restore_
from dynorm.replace.original import recorded
from dynorm.replace.specs import norms_of, require_layers
from dynorm.table import Plain

# Of a model's output, its teacher's, and the batch.
Loss = Callable[[Any, Any, Any], Tensor]

# So many logits at a time stay in the cache of a CPU core.
_CHUNK = 1 << 20
# Steps that are timed before the schedule is made, when a time and not a number of steps is given,
# and the batches from which they are taken evenly by size.
_TIMED, _LOOKED_AT = 8, 64
# Batches that tell whether the training helped, and steps below which it hardly can.
_MEASURED, FEW = 4, 20
# Of the time that is given, the share that timing may take.
_SHARE = 0.1
# Measured at 384 channels (docs/quality.md). A step of Adam changes the output of a matrix in
# proportion to its width.
_RATE, _WIDTH = 1.5e-4, 384
# The best rate is about four times the best first step: measured on an encoder of texts, and one of
# images.
_FIRST_STEPS, _HALVINGS = 4, 8
_WARM_UP = 10
_SMALL, _EXACT = (
    0.1,
    1e-4,
)  # the weight of the logarithm of a site's error, which is cut where there is hardly one


@dataclass(frozen=True)
class DistillationReport(Plain):
    """The course of a distillation.

    Args:
        steps: how many optimizer steps were taken.
        lr: the highest learning rate.
        seconds: how long it took.
        samples: how many samples were seen, repeats counted.
        last_loss: the last loss that the Trainer logged.
        loss_before: the loss of the first batches at first, perhaps negative; None for an annealed
            model, then a norm.
        loss_after: the same after it.
        kept: whether the trained weights are kept; False where those from before were better.
    """

    steps: int
    lr: float
    seconds: float
    samples: int
    last_loss: float | None
    loss_before: float | None = None
    loss_after: float | None = None
    kept: bool = True


def distill_(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    teacher: nn.Module | None = None,
    loss: Loss | None = None,
    steps: int | None = None,
    minutes: float | None = None,
    lr: float | None = None,
    seed: int = 0,
    bf16: bool = False,
    accumulate: int = 1,
    checkpoints: str | Path | None = None,
    quiet: bool = False,
    callbacks: Sequence[Any] = (),
) -> DistillationReport:
    """Train all weights of a converted model so that its outputs come close to the original's, in place.

    The loss is the mean over the sites of ``e + log(max(e, 1e-4)) / 10``, ``e = |f(x) - y|^2 / |y -
    mean y|^2`` with y the teacher's norms, plus that of the outputs, :func:`output_loss`. Small
    errors of early sites grow on the way, and the logarithm sees them. Each batch is one step of
    the Trainer of transformers, without dropout. Where that made the loss of the first batches
    larger, or was broken off, the weights from before are put back. The model is left in eval mode.

    Under ``torchrun`` or ``accelerate launch``, call it on every rank, each with its own share of
    the data. A step is then one batch per rank, its loss the mean over the ranks, as in one process
    that accumulates these batches. A plain model is wrapped in DDP. For FSDP2, call ``fully_shard``
    on the model and the teacher first.

    Args:
        model: a converted and calibrated model.
        batches: tensors, tuples or dicts, as for :func:`calibrate_`, in the order of training; gone
            through again where the steps are more, so that an iterable may shuffle at each pass.
        teacher: the original model; it is put into eval mode, and its weights no longer require
            gradients. None takes a copy of the model with its norms put back, before any weight
            moves; one that was loaded has none. Layers whose norm is not known stay in the copy,
            with a warning, and are trained by the outputs only.
        loss: gives a scalar of the model's output, the teacher's and the batch, instead of
            :func:`output_loss`.
        steps: how many steps to take. Give this or ``minutes``.
        minutes: how long to train. A few steps are timed first, so that the schedule ends when the
            time does.
        lr: the highest learning rate. A twentieth of the steps, or the first ten, warm up to it,
            then it falls to 0 as a cosine, over the steps or, where that is sooner, the minutes.
            None takes :func:`distillation_rate`, halved until a step of a quarter of it, along the
            signs of the gradients as Adam's first, leaves the least loss. It is halved eight times
            at most. Where no step helps on a batch, the next one of four is tried.
        seed: of whatever the models or callbacks draw.
        bf16: run both models under ``torch.autocast`` in bfloat16; the weights keep their dtype.
            Where the processor knows bfloat16, a step takes a third of the time.
        accumulate: how many batches make a step, one after another; its loss is the mean of theirs.
        checkpoints: a folder for the Trainer's checkpoints: ten in a run, of which the last is
            kept. Training goes on from one that is there, of this model, teacher and rate; the
            steps may be more. None keeps none.
        quiet: no progress bar.
        callbacks: more callbacks for the Trainer, such as an :class:`AnnealCallback` for an
            annealed model.

    Returns:
        Steps, time, and the loss before and after.

    Raises:
        ArgumentError: neither or both of ``steps`` and ``minutes`` are given; or a number is not
            positive and finite, or a count no integer; or ``minutes`` with batches that can be gone
            through only once; or ``loss`` is no function or returns no scalar; or ``callbacks`` or
            ``checkpoints`` are of another kind.
        DataError: there is no batch, a wrong one, or a one-shot iterator with fewer batches than
            steps; or the outputs hold nothing to compare; or another rank failed. The weights are
            then as they were, on every rank.
        ModelError: the model has no point-wise layer, or nothing to train, or is loaded or sharded
            and has no teacher; the teacher has no module where a layer stands, is converted itself,
            or shares weights with the model; another rank's layers differ; or the environment does
            not name the group's processes, as torchrun makes it.
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
    steps, accumulate, seed = _check(steps, minutes, lr, accumulate, seed)
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
            "batches must be a list, or able to begin again, when minutes are given: some are timed"
        )
    require_library("transformers", "its Trainer", "transformers")
    require_library("accelerate", "the Trainer of transformers", "transformers")
    _check_callbacks(callbacks)
    started, ranks = time.perf_counter(), Ranks()
    # In inference mode nothing has a gradient.
    with torch.inference_mode(False), ranks.sharing_errors():
        job = _Distillation(model, teacher, loss or output_loss, bf16, ranks)
        if checkpoints is not None:
            job.recipe = _recipe(job, lr)
        if steps is None:
            assert minutes is not None
            steps = _steps_in(minutes * 60, job, batches, accumulate)
            if steps < FEW:
                _warn(
                    f"{minutes:g} minutes allow {steps} steps of distillation, which can hardly "
                    "help: give more time"
                )
        # A one-shot iterator keeps the batches that are looked at.
        first = list(islice(iterate(batches), _MEASURED))
        batches = chain(first, batches) if isinstance(batches, Iterator) else batches
        annealed = any(isinstance(module, AnnealedNorm) for module in model.modules())
        # A sharded model runs only where all ranks run it.
        first = first[: min(ranks.exchange(len(first)))]
        before = None if annealed else job.measure(first)
    weights = {name: t.detach().clone() for name, t in model.state_dict().items()}
    if lr is None:
        try:
            with torch.inference_mode(False), ranks.sharing_errors():
                # An annealed model is its teacher at first: no step makes its loss smaller.
                lr = distillation_rate(model) if annealed else job.rate(first, weights)
        finally:
            model.load_state_dict(weights)
    with (
        torch.inference_mode(False),
        tempfile.TemporaryDirectory(prefix="dynorm-") as scratch,
        _bar(quiet or ranks.rank > 0) as progress,
    ):
        arguments = _arguments(
            job, Path(checkpoints or scratch), steps, seed, accumulate, checkpoints is not None
        )
        job.until = None if minutes is None else started + 60 * minutes
        trainer = _trainer(
            job, cycled(batches, steps * accumulate), arguments, lr, callbacks, progress
        )
        found = None if checkpoints is None else newest_checkpoint(Path(checkpoints))
        try:
            if found and found[1].global_step >= steps:
                # The Trainer would take one more step.
                trainer._load_from_checkpoint(found[0])
                trainer.state = found[1]
            else:
                trainer.train(resume_from_checkpoint=found and found[0])
        except BaseException:
            model.load_state_dict(weights)
            raise
        finally:
            model.eval()
            model.zero_grad(set_to_none=True)
    done = int(trainer.state.global_step)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    with ranks.sharing_errors():
        after = None if annealed else job.measure(first)
    kept = before is None or after is None or after <= before  # so NaN is worse
    if not kept:
        model.load_state_dict(weights)
        words = (
            f"{done} steps at a rate of {lr:.2g} made the loss {after:.3f}, which was {before:.3f}"
        )
        _warn(f"{words}: the weights from before are put back; give more steps, or a lower rate")
    seconds, samples = time.perf_counter() - started, sum(ranks.exchange(job.samples))
    return DistillationReport(
        done, lr, seconds, samples, losses[-1] if losses else None, before, after, kept
    )


def _warn(message: str) -> None:
    warnings.warn(message, CalibrationWarning, stacklevel=3)


def distillation_rate(model: nn.Module) -> float:
    """Return the default learning rate of a distillation: 1.5e-4 at 384 channels, in proportion to 1 / C.

    Args:
        model: a converted model; C is the median of its point-wise layers' channels.

    Raises:
        ModelError: it has no point-wise layer.
    """
    return _RATE * _WIDTH / median(layer.channels for layer in require_layers(model).values())


def output_loss(ours: Any, theirs: Any, batch: Any) -> Tensor:
    """Return how far an output is from the teacher's; :func:`distill_` has it where no other loss is given.

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
    (name, target), (_, found) = (output_tensor(output, batch) for output in (theirs, ours))
    if name == "logits" and target.dim() in (2, 3) and target.shape[-1] > 1:
        rows = [each.flatten(0, -2) for each in (target, found)]
        if (valid := valid_tokens(target.shape, (-1,), token_masks(batch))) is None:
            valid = torch.ones(len(rows[0]), dtype=torch.bool, device="cpu")
        size, padding = max(1, _CHUNK // target.shape[-1]), ~valid.to(found.device)[:, None]
        parts = zip(*(torch.split(each, size) for each in (*rows, padding)), strict=True)
        # In parts that are computed again for the gradient: all logits at once would be held in
        # float32 six times over.
        sums = [
            checkpoint(_divergence, *part, use_reentrant=False, preserve_rng_state=False)
            for part in parts
        ]
        return torch.stack(sums).sum() / valid.sum()
    y, f = (
        sample_vectors(each, batch, pooled=name == "last_hidden_state") for each in (target, found)
    )
    if name == "last_hidden_state" and target.dim() == 3:
        return (1 - (y * f).sum(-1)).mean()
    return relative_error(f, y)


def _divergence(theirs: Tensor, ours: Tensor, padding: Tensor) -> Tensor:
    """Return the sum of the rows' divergences; those of padding are made equal."""
    p, q = (log_softmax(upcast(each).masked_fill(padding, 0), -1) for each in (theirs, ours))
    return kl_div(q, p, log_target=True, reduction="sum")


def _check(
    steps: int | None, minutes: float | None, lr: float | None, accumulate: int, seed: int
) -> tuple[int | None, int, int]:
    """Check the numbers, and return steps, accumulate and seed as Python's own integers."""
    if (steps is None) == (minutes is None):
        raise ArgumentError(
            f"one of steps and minutes must be given, got steps={steps!r}, minutes={minutes!r}"
        )
    for name, value in (("minutes", minutes), ("lr", lr)):
        if value is not None:
            check_positive(name, value)
    if check_count("seed", seed, 0) >= 2**32:
        raise ArgumentError(f"seed must be from 0 to 2**32 - 1, got {seed}")
    return (
        None if steps is None else check_count("steps", steps),
        check_count("accumulate", accumulate),
        int(seed),
    )


def _check_callbacks(callbacks: Sequence[Any]) -> None:
    from transformers import TrainerCallback

    given = callbacks if isinstance(callbacks, list | tuple) else [None]
    # The Trainer takes a class too, and makes one.
    if not all(issubclass(c if isinstance(c, type) else type(c), TrainerCallback) for c in given):
        raise ArgumentError(
            f"callbacks must be a list of transformers' TrainerCallback, got {callbacks!r:.200}"
        )


class _Distillation(nn.Module):
    """A model, its teacher, and their loss, with the course of the training: samples, last loss, share of the time."""

    def __init__(
        self, model: nn.Module, teacher: nn.Module | None, loss: Loss, bf16: bool, ranks: Ranks
    ) -> None:
        super().__init__()
        layers = require_layers(model, with_norms=teacher is None)
        require_gathered(model)
        require_trainable(model)
        # Known by the method of a DTensor. Where its parameters are sharded already, accelerate is
        # not to wrap it.
        self.sharded = self._is_accelerate_prepared = any(
            hasattr(p, "full_tensor") for p in model.parameters()
        )
        if teacher is None and self.sharded:
            raise ModelError(
                "a sharded model must be given its teacher, for a copy cannot be taken: shard that "
                "too"
            )
        if not self.sharded:
            ranks.require_alike(layers.items())
        if not any(p.requires_grad for p in model.parameters()):
            raise ModelError(
                "the model must have weights to train, but all are frozen: call requires_grad_() "
                "on some"
            )
        teacher = restore_(copy.deepcopy(model)) if teacher is None else teacher
        norms_of(teacher, layers, "teacher")
        require_gathered(teacher)
        if not set(model.parameters()).isdisjoint(teacher.parameters()):
            raise ModelError(
                "the teacher must have weights of its own, but shares some with the model: pass a "
                "copy"
            )
        self.model, self.teacher = model, teacher.eval().requires_grad_(False)
        self.loss, self.bf16, self.ranks = loss, bf16, ranks
        self.recipe: dict[str, Any] = {}  # what a checkpoint must have been made with
        self.samples, self.gone = 0, 0.0
        self.last = torch.zeros((), dtype=torch.float32, device="cpu")
        self.until: float | None = None  # when its time is over

    @torch.no_grad()
    def measure(self, batches: Sequence[Any]) -> float:
        """Return the mean loss of some batches of every rank in eval mode."""
        self.model.eval()
        return fmean(self.ranks.exchange(fmean(float(self(batch)) for batch in batches)))

    def rate(self, batches: Sequence[Any], weights: dict[str, Tensor]) -> float:
        """Return the highest rate, by the first batch on which a step helps: where a token has blown up, none does."""
        usual = distillation_rate(self.model)
        found = (self.best_step(batch, usual, weights) for batch in batches)
        return next(filter(None, found), usual * 0.5**_HALVINGS)

    def best_step(self, batch: Any, usual: float, weights: dict[str, Tensor]) -> float:
        """Return the usual rate, halved until a first step leaves a batch the least loss; 0 where none helps."""
        self.model.load_state_dict(weights)
        best, least = 0.0, self.measure([batch])
        self.model.zero_grad()
        self(batch).backward()
        # A rank that has failed is to be seen before the sums.
        self.ranks.exchange(BATCH)
        signs = {}
        for p in (p for p in self.model.parameters() if p.requires_grad):
            gradient = torch.zeros_like(p) if p.grad is None else p.grad
            signs[p] = (gradient if self.sharded else self.ranks.summed(gradient)).sign()
        self.model.zero_grad()
        for rate in (usual * 0.5**k for k in range(_HALVINGS)):
            self.model.load_state_dict(weights)
            with torch.no_grad():
                for p, sign in signs.items():
                    p.sub_(sign, alpha=rate / _FIRST_STEPS)
            if (loss := self.measure([batch])) < least:
                best, least = rate, loss
            elif best:
                break
        return best

    def forward(self, batch: Any) -> Tensor:
        """Return the loss of the sites plus that of the outputs, of one batch."""
        # Found anew: a callback may have put other layers in their place.
        norms = norms_of(self.teacher, require_layers(self.model), "teacher")
        with autocast(self.model, self.bf16):
            with torch.no_grad(), recorded(norms) as wanted:
                target = call(self.teacher, batch)
            with recomputing(self.model), recorded({layer: layer for layer in norms}) as given:
                output = call(self.model, batch)
        errors = site_errors(wanted, given, token_masks(batch))
        outer: object = self.loss(output, target, batch)
        if not isinstance(outer, Tensor) or outer.dim():
            found = (
                f"a tensor of shape {tuple(outer.shape)}"
                if isinstance(outer, Tensor)
                else type(outer).__name__
            )
            raise ArgumentError(
                f"loss must return a scalar tensor, got {found}: take its mean, or torch.zeros(())"
            )
        return (errors + _SMALL * errors.clamp_min(_EXACT).log()).mean() + outer


def _largest(batch: Any) -> Tensor:
    return max((leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)), key=Tensor.numel)


def _steps_in(seconds: float, job: _Distillation, batches: Iterable[Any], accumulate: int) -> int:
    """Return how many steps fit into the time, from that of a few batches whose gradients are thrown away."""
    given = iterate(batches)
    found = list(islice(given, _TIMED))
    # A step's batches are alike in length: short in one, long in another. Images and blocks are of
    # one size, and take long to read: a few tell all.
    if len({_largest(batch).numel() for batch in found}) > 1:
        found += islice(given, _LOOKED_AT - _TIMED)
    found.sort(key=lambda batch: _largest(batch).numel())
    # The ones of middle size come first, for there may be time for few.
    places = sorted(range(_TIMED), key=lambda i: abs(i - _TIMED // 2))
    timed = [found[(2 * i + 1) * len(found) // (2 * _TIMED)] for i in places]
    begun = time.perf_counter()
    # The first is not counted: it allocates, and kernels are chosen.
    job(timed[0]).backward()
    times = [time.perf_counter()]
    for batch in timed:
        job(batch).backward()
        times.append(time.perf_counter())
        # All ranks take as many, for of a sharded model none runs alone.
        if any(job.ranks.exchange(times[-1] - begun > _SHARE * seconds)):
            break
    job.model.zero_grad(set_to_none=True)
    step = accumulate * (times[-1] - times[0]) / (len(times) - 1)
    # The optimizer's part and the Trainer's own work come on top of these steps.
    return min(job.ranks.exchange(max(1, int((seconds - (times[-1] - begun)) / (1.15 * step)))))


def rate_factor(step: int, steps: int, gone: float = 0.0) -> float:
    """Return the learning rate of a step over the highest: a warm-up, then a cosine to 0 at the last step.

    ``gone`` is the share of the time that is over. Where it is ahead of the steps, because the
    machine is slower than when they were planned, the cosine follows it: a run that is cut at a
    high rate can be worse than none.
    """
    warm_up = max(steps // 20, min(steps, _WARM_UP))
    if step < warm_up:
        # The first step is not wasted at a rate of 0.
        return max(step, 1) / warm_up
    return 0.5 * (
        1 + math.cos(math.pi * min(1.0, max((step - warm_up) / max(1, steps - warm_up), gone)))
    )


def _bar(quiet: bool) -> Any:
    """Return a bar on the standard error, with step, loss and the time that is left."""
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress

    columns = *Progress.get_default_columns(), MofNCompleteColumn()
    return Progress(*columns, console=Console(stderr=True), disable=quiet)


def _arguments(
    job: _Distillation, folder: Path, steps: int, seed: int, accumulate: int, save: bool
) -> Any:
    from transformers import TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        gradient_accumulation_steps=accumulate,
        logging_steps=max(1, steps // 20),
        save_strategy="steps" if save else "no",
        save_steps=max(1, steps // 10),
        save_total_limit=1,
        report_to="none",
        disable_tqdm=True,
        # They are alike on all ranks, as nothing is in training mode.
        ddp_broadcast_buffers=False,
        seed=seed,
        use_cpu=next(job.model.parameters()).device.type == "cpu",
    )
    # One process takes one GPU. The Trainer would copy the model to all, where no hook knows it.
    arguments._n_gpu = min(arguments.n_gpu, 1)
    if arguments.world_size != job.ranks.size:
        raise ModelError(
            f"the environment must name the {job.ranks.size} processes of the group, but names "
            f"{arguments.world_size}: "
            "start them with torchrun or accelerate launch, and call "
            "torch.distributed.init_process_group first"
        )
    return arguments


def _recipe(job: _Distillation, lr: float | None) -> dict[str, Any]:
    """Return the layers and the rate that was asked for, and the sum of the teacher's weights' sizes."""
    # A rank that has failed is to be seen before the sums.
    job.ranks.exchange(BATCH)
    sizes = (float(gathered(p.abs().sum(dtype=torch.float64))) for p in job.teacher.parameters())
    return {"layers": str(require_layers(job.model)), "rate": lr, "teacher": f"{sum(sizes):.6g}"}


def newest_checkpoint(folder: Path) -> tuple[str, Any] | None:
    """Return the last checkpoint that was written to its end, and the Trainer's state, which it writes last."""
    from transformers import TrainerState

    for path in sorted(
        folder.glob("checkpoint-*"), key=lambda path: (len(path.name), path.name), reverse=True
    ):
        with suppress(OSError, ValueError, TypeError):
            return str(path), TrainerState.load_from_json(str(path / "trainer_state.json"))
    return None


def _trainer(
    job: _Distillation,
    batches: Iterator[Any],
    arguments: Any,
    lr: float,
    callbacks: Sequence[Any],
    progress: Any,
) -> Any:
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save
    from transformers import PrinterCallback, Trainer, TrainerCallback

    begun = time.perf_counter()
    # A rank that fails inside a sharded model cannot tell the others, who wait for its shards: it
    # goes, and they fail.
    told: Any = nullcontext if job.sharded else job.ranks.sharing_errors

    class Course(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            # The callbacks after this one know the model that is trained, without its teacher.
            trainer.callback_handler.model = job.model
            self.task = progress.add_task("distilling", total=state.max_steps)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            words = f"distilling, loss {float(job.last):.3f}"
            progress.update(self.task, completed=state.global_step, description=words)
            if job.until is not None:
                job.gone = fmean(
                    job.ranks.exchange((time.perf_counter() - begun) / max(job.until - begun, 1e-9))
                )
                control.should_training_stop |= job.gone > 1

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            # Where the time was over first, the steps that were taken are all.
            progress.update(self.task, total=state.global_step)

    class Distiller(Trainer):  # type: ignore[misc]
        def get_train_dataloader(self) -> DataLoader[Any]:
            # Not prepared by accelerate, which would give each rank a part of a batch.
            return DataLoader(Batches(), batch_size=None, pin_memory=torch.cuda.is_available())

        def compute_loss(
            self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any
        ) -> Tensor:
            # The Trainer turns dropout on; here it would only be noise between teacher and student.
            model.eval()
            with told():
                loss: Tensor = model(inputs["batch"])
            job.ranks.exchange(BATCH)
            job.samples += _largest(inputs["batch"]).shape[0]
            job.last = loss.detach()
            return loss

        def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
            stored(save, output_dir)

        def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
            """They are saved with the model."""

        def _load_from_checkpoint(
            self, resume_from_checkpoint: str, model: nn.Module | None = None
        ) -> None:
            try:
                held = stored(load, resume_from_checkpoint)
                if others := [
                    name for name, value in job.recipe.items() if held["recipe"][name] != value
                ]:
                    raise ValueError(f"it differs in {' and '.join(others)}")
                set_state_dict(
                    job.model,
                    optimizer,
                    model_state_dict=held["model"],
                    optim_state_dict=held["optimizer"],
                )
                schedule.load_state_dict(held["schedule"])
            except (Exception, CheckpointException) as error:
                raise StorageError(
                    "the checkpoint must be of this model and recipe, but "
                    f"{resume_from_checkpoint} is not: "
                    f"{str(error).strip().splitlines()[-1]:.300}: remove it, or give another folder"
                ) from error

    def stored(act: Any, folder: str | None) -> dict[str, Any]:
        """Save or load all that is trained, by all ranks together; as many or others may load it."""
        weights, moments = get_state_dict(job.model, optimizer)
        held = {"model": weights, "optimizer": moments, "schedule": schedule.state_dict()}
        # A copy, into which a load writes.
        held["recipe"] = dict(job.recipe)
        with warnings.catch_warnings():
            # It warns of one process, that it is one.
            warnings.simplefilter("ignore")
            act(held, checkpoint_id=folder)
        return held

    class Batches(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            with told():
                yield from ({"batch": batch} for batch in batches)

    # Fused, a step over 22 M parameters takes a twentieth of the time on a CPU.
    optimizer = torch.optim.AdamW(param_groups(job.model, lr=lr, constants_lr=lr), fused=True)
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        # What no loss reaches gets its state too: a checkpoint is loaded into an optimizer that has
        # all of it.
        step = torch.zeros((), device=p.device, dtype=torch.float32)
        optimizer.state[p] = {
            "step": step,
            "exp_avg": torch.zeros_like(p),
            "exp_avg_sq": torch.zeros_like(p),
        }
    schedule = LambdaLR(optimizer, lambda step: rate_factor(step, arguments.max_steps, job.gone))
    trainer = Distiller(
        job,
        arguments,
        train_dataset=Batches(),
        optimizers=(optimizer, schedule),
        callbacks=[Course(), *callbacks],
    )
    # Without its bar the Trainer prints its log instead, in the middle of ours.
    trainer.remove_callback(PrinterCallback)
    return trainer
