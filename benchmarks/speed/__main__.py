"""The speed of the family compared with the norms, on this machine: ``python -m benchmarks.speed --quick``."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from functools import partial

from rich.console import Console
from rich.progress import track

from benchmarks.speed.figures import reached
from benchmarks.speed.plot import draw
from benchmarks.speed.run import run
from benchmarks.speed.settings import make_parser, make_settings
from benchmarks.speed.table import printed
from dynorm.errors import DynormError
from dynorm.files import require_writable, write_bytes, write_text

# Names and six sizes side by side, where the output is no terminal.
WIDTH = 132


def main(words: Sequence[str] | None = None) -> None:
    """Check, measure, write and print."""
    options = make_parser().parse_args(words)
    stderr, console = Console(stderr=True), Console(highlight=False)
    progress = partial(
        track, console=stderr, transient=True, disable=options.json or not stderr.is_terminal
    )
    outputs = [path for path in (options.out, options.plot) if path is not None]
    try:
        for path in outputs:
            require_writable(path)
        document = run(
            make_settings(options),
            model=options.model,
            name=options.name,
            block=not options.no_block,
            track=progress,
        )
    except DynormError as error:
        sys.exit(f"error: {error}")
    text = json.dumps(document, indent=1)
    if options.out is not None:
        write_text(options.out, text + "\n")
    if options.plot is not None:
        write_bytes(options.plot, draw(document))
    if options.json:
        print(text)
        return
    if not console.is_terminal:
        console.width = max(console.width, WIDTH)
    short = [row["what"] for row in document["targets"] if reached(row) is False]
    notes = [f"short of its goal (benchmarks/speed/goals.json): {what}" for what in short]
    for part in (*printed(document), *notes, *(f"wrote {path}" for path in outputs)):
        console.print(part, markup=False, soft_wrap=isinstance(part, str))


if __name__ == "__main__":
    main()
