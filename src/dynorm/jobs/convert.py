"""A pretrained model in: converted, calibrated, distilled, measured and saved."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Unpack

from dynorm.errors import ArgumentError, require_library
from dynorm.jobs.job import JobOptions, Say, Track, load_job
from dynorm.jobs.recipe import Recipe
from dynorm.jobs.write import folders_of_modules, require_output, write_model, write_out
from dynorm.report import ModelReport


def convert_pretrained(
    source: str | Path,
    out: str | Path,
    recipe: Recipe | None = None,
    *,
    keep_original: bool = False,
    overwrite: bool = False,
    quiet: bool = False,
    say: Say = lambda line: None,
    track: Track = lambda batches, description: batches,
    **options: Unpack[JobOptions],
) -> ModelReport:
    """Convert a pretrained model and save it, with its report on held-out samples, in a folder.

    ``model`` (loadable), ``report.json`` and ``report.html`` go there, and ``original``, the model
    before, where that is to be kept. On several processes of torchrun, each fits to its share of
    the samples, and the first one writes. ``say`` is called with a line at the start of each stage;
    ``track`` wraps a stage's batches, to show a bar, and is given them and a description. An error
    before the writing leaves nothing behind.
    """
    recipe, source, out = recipe or Recipe(), Path(source), Path(out)
    recipe.check()
    require_library("matplotlib", "the report's pictures", "plots")
    names = ("model", "original") if keep_original else ("model",)
    require_output(source, out, (*names, "report.json", "report.html"), overwrite=overwrite)
    if recipe.checkpoints is not None:
        checkpoints = Path(recipe.checkpoints)
        for folder in (source, *(out / name for name in names)):
            if checkpoints.resolve().is_relative_to(folder.resolve()):
                raise ArgumentError(
                    f"checkpoints must have a folder of their own, but {checkpoints} is in {folder}"
                )
        require_output(checkpoints, checkpoints, (), overwrite=True)
    folders_of_modules(source)
    job = load_job(source, recipe, say, track, **options)
    model, remarks, noun = job.pretrained.model, job.pretrained.remarks, job.inputs.noun
    counts = f"{job.inputs.counts[f'{noun}_to_fit']} to fit on, {len(job.inputs.held_out)} held out"
    for line in (f"{type(model).__name__} from {source}, {noun}: {counts}", *remarks):
        say(line)
    if job.original is None:
        job.original = copy.deepcopy(model)
    job.convert_()
    if job.recipe.refine:
        job.refine_()
    if job.recipe.steps or job.recipe.minutes:
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
    )
    if keep_original:
        write_model(job.original, source, out / "original", overwrite)
    report.to_html(out / "report.html")
    say(f"saved {out / 'model'}, {out / 'report.json'} and {out / 'report.html'}")
    return report
