"""The application that every command registers with, and the output that they share."""

import inspect
import json
import logging
import os
import re
import tomllib
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial, wraps
from importlib.resources import files
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

from dynorm._version import __version__
from dynorm.errors import ArgumentError, DynormError, require_library

app = typer.Typer(
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
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Print the version and stop."
        ),
    ] = False,
) -> None:
    """Normalization without statistics: replace LayerNorm and RMSNorm by point-wise functions."""


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Register a command: its parameters with defaults are options, and the help of all stands in options.toml.

    The fields of a ``recipe`` that have a help there are options too.
    """
    known = tomllib.loads(files(__package__).joinpath("options.toml").read_text("utf-8"))
    texts = known["shared"] | known[function.__name__]
    given = dict(inspect.signature(function, eval_str=True).parameters)
    recipe = given.pop("recipe").annotation if "recipe" in given else object
    fields = {
        n: field
        for n, field in inspect.signature(recipe, eval_str=True).parameters.items()
        if n in texts
    }

    @wraps(function)
    def run(**values: Any) -> None:
        if fields:
            values["recipe"] = recipe(**{name: values.pop(name) for name in fields})
        function(**values)

    options = [_described(option, texts[name]) for name, option in (given | fields).items()]
    run.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    return app.command()(run)


def _described(parameter: inspect.Parameter, text: str | dict[str, Any]) -> inspect.Parameter:
    """Return a parameter as typer takes it, with its help."""
    more = dict(text) if isinstance(text, dict) else {"help": text}
    # An option that is off has no second name to put it off.
    names = more.pop(
        "names", [f"--{parameter.name.replace('_', '-')}"] if parameter.default is False else []
    )
    kind = typer.Argument if parameter.default is parameter.empty else typer.Option
    hint = list[str] if parameter.annotation == Sequence[str] else parameter.annotation
    return parameter.replace(annotation=Annotated[hint, kind(*names, **more)])


def main() -> None:
    """Run the command line; exit with 0, with 1 if the work failed, 2 for wrong usage, or 130 after Ctrl-C."""
    warnings.showwarning = lambda message, *_: typer.echo(f"dynorm: {message}", err=True)
    try:
        app()
    except DynormError as error:
        typer.echo(f"dynorm: {_by_option(str(error))}", err=True)
        raise SystemExit(2 if isinstance(error, ArgumentError) else 1) from error
    except SystemExit as stop:
        # typer makes this of a Ctrl-C.
        if stop.code == 130:
            typer.echo("dynorm: stopped; nothing was half-written", err=True)
        raise


def _by_option(message: str) -> str:
    """Return an error's message with the options of the command line in the place of Python's arguments."""
    commands: Any = typer.main.get_command(app)
    options = {
        p.name
        for c in commands.commands.values()
        for p in c.params
        if p.param_type_name == "option"
    }
    names = "|".join(sorted(options & set(re.findall(r"\w+", message)), key=len, reverse=True))
    if not names:
        return message
    # As the subject of a sentence, in a list of subjects, or as name=value.
    found = (
        rf"(?<![\w'.(-])({names})(?:=True)?(?==|,? (?:must|and (?:{names})\b)|, (?:{names})\b|$)"
    )
    return re.sub(found, lambda match: "--" + match[1].replace("_", "-"), message)


def quiet_libraries() -> None:
    """Keep transformers, which must be installed, from the network, and its bars and advice out of our output."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # torchao, where it is installed, comes with transformers and reports each CUDA library that
    # does not load.
    for library in ("torch", "torchao"):
        logging.getLogger(library).setLevel(logging.ERROR)
    require_library("transformers.utils", "this command", "transformers")
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    warnings.filterwarnings("ignore", module=r"(torch|transformers|accelerate)\.")


def show(report: Any, as_json: bool) -> None:
    """Print a report on the standard output, as text or as the JSON of its ``to_dict``."""
    typer.echo(json.dumps(report.to_dict(), indent=1) if as_json else str(report))


def tracked(batches: Sequence[Any], description: str, console: Console) -> Iterator[Any]:
    """Yield the batches under a bar, which ends full also where the last of them ends the work."""
    with Progress(*Progress.get_default_columns(), console=console) as progress:
        task = progress.add_task(description, total=len(batches))
        for batch in batches:
            progress.advance(task)
            yield batch


def speaker(quiet: bool) -> tuple[Callable[[str], None], Callable[..., Iterator[Any]]]:
    """Return a function that prints a line on the standard error, and one that tracks batches there."""
    console = Console(stderr=True, quiet=quiet, highlight=False, soft_wrap=True)
    return partial(console.print, markup=False), partial(tracked, console=console)
