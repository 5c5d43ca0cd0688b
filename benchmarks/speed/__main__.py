"""Compare the speed of the family with that of the norms: ``python -m benchmarks.speed --quick``."""

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

# The width of names and six sizes, if the output is not a terminal.
WIDTH = 132


def main(words: Sequence[str] | None = None) -> None:
    """Check, measure, write and print."""
    options = make_parser().parse_args(words)
    stderr = Console(stderr=True)
    console = Console(highlight=False)
    is_quiet = options.json or not stderr.is_terminal
    progress = partial(track, console=stderr, transient=True, disable=is_quiet)
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
    parts = printed(document)
    for row in document["targets"]:
        if reached(row) is False:
            parts.append(f"short of its goal (benchmarks/speed/goals.json): {row['what']}")
    for path in outputs:
        parts.append(f"wrote {path}")
    for part in parts:
        console.print(part, markup=False, soft_wrap=isinstance(part, str))


if __name__ == "__main__":
    main()
