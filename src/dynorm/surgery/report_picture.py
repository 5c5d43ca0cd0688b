"""The picture of one site: the norm's core against its input, with the fitted functions, as SVG to put into a page."""

from __future__ import annotations

import io
import math
import re
from html import escape
from itertools import chain
from typing import TYPE_CHECKING

import torch

from dynorm.errors import ArgumentError
from dynorm.surgery.report import SiteReport
from dynorm.surgery.report_stats import FUNCTIONS, PICTURE_KNEE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

# Colours that stand for the page's own, which differ by day and night; matplotlib only knows fixed ones.
_COLORS = {
    "ink": "#010101",
    "soft": "#010102",
    "edge": "#010103",
    "point": "#010104",
    "bar": "#010105",
    "dyisru": "#010106",
    "dyt": "#010107",
    "linear": "#010108",
}
_STYLES = {"linear": (0, (1, 1.5)), "dyt": (0, (4, 2)), "dyisru": "solid"}


def picture(site: SiteReport, alternative: str) -> str:
    """Return the picture as an ``<svg>`` element whose colours are the page's variables.

    Args:
        site: a row of a report.
        alternative: what it shows, in words.

    Raises:
        ArgumentError: matplotlib is not installed.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ArgumentError("an HTML report needs matplotlib: pip install dynorm[plots]") from error
    buffer = io.StringIO()
    # The salt makes the ids of this picture differ from those of the others in the page.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": site.path, "path.simplify": False}):
        figure = Figure(figsize=(4.4, 3.1), layout="constrained")
        _draw(figure.add_subplot(), site)
        figure.savefig(buffer, format="svg", transparent=True)
    return _inline(buffer.getvalue(), alternative)


def _draw(axes: Axes, site: SiteReport) -> None:
    """Points first, then bounds and curves, the error bars on top; x is counted from the centre."""
    center, bins = site.fit.center, site.picture.bins
    x = [x - center for x in site.picture.x]
    ends = _scale_axes(axes, site, x)
    # A dot is a line of no length: one path for all is a fifth of as many markers.
    dots = [list(chain.from_iterable((v, v, math.nan) for v in values)) for values in (x, site.picture.y)]
    axes.plot(*dots, color=_COLORS["point"], linewidth=3, solid_capstyle="round")
    for side in (-1, 1):
        axes.axhline(side * site.fit.scale, color=_COLORS["soft"], linewidth=0.8, linestyle=(0, (4, 3)))
    _draw_functions(axes, site, ends)
    places, means = [b.x - center for b in bins], [b.mean for b in bins]
    axes.errorbar(places, means, [b.std for b in bins], fmt="none", ecolor=_COLORS["bar"], elinewidth=1.1)


def _scale_axes(axes: Axes, site: SiteReport, x: list[float]) -> tuple[float, float]:
    """Axes that are linear within two sigmas and logarithmic beyond; returns the ends of x on that scale."""
    knee = PICTURE_KNEE * site.picture.sigma
    low, high = math.asinh(min(x) / knee), math.asinh(max(x) / knee)
    margin = 0.06 * max(high - low, 1.0)
    top = math.asinh(1.35 * site.fit.scale / PICTURE_KNEE)
    axes.set_xscale("asinh", linear_width=knee)
    axes.set_yscale("asinh", linear_width=PICTURE_KNEE)
    ends = low - margin, high + margin
    axes.set_xlim(*(knee * math.sinh(end) for end in ends))
    axes.set_ylim(-1.35 * site.fit.scale, 1.35 * site.fit.scale)
    _set_ticks(axes.xaxis, *ends, knee)
    _set_ticks(axes.yaxis, -top, top, PICTURE_KNEE)
    axes.set_xlabel("input x − centre" if site.fit.center else "input x", color=_COLORS["soft"])
    axes.set_ylabel("norm's core y", color=_COLORS["soft"])
    axes.tick_params(colors=_COLORS["edge"], labelcolor=_COLORS["soft"], labelsize=9)
    for spine in axes.spines.values():
        spine.set_color(_COLORS["edge"])
    return ends


def _set_ticks(axis: Axis, low: float, high: float, knee: float) -> None:
    """Put ticks at 0 and at round numbers with room between them, on an asinh scale from low to high."""
    decades = [10.0**k for k in range(math.ceil(math.log10(knee)) + 12, math.floor(math.log10(knee)) - 2, -1)]
    sizes = [*decades, *(f * v for f in (3, 2, 5) for v in decades)]
    chosen: dict[float, float] = {}
    for value in [0.0, *(sign * size for size in sizes for sign in (1, -1))]:
        place = math.asinh(value / knee)
        if low <= place <= high and all(abs(place - other) > 0.11 * (high - low) for other in chosen):
            chosen[place] = value
    axis.set_ticks(list(chosen.values()), [f"{value:g}".replace("-", "−") for value in chosen.values()])
    axis.set_ticks([], minor=True)


def _draw_functions(axes: Axes, site: SiteReport, ends: tuple[float, float]) -> None:
    d = PICTURE_KNEE * site.picture.sigma * torch.linspace(*ends, 121, dtype=torch.float64).sinh()
    for name, function in FUNCTIONS.items():
        y = function(d, torch.tensor(site.fit.betas[name], dtype=torch.float64), 0.0, site.fit.scale)
        axes.plot(d.tolist(), y.tolist(), color=_COLORS[name], linewidth=1.5, linestyle=_STYLES[name])


def _inline(svg: str, alternative: str) -> str:
    """An SVG document as an element of a page: no headers, the page's colours and font, short numbers."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\s(?:xmlns(?::xlink)?|version|width|height)="[^"]*"', "", svg, count=5)
    svg = re.sub(r"(\d\.\d{2})\d+", r"\1", svg)
    for name, color in _COLORS.items():
        svg = svg.replace(color, f"var(--{name})")
    return svg.replace("<svg", f'<svg role="img" aria-label="{escape(alternative)}"', 1)
