"""The application that every command registers with, and the output they share."""

import json
import logging
import os
import signal
import sys
import warnings
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import track

from dynorm import version
from dynorm.errors import ArgumentError, CalibrationWarning, DynormError, require_library

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(show: bool) -> None:
    if show:
        typer.echo(version.__version__)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Print the version and stop."
        ),
    ] = False,
) -> None:
    """Normalization without statistics: replace LayerNorm and RMSNorm by point-wise functions."""


AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON and nothing else.")]
"""The option ``--json`` of every command that prints a result."""
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what is there already.")]
"""The option ``--overwrite`` of every command that writes files."""


def main() -> None:
    """Run the command line.

    The exit status is 0, 1 if the work failed, 2 for wrong usage, 130 after Ctrl-C, or 143
    after SIGTERM.
    """
    warnings.formatwarning = format_warning
    # As an exception it removes temporary folders on its way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        app()
    except DynormError as error:
        typer.echo(f"dynorm: {error}", err=True)
        raise SystemExit(2 if isinstance(error, ArgumentError) else 1) from error
    except SystemExit as stop:
        # typer turns Ctrl-C into 130.
        if stop.code in (130, 143):
            typer.echo("dynorm: stopped; nothing was half-written", err=True)
        raise


_format_of_python = warnings.formatwarning


def format_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    line: str | None = None,
) -> str:
    """Return a warning of dynorm like one of its errors, and a library's as Python shows it."""
    if issubclass(category, CalibrationWarning):
        return f"dynorm: {message}\n"
    return _format_of_python(message, category, filename, lineno, line)


def quiet_libraries() -> None:
    """Keep transformers off the network, and its progress bars and advice out of our output.

    It must be installed.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # transformers imports torchao if it is installed, which reports each CUDA library that does
    # not load.
    for library in ("torch", "torchao"):
        logging.getLogger(library).setLevel(logging.ERROR)
    require_library("transformers.utils", "this command")
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    warnings.filterwarnings("ignore", module=r"(torch|transformers|accelerate)\.")


def show(report: Any, as_json: bool) -> None:
    """Print a report to standard output, as text or as the JSON of its ``to_dict``."""
    typer.echo(json.dumps(report.to_dict(), indent=1) if as_json else str(report))


def speaker(quiet: bool) -> Callable[[str], None]:
    """Return a function that prints a line to standard error at once, or nothing."""

    def say(line: str) -> None:
        if not quiet:
            print(line, file=sys.stderr, flush=True)

    return say


def progress_bar(title: str) -> Callable[..., Any]:
    """Return a function that shows the progress of a loop, on a terminal."""
    stderr = Console(stderr=True)
    is_hidden = not stderr.is_terminal
    return partial(track, description=title, console=stderr, transient=True, disable=is_hidden)
