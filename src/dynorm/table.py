"""The table of a report: rows under heads, with a title above and notes below."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from io import StringIO

WIDTH = 100
"""The width of a report's sentences; a table is as wide as its paths need, in any terminal."""
_NUMBERS = frozenset("0123456789.,+-−–%<e ")


@dataclass(frozen=True)
class Table:
    """Rows under columns, with a title above and notes below; ``str`` gives plain text.

    Fractions are shown with four digits; None is a dash.

    Example:
        >>> print(Table(["site", "beta"], [("block.0.norm", 12.34567), ("head", None)]))
        site           beta
        block.0.norm  12.35
        head              –
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[object]]  # one value for each column
    notes: Sequence[str] = ()
    title: str = ""

    def cells(self) -> list[list[str]]:
        """Return the texts of the rows."""
        return [[_text(value) for value in row] for row in self.rows]

    def __str__(self) -> str:
        """Return the table as plain text."""
        lines = [*self.title.splitlines(), ""]
        if self.rows:
            lines += [*self._grid(), ""]
        return "\n".join([*lines, *self.notes]).strip()

    def _grid(self) -> list[str]:
        from rich.console import Console
        from rich.table import Table as Grid

        grid = Grid(box=None, padding=(0, 2, 0, 0), pad_edge=False)
        cells = self.cells()
        for title, *texts in zip(self.columns, *cells, strict=True):
            is_numeric = _NUMBERS.issuperset("".join(texts)) and grid.columns
            grid.add_column(title, justify="right" if is_numeric else "left", no_wrap=True)
        for texts in cells:
            grid.add_row(*texts)
        # Wide enough for any path: a table takes only the width that it needs.
        console = Console(file=StringIO(), width=1000, markup=False, emoji=False, highlight=False)
        with console.capture() as capture:
            console.print(grid)
        return [line.rstrip() for line in capture.get().splitlines()]


def _text(value: object) -> str:
    if value is None:
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def wrapped(text: str) -> str:
    """Return a paragraph in lines of :data:`WIDTH`."""
    return textwrap.fill(text, WIDTH, break_long_words=False)
