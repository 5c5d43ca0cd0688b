"""``dynorm convert``, ``dynorm inspect`` and ``dynorm fold``: commands that take the folder of a pretrained model."""

import sys
import warnings
from pathlib import Path
from typing import Any

from dynorm.cli.application import command, quiet_libraries, show, speaker
from dynorm.files import require_writable
from dynorm.jobs.convert import convert_pretrained
from dynorm.jobs.inspect import inspect_pretrained
from dynorm.jobs.job import Given
from dynorm.jobs.recipe import Recipe
from dynorm.ranks import joined


@command
def convert(
    model: Path,
    out: Path,
    recipe: Recipe,
    texts: list[str] | None = None,
    images: list[str] | None = None,
    audio: list[str] | None = None,
    name: str | None = None,
    device: str = "cpu",
    dtype: str = "float32",
    keep_original: bool = False,
    overwrite: bool = False,
    as_json: bool = False,
) -> None:
    """Replace the norms of a pretrained model, fit their constants to texts, images or audio, measure, save.

    Example: dynorm convert ./all-MiniLM-L6-v2 ./converted --minutes 4
    """
    quiet_libraries()
    with joined(device) as ranks:
        say, track = speaker(quiet=as_json or ranks.rank > 0)
        if ranks.rank:
            # The first process says what holds for all.
            warnings.simplefilter("ignore")
        given = Given(
            texts=texts or (),
            images=images or (),
            audio=audio or (),
            name=name,
            device=device,
            dtype=dtype,
        )
        keep = {"keep_original": keep_original, "overwrite": overwrite}
        quiet = as_json or not sys.stderr.isatty()
        report = convert_pretrained(
            model, out, recipe, quiet=quiet, say=say, track=track, **keep, **given
        )
        if not ranks.rank:
            show(report, as_json)


@command
def inspect(
    model: Path,
    recipe: Recipe,
    texts: list[str] | None = None,
    images: list[str] | None = None,
    audio: list[str] | None = None,
    html: Path | None = None,
    samples: int = 256,
    name: str | None = None,
    device: str = "cpu",
    as_json: bool = False,
) -> None:
    """Find massive activations at the norms of a model, and compare DyT, DyISRU and a line on its outliers.

    Example: dynorm inspect ./all-MiniLM-L6-v2 --html inspection.html
    """
    quiet_libraries()
    if html is not None:
        require_writable(html)
    say, track = speaker(quiet=as_json)
    given = Given(
        texts=texts or (), images=images or (), audio=audio or (), name=name, device=device
    )
    report = inspect_pretrained(model, recipe, samples=samples, say=say, track=track, **given)
    if html is not None:
        report.to_html(html)
        say(f"wrote {html}")
    show(report, as_json)


@command
def fold(
    model: Path,
    out: Path,
    affine: bool = True,
    center: bool = True,
    redundant: float = 0.0,
    add_bias: bool = False,
    untie: bool = False,
    only: list[str] | None = None,
    skip: list[str] | None = None,
    overwrite: bool = False,
    as_json: bool = False,
) -> None:
    """Fold the norms of a pretrained model into their neighbours, exactly, check the outputs, and save.

    Example: dynorm fold ./gpt2 ./folded --untie
    """
    quiet_libraries()
    from dynorm.jobs.fold import fold_pretrained

    say, _ = speaker(quiet=as_json)
    options: dict[str, Any] = {
        "affine": affine,
        "center": center,
        "add_bias": add_bias,
        "untie": untie,
    }
    options |= {"redundant": redundant, "only": only or None, "skip": skip or None}
    show(fold_pretrained(model, out, options, overwrite=overwrite, say=say), as_json)
