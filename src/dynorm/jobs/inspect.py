"""The command ``dynorm inspect``: the norms of a pretrained model on its activations."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Unpack

from dynorm.errors import ArgumentError
from dynorm.jobs.job import JobOptions, load_job
from dynorm.jobs.stages import Say, silent
from dynorm.recipe import Recipe
from dynorm.report import InspectionReport, inspect_norms


def inspect_pretrained(
    source: str | Path,
    recipe: Recipe | None = None,
    *,
    samples: int = 256,
    say: Say = silent,
    **options: Unpack[JobOptions],
) -> InspectionReport:
    """Run :func:`dynorm.inspect_norms` on a pretrained model and texts or images.

    At most ``samples`` of them (or blocks of texts) are looked at.
    """
    if samples < 1:
        raise ArgumentError(f"samples must be at least 1, got {samples}")
    recipe = recipe or Recipe()
    recipe.check()
    job = load_job(source, replace(recipe, held_out=samples), say, **options)
    held_out = job.inputs.held_out[:samples]
    meta = job.meta | {"max_length": job.recipe.max_length, "seed": recipe.seed}
    meta[f"{job.inputs.noun}_held_out"] = len(held_out)
    return inspect_norms(
        job.pretrained.model,
        job.batches(held_out),
        seed=recipe.seed,
        meta=meta,
    )
