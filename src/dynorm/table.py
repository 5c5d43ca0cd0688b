"""The one table that every report prints, shows in a page, or hands on as plain values."""

import math
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import Any, cast

WIDTH = 80
# Signs of ours that a console which is not UTF-8 cannot print.
_ASCII = str.maketrans(
    {
        "−": "-",
        "–": "-",
        "·": "*",
        "…": "..",
        "²": "^2",
        "√": "sqrt",
        "σ": "sigma",
        "β": "beta",
        "α": "alpha",
    }
)


@dataclass(frozen=True)
class Column:
    """One column of a table, with its head, and how it turns a value into text."""

    title: str
    form: str | Callable[[Any], str] = ""  # a format specification like ".3f", or a function
    # its meaning, said below the table; that of a group's first column stands there for the group
    note: str = ""
    # a head above neighbouring columns that are compared; a page marks the least value of each row
    group: str = ""
    page_only: bool = False  # whether to leave it out of plain text, which has no room for all

    def text(self, value: Any) -> str:
        """Return the text of a value; None is a dash."""
        if value is None:
            return "–"
        return self.form(value) if callable(self.form) else format(value, self.form)


@dataclass(frozen=True)
class Table:
    """Rows under columns, with a title above and notes below; ``str`` gives plain text of 80 columns.

    Numbers stand right. Where a line would be too long, the words of its first cell are shortened,
    as in "e.l.0.a.LayerNorm", and at last cut. Long lines of title and notes are wrapped.

    Example:
        >>> print(Table(["site", Column("beta", ".3g")], [("block.0.norm", 12.3456), ("head", None)], title="2 sites"))
        2 sites
        <BLANKLINE>
        site          beta
        block.0.norm  12.3
        head             -
    """

    columns: Sequence[str | Column]  # a string is a title alone
    rows: Sequence[Sequence[Any]]  # one value for each column
    notes: Sequence[str] = ()
    title: str = ""

    def head(self) -> list[Column]:
        """Return the columns, each as a :class:`Column`."""
        return [Column(column) if isinstance(column, str) else column for column in self.columns]

    def __str__(self) -> str:
        """Return the table as plain text."""
        meanings: dict[str, str] = {}
        for column in self.head():
            if column.note and self.rows and not column.page_only:
                meanings.setdefault(column.group or column.title, column.note)
        lines = "\n".join(self._lines())
        if any(self.head()[0].text(row[0]).translate(_ASCII) not in lines for row in self.rows):
            meanings = {self.head()[0].title: "shortened, a letter for a word"} | meanings
        below = _wrapped([f"{name}: {note}" for name, note in meanings.items()])
        parts = (_wrapped(self.title.splitlines()), lines, _wrapped(self.notes), below)
        return "\n\n".join(part for part in parts if part)

    def _lines(self) -> list[str]:
        if not self.rows:
            return []
        shown = [
            (c, values)
            for c, *values in zip(self.head(), *self.rows, strict=True)
            if not c.page_only
        ]
        cells = [
            [text.translate(_ASCII) for text in (c.title, *map(c.text, values))]
            for c, values in shown
        ]
        widths = [max(map(len, column)) for column in cells]
        gap = "  " if sum(widths) + 2 * len(widths) - 2 <= WIDTH else " "
        widths[0] = min(widths[0], max(WIDTH - sum(widths[1:]) - len(gap) * (len(widths) - 1), 12))
        cells[0] = [shortened(text, widths[0]) for text in cells[0]]
        for i, (_, values) in enumerate(shown):
            side = (
                ">" if all(isinstance(value, (int, float, type(None))) for value in values) else "<"
            )
            cells[i] = [f"{text:{side}{widths[i]}}" for text in cells[i]]
        groups = groupby(
            zip((column.group for column, _ in shown), widths, strict=True), key=itemgetter(0)
        )
        above = gap.join(
            f"{group:>{sum(width + len(gap) for _, width in part) - len(gap)}}"
            for group, part in groups
        )
        lines = [above, *map(gap.join, zip(*cells, strict=True))]
        return [line.rstrip().translate(_ASCII) for line in lines if line.strip()]


def _wrapped(lines: Sequence[str]) -> str:
    fill = partial(textwrap.fill, width=WIDTH, subsequent_indent="  ", break_long_words=False)
    return "\n".join(fill(line.translate(_ASCII)) for line in lines)


def shortened(text: str, width: int) -> str:
    """Return text with as few words as needed cut down to a letter and their digits, from the left."""
    words = re.split(r"([._])", text)
    for place, word in enumerate(words):
        if len("".join(words)) > width and place < len(words) - 1:
            words[place] = word[:1] + re.sub(r"\D", "", word[1:])
    short = "".join(words)
    return short if len(short) <= width else f"{short[: width - 8]}..{short[-6:]}"


class Plain:
    """A dataclass that plain values can be made of."""

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain values that JSON knows."""
        values: dict[str, Any] = plain(asdict(cast("Any", self)))
        return values


def plain(value: Any) -> Any:
    """Return a value as JSON knows it: what is not finite becomes None, what is unknown its text."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)
