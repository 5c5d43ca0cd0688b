"""The command ``dynorm inspect``: the norms of a pretrained model on its activations."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Unpack

from dynorm.batches import arguments
from dynorm.errors import ArgumentError
from dynorm.find import find_norms
from dynorm.jobs.job import JobOptions, Say, Track, load_job
from dynorm.recipe import Recipe
from dynorm.report import InspectionReport, inspect_norms
from dynorm.site import select_sites


def inspect_pretrained(
    source: str | Path,
    recipe: Recipe | None = None,
    *,
    samples: int = 256,
    say: Say = lambda line: None,
    track: Track = lambda batches, description: batches,
    **options: Unpack[JobOptions],
) -> InspectionReport:
    """Run :func:`dynorm.inspect_norms` on a pretrained model and texts or images.

    At most ``samples`` of them (or blocks of texts) are fitted to, and at most ``samples`` others
    measured on.
    """
    if samples < 1:
        raise ArgumentError(f"samples must be at least 1, got {samples}")
    recipe = recipe or Recipe()
    recipe.check()
    job = load_job(source, replace(recipe, held_out=samples), say, track, **options)
    model = job.pretrained.model
    seed = recipe.seed
    fitted = job.batches(job.inputs.fit[:samples])
    held_out = job.inputs.held_out[:samples]
    _, example = arguments(model, fitted[0])
    sites = find_norms(model, **example)
    meta = job.meta | {"max_length": job.recipe.max_length, "seed": seed}
    meta[f"{job.inputs.noun}_held_out"] = len(held_out)
    fit_on = track(fitted, "fitting")
    tests = track(job.batches(held_out), "measuring")
    return inspect_norms(
        model,
        tests,
        sites=select_sites(sites, recipe.only, recipe.skip),
        fit_on=fit_on,
        seed=seed,
        meta=meta,
        decode=getattr(job.pretrained.tokenizer, "convert_ids_to_tokens", None),
    )
