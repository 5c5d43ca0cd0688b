"""``dynorm convert --dry-run``: what a conversion would change, and its expected time and memory."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Unpack

import torch
from torch import nn

from dynorm.batches import Batch
from dynorm.errors import CalibrationWarning
from dynorm.fit import calibrate_, refine_
from dynorm.jobs.convert import require_point_wise
from dynorm.jobs.job import Job, JobOptions, Say, load_job
from dynorm.jobs.write import require_writable_with_code
from dynorm.recipe import Recipe
from dynorm.replace import ConversionReport
from dynorm.report import measure
from dynorm.table import Column, Plain, Table
from dynorm.train.distill import distill_, distillation_rate

# Steps and batches that are run to measure the time of each.
_TRIED = 2


@dataclass(frozen=True)
class DryRun(Plain):
    """The findings of ``dynorm convert --dry-run``.

    Args:
        model: the name of the model.
        conversion: the norms that would be replaced, with their layers, and those that would stay.
        recipe: the options, with the defaults for the model filled in.
        seconds: the expected time of each stage, extrapolated from a few batches.
        memory: peak memory of this process in bytes, in the dry run, which runs each stage on a few
            batches; on a GPU that of torch on the GPU.
        steps: steps of distillation; with ``minutes`` the number that is expected to fit.
    """

    model: str
    conversion: ConversionReport
    recipe: dict[str, object]
    seconds: dict[str, float]
    memory: int
    steps: int

    def __str__(self) -> str:
        """Return the tables of sites, recipe and time."""
        options = [(name, str(value)) for name, value in self.recipe.items() if value is not None]
        times = [(name, seconds) for name, seconds in self.seconds.items()]
        times.append(("in all", sum(self.seconds.values())))
        notes = [
            "Times from calibrate on are extrapolated from a few batches. The writing of the files, and the texts that "
            "a language or speech model generates for the report, are not included.",
            f"Peak memory: about {self.memory / 2**30:.1f} GiB.",
        ]
        if self.steps:
            notes.append(f"Distillation: about {self.steps:,} steps.")
        parts = [
            f"{self.model}, a dry run: nothing was written.",
            self.conversion,
            Table(("option", "value"), options, title="recipe"),
            Table(("stage", Column("about, in seconds", ",.0f")), times, notes),
        ]
        return "\n\n".join(map(str, parts))


def dry_run(
    source: str | Path,
    recipe: Recipe | None = None,
    *,
    remote_code: bool = False,
    say: Say = lambda line: None,
    **options: Unpack[JobOptions],
) -> DryRun:
    """Return what a conversion would change, with its expected time and memory; write nothing.

    The model is loaded, and every stage is run on a few batches.
    """
    recipe = recipe or Recipe()
    recipe.check()
    require_point_wise(recipe)
    job = load_job(source, recipe, say, lambda batches, _: batches, **options)
    model = job.pretrained.model
    if remote_code:
        require_writable_with_code(model)
    recipe = job.recipe
    batches = job.calibration_batches()
    converted = job.replace_norms_(batches)
    say("trying each stage on a few batches")
    with warnings.catch_warnings():
        # A few steps are too few to help, which does not matter here.
        warnings.simplefilter("ignore", CalibrationWarning)
        seconds, steps = _expected(job, batches)
    return DryRun(
        job.name,
        converted,
        recipe.to_dict(),
        {name: round(value, 2) for name, value in seconds.items()},
        _peak_memory(model),
        steps,
    )


def _expected(job: Job, batches: Sequence[Batch]) -> tuple[dict[str, float], int]:
    """Return the expected seconds of each stage, and the steps of distillation."""
    model = job.pretrained.model
    recipe = job.recipe
    # A batch is read from its files whenever it is taken, as in the conversion.
    few = batches[:_TRIED]
    # The stages up to the conversion are done, and take as long in a real one.
    seconds = dict(job.seconds)
    tried = _timed(lambda: calibrate_(model, few, lean=recipe.lean, tolerance=recipe.tolerance))
    seconds["calibrate"] = tried * len(batches) / len(few)
    larger = job.batches(job.inputs.fit, recipe.seed)[:_TRIED]
    if recipe.refine:
        tried = _timed(lambda: refine_(model, larger, steps=len(larger), **recipe.refine_fields))
        seconds["refine"] = tried * recipe.refine / len(larger)
    steps = 0
    if recipe.steps or recipe.minutes:
        step = _seconds_per_step(job, larger)
        if recipe.steps:
            steps = recipe.steps
        else:
            steps = max(1, int(recipe.minutes * 60 / step))
        seconds["distill"] = recipe.minutes * 60 if recipe.minutes else steps * step
    tests = job.batches(job.inputs.held_out)
    first = [tests[0]]
    tried = _timed(lambda: measure(model, first, original=job.original))
    seconds["measure"] = tried * len(tests)
    return seconds, steps


def _seconds_per_step(job: Job, batches: Sequence[Batch]) -> float:
    """Return the seconds of a step of distillation, from the end of the first step to the last."""
    from transformers import TrainerCallback

    ends = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *args: object, **options: object) -> None:
            ends.append(time.perf_counter())

    recipe = job.recipe
    model = job.pretrained.model
    # The first step includes the start of the Trainer.
    distill_(
        model,
        batches,
        teacher=job.original,
        steps=1 + _TRIED,
        lr=recipe.lr or distillation_rate(model),
        bf16=recipe.bf16,
        accumulate=recipe.accumulate,
        quiet=True,
        callbacks=[Clock()],
    )
    return (ends[-1] - ends[0]) / _TRIED


def _timed(run: Callable[[], object]) -> float:
    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun


def _peak_memory(model: nn.Module) -> int:
    """Return the peak memory so far: of torch on the model's GPU, or of this process."""
    device = next(model.parameters()).device
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    # Windows has no such module.
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # In bytes on macOS, else in KiB.
    return peak if sys.platform == "darwin" else peak * 1024
