"""The command ``dynorm inspect``: the norms of a pretrained model on its activations."""

from __future__ import annotations

from pathlib import Path
from typing import Unpack

from dynorm.jobs.job import JobOptions, load_job
from dynorm.jobs.stages import Say, silent
from dynorm.recipe import Recipe
from dynorm.report import InspectionReport, inspect_norms


def inspect_pretrained(
    source: str | Path,
    recipe: Recipe | None = None,
    *,
    say: Say = silent,
    **options: Unpack[JobOptions],
) -> InspectionReport:
    """Run :func:`dynorm.inspect_norms` on a pretrained model and texts or images.

    At most ``recipe.held_out`` of them (or blocks of texts) are looked at.
    """
    recipe = recipe or Recipe()
    recipe.check()
    job = load_job(source, recipe, say, **options)
    held_out = job.inputs.held_out[: recipe.held_out]
    meta = job.meta | {"max_length": job.recipe.max_length, "seed": recipe.seed}
    meta[f"{job.inputs.noun}_held_out"] = len(held_out)
    return inspect_norms(
        job.pretrained.model,
        job.batches(held_out),
        seed=recipe.seed,
        meta=meta,
    )
