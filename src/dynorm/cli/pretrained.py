"""``dynorm convert``, ``dynorm inspect`` and ``dynorm fold``: commands that take the folder of a pretrained model."""

from __future__ import annotations

import sys
from dataclasses import fields
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from dynorm.cli.application import (
    AsJson,
    Device,
    Images,
    MaxLength,
    Name,
    Only,
    Overwrite,
    Seed,
    Skip,
    app,
    quiet_libraries,
    show,
    speaker,
)
from dynorm.files import require_writable

Model = Annotated[
    Path, typer.Argument(help="Folder of a transformers model with its tokenizer or image processor, or a .gguf file.")
]
Texts = Annotated[
    list[Path] | None,
    typer.Option(
        help="Text file or folder: one text per paragraph, or per line of a file without blank lines. By default the "
        "docstrings of Python's standard library. Repeatable."
    ),
]


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


@app.command()
def convert(
    model: Model,
    out: Annotated[Path, typer.Argument(help="New folder, for model/, report.json and report.html.")],
    to: Annotated[
        Function, typer.Option(help="The layer that replaces the norms; auto: the simplest that holds.")
    ] = Function.dyisru,
    texts: Texts = None,
    images: Images = None,
    steps: Annotated[int | None, typer.Option(help="Distil for this many steps; by default not at all.")] = None,
    minutes: Annotated[float | None, typer.Option(help="Distil for this long instead.")] = None,
    refine: Annotated[int, typer.Option(help="Steps that refine the constants of all layers together.")] = 50,
    only: Only = None,
    skip: Skip = None,
    held_out: Annotated[int, typer.Option(help="Texts or images to keep aside for measuring, of few a quarter.")] = 512,
    max_length: MaxLength = None,
    batch: Annotated[
        int | None,
        typer.Option(help="Texts per step, or blocks of a language model, or images; by default 32, 4 or 16."),
    ] = None,
    per_channel: Annotated[
        bool | None,
        typer.Option(
            "--per-channel/--per-layer",
            help="Give each channel its own constant (as for an encoder), or each layer one (as for a language model).",
        ),
    ] = None,
    witnesses: Annotated[
        int | None,
        typer.Option(
            help="Channels, at most, that each layer may read to tell a token's size, by default 4, or 8 in a language "
            "model; 0 makes it a function of one channel alone."
        ),
    ] = None,
    tolerance: Annotated[
        float,
        typer.Option(help="With --to auto: how far the error of a simpler layer may lie above the best one's."),
    ] = 0.05,
    lr: Annotated[
        float | None, typer.Option(help="Highest learning rate of the distillation; by default it fits the width.")
    ] = None,
    bf16: Annotated[
        bool, typer.Option("--bf16", help="Distil in bfloat16: up to three times as fast where the processor knows it.")
    ] = False,
    accumulate: Annotated[
        int, typer.Option(help="Batches that make a step of distillation, on each process of torchrun.")
    ] = 1,
    seed: Seed = 0,
    name: Name = None,
    device: Device = "cpu",
    dtype: Annotated[str, typer.Option(help="Dtype of the weights, or auto for the checkpoint's.")] = "float32",
    checkpoints: Annotated[
        Path | None, typer.Option(help="Folder for checkpoints of the distillation, which resumes from there.")
    ] = None,
    keep_original: Annotated[
        bool, typer.Option("--keep-original", help="Also write the original as it was loaded, to OUT/original.")
    ] = False,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Replace the norms of a pretrained model, set their constants from texts or images, measure, and save.

    Example: dynorm convert ./all-MiniLM-L6-v2 ./converted --minutes 4
    """
    given = {name: value for name, value in locals().items() if value is not None}
    quiet_libraries()
    from dynorm.distill.pipeline import convert_pretrained
    from dynorm.fit.ranks import joined

    with joined(device) as ranks:
        say, track = speaker(quiet=as_json or ranks.rank > 0)
        quiet = as_json or not sys.stderr.isatty()
        recipe, rest = _recipe_of(given, "model", "out", "as_json")
        report = convert_pretrained(model, out, recipe, quiet=quiet, say=say, track=track, **rest)
        if not ranks.rank:
            show(report, as_json)


@app.command()
def inspect(
    model: Model,
    texts: Texts = None,
    images: Images = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with a picture of each norm to this file.")] = None,
    samples: Annotated[int, typer.Option(help="Texts to fit on, and as many others to measure on.")] = 256,
    max_length: MaxLength = None,
    only: Only = None,
    skip: Skip = None,
    seed: Seed = 0,
    name: Name = None,
    device: Device = "cpu",
    as_json: AsJson = False,
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
    report = inspect_pretrained(model, recipe, track=track, **rest)
    if html is not None:
        report.to_html(html)
        say(f"wrote {html}")
    show(report, as_json)


@app.command()
def fold(
    model: Annotated[Path, typer.Argument(help="Folder of a transformers model.")],
    out: Annotated[Path, typer.Argument(help="New folder, for model/ and report.json.")],
    affine: Annotated[bool, typer.Option(help="Fold weights and biases into the layers that read the norms.")] = True,
    center: Annotated[
        bool, typer.Option(help="Fold LayerNorm's mean into the layers that write the residual stream.")
    ] = True,
    add_bias: Annotated[bool, typer.Option("--add-bias", help="Give linear layers the biases they lack.")] = False,
    untie: Annotated[bool, typer.Option("--untie", help="Untie the head from the embedding where needed.")] = False,
    only: Only = None,
    skip: Skip = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Fold the norms of a pretrained model into their neighbours, exactly, check the outputs, and save.

    Example: dynorm fold ./gpt2 ./folded --untie
    """
    quiet_libraries()
    from dynorm.distill.fold import fold_pretrained

    say, _ = speaker(quiet=as_json)
    options: dict[str, Any] = {"affine": affine, "center": center, "add_bias": add_bias, "untie": untie}
    options |= {"only": only or None, "skip": skip or None}
    show(fold_pretrained(model, out, options, overwrite=overwrite, say=say), as_json)
