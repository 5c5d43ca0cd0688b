"""``dynorm bench``: the speed of the family beside what it replaces, on this machine."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track

from dynorm.cli._app import app, quiet_libraries
from dynorm.files import require_writable, write_bytes, write_text

# Names and six sizes side by side, where the output is no terminal.
WIDTH = 132


@app.command()
def bench(
    model: Annotated[Path | None, typer.Option(help="Folder of a transformers model to time as a whole, too.")] = None,
    sizes: Annotated[
        list[str] | None,
        typer.Option(help="Rows x channels, as 512x768; 16x384 to 8192x4096 by default. Repeatable, or with commas."),
    ] = None,
    dtypes: Annotated[
        list[str] | None,
        typer.Option(help="float32, bfloat16 (the two by default), float16, float64. Repeatable, or with commas."),
    ] = None,
    threads: Annotated[
        list[str] | None,
        typer.Option(help="A number or all; all, then 1, by default. Targets look at the first. Repeatable."),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(help="Glob of contenders, as 'DyISRU*'; copies and LayerNorm stay. Repeatable."),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    quick: Annotated[
        bool, typer.Option("--quick", help="A minute: two sizes, float32, all threads, few rounds, nothing compiled.")
    ] = False,
    no_compile: Annotated[bool, typer.Option("--no-compile", help="Leave torch.compile out.")] = False,
    no_block: Annotated[bool, typer.Option("--no-block", help="Leave the GPT-2 block out.")] = False,
    seconds: Annotated[
        float | None, typer.Option(help="What a group of contenders may take; 4, or 1 with --quick.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="What the model is called; the folder's name.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the inputs and of the order in each round.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Write the results here as JSON.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the results here as PNG.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON, and nothing else.")] = False,
) -> None:
    """Check what the layers, kernels and their peers compute, then time them side by side.

    Example: dynorm bench --quick --plot speed.png
    """
    from dynorm.bench.contenders import check_globs
    from dynorm.bench.plot import check_plots, draw
    from dynorm.bench.run import run
    from dynorm.bench.settings import make_settings
    from dynorm.bench.table import printed

    settings = make_settings(
        sizes=sizes or (),
        dtypes=dtypes or (),
        threads=threads or (),
        only=only or (),
        device=device,
        quick=quick,
        compiled=not no_compile,
        seconds=seconds,
        seed=seed,
    )
    check_globs(settings.only)
    for path in (out, plot):
        if path is not None:
            require_writable(path)
    if plot is not None:
        check_plots()
    if model is not None or not no_block:
        quiet_libraries()
    stderr = Console(stderr=True)
    progress = partial(track, console=stderr, transient=True, disable=as_json or not stderr.is_terminal)
    document = run(settings, model=model, name=name, block=not no_block, track=progress)
    text = json.dumps(document, indent=1)
    if out is not None:
        write_text(out, text + "\n")
    if plot is not None:
        write_bytes(plot, draw(document))
    if as_json:
        typer.echo(text)
        return
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, WIDTH)
    for part in printed(document):
        console.print(part, markup=False)
    for path in (out, plot):
        if path is not None:
            console.print(f"wrote {path}", markup=False, soft_wrap=True)
