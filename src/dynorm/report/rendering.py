"""Fill the templates: the pages and cards in ``dynorm/templates``."""

import re
from collections.abc import Callable
from functools import cache
from html import escape
from typing import TYPE_CHECKING, Any

from dynorm.errors import require_library
from dynorm.report.colours import css_colors
from dynorm.report.pictures import svg_picture
from dynorm.table import Table, digits

if TYPE_CHECKING:
    from jinja2 import Environment


@cache
def environment() -> "Environment":
    """Return the environment of the templates, with their filters and functions."""
    require_library("jinja2", "pages and cards")
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
        "picture": lambda *parts: Markup(svg_picture(*parts)),
    }
    filters: dict[str, Callable[..., str]] = {
        # A path may break after its dots and underscores.
        "breakable": lambda path: Markup(re.sub("([._])", r"\1<wbr>", escape(path))),
        "digits": digits,
        "table": lambda table: Markup(table_html(table)),
    }
    jinja.filters |= filters
    return jinja


def rendered(template: str, **values: object) -> str:
    """Return a template filled with values; a missing name is an error."""
    return environment().get_template(template).render(values)


def table_html(table: Table) -> str:
    """Return a table with its notes as HTML; it scrolls sideways by itself."""
    return rendered("table.html", table=table)
