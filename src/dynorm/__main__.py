"""``dynorm`` and ``python -m dynorm``: the command line, if its libraries are installed."""

import sys

from dynorm.errors import ArgumentError, require_library


def main() -> None:
    """Run the command line; without typer say which extra brings it."""
    extra = "convert"
    if sys.argv[1:2] in (["paper"], ["prove"], ["explore"]):
        extra = "paper"
    try:
        require_library("typer", "the commands", extra)
    except ArgumentError as error:
        sys.exit(f"dynorm: {error}")
    from dynorm.cli import main as run

    run()


if __name__ == "__main__":
    main()
