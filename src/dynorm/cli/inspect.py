"""``dynorm inspect``: section 4 of the paper on a real model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track

from dynorm.cli._app import app, quiet_libraries
from dynorm.files import require_writable


@app.command()
def inspect(
    model: Annotated[Path, typer.Argument(help="Folder of a transformers model with its tokenizer.")],
    texts: Annotated[
        list[Path] | None,
        typer.Option(help="Text files or folders; the standard library's docstrings by default. Repeatable."),
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with a picture of each norm here.")] = None,
    samples: Annotated[int, typer.Option(help="Texts to fit on, and as many others to measure on.")] = 256,
    max_length: Annotated[int, typer.Option(help="Longest text, in tokens.")] = 128,
    only: Annotated[list[str] | None, typer.Option(help="Glob of paths to inspect. Repeatable.")] = None,
    skip: Annotated[list[str] | None, typer.Option(help="Glob of paths to leave out. Repeatable.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the split and of the samples.")] = 0,
    name: Annotated[str | None, typer.Option(help="What the report calls the model; the folder's name.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, ...")] = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON, and nothing else.")] = False,
) -> None:
    """Fit DyT, DyISRU and a straight line to the outliers of every norm of a model, and compare them.

    Example: dynorm inspect ./all-MiniLM-L6-v2 --html inspection.html
    """
    quiet_libraries()
    from dynorm.distill.inspection import inspect_pretrained

    if html is not None:
        require_writable(html)
    console = Console(stderr=True, quiet=as_json, highlight=False, soft_wrap=True)
    report = inspect_pretrained(
        model,
        texts=texts or (),
        samples=samples,
        max_length=max_length,
        only=only or (),
        skip=skip or (),
        seed=seed,
        name=name,
        device=device,
        track=lambda batches, description: track(batches, description, console=console),
    )
    if html is not None:
        report.to_html(html)
        console.print(f"wrote {html}", markup=False)
    typer.echo(json.dumps(report.to_dict(), indent=1) if as_json else str(report))
