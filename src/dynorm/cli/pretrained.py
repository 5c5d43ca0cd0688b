"""``dynorm convert``, ``dynorm inspect`` and ``dynorm fold``: jobs on a pretrained model."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Annotated, Literal

import typer

from dynorm.cli.application import AsJson, Overwrite, app, quiet_libraries, show, speaker
from dynorm.errors import ArgumentError
from dynorm.files import require_writable
from dynorm.jobs.convert import convert_pretrained
from dynorm.jobs.inspect import inspect_pretrained
from dynorm.jobs.job import JobOptions
from dynorm.recipe import ENCODER, IMAGES, LANGUAGE, Recipe
from dynorm.replace.options import REST, LayerOptions, Target

# Arguments and options of several commands.
Model = Annotated[
    Path,
    typer.Argument(
        help="Folder of a transformers model with its tokenizer or processor, as `hf download` "
        "fetches it, or a .gguf file."
    ),
]
Texts = Annotated[
    list[str] | None,
    typer.Option(
        help="Text file or folder. Each paragraph is a text; in a file without blank lines, each "
        "line; in a .py file, each docstring. Default: the docstrings of Python's standard "
        "library. Repeatable."
    ),
]
Images = Annotated[
    list[str] | None,
    typer.Option(help="Image file or folder, for a model that takes images. Repeatable."),
]
Name = Annotated[
    str | None,
    typer.Option(help="Name of the model in the report. Default: the name of its folder."),
]
Device = Annotated[str, typer.Option(help="Device to compute on: cpu, cuda, ...")]
MaxLength = Annotated[
    int | None,
    typer.Option(
        help="Longest text in tokens; for a language model, the size of the blocks that joined "
        "texts are cut into. Default: 64, or 256 for a language model."
    ),
]
Seed = Annotated[int, typer.Option(help="Seed of all random choices.")]


def layers_of(words: list[str]) -> Target:
    """Return the layer of ``--to NAME``, or the layers by globs of ``--to GLOB=NAME``."""
    by_glob: dict[str, str] = {}
    for word in words:
        glob, _, name = word.rpartition("=")
        if (glob or REST) in by_glob:
            raise ArgumentError(
                f"--to must name a glob once, got {word!r} after another: leave one out"
            )
        by_glob[glob or REST] = name
    rest = by_glob.pop(REST, LayerOptions.to)
    # The first glob that matches a norm decides.
    return by_glob | {REST: rest} if by_glob else rest


def _fields_of_options(context: typer.Context) -> dict[str, object]:
    """Return the fields of a recipe that are on the command line."""
    values = {}
    for field in fields(Recipe):
        source = context.get_parameter_source(field.name)
        if source is not None and source.name == "COMMANDLINE":
            values[field.name] = context.params[field.name]
    if "to" in values:
        values["to"] = layers_of(context.params["to"])
    return values


@app.command()
def convert(
    context: typer.Context,
    model: Model,
    out: Annotated[
        Path,
        typer.Argument(help="New folder for model/, recipe.json, report.json and report.html."),
    ],
    texts: Texts = None,
    images: Images = None,
    name: Name = None,
    device: Device = "cpu",
    dtype: Annotated[
        str, typer.Option(help="Dtype of the weights; auto keeps the checkpoint's.")
    ] = "float32",
    overwrite: Overwrite = False,
    as_json: AsJson = False,
    recipe: Annotated[
        Path | None,
        typer.Option(
            help="JSON file of a recipe, such as the recipe.json of an earlier run. It has any of "
            "the options below, and calibration, the number of samples for the constants. Options of "
            "the command line replace those of the file."
        ),
    ] = None,
    to: Annotated[
        list[str] | None,
        typer.Option(
            help="Layer in the place of the norms: dyisru, dyt, derf, linear, or none, which folds "
            "lines away into the weights of a pre-norm model. GLOB=NAME is for the norms whose path "
            "matches the glob, and GLOB=keep leaves them. The first glob that matches decides. "
            f"Default: {LayerOptions.to}. Repeatable."
        ),
    ] = None,
    stock: Annotated[
        bool,
        typer.Option(
            "--stock", help="With --to none, save the model in its own class, without dynorm."
        ),
    ] = Recipe.stock,
    prefix: Annotated[
        bool,
        typer.Option(
            "--prefix",
            help="Let all texts of a decoder follow its first token (bos_token_id), whose keys and "
            "values are trained and saved in prefix/.",
        ),
    ] = Recipe.prefix,
    steps: Annotated[
        int | None,
        typer.Option(
            help=f"Steps of distillation, 0 for none. Default: {ENCODER.steps} for an encoder of texts, "
            f"{LANGUAGE.steps} for a language model, {IMAGES.steps} for a model of images."
        ),
    ] = Recipe.steps,
    held_out: Annotated[
        int,
        typer.Option(
            help="Number of texts or images to set aside for measuring. With fewer than twice this "
            "number, a quarter of them."
        ),
    ] = Recipe.held_out,
    max_length: MaxLength = Recipe.max_length,
    batch: Annotated[
        int | None,
        typer.Option(
            help=f"Batch size. Default: {ENCODER.batch} texts, {LANGUAGE.batch} block of a language "
            f"model, or {IMAGES.batch} images."
        ),
    ] = Recipe.batch,
    witnesses: Annotated[
        int,
        typer.Option(
            help="Number of channels, at most 16, from which each DyISRU may estimate the size of a "
            "token. With 0 each value depends on its own channel."
        ),
    ] = Recipe.witnesses,
    fold_means: Annotated[
        bool,
        typer.Option(
            "--fold-means/--keep-means",
            help="First fold the means of LayerNorms into the weights, wherever that is exact.",
        ),
    ] = Recipe.fold_means,
    seed: Seed = Recipe.seed,
    lr: Annotated[
        float | None,
        typer.Option(
            help="Highest learning rate of the distillation: by which share of its size a step moves "
            f"a weight. Default: {IMAGES.lr:.2g} for a model of images, {ENCODER.lr:.2g} for others.",
        ),
    ] = Recipe.lr,
    bf16: Annotated[
        bool,
        typer.Option(
            "--bf16",
            help="Distil in bfloat16, which is up to three times as fast on processors "
            "that support it.",
        ),
    ] = Recipe.bf16,
    checkpoints: Annotated[
        Path | None,
        typer.Option(
            help="Folder for checkpoints of the distillation. The same command resumes from them."
        ),
    ] = None,
) -> None:
    """Replace the norms of a pretrained model with point-wise layers, train them, measure, save.

    Example: dynorm convert ./all-MiniLM-L6-v2 ./converted
    """
    quiet_libraries()
    start = Recipe() if recipe is None else Recipe.load(recipe)
    report = convert_pretrained(
        model,
        out,
        start.changed(**_fields_of_options(context)),
        overwrite=overwrite,
        say=speaker(quiet=as_json),
        **JobOptions(texts=texts or (), images=images or (), name=name, device=device, dtype=dtype),
    )
    show(report, as_json)


@app.command()
def inspect(
    model: Model,
    texts: Texts = None,
    images: Images = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Also write the result as an HTML page, with a picture of each norm."),
    ] = None,
    samples: Annotated[
        int,
        typer.Option(help="Largest number of texts or images to measure on."),
    ] = 256,
    name: Name = None,
    device: Device = "cpu",
    as_json: AsJson = False,
    max_length: MaxLength = Recipe.max_length,
    seed: Seed = Recipe.seed,
) -> None:
    """Find massive activations at a model's norms; compare DyT, DyISRU and a line on the outliers.

    Example: dynorm inspect ./all-MiniLM-L6-v2 --out inspection.html
    """
    quiet_libraries()
    if out is not None:
        require_writable(out, overwrite=True)
    say = speaker(quiet=as_json)
    report = inspect_pretrained(
        model,
        Recipe(max_length=max_length, seed=seed, held_out=samples),
        say=say,
        **JobOptions(texts=texts or (), images=images or (), name=name, device=device),
    )
    if out is not None:
        report.to_html(out)
        say(f"wrote {out}")
    show(report, as_json)


@app.command()
def fold(
    model: Model,
    out: Annotated[Path, typer.Argument(help="New folder for model/ and report.json.")],
    center: Annotated[
        bool,
        typer.Option(
            help="Fold the mean of LayerNorm into the layers that write the residual stream."
        ),
    ] = True,
    add_bias: Annotated[
        bool, typer.Option("--add-bias", help="Add biases to linear layers that need one.")
    ] = False,
    untie: Annotated[
        bool,
        typer.Option("--untie", help="Separate the head from the embedding if they share weights."),
    ] = False,
    format: Annotated[
        Literal["flashnorm"] | None,
        typer.Option(
            help="flashnorm: fold only weights of RMSNorms, and mark the config as engines expect "
            "it. The files are changed one at a time: the model need not fit into memory, and its "
            "outputs are not compared."
        ),
    ] = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Fold the norms of a pretrained model into their neighbours, exactly, check the outputs, save.

    Example: dynorm fold ./gpt2 ./folded --untie
    """
    quiet_libraries()
    from dynorm.jobs.fold import fold_pretrained

    options = {"center": center, "add_bias": add_bias, "untie": untie}
    say = speaker(quiet=as_json)
    report = fold_pretrained(model, out, options, format=format, overwrite=overwrite, say=say)
    show(report, as_json)
