"""One HTML page for any report: figures, a table and pictures, in one file that loads nothing."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from itertools import groupby
from typing import Any

from dynorm.family import css_colors
from dynorm.report.picture import Drawing, svg_picture
from dynorm.table import Column, Table, plain


@dataclass(frozen=True)
class Page:
    """The contents of a page, from top to bottom; all of it plain text."""

    title: str
    lead: str
    """A sentence or two on the work behind it."""
    cards: Sequence[tuple[str, str, str]]
    """The headline figures, each with its name and a note."""
    table: Table
    heading: str
    """Of the pictures."""
    legend: Mapping[str, str]
    """The marks in the pictures, by their style."""
    drawings: Sequence[Drawing]
    meta: Mapping[str, Any]
    """How it was made."""
    findings: str = ""
    """The conclusions, as a paragraph."""
    texts: Sequence[tuple[str, str, str]] = ()
    """Prompts, with the original's and the converted model's continuation."""

    def html(self) -> str:
        """Return the page, which follows the reader's choice of light or dark.

        Raises:
            ArgumentError: matplotlib is not installed.
        """
        cards = (
            f"<div><dt>{escape(label)}</dt><dd>{escape(value)}</dd><dd>{escape(note)}</dd></div>"
            for value, label, note in self.cards
        )
        legend = (f'<li><i class="{style}"></i>{escape(words)}</li>' for style, words in self.legend.items())
        figures = (
            f"<figure><figcaption><b>{_breakable(drawing.path)}</b><span>{escape(drawing.caption)}</span></figcaption>"
            f"{svg_picture(drawing)}</figure>"
            for drawing in self.drawings
        )
        meta = ((str(key), _nested(plain(value))) for key, value in self.meta.items())
        body = [
            f"<h1>{escape(self.title)}</h1>",
            f'<p class="lead">{escape(self.lead)}</p>',
            f'<dl class="cards">{"".join(cards)}</dl>',
            f"<p>{escape(self.findings)}</p>" * bool(self.findings),
            _continuations(self.texts) * bool(self.texts),
            "<h2>Every site</h2>",
            table_html(self.table),
            f"<h2>{escape(self.heading)}</h2>",
            f'<ul class="legend">{"".join(legend)}</ul>',
            f'<p class="note">{_AXES}</p>',
            f'<div class="grid">{"".join(figures)}</div>',
            f"<h2>How it was made</h2>{_definitions(meta)}" * bool(self.meta),
        ]
        style = css_colors() + files(__package__).joinpath("page.css").read_text("utf-8")
        return whole_page(self.title, style, "\n".join(body))


def _continuations(texts: Iterable[Sequence[str]]) -> str:
    """Return a table of texts and their continuations, white space kept."""
    rows = "".join(f"<tr>{''.join(f'<td>{escape(text)}</td>' for text in row)}</tr>" for row in texts)
    heads = "".join(f"<th>{name}</th>" for name in ("held-out text", "the original goes on", "the converted model"))
    return (
        f'<h2>Likeliest continuations</h2><div class="scroll"><table class="texts"><tr>{heads}</tr>{rows}</table></div>'
    )


def table_html(table: Table) -> str:
    """Return a table with its notes. It scrolls sideways by itself; the columns' meanings are folded away."""
    columns = table.head()
    groups = [(name, len(list(part))) for name, part in groupby(column.group for column in columns)]
    above = "".join(f'<th colspan="{count}">{escape(name)}</th>' for name, count in groups)
    heads = "".join(f'<th scope="col" title="{escape(c.note)}">{escape(c.title)}</th>' for c in columns)
    meanings = ((", ".join(filter(None, (c.title, c.group))), escape(c.note)) for c in columns if c.note)
    return (
        '<div class="scroll" tabindex="0" role="region" aria-label="Table of sites"><table>'
        f"<thead><tr>{above}</tr><tr>{heads}</tr></thead>"
        f"<tbody>{''.join(_row(columns, row) for row in table.rows)}</tbody></table></div>"
        f"{''.join(f'<p>{escape(note)}</p>' for note in table.notes)}"
        f"<details><summary>Meaning of the columns</summary>{_definitions(meanings)}</details>"
    )


def _row(columns: Sequence[Column], row: Sequence[Any]) -> str:
    """Return a row whose first cell is its head; the least value of each group is marked as best."""
    best = {
        name: min(value for column, value in zip(columns, row, strict=True) if column.group == name)
        for name in {column.group for column in columns if column.group}
    }
    cells = (
        f"<td{' class=best' * (bool(c.group) and value == best[c.group])}>{escape(c.text(value))}</td>"
        for c, value in list(zip(columns, row, strict=True))[1:]
    )
    return f'<tr><th scope="row">{_breakable(str(row[0]))}</th>{"".join(cells)}</tr>'


def _definitions(pairs: Iterable[tuple[str, str]]) -> str:
    """Return a list of names with their definitions; the names are escaped here, the definitions are HTML already."""
    return f'<dl class="notes">{"".join(f"<dt>{escape(name)}</dt><dd>{text}</dd>" for name, text in pairs)}</dl>'


def _nested(value: Any) -> str:
    if isinstance(value, dict):
        return "<br>".join(f"{escape(name)}: {_nested(item)}" for name, item in value.items())
    return escape(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


def _breakable(path: str) -> str:
    """Return the path, escaped, which may break after its dots and underscores."""
    return escape(path).replace(".", ".<wbr>").replace("_", "_<wbr>")


_AXES = """Each curve has the one constant that fits the site best; its error stands above. Both axes are
linear near 0 and logarithmic far from it (asinh), so that outliers stay in view; there even a straight line bends."""


def whole_page(title: str, style: str, body: str) -> str:
    """Return an HTML page that follows the reader's choice of light or dark; its links to ``#top`` lead to its head."""
    return f"""<!doctype html>
<html lang="en" id="top">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(title)}</title>
<style>{style}</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""
