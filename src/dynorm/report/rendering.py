"""Fill the templates: the texts and pages in ``dynorm/templates``."""

import json
from collections.abc import Iterable, Mapping
from functools import cache, partial
from html import escape
from itertools import groupby
from typing import TYPE_CHECKING, Any

from dynorm.family import FAMILY
from dynorm.plain import plain
from dynorm.report.colours import css_colors
from dynorm.report.pictures import svg_curve, svg_picture
from dynorm.report.stats import FUNCTIONS
from dynorm.table import Table

if TYPE_CHECKING:
    from jinja2 import Environment


@cache
def environment() -> "Environment":
    """Return the environment of the templates, with their filters and functions."""
    from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
    from markupsafe import Markup

    options: dict[str, Any] = {
        "undefined": StrictUndefined,
        "trim_blocks": True,
        "lstrip_blocks": True,
    }
    jinja = Environment(loader=PackageLoader("dynorm"), autoescape=select_autoescape(), **options)
    jinja.globals |= {
        "css_colors": css_colors,
        "curve": lambda losses: Markup(svg_curve(losses)),
        "picture": lambda *parts: Markup(svg_picture(*parts)),
    }
    jinja.filters |= {
        # A path may break after its dots and underscores.
        "breakable": lambda path: Markup(
            escape(str(path)).replace(".", ".<wbr>").replace("_", "_<wbr>")
        ),
        "digits": digits,
        "json": partial(json.dumps, ensure_ascii=False),
        "percent": "{:.1%}".format,
        "named": lambda values: " · ".join(
            f"{FAMILY[name].title} {values[name]:.3f}" for name in FUNCTIONS
        ),
        "plain": plain,
        "wins": wins,
        "table": lambda table: Markup(table_html(table)),
    }
    return jinja


def rendered(template: str, **values: object) -> str:
    """Return a template filled with values; a missing name is an error."""
    return environment().get_template(template).render(values)


def digits(value: float | None, digits: int = 3) -> str:
    """Return a number with that many digits behind the point; None is a dash."""
    if not isinstance(value, (int, float)):
        return "–"
    return f"{value:.{digits}f}".replace("-", "−")


def wins(rows: Iterable[Mapping[str, float]]) -> dict[str, int]:
    """Count the rows in which each function has the smallest value."""
    best = [min(row, key=row.__getitem__) for row in rows]
    return {name: best.count(name) for name in FUNCTIONS}


def table_html(table: Table) -> str:
    """Return a table with its notes, as HTML.

    It scrolls sideways by itself; the meanings of the columns are folded away.
    """
    columns = table.head()
    rows = []
    for values in table.rows:
        # The least value of each group is marked as best.
        best: dict[str, Any] = {}
        for column, value in zip(columns, values, strict=True):
            if column.group:
                best[column.group] = min(best.get(column.group, value), value)
        cells = []
        for column, value in zip(columns, values, strict=True):
            is_best = bool(column.group) and value == best[column.group]
            cells.append((column.text(value), is_best))
        rows.append(cells)
    groups = []
    for name, members in groupby(column.group for column in columns):
        groups.append((name, len(list(members))))
    return rendered("table.html", columns=columns, groups=groups, rows=rows, notes=table.notes)
