"""``dynorm paper``: the simulation of section 4, its figures and its numbers."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import track

from dynorm.cli._app import app
from dynorm.errors import ArgumentError
from dynorm.files import require_writable, write_bytes, write_text

if TYPE_CHECKING:
    from dynorm.paper.reproduction import Reproduction

TABLES = ("table.json", "table.csv")
STUDY_TABLES = ("generality.csv", "samples.csv")
# A token of these, times a thousand samples, is a minute of work.
MOST_CHANNELS = 1 << 16


@app.command()
def paper(
    out: Annotated[Path, typer.Option(help="Folder for figures and tables; made if missing.")] = Path("paper"),
    figure: Annotated[
        list[str] | None, typer.Option(help="Draw only this one, fig1 to fig5; all by default. Repeatable.")
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(help="Only the sample with this seed; by default the paper's, 1, and a study over many."),
    ] = None,
    channels: Annotated[int, typer.Option(help="C, the number of channels, 3 to 65,536.")] = 100,
    sigma: Annotated[float, typer.Option(help="Standard deviation of the samples.")] = 2.0,
    samples: Annotated[
        int | None, typer.Option(min=1, help="Samples a setting of the study, with the seeds 1, 2, ...; 1000.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON, and nothing else.")] = False,
) -> None:
    """Reproduce section 4: outliers, fits of DyT and DyISRU, the closed form, and how general the claim is.

    Example: dynorm paper --out paper
    """
    from dynorm.paper.figures import FIGURES, check_figures
    from dynorm.paper.generality import study_all
    from dynorm.paper.reproduction import PAPER_SEED, reproduce
    from dynorm.paper.table import document, printed

    names = list(dict.fromkeys(figure or [name for name in FIGURES if seed is None or name != "fig5"]))
    check_figures(names, with_study=seed is None)
    _check(channels, sigma, seed, samples)
    _prepare(out, [*TABLES, *(STUDY_TABLES if seed is None else ())], names)
    stderr = Console(stderr=True)
    progress = partial(track, console=stderr, transient=True, disable=as_json or not stderr.is_terminal)
    generality = None
    if seed is None:
        generality = study_all(channels, sigma, samples or 1000, track=partial(progress, description="study"))
    reproduction = reproduce(channels, sigma, PAPER_SEED if seed is None else seed, generality)
    _write_tables(out, reproduction)
    _write_figures(out, reproduction, progress(names, description="figures"))
    if as_json:
        typer.echo(json.dumps(document(reproduction), indent=1))
        return
    console = Console(highlight=False)
    for part in printed(reproduction):
        console.print(part, markup=False)
    console.print(f"\nThe tables are in {out}, and the figures {', '.join(names)} as PNG and SVG.", markup=False)


def _check(channels: int, sigma: float, seed: int | None, samples: int | None) -> None:
    from dynorm.paper.simulation import check_settings

    if channels < 3:
        raise ArgumentError(
            f"channels must be at least 3, got {channels}: LayerNorm of one channel is undefined and of two always "
            "1 and -1, which leaves nothing to fit"
        )
    if channels > MOST_CHANNELS:
        raise ArgumentError(f"channels must be at most {MOST_CHANNELS:,}, got {channels:,}: no model has more")
    check_settings(channels, sigma, 0.0, 0 if seed is None else seed)
    if seed is not None and samples is not None:
        raise ArgumentError("samples is for the study over many, but one seed was asked for: leave out one of the two")


def _prepare(out: Path, tables: list[str], figures: list[str]) -> None:
    """Make the folder, and refuse before the work what could not be written after it."""
    from dynorm.paper.figures import FORMATS

    for file in [*tables, *(f"{name}.{format}" for name in figures for format in FORMATS)]:
        require_writable(out / file)


def _write_tables(out: Path, reproduction: Reproduction) -> None:
    from dynorm.paper.table import document, generality_csv, outliers_csv, samples_csv

    texts = [json.dumps(document(reproduction), indent=1) + "\n", outliers_csv(reproduction)]
    for name, text in zip(TABLES, texts, strict=True):
        write_text(out / name, text)
    if reproduction.generality is not None:
        texts = [generality_csv(reproduction.generality), samples_csv(reproduction.generality.base)]
        for name, text in zip(STUDY_TABLES, texts, strict=True):
            write_text(out / name, text)


def _write_figures(out: Path, reproduction: Reproduction, names: Iterable[str]) -> None:
    from dynorm.paper.figures import FORMATS, draw, render

    for name in names:
        figure = draw(name, reproduction)
        for format in FORMATS:
            write_bytes(out / f"{name}.{format}", render(figure, format))
