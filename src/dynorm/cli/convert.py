"""``dynorm convert``: the main job."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track

from dynorm.cli._app import app, quiet_libraries


@app.command()
def convert(
    model: Annotated[Path, typer.Argument(help="Folder of a transformers model with its tokenizer.")],
    out: Annotated[Path, typer.Argument(help="New folder: model/, report.json and report.html go there.")],
    to: Annotated[str, typer.Option(help="What the norms become: dyisru, dyt, derf or linear.")] = "dyisru",
    texts: Annotated[
        list[Path] | None,
        typer.Option(help="Text files or folders; the standard library's docstrings by default. Repeatable."),
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Distillation steps; none by default.")] = None,
    minutes: Annotated[float | None, typer.Option(help="Distil for this long instead.")] = None,
    refine: Annotated[int, typer.Option(help="Steps of joint refinement of the constants.")] = 50,
    only: Annotated[list[str] | None, typer.Option(help="Glob of paths to convert. Repeatable.")] = None,
    skip: Annotated[list[str] | None, typer.Option(help="Glob of paths to leave alone. Repeatable.")] = None,
    held_out: Annotated[int, typer.Option(help="Texts kept for measuring.")] = 512,
    max_length: Annotated[int, typer.Option(help="Longest text, in tokens.")] = 128,
    per_channel: Annotated[
        bool, typer.Option("--per-channel/--per-layer", help="One constant a channel, or one a layer.")
    ] = True,
    lr: Annotated[float | None, typer.Option(help="Highest learning rate of the distillation; by the width.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of split, order and training.")] = 0,
    name: Annotated[str | None, typer.Option(help="What the report calls the model; the folder's name.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, ...")] = "cpu",
    checkpoints: Annotated[Path | None, typer.Option(help="Keep the Trainer's checkpoints here, and resume.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a model that is in OUT.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON, and nothing else.")] = False,
) -> None:
    """Replace the norms of a pretrained model, set their constants from texts, measure, and save.

    Example: dynorm convert ./all-MiniLM-L6-v2 ./converted --minutes 4
    """
    quiet_libraries()
    from dynorm.distill.pipeline import Recipe, convert_pretrained

    console = Console(stderr=True, quiet=as_json, highlight=False, soft_wrap=True)
    recipe = Recipe(
        to=to,
        steps=steps,
        minutes=minutes,
        refine=refine,
        held_out=held_out,
        max_length=max_length,
        only=tuple(only or ()),
        skip=tuple(skip or ()),
        per_channel=per_channel,
        seed=seed,
        lr=lr,
        checkpoints=None if checkpoints is None else str(checkpoints),
    )
    report = convert_pretrained(
        model,
        out,
        recipe,
        texts=texts or (),
        name=name,
        device=device,
        overwrite=overwrite,
        quiet=as_json or not sys.stderr.isatty(),
        say=lambda line: console.print(line, markup=False),
        track=lambda batches, description: track(batches, description, console=console),
    )
    typer.echo(json.dumps(report.to_dict(), indent=1) if as_json else str(report))
