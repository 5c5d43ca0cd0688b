"""Convert a pretrained model: calibrate, distil, measure and save it."""

from __future__ import annotations

from pathlib import Path
from typing import Unpack

from dynorm.errors import ArgumentError, require_library
from dynorm.jobs.checkpoint import local_source
from dynorm.jobs.job import JobOptions, Say, Track, load_job
from dynorm.jobs.write import (
    folders_of_modules,
    require_output,
    require_writable_with_code,
    write_model,
    write_out,
)
from dynorm.recipe import Recipe
from dynorm.report import ModelReport

RECIPE = "recipe.json"
"""The file of the recipe, next to the model."""


def convert_pretrained(
    source: str | Path,
    out: str | Path,
    recipe: Recipe | None = None,
    *,
    keep_original: bool = False,
    remote_code: bool = False,
    overwrite: bool = False,
    quiet: bool = False,
    say: Say = lambda line: None,
    track: Track = lambda batches, description: batches,
    **options: Unpack[JobOptions],
) -> ModelReport:
    """Convert a pretrained model and save it, with its report on held-out samples, in a folder.

    ``source`` is a folder, a GGUF file, or the name of a model on the hub.
    The folder ``out`` gets ``model`` (loadable), ``report.json``, ``report.html``, ``recipe.json`` and,
    with ``keep_original``, the unchanged model as ``original``. With ``remote_code`` the model also
    loads without dynorm, as in :func:`dynorm.save`. On several processes of torchrun, each
    fits to its share of the samples, and the first one writes. ``say`` is called with a line at the
    start of each stage; ``track`` is called with the batches of a stage and a description, and
    returns them, for example with a progress bar. An error before the writing leaves nothing
    behind.
    """
    recipe = recipe or Recipe()
    out = Path(out)
    recipe.check()
    require_point_wise(recipe)
    source = local_source(source)
    require_library("matplotlib", "the report's pictures", "plots")
    names = ("model", "original") if keep_original else ("model",)
    files = ("report.json", "report.html", RECIPE)
    require_output(source, out, (*names, *files), overwrite=overwrite)
    if recipe.checkpoints is not None:
        checkpoints = Path(recipe.checkpoints)
        for folder in (source, *(out / name for name in names)):
            if checkpoints.resolve().is_relative_to(folder.resolve()):
                raise ArgumentError(
                    f"checkpoints must have a separate folder, but {checkpoints} is in {folder}"
                )
        require_output(checkpoints, checkpoints, (), overwrite=True)
    folders_of_modules(source)
    job = load_job(source, recipe, say, track, **options)
    model = job.pretrained.model
    remarks = job.pretrained.remarks
    if remote_code:
        require_writable_with_code(model)
    noun = job.inputs.noun
    to_fit = job.inputs.counts[f"{noun}_to_fit"]
    held_out = len(job.inputs.held_out)
    say(f"{type(model).__name__} from {source}, {noun}: {to_fit} to fit on, {held_out} held out")
    for remark in remarks:
        say(remark)
    say(str(job.recipe))
    job.convert_()
    if job.recipe.refine:
        job.refine_()
    if job.recipe.steps:
        job.distill_(quiet)
    report = job.measure()
    if job.ranks.rank:
        return report
    write_out(
        model,
        source,
        out,
        overwrite,
        report,
        template="conversion.md",
        name=report.name,
        remarks=remarks,
        remote_code=remote_code,
    )
    if keep_original:
        write_model(job.original, source, out / "original", overwrite)
    report.to_html(out / "report.html")
    job.recipe.save(out / RECIPE)
    say(f"saved {out / 'model'}, {out / 'report.json'}, {out / 'report.html'} and {out / RECIPE}")
    return report


def require_point_wise(recipe: Recipe) -> None:
    """Refuse annealed layers, which are norms until they are trained."""
    for layer in recipe.layers:
        if layer.is_annealed:
            raise ArgumentError(
                f"to must be point-wise, but {layer.to!r} is a norm until its annealing ends: "
                "train it with AnnealCallback"
            )
