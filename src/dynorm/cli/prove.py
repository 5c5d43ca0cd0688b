"""``dynorm prove``: the theorems, proven for every C and confirmed with numbers."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import track

from dynorm.cli._app import app

if TYPE_CHECKING:
    from dynorm.paper.proof.statement import Statement


@app.command()
def prove(
    out: Annotated[Path | None, typer.Option(help="Write the proofs as one HTML page to this file.")] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="Name or glob of statements, say theorem-*. Repeatable.")
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, max=2**32 - 1, help="Seed of the random tokens that confirm the proofs.")
    ] = 0,
    brief: Annotated[bool, typer.Option("--brief", help="Print the table alone, without the steps.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON, and nothing else.")] = False,
) -> None:
    """Prove the paper's theorems for every number of channels, step by step, and confirm them with numbers.

    Exit status 1 if one of them does not hold.

    Example: dynorm prove --out proofs.html
    """
    from dynorm.paper.proof import page, prove, terminal

    prove.choose(only or ())
    if out is not None:
        page.prepare(out)
    progress = Console(stderr=True, quiet=as_json)

    def tracked(statements: Iterable[Statement]) -> Iterable[Statement]:
        return track(list(statements), "proving", console=progress, transient=True)

    report = prove.prove(only or (), seed=seed, track=tracked)
    if out is not None:
        page.save(report, out)
    if as_json:
        typer.echo(json.dumps(report.to_dict(), indent=1, ensure_ascii=False))
    else:
        # rich takes 80 columns where there is no terminal, which breaks formulas.
        width = None if Console().is_terminal or "COLUMNS" in os.environ else 140
        terminal.show(report, Console(highlight=False, width=width), brief=brief)
        if out is not None:
            typer.echo(f"The proofs are in {out}")
    raise typer.Exit(0 if report.holds else 1)
