"""Convert a pretrained model: calibrate, distil, measure and save it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Unpack

from dynorm.errors import ArgumentError, require_library
from dynorm.fold.stock import as_stock, stock_config
from dynorm.hub import with_prefix
from dynorm.jobs.inputs import ShuffledBatches
from dynorm.jobs.job import JobOptions, load_job
from dynorm.jobs.stages import Data, Say, convert_in_stages_, silent
from dynorm.jobs.write import require_output, write_out
from dynorm.recipe import Recipe
from dynorm.report import ModelReport

_STOCK = (
    "Its norms compute the identity, with numbers of 2^40, so load it in bfloat16 or float32: in float16 its "
    "outputs are NaN."
)


def convert_pretrained(
    source: str | Path,
    out: str | Path,
    recipe: Recipe | None = None,
    *,
    overwrite: bool = False,
    say: Say = silent,
    **options: Unpack[JobOptions],
) -> ModelReport:
    """Convert a pretrained model and save it, with its report on held-out samples, in a folder.

    ``source`` is a folder or a GGUF file. The folder ``out`` gets ``model`` (loadable), ``report.json``,
    ``report.html`` and ``recipe.json``, and ``prefix`` if the recipe asks for one. It appears as a whole
    when all is done: an error leaves nothing behind. ``say`` is called with a line about each stage.
    """
    recipe = recipe or Recipe()
    out = Path(out)
    recipe.check()
    _require_one_process()
    source = Path(source)
    if recipe.steps != 0:
        require_library("accelerate", "distillation (or --steps 0)")
    if recipe.prefix:
        require_library("peft", "a prefix")
    require_output(source, out, overwrite=overwrite)
    if recipe.checkpoints is not None:
        place = Path(recipe.checkpoints).resolve()
        if place.is_relative_to(out.resolve()) or place.is_relative_to(source.resolve()):
            raise ArgumentError(
                f"checkpoints must have a separate folder, but {recipe.checkpoints} is in {out} or "
                f"{source}"
            )
    job = load_job(source, recipe, say, **options)
    model = job.pretrained.model
    # With the defaults for the model filled in.
    recipe = job.recipe
    if recipe.stock:
        # A class that cannot hold the result is refused before the work.
        stock_config(model)
    # The prefix is put around the model, which is converted with it.
    whole = with_prefix(model) if recipe.prefix else model
    assert recipe.batch is not None
    assert recipe.calibration is not None
    inputs = job.inputs
    say(str(recipe))
    data = Data(
        calibration=job.batches(inputs.fit[: recipe.calibration], recipe.seed),
        training=ShuffledBatches(inputs.batches, inputs.fit, recipe.batch, recipe.seed),
        held_out=job.batches(inputs.held_out),
        compared=job.batches(inputs.held_out[: 4 * recipe.batch]),
    )
    report = convert_in_stages_(whole, data, recipe, job.meta, say)
    if recipe.stock:
        model = as_stock(model, data.compared[0])
    stages = report.meta["stages"]
    stages["calibrate"]["samples"] = min(recipe.calibration, len(inputs.fit))
    if report.output.worst is not None:
        report.meta["worst_sample"] = inputs.name(report.output.worst)
    write_out(
        model,
        source,
        out,
        overwrite,
        report,
        recipe=recipe,
        template="conversion.jinja",
        prefixed=whole if recipe.prefix else None,
        name=report.name,
        remarks=(*job.pretrained.remarks, *([_STOCK] if recipe.stock else [])),
    )
    say(f"saved {', '.join(str(path) for path in sorted(out.iterdir()))}")
    return report


def _require_one_process() -> None:
    """Refuse several processes, which would all write the same folder."""
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count > 1:
        raise ArgumentError(
            f"dynorm convert must run as one process, got {count} of torchrun: for several GPUs "
            "call the verbs in a script, where distill_ trains on all processes"
        )
