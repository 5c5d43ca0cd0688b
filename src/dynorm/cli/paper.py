"""``dynorm paper``, ``dynorm prove`` and ``dynorm explore``: the paper's figures, theorems and a page to play with."""

import json
import os
import webbrowser
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import track

from dynorm.cli.application import command
from dynorm.errors import ArgumentError, StorageError
from dynorm.files import require_writable, write_bytes, write_text

# A token of these, times a thousand samples, is a minute of work.
MOST_CHANNELS = 1 << 16


@command
def paper(
    out: Path = Path("paper"),
    figure: list[str] | None = None,
    seed: int | None = None,
    channels: int = 100,
    sigma: float = 2.0,
    samples: int | None = None,
    as_json: bool = False,
) -> None:
    """Reproduce section 4: outliers, fits of DyT and DyISRU, the closed form, and how general the claim is.

    Example: dynorm paper --out paper
    """
    from dynorm.paper.figures import FIGURES, FORMATS, check_figures, draw, render
    from dynorm.paper.generality import PAPER_SEED, reproduce, study_all
    from dynorm.paper.table import document, outliers_csv, printed

    names = list(
        dict.fromkeys(figure or [name for name in FIGURES if seed is None or name != "fig5"])
    )
    check_figures(names, with_study=seed is None)
    _check(channels, sigma, seed, samples)
    tables: dict[str, Callable[[Any], str]] = {
        "table.json": lambda found: json.dumps(document(found), indent=1) + "\n",
        "table.csv": outliers_csv,
    }
    for file in [*tables, *(f"{name}.{format}" for name in names for format in FORMATS)]:
        require_writable(out / file)
    stderr = Console(stderr=True)
    progress = partial(
        track, console=stderr, transient=True, disable=as_json or not stderr.is_terminal
    )
    generality = None
    if seed is None:
        generality = study_all(
            channels, sigma, samples or 1000, track=partial(progress, description="study")
        )
    reproduction = reproduce(channels, sigma, PAPER_SEED if seed is None else seed, generality)
    for name, text in tables.items():
        write_text(out / name, text(reproduction))
    for name in progress(names, description="figures"):
        drawn = draw(name, reproduction)
        for format in FORMATS:
            write_bytes(out / f"{name}.{format}", render(drawn, format))
    if as_json:
        typer.echo(json.dumps(document(reproduction), indent=1))
        return
    console = Console(highlight=False)
    for part in printed(reproduction):
        console.print(part, markup=False)
    console.print(
        f"\nThe tables are in {out}, and the figures {', '.join(names)} as PNG and SVG.",
        markup=False,
    )


def _check(channels: int, sigma: float, seed: int | None, samples: int | None) -> None:
    from dynorm.paper.simulation import check_settings

    if channels < 3:
        raise ArgumentError(
            f"channels must be at least 3, got {channels}: LayerNorm of one channel is undefined "
            "and of two always "
            "1 and -1, which leaves nothing to fit"
        )
    if channels > MOST_CHANNELS:
        raise ArgumentError(
            f"channels must be at most {MOST_CHANNELS:,}, got {channels:,}: no model has more"
        )
    check_settings(channels, sigma, 0.0, 0 if seed is None else seed)
    if seed is not None and samples is not None:
        raise ArgumentError(
            "samples is for the study over many, but one seed was given: leave out one of the two"
        )


@command
def prove(
    out: Path | None = None,
    only: list[str] | None = None,
    seed: int = 0,
    brief: bool = False,
    as_json: bool = False,
) -> None:
    """Prove the paper's theorems for every number of channels, step by step, and confirm them with numbers.

    Exit status 1 if one of them does not hold.

    Example: dynorm prove --out proofs.html
    """
    from dynorm.paper.proof import prove, show

    prove.choose(only or ())
    if out is not None:
        show.prepare(out)
    console = Console(stderr=True, quiet=as_json)
    progress = partial(track, description="proving", console=console, transient=True)
    report = prove.prove(only or (), seed=seed, track=progress)
    if out is not None:
        show.save(report, out)
    if as_json:
        typer.echo(json.dumps(report.to_dict(), indent=1, ensure_ascii=False))
    else:
        # rich takes 80 columns where there is no terminal, which breaks formulas.
        width = None if Console().is_terminal or "COLUMNS" in os.environ else 140
        show.show(report, Console(highlight=False, width=width), brief=brief)
        if out is not None:
            typer.echo(f"The proofs are in {out}")
    raise typer.Exit(0 if report.holds else 1)


@command
def explore(out: Path = Path("explore.html"), show: bool = False, as_json: bool = False) -> None:
    """Write one HTML page that works offline: drag an outlier and see LayerNorm, DyT, Derf and DyISRU follow.

    Example: dynorm explore --out explore.html --open
    """
    from dynorm.paper.explorer import save_page

    page = save_page(out)
    if as_json:
        typer.echo(json.dumps({"page": str(page), "bytes": page.stat().st_size}, indent=1))
    else:
        typer.echo(f"Read {page} in a browser.")
    if show and not webbrowser.open(page.as_uri()):
        raise StorageError(
            f"no browser was found to open {str(page)!r}, which is written: open it yourself"
        )
