"""Fill the templates: the texts and pages of ``dynorm/templates`` with the values of a report, a card or a proof."""

import json
from collections.abc import Iterable, Mapping
from functools import cache, partial
from html import escape
from itertools import groupby
from typing import TYPE_CHECKING, Any

from dynorm.family import FAMILY
from dynorm.report.colours import css_colors
from dynorm.report.pictures import svg_picture
from dynorm.report.stats import FUNCTIONS
from dynorm.table import Table, plain

if TYPE_CHECKING:
    from jinja2 import Environment


@cache
def environment() -> "Environment":
    """Return what fills the templates, with their filters, and compiles the expressions of the columns."""
    from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
    from markupsafe import Markup

    options: dict[str, Any] = {
        "undefined": StrictUndefined,
        "trim_blocks": True,
        "lstrip_blocks": True,
    }
    found = Environment(loader=PackageLoader("dynorm"), autoescape=select_autoescape(), **options)
    found.globals |= {
        "css_colors": css_colors,
        "picture": lambda *parts: Markup(svg_picture(*parts)),
    }
    found.filters |= {
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
    return found


def rendered(template: str, **values: Any) -> str:
    """Return the text that a template makes of some values; a name that it does not get is an error."""
    return environment().get_template(template).render(values)


def digits(value: float | None, digits: int = 3) -> str:
    """Return a number to so many digits behind the point; None is a dash."""
    return "–" if not isinstance(value, (int, float)) else f"{value:.{digits}f}".replace("-", "−")


def wins(rows: Iterable[Mapping[str, float]]) -> dict[str, int]:
    """Count for each function the rows in which it has the smallest value."""
    best = [min(row, key=row.__getitem__) for row in rows]
    return {name: best.count(name) for name in FUNCTIONS}


def table_html(table: Table) -> str:
    """Return a table with its notes. It scrolls sideways by itself; the columns' meanings are folded away."""
    columns, rows = table.head(), []
    for row in table.rows:
        cells = list(zip(columns, row, strict=True))
        # The least value of each group is marked as best.
        best = {
            c.group: min(v for d, v in cells if d.group == c.group) for c, _ in cells if c.group
        }
        rows.append([(c.text(v), bool(c.group) and v == best[c.group]) for c, v in cells])
    groups = [(name, len(list(part))) for name, part in groupby(column.group for column in columns)]
    return rendered("table.html", columns=columns, groups=groups, rows=rows, notes=table.notes)
