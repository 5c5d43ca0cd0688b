"""``dynorm explore``: a page to play with."""

from __future__ import annotations

import json
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from dynorm.cli._app import app
from dynorm.errors import StorageError


@app.command()
def explore(
    out: Annotated[Path, typer.Option(help="The page; one that exists is replaced.")] = Path("explore.html"),
    show: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was written as JSON, and nothing else.")] = False,
) -> None:
    """Write one HTML page, for use without a network: drag an outlier and see LayerNorm, DyT, Derf and DyISRU follow.

    Example: dynorm explore --out explore.html --open
    """
    from dynorm.paper.explorer import save_page

    page = save_page(out)
    if as_json:
        typer.echo(json.dumps({"page": str(page), "bytes": page.stat().st_size}, indent=1))
    else:
        typer.echo(f"Read {page} in a browser.")
    if show and not webbrowser.open(page.as_uri()):
        raise StorageError(f"no browser was found to open {str(page)!r}, which is written: open it yourself")
