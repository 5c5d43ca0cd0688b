"""Inspect the norms of a pretrained model on its own activations, for the command line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Unpack

from dynorm.batches import arguments
from dynorm.errors import ArgumentError
from dynorm.find import find_norms
from dynorm.jobs.job import JobOptions, Say, Track, load_job
from dynorm.jobs.recipe import Recipe
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
    """Inspect the norms of a pretrained model: :func:`dynorm.inspect_norms` on texts, images or audio.

    Of these, or of blocks of texts, at most ``samples`` are fitted to, and as many measured on.
    """
    if samples < 1:
        raise ArgumentError(f"samples must be at least 1, got {samples}")
    recipe = recipe or Recipe()
    recipe.check()
    job = load_job(Path(source), replace(recipe, held_out=samples), say, track, **options)
    fitted, measured = (
        job.batches(part[:samples]) for part in (job.inputs.fit, job.inputs.held_out)
    )
    model, decode = (
        job.pretrained.model,
        getattr(job.pretrained.tokenizer, "convert_ids_to_tokens", None),
    )
    sites = find_norms(model, **arguments(model, fitted[0])[1])
    sites, seed = select_sites(sites, recipe.only or None, recipe.skip or None), recipe.seed
    meta = job.meta | {"max_length": job.recipe.max_length, "seed": seed}
    meta[f"{job.inputs.noun}_held_out"] = len(job.inputs.held_out[:samples])
    fit_on, tests = track(fitted, "fitting"), track(measured, "measuring")
    return inspect_norms(
        model, tests, sites=sites, fit_on=fit_on, seed=seed, meta=meta, decode=decode
    )
