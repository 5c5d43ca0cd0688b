"""``dynorm fold``: exact algebra on a pretrained model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from dynorm.cli._app import app, quiet_libraries


@app.command()
def fold(
    model: Annotated[Path, typer.Argument(help="Folder of a transformers model.")],
    out: Annotated[Path, typer.Argument(help="New folder: model/ and report.json go there.")],
    affine: Annotated[bool, typer.Option(help="Fold weights and biases into what reads the norms.")] = True,
    center: Annotated[bool, typer.Option(help="Fold LayerNorm's mean into what writes the residual stream.")] = True,
    add_bias: Annotated[bool, typer.Option("--add-bias", help="Give linear layers the biases they lack.")] = False,
    untie: Annotated[bool, typer.Option("--untie", help="Untie the head from the embedding where needed.")] = False,
    modules: Annotated[bool, typer.Option("--modules", help="Without a graph: affine maps only.")] = False,
    only: Annotated[list[str] | None, typer.Option(help="Glob of paths to fold. Repeatable.")] = None,
    skip: Annotated[list[str] | None, typer.Option(help="Glob of paths to leave alone. Repeatable.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a model that is in OUT.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON, and nothing else.")] = False,
) -> None:
    """Fold the norms of a pretrained model into their neighbours, exactly, check the outputs, and save.

    Example: dynorm fold ./gpt2 ./folded --untie
    """
    quiet_libraries()
    from dynorm.distill.fold import fold_pretrained

    console = Console(stderr=True, quiet=as_json, highlight=False, soft_wrap=True)
    report = fold_pretrained(
        model,
        out,
        affine=affine,
        center=center,
        add_bias=add_bias,
        untie=untie,
        only=only or (),
        skip=skip or (),
        modules=modules,
        overwrite=overwrite,
        say=lambda line: console.print(line, markup=False),
    )
    typer.echo(json.dumps(report.to_dict(), indent=1) if as_json else str(report))
