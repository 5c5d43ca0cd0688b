"""The commands ``dynorm paper``, ``dynorm prove`` and ``dynorm explore``."""

import json
from pathlib import Path
from typing import Annotated

import typer

from dynorm.cli.application import Overwrite, app, progress_bar
from dynorm.errors import require_library
from dynorm.files import require_writable, write_bytes, write_text


@app.command()
def paper(
    out: Annotated[
        Path, typer.Option(help="Folder for figures and tables. Created if missing.")
    ] = Path("paper"),
    samples: Annotated[
        int, typer.Option(min=1, help="Samples per setting of the study, with seeds 1, 2, ...")
    ] = 1000,
    overwrite: Overwrite = False,
) -> None:
    """Reproduce section 4: outliers, fits, the closed form, and a study over many samples.

    Example: dynorm paper --out paper
    """
    require_library("matplotlib", "the figures", "paper")
    from dynorm.paper.figures import FIGURES, draw, render
    from dynorm.paper.generality import reproduce
    from dynorm.paper.table import document, printed

    table = out / "table.json"
    pictures = {name: out / f"{name}.png" for name in FIGURES}
    for path in (table, *pictures.values()):
        require_writable(path, overwrite=overwrite)
    reproduction = reproduce(samples, progress_bar("study"))
    write_text(table, json.dumps(document(reproduction), indent=1) + "\n")
    for name, path in pictures.items():
        write_bytes(path, render(draw(name, reproduction)))
    for part in printed(reproduction):
        typer.echo(part)
    typer.echo(f"{out} has the results as table.json, and {', '.join(FIGURES)} as PNG.")


@app.command()
def prove(
    out: Annotated[
        Path | None,
        typer.Option(help="Write the proofs, with all steps, to this file, as one HTML page."),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            help="Prove only statements with this name or glob, such as 'theorem-*'. Repeatable."
        ),
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Prove the paper's theorems step by step for any number of channels; check them numerically.

    The exit status is 1 if a statement does not hold.

    Example: dynorm prove --out proofs.html
    """
    from dynorm.paper.proof import prove, show

    patterns = only or ()
    prove.choose(patterns)
    if out is not None:
        require_library("latex2mathml", "the page of proofs", "paper")
        require_writable(out, overwrite=overwrite)
    report = prove.prove(patterns, track=progress_bar("proving"))
    if out is not None:
        write_text(out, show.render(report))
    typer.echo(show.as_text(report))
    if out is not None:
        typer.echo(f"The proofs are in {out}")
    raise typer.Exit(0 if report.holds else 1)


@app.command()
def explore(
    out: Annotated[Path, typer.Option(help="File for the page.")] = Path("explore.html"),
    overwrite: Overwrite = False,
) -> None:
    """Write an offline HTML page: LayerNorm, DyT, Derf and DyISRU with an outlier to move.

    Example: dynorm explore --out explore.html
    """
    from dynorm.paper.explorer import build_page

    require_writable(out, overwrite=overwrite)
    write_text(out, build_page())
    typer.echo(f"Read {out.resolve()} in a browser.")
