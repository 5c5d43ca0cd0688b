"""The table of a report: rows under heads, with a title above and notes below."""

import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from io import StringIO
from typing import Literal

WIDTH = 100
"""The width of a report's sentences, unless the terminal is narrower."""
Side = Literal["left", "right"]
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

    def sides(self) -> list[Side]:
        """Return the alignment of each column."""
        return _sides(self.columns, self.cells())

    def __str__(self) -> str:
        """Return the table as plain text."""
        lines = [*self.title.splitlines(), ""]
        if self.rows:
            lines += [*self._lines(), ""]
        return "\n".join([*lines, *self.notes]).strip()

    def _lines(self) -> list[str]:
        """Return the rows; in a narrow terminal the first column is on a line of its own."""
        cells = self.cells()
        lines = _grid(self.columns, cells)
        width = max(map(len, lines))
        if width <= _terminal_width(width):
            return lines
        others = _grid(self.columns[1:], [row[1:] for row in cells])
        folded = []
        for first, line in zip([self.columns[0], *(row[0] for row in cells)], others, strict=True):
            folded += [first, f"  {line}"]
        return folded


def _sides(columns: Sequence[str], cells: Sequence[Sequence[str]]) -> list[Side]:
    """Return the alignment of columns: numbers on the right; texts, and the first, on the left."""
    sides: list[Side] = []
    for _, *texts in zip(columns, *cells, strict=True):
        is_number = bool(sides) and _NUMBERS.issuperset("".join(texts))
        sides.append("right" if is_number else "left")
    return sides


def _grid(columns: Sequence[str], cells: Sequence[Sequence[str]]) -> list[str]:
    """Return rows under their titles, aligned."""
    from rich.console import Console
    from rich.table import Table as Grid

    grid = Grid(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for title, side in zip(columns, _sides(columns, cells), strict=True):
        grid.add_column(title, justify=side, no_wrap=True)
    for row in cells:
        grid.add_row(*row)
    # Wide enough for any path: a table takes only the width that it needs.
    console = Console(file=StringIO(), width=1000, markup=False, emoji=False, highlight=False)
    with console.capture() as capture:
        console.print(grid)
    return [line.rstrip() for line in capture.get().splitlines()]


def _terminal_width(default: int) -> int:
    """Return the width of the terminal, or the default where there is none."""
    return shutil.get_terminal_size((default, 1)).columns


def _text(value: object) -> str:
    if value is None:
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def digits(value: float | None) -> str:
    """Return a number with three digits behind the point; None is a dash."""
    if value is None:
        return "–"
    return f"{value:.3f}".replace("-", "−")


def count_of(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural if there is not one."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def wrapped(text: str) -> str:
    """Return a paragraph in lines of :data:`WIDTH`, or of the terminal's if that is less."""
    return textwrap.fill(text, min(WIDTH, _terminal_width(WIDTH)), break_long_words=False)
