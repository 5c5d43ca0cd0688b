"""The parts that every page of a report is made of: one HTML file with its style in it, that loads nothing."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

from dynorm.report.text import number, plain


def whole_page(title: str, parts: Iterable[str]) -> str:
    """Return a page; the parts are HTML already, the title is not."""
    return _PAGE.format(title=escape(title), style=_STYLE, body="\n".join(parts))


def card(value: str, label: str, note: str) -> str:
    """A figure with its name, and a note that is HTML already."""
    return f"<div><dt>{escape(label)}</dt><dd>{escape(value)}</dd><dd>{note}</dd></div>"


def scrolled_table(columns: Iterable[tuple[str, str]], rows: Iterable[str], label: str) -> str:
    """A table that scrolls sideways by itself; columns are titles with their meaning, rows are HTML already."""
    head = "".join(f'<th scope="col" title="{escape(note)}">{escape(title)}</th>' for title, note in columns)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(label)}">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def breakable(path: str) -> str:
    """The path, escaped, which may break after its dots and underscores."""
    return escape(path).replace(".", ".<wbr>").replace("_", "_<wbr>")


def three(*values: float) -> list[str]:
    """Cells of figures that are compared, the least marked as best."""
    return [f"<td{' class=best' * (value == min(values))}>{number(value, 3)}</td>" for value in values]


def column_notes(columns: Iterable[tuple[str, str]]) -> str:
    """What the columns say, folded away."""
    rows = "".join(f"<dt>{escape(title)}</dt><dd>{escape(note)}</dd>" for title, note in columns)
    return f'<details><summary>What the columns say</summary><dl class="notes">{rows}</dl></details>'


def panel(path: str, caption: str, svg: str) -> str:
    """A picture under its site's path and a line of text."""
    return f"<figure><figcaption><b>{breakable(path)}</b><span>{escape(caption)}</span></figcaption>{svg}</figure>"


def unreached_note(paths: Iterable[str]) -> list[str]:
    """A paragraph on the norms that no batch reached, or nothing."""
    names = ", ".join(paths)
    return [f"<p>Not reached by any batch: {escape(names)}.</p>"] if names else []


def meta_list(meta: Mapping[str, Any]) -> list[str]:
    """A section on how the report was made, or nothing."""
    if not meta:
        return []
    rows = "".join(f"<dt>{escape(str(key))}</dt><dd>{_value(plain(value))}</dd>" for key, value in meta.items())
    return ["<h2>How it was made</h2>", f'<dl class="notes">{rows}</dl>']


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "<br>".join(f"{escape(str(key))}: {_value(item)}" for key, item in value.items())
    return escape(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


_STYLE = """
:root { color-scheme: light dark; --page: #fbfaf8; --card: #fff; --ink: #1f2328; --soft: #5c6570; --edge: #dfdcd6;
  --dyisru: #1a5fd0; --dyt: #c2410c; --linear: #5f7a3a; --point: #b4b9bf; --bar: #333a42; --outlier: #8a3ffc; }
@media (prefers-color-scheme: dark) { :root { --page: #14171b; --card: #1c2026; --ink: #e8e6e3; --soft: #a3abb5;
  --edge: #343a42; --dyisru: #78acff; --dyt: #ff9a62; --linear: #a9cb7b; --point: #5d646d; --bar: #d5dae0;
  --outlier: #c9a2ff; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 78rem; padding: 1.5rem 1rem 4rem; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { margin: 0 0 .25rem; font-size: 1.7rem; line-height: 1.2; overflow-wrap: anywhere; }
h2 { margin: 2.2rem 0 .8rem; font-size: 1.2rem; }
.lead, .note { margin: 0 0 1.2rem; color: var(--soft); max-width: 46rem; }
.note, .legend, .notes { font-size: .875rem; }
dl, dd, figure { margin: 0; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: .75rem; }
.cards div, figure, .scroll { background: var(--card); border: 1px solid var(--edge); border-radius: .5rem; }
.cards div { display: flex; flex-direction: column; padding: .75rem .9rem; min-width: 0; }
.cards dt { font-size: .875rem; color: var(--soft); }
.cards dd { font-size: 1.6rem; font-weight: 600; line-height: 1.3; font-variant-numeric: tabular-nums; }
.cards dd + dd { font-size: .8rem; font-weight: 400; color: var(--soft); overflow-wrap: anywhere; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .82rem; font-variant-numeric: tabular-nums; width: 100%; }
th, td { padding: .4rem .5rem; text-align: right; white-space: nowrap; }
thead th { font-weight: 500; color: var(--soft); vertical-align: bottom; white-space: normal; }
tbody tr { border-top: 1px solid var(--edge); }
th:first-child { text-align: left; position: sticky; left: 0; background: var(--card); }
tbody th { font-weight: 400; }
tbody th wbr { display: none; }
thead th:nth-child(2), td:nth-child(2) { text-align: left; }
.best { font-weight: 700; color: var(--dyisru); }
details { margin-top: .8rem; }
summary { cursor: pointer; color: var(--soft); font-size: .875rem; }
.notes { display: grid; grid-template-columns: max-content 1fr; gap: .3rem 1rem; margin-top: .6rem; }
.notes dt { color: var(--soft); }
.notes dd { overflow-wrap: anywhere; min-width: 0; }
.legend { display: flex; flex-wrap: wrap; gap: .3rem 1.2rem; list-style: none; margin: 0 0 .6rem; padding: 0; }
.legend li { display: flex; align-items: center; gap: .45rem; }
.legend i { display: inline-block; width: 1.5rem; flex: none; }
.legend .line { border-top: 2.5px solid; }
.legend .dyisru { border-color: var(--dyisru); }
.legend .dyt { border-color: var(--dyt); border-top-style: dashed; }
.legend .linear { border-color: var(--linear); border-top-style: dotted; }
.legend .bound { border-color: var(--soft); border-top: 1px dashed; }
.legend .point { width: .5rem; height: .5rem; border-radius: 50%; background: var(--point); }
.legend .point.outlier { background: var(--outlier); }
.legend .bar { width: 0; height: 1.1rem; border-left: 2px solid var(--bar); }
.grid { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(22rem, 100%), 1fr)); gap: .75rem; }
figure { padding: .7rem .8rem .4rem; min-width: 0; }
figcaption { font-size: .84rem; overflow-wrap: anywhere; }
figcaption span { display: block; color: var(--soft); font-variant-numeric: tabular-nums; }
svg { display: block; width: 100%; height: auto; }
@media (max-width: 34rem) { .notes { grid-template-columns: 1fr; gap: 0; } .notes dd { margin-bottom: .5rem; }
  th, td { padding: .35rem .45rem; } tbody th { min-width: 8rem; white-space: normal; overflow-wrap: anywhere; }
  tbody th wbr { display: inline; } }
"""

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""
