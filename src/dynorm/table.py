"""The table of every report: printed as text or shown in a page; and values for JSON."""

import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

WIDTH = 80
# Replacements for signs that a console without UTF-8 cannot print.
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
    # its meaning, below the table; for a group in plain text, only that of the first column
    note: str = ""
    # a head above neighbouring columns that are compared; a page marks the least value of each row
    group: str = ""
    page_only: bool = False  # whether to leave it out of plain text, which is narrow

    def text(self, value: object) -> str:
        """Return the text of a value; None is a dash."""
        if value is None:
            return "–"
        if callable(self.form):
            return self.form(value)
        return format(value, self.form)


@dataclass(frozen=True)
class Table:
    """Rows under columns, with a title above and notes below; ``str`` gives text of 80 columns.

    Numbers are on the right of their column. If a line would be too long, the words of its first
    cell are shortened, as in "e.l.0.a.LayerNorm", and if that is not enough, cut. Long lines of
    title and notes are wrapped.

    Example:
        >>> rows = [("block.0.norm", 12.3456), ("head", None)]
        >>> print(Table(["site", Column("beta", ".3g")], rows, title="2 sites"))
        2 sites
        <BLANKLINE>
        site          beta
        block.0.norm  12.3
        head             -
    """

    columns: Sequence[str | Column]  # a string is a column with only a title
    rows: Sequence[Sequence[object]]  # one value for each column
    notes: Sequence[str] = ()
    title: str = ""

    def head(self) -> list[Column]:
        """Return the columns, each as a :class:`Column`."""
        return [Column(column) if isinstance(column, str) else column for column in self.columns]

    def __str__(self) -> str:
        """Return the table as plain text."""
        lines = "\n".join(self._lines())
        parts = [
            _wrapped(self.title.splitlines()),
            lines,
            _wrapped(self.notes),
            _wrapped(self._meanings(lines)),
        ]
        return "\n\n".join(part for part in parts if part)

    def _meanings(self, lines: str) -> list[str]:
        """Return a line for each column or group with a note."""
        if not self.rows:
            return []
        columns = self.head()
        meanings: dict[str, str] = {}
        first = columns[0]
        names = [first.text(row[0]).translate(_ASCII) for row in self.rows]
        if any(name not in lines for name in names):
            meanings[first.title] = "shortened, a letter for a word"
        for column in columns:
            if column.note and not column.page_only:
                meanings.setdefault(column.group or column.title, column.note)
        return [f"{name}: {note}" for name, note in meanings.items()]

    def _lines(self) -> list[str]:
        """Return the heads and the rows, at most 80 columns wide where that is possible."""
        if not self.rows:
            return []
        columns = []
        cells = []  # by column, the title first
        numeric = []
        for column, *values in zip(self.head(), *self.rows, strict=True):
            if column.page_only:
                continue
            texts = [column.title, *(column.text(value) for value in values)]
            columns.append(column)
            cells.append([text.translate(_ASCII) for text in texts])
            numeric.append(all(isinstance(value, (int, float, type(None))) for value in values))
        widths = [max(len(text) for text in texts) for texts in cells]
        gap = "  " if sum(widths) + 2 * (len(widths) - 1) <= WIDTH else " "
        # Only the first column gives way.
        others = sum(widths[1:]) + len(gap) * (len(widths) - 1)
        cells[0] = shortened(cells[0], min(widths[0], max(WIDTH - others, 12)))
        widths[0] = max(len(text) for text in cells[0])
        for texts, width, is_numeric in zip(cells, widths, numeric, strict=True):
            texts[:] = [text.rjust(width) if is_numeric else text.ljust(width) for text in texts]
        lines = [gap.join(row) for row in zip(*cells, strict=True)]
        lines.insert(0, _group_heads(columns, widths, gap))
        return [line.rstrip().translate(_ASCII) for line in lines if line.strip()]


def _group_heads(columns: Sequence[Column], widths: Sequence[int], gap: str) -> str:
    """Return the line with the name of each group above its columns, at their right end."""
    heads = []
    pairs = zip(columns, widths, strict=True)
    for group, members in groupby(pairs, key=lambda pair: pair[0].group):
        member_widths = [width for _, width in members]
        width = sum(member_widths) + len(gap) * (len(member_widths) - 1)
        heads.append(group.rjust(width))
    return gap.join(heads)


def _wrapped(lines: Sequence[str]) -> str:
    fill = partial(textwrap.fill, width=WIDTH, subsequent_indent="  ", break_long_words=False)
    return "\n".join(fill(line.translate(_ASCII)) for line in lines)


def shortened(texts: Sequence[str], width: int) -> list[str]:
    """Return the texts; in those that are too long, words are cut to a letter and their digits.

    Words are cut from the left, until the text fits. A word cut in one text is cut in all long ones.
    """
    initials: dict[str, str] = {}

    def cut(text: str) -> str:
        *words, last = re.split(r"([._])", text)
        return "".join(initials.get(word, word) for word in words) + last

    for text in texts:
        for word in re.split(r"[._]", text)[:-1]:
            if len(cut(text)) > width:
                initials[word] = word[:1] + re.sub(r"\D", "", word[1:])
    results = []
    for text in texts:
        short = cut(text) if len(text) > width else text
        if len(short) > width:
            short = f"{short[: width - 8]}..{short[-6:]}"
        results.append(short)
    return results
