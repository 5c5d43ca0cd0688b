"""Run one benchmark on a model and its conversion, and add the figures to the results."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.field import embeddings, images, language, text
from benchmarks.field.pair import add_result
from benchmarks.field.table import RESULTS
from dynorm.errors import DynormError
from dynorm.files import require_writable

BENCHMARKS = {"lm-eval": language, "mteb": embeddings, "imagenet": images, "openwebtext": text}


def main(words: Sequence[str] | None = None) -> None:
    """Read the options, run, write and print."""
    options = _parser().parse_args(words)
    sources = (options.original, options.converted)
    try:
        require_writable(options.out)
        result = BENCHMARKS[options.name].run(sources, options)
        add_result(options.out, options.name, sources, result)
    except DynormError as error:
        sys.exit(f"error: {error}")
    print(json.dumps(result.to_dict(), indent=1))
    print(f"wrote {options.out}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.field", description=__doc__.splitlines()[0]
    )
    commands = parser.add_subparsers(dest="name", required=True)
    for name, benchmark in BENCHMARKS.items():
        command = commands.add_parser(name, help=benchmark.__doc__.splitlines()[0])
        command.add_argument("original", help="folder of the model, or its name on the hub")
        command.add_argument("converted", help="folder of the converted model, or its name")
        command.add_argument("--device", default="cpu", help="cpu, cuda, ...")
        command.add_argument("--out", type=Path, default=RESULTS, help="file of the results")
        benchmark.add_options(command)
    return parser


if __name__ == "__main__":
    main()
