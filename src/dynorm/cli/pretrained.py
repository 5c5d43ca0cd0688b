"""``dynorm convert``, ``dynorm inspect`` and ``dynorm fold``: commands that take the folder of a pretrained model."""

import sys
import warnings
from dataclasses import fields
from enum import StrEnum
from pathlib import Path
from typing import Any

from dynorm.cli.application import command, quiet_libraries, show, speaker
from dynorm.files import require_writable


class Function(StrEnum):
    """The layers that a command may put in."""

    dyisru = "dyisru"
    dyt = "dyt"
    derf = "derf"
    linear = "linear"
    auto = "auto"


def _recipe_of(given: dict[str, Any], *left_out: str) -> tuple[Any, dict[str, Any]]:
    """Return a recipe of the options that its fields are named after, and the rest; the others have their defaults."""
    from dynorm.distill.pipeline import Recipe

    names = {field.name for field in fields(Recipe)} & given.keys()
    rest = given.keys() - names - set(left_out)
    return Recipe(**{name: given[name] for name in names}), {name: given[name] for name in rest}


@command
def convert(
    model: Path,
    out: Path,
    to: Function = Function.dyisru,
    texts: list[Path] | None = None,
    images: list[Path] | None = None,
    audio: list[Path] | None = None,
    steps: int | None = None,
    minutes: float | None = None,
    refine: int = 50,
    only: list[str] | None = None,
    skip: list[str] | None = None,
    held_out: int = 512,
    max_length: int | None = None,
    batch: int | None = None,
    per_channel: bool | None = None,
    witnesses: int | None = None,
    tolerance: float = 0.05,
    lr: float | None = None,
    bf16: bool = False,
    accumulate: int = 1,
    seed: int = 0,
    name: str | None = None,
    device: str = "cpu",
    dtype: str = "float32",
    checkpoints: Path | None = None,
    keep_original: bool = False,
    overwrite: bool = False,
    as_json: bool = False,
) -> None:
    """Replace the norms of a pretrained model, fit their constants to texts, images or audio, measure, save.

    Example: dynorm convert ./all-MiniLM-L6-v2 ./converted --minutes 4
    """
    given = {name: value for name, value in locals().items() if value is not None}
    quiet_libraries()
    from dynorm.distill.pipeline import convert_pretrained
    from dynorm.fit.ranks import joined

    with joined(device) as ranks:
        say, track = speaker(quiet=as_json or ranks.rank > 0)
        if ranks.rank:
            # The first process says what holds for all.
            warnings.simplefilter("ignore")
        quiet = as_json or not sys.stderr.isatty()
        recipe, rest = _recipe_of(given, "model", "out", "as_json")
        report = convert_pretrained(model, out, recipe, quiet=quiet, say=say, track=track, **rest)
        if not ranks.rank:
            show(report, as_json)


@command
def inspect(
    model: Path,
    texts: list[Path] | None = None,
    images: list[Path] | None = None,
    audio: list[Path] | None = None,
    html: Path | None = None,
    samples: int = 256,
    max_length: int | None = None,
    only: list[str] | None = None,
    skip: list[str] | None = None,
    seed: int = 0,
    name: str | None = None,
    device: str = "cpu",
    as_json: bool = False,
) -> None:
    """Find massive activations at the norms of a model, and compare DyT, DyISRU and a line on its outliers.

    Example: dynorm inspect ./all-MiniLM-L6-v2 --html inspection.html
    """
    given = {name: value for name, value in locals().items() if value is not None}
    quiet_libraries()
    from dynorm.distill.pipeline import inspect_pretrained

    if html is not None:
        require_writable(html)
    say, track = speaker(quiet=as_json)
    recipe, rest = _recipe_of(given, "model", "html", "as_json")
    report = inspect_pretrained(model, recipe, say=say, track=track, **rest)
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
    from dynorm.distill.fold import fold_pretrained

    say, _ = speaker(quiet=as_json)
    options: dict[str, Any] = {"affine": affine, "center": center, "add_bias": add_bias, "untie": untie}
    options |= {"redundant": redundant, "only": only or None, "skip": skip or None}
    show(fold_pretrained(model, out, options, overwrite=overwrite, say=say), as_json)
