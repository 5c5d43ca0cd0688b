"""The application that every command registers with, and what all of them share."""

from __future__ import annotations

import logging
import os
import warnings
from typing import Annotated

import typer

from dynorm import __version__
from dynorm.errors import ArgumentError, DynormError

app = typer.Typer(
    help="Normalization without statistics: replace LayerNorm and RMSNorm by point-wise functions.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(show: bool) -> None:
    if show:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Normalization without statistics: replace LayerNorm and RMSNorm by point-wise functions."""


def main() -> None:
    """Run the command line; exit status 0, 1 where the work failed, 2 where it was asked for wrongly, 130 on Ctrl-C."""
    try:
        app()
    except DynormError as error:
        typer.echo(f"dynorm: {error}", err=True)
        raise SystemExit(2 if isinstance(error, ArgumentError) else 1) from error
    except KeyboardInterrupt:
        typer.echo("dynorm: stopped; nothing was half-written", err=True)
        raise SystemExit(130) from None


def quiet_libraries() -> None:
    """Keep transformers from the network, and its bars and advice out of our output.

    Raises:
        ArgumentError: it is not installed.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # torchao, where it is installed, comes with transformers and reports each CUDA library that does not load.
    for library in ("torch", "torchao"):
        logging.getLogger(library).setLevel(logging.ERROR)
    try:
        from transformers.utils import logging as transformers_logging
    except ImportError as error:
        raise ArgumentError("this command needs transformers: pip install 'dynorm[transformers]'") from error

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    warnings.filterwarnings("ignore", module=r"(torch|transformers|accelerate)\.")
