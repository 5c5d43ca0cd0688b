"""The commands ``dynorm paper``, ``dynorm prove`` and ``dynorm explore``."""

import json
import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from dynorm.cli.application import AsJson, app, progress_bar
from dynorm.errors import ArgumentError, StorageError
from dynorm.files import require_writable, write_bytes, write_text

# With a thousand samples, tokens of this size take a minute.
MOST_CHANNELS = 1 << 16

Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the file if it exists.")]


@app.command()
def paper(
    out: Annotated[
        Path, typer.Option(help="Folder for figures and tables. Created if missing.")
    ] = Path("paper"),
    figure: Annotated[
        list[str] | None,
        typer.Option(help="Draw only this figure, fig1 to fig3. Default: all. Repeatable."),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            help="Use only the sample with this seed. Default: the paper's seed, 1, and a study "
            "of many seeds."
        ),
    ] = None,
    channels: Annotated[int, typer.Option(help="Number of channels C, from 3 to 65,536.")] = 100,
    sigma: Annotated[float, typer.Option(help="Standard deviation of the samples.")] = 2.0,
    samples: Annotated[
        int | None,
        typer.Option(
            min=1, help="Samples per setting of the study, with seeds 1, 2, ... Default: 1000."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Reproduce section 4: outliers, fits, the closed form, and a study over many samples.

    Example: dynorm paper --out paper
    """
    from dynorm.paper.figures import FIGURES, FORMATS, check_figures, draw, render
    from dynorm.paper.generality import PAPER_SEED, reproduce, study_all
    from dynorm.paper.table import document, printed

    names = list(figure or FIGURES)
    names = list(dict.fromkeys(names))
    check_figures(names)
    _check(channels, sigma, seed, samples)
    files = ["table.json"]
    for name in names:
        files += [f"{name}.{format}" for format in FORMATS]
    for file in files:
        require_writable(out / file)
    if seed is None:
        track = progress_bar("study", quiet=as_json)
        studies = study_all(channels, sigma, samples or 1000, track=track)
        reproduction = reproduce(channels, sigma, PAPER_SEED, studies)
    else:
        reproduction = reproduce(channels, sigma, seed)
    as_text = json.dumps(document(reproduction), indent=1)
    write_text(out / "table.json", as_text + "\n")
    for name in names:
        drawn = draw(name, reproduction)
        for format in FORMATS:
            write_bytes(out / f"{name}.{format}", render(drawn, format))
    if as_json:
        typer.echo(as_text)
        return
    console = Console(highlight=False)
    for part in printed(reproduction):
        console.print(part, markup=False, soft_wrap=True)
    console.print(
        f"\n{out} has the results as table.json, and {', '.join(names)} as PNG and SVG.",
        markup=False,
    )


def _check(
    channels: int,
    sigma: float,
    seed: int | None,
    samples: int | None,
) -> None:
    from dynorm.paper.simulation import check_settings

    if channels < 3:
        raise ArgumentError(
            f"channels must be at least 3, got {channels}: LayerNorm is undefined for one channel "
            "and always gives 1 and -1 for two, which leaves nothing to fit"
        )
    if channels > MOST_CHANNELS:
        raise ArgumentError(
            f"channels must be at most {MOST_CHANNELS:,}, got {channels:,}: no model has more"
        )
    check_settings(channels, sigma, 0.0, seed or 0)
    if seed is not None and samples is not None:
        raise ArgumentError(
            "samples must not come with seed, which asks for one sample: leave out one of the two"
        )


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
    as_json: AsJson = False,
) -> None:
    """Prove the paper's theorems step by step for any number of channels; check them numerically.

    The exit status is 1 if a statement does not hold.

    Example: dynorm prove --out proofs.html
    """
    from dynorm.paper.proof import prove, show

    patterns = only or ()
    prove.choose(patterns)
    if out is not None:
        _require_new(out, overwrite)
        show.prepare(out)
    report = prove.prove(patterns, track=progress_bar("proving", quiet=as_json))
    if out is not None:
        show.save(report, out)
    if as_json:
        typer.echo(json.dumps(report.to_dict(), indent=1, ensure_ascii=False))
    else:
        # Without a terminal rich assumes 80 columns, which would break names.
        has_width = Console().is_terminal or "COLUMNS" in os.environ
        console = Console(highlight=False, width=None if has_width else 140)
        show.show(report, console)
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
    from dynorm.paper.explorer import save_page

    _require_new(out, overwrite)
    typer.echo(f"Read {save_page(out)} in a browser.")


def _require_new(path: Path, overwrite: bool) -> None:
    """Refuse to replace a file, unless overwrite is given."""
    # Other paths that cannot be written are refused where the page is written.
    if path.is_file() and not overwrite:
        raise StorageError(
            f"the output must be a new file, but {str(path)!r} exists: choose another path, or "
            "pass --overwrite"
        )
