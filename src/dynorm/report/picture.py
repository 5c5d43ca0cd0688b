"""The picture of one site: the norm's core against its input, with the fitted functions."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from itertools import chain
from typing import TYPE_CHECKING

import torch

from dynorm.errors import require_library
from dynorm.report.stats import FUNCTIONS, PICTURE_KNEE, CoreFit, Picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

DAYLIGHT = {
    "ink": "#1f2328",
    "soft": "#5c6570",
    "edge": "#c9c5bd",
    "point": "#c3c7cc",
    "bar": "#333a42",
    "outlier": "#8a3ffc",
    "dyisru": "#1a5fd0",
    "dyt": "#c2410c",
    "linear": "#5f7a3a",
}
"""The colours of a picture on white paper, by what they are for."""

# Colours that stand for the page's own, which differ by day and night; matplotlib only knows fixed ones.
_OF_THE_PAGE = {name: f"#0101{place:02x}" for place, name in enumerate(DAYLIGHT, start=1)}
_STYLES = {"linear": (0, (1, 1.5)), "dyt": (0, (4, 2)), "dyisru": "solid"}


@dataclass(frozen=True)
class Drawing:
    """What one picture shows.

    Args:
        path: of the site.
        fit: the curves.
        sample: the points and error bars behind them.
        outliers: x and y of the points that the curves were fitted on, where these are outliers alone.
    """

    path: str
    fit: CoreFit
    sample: Picture
    outliers: tuple[list[float], list[float]] | None = None


def svg_picture(drawing: Drawing, alternative: str) -> str:
    """Return the picture as an ``<svg>`` element whose colours are the page's variables.

    Args:
        drawing: what it shows.
        alternative: the same in words.

    Raises:
        ArgumentError: matplotlib is not installed.
    """
    require_library("matplotlib", "an HTML report", "plots")
    import matplotlib
    from matplotlib.figure import Figure

    buffer = io.StringIO()
    # The salt makes the ids of this picture differ from those of the others in the page.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": drawing.path, "path.simplify": False}):
        figure = Figure(figsize=(4.4, 3.1), layout="constrained")
        draw(figure.add_subplot(), drawing, _OF_THE_PAGE)
        figure.savefig(buffer, format="svg", transparent=True)
    return _inline(buffer.getvalue(), alternative)


def draw(axes: Axes, drawing: Drawing, colors: Mapping[str, str] = DAYLIGHT) -> None:
    """Draw points first, then bounds and curves, error bars or outliers on top; x is counted from the centre."""
    center, sample = drawing.fit.center, drawing.sample
    x = [x - center for x in sample.x]
    far = [] if drawing.outliers is None else [x - center for x in drawing.outliers[0]]
    ends = _scale_axes(axes, drawing, x + far, colors)
    _draw_dots(axes, x, sample.y, colors["point"])
    for side in (-1, 1):
        axes.axhline(side * drawing.fit.scale, color=colors["soft"], linewidth=0.8, linestyle=(0, (4, 3)))
    if drawing.outliers is not None:
        _draw_dots(axes, far, drawing.outliers[1], colors["outlier"])
    _draw_functions(axes, drawing, ends, colors)
    if drawing.outliers is None:
        places, means = [b.x - center for b in sample.bins], [b.mean for b in sample.bins]
        spread = [b.std for b in sample.bins]
        axes.errorbar(places, means, spread, fmt="none", ecolor=colors["bar"], elinewidth=1.1)


def _draw_dots(axes: Axes, x: list[float], y: list[float], color: str) -> None:
    # A dot is a line of next to no length (of none, a PNG would not show it): one path for all is a fifth of as many
    # markers.
    dots = [
        list(chain.from_iterable((v, v + length, math.nan) for v in values)) for values, length in ((x, 0.0), (y, 1e-4))
    ]
    axes.plot(*dots, color=color, linewidth=3, solid_capstyle="round")


def _scale_axes(axes: Axes, drawing: Drawing, x: list[float], colors: Mapping[str, str]) -> tuple[float, float]:
    """Axes that are linear within two sigmas and logarithmic beyond; returns the ends of x on that scale."""
    knee = PICTURE_KNEE * drawing.sample.sigma
    low, high = math.asinh(min(x) / knee), math.asinh(max(x) / knee)
    margin = 0.06 * max(high - low, 1.0)
    top = math.asinh(1.35 * drawing.fit.scale / PICTURE_KNEE)
    axes.set_xscale("asinh", linear_width=knee)
    axes.set_yscale("asinh", linear_width=PICTURE_KNEE)
    ends = low - margin, high + margin
    axes.set_xlim(*(knee * math.sinh(end) for end in ends))
    axes.set_ylim(-1.35 * drawing.fit.scale, 1.35 * drawing.fit.scale)
    _set_ticks(axes.xaxis, *ends, knee)
    _set_ticks(axes.yaxis, -top, top, PICTURE_KNEE)
    axes.set_xlabel("input x − centre" if drawing.fit.center else "input x", color=colors["soft"])
    axes.set_ylabel("norm's core y", color=colors["soft"])
    axes.tick_params(colors=colors["edge"], labelcolor=colors["soft"], labelsize=9)
    for spine in axes.spines.values():
        spine.set_color(colors["edge"])
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


def _draw_functions(axes: Axes, drawing: Drawing, ends: tuple[float, float], colors: Mapping[str, str]) -> None:
    d = PICTURE_KNEE * drawing.sample.sigma * torch.linspace(*ends, 121, dtype=torch.float64).sinh()
    for name, function in FUNCTIONS.items():
        y = function(d, torch.tensor(drawing.fit.betas[name], dtype=torch.float64), 0.0, drawing.fit.scale)
        axes.plot(d.tolist(), y.tolist(), color=colors[name], linewidth=1.5, linestyle=_STYLES[name])


def _inline(svg: str, alternative: str) -> str:
    """An SVG document as an element of a page: no headers, the page's colours and font, short numbers."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\s(?:xmlns(?::xlink)?|version|width|height)="[^"]*"', "", svg, count=5)
    svg = re.sub(r"(\d\.\d{2})\d+", r"\1", svg)
    for name, color in _OF_THE_PAGE.items():
        svg = svg.replace(color, f"var(--{name})")
    return svg.replace("<svg", f'<svg role="img" aria-label="{escape(alternative)}"', 1)
