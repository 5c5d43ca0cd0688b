"""The pictures of reports: points, bounds and curves, as an element of a page or on axes of matplotlib."""

import io
import math
import re
from collections.abc import Mapping
from html import escape
from statistics import fmean
from typing import TYPE_CHECKING

import torch

from dynorm.errors import require_library
from dynorm.family import FAMILY
from dynorm.report.stats import FUNCTIONS, PICTURE_KNEE, CoreFit, Picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Colours that stand for the page's own, which differ by day and night; matplotlib only knows fixed
# ones.
_USES = (*FAMILY, "soft", "edge", "point", "bar", "outlier")
_OF_THE_PAGE = {use: f"#0101{place:02x}" for place, use in enumerate(_USES, start=1)}
_STYLES = {"linear": (0, (1, 1.5)), "dyt": (0, (4, 2)), "dyisru": "solid"}
Points = tuple[list[float], list[float]]


def svg_picture(
    name: str,
    words: str,
    fit: CoreFit,
    sample: Picture,
    outliers: Points | None = None,
    sums: Points | None = None,
) -> str:
    """Return the picture that :func:`draw` makes as an ``<svg>`` element whose colours are the page's variables.

    The ``name`` tells its parts from those of other pictures in the page, and ``words`` tell it to
    a reader who cannot see it. ``sums`` are of some tokens the layer's sum and the norm's own, for
    a second picture below.
    """
    require_library("matplotlib", "an HTML report", "plots")
    import matplotlib
    from matplotlib.figure import Figure

    buffer = io.StringIO()
    # The salt makes the ids of this picture differ from those of the others in the page.
    with matplotlib.rc_context(
        {"svg.fonttype": "none", "svg.hashsalt": name, "path.simplify": False}
    ):
        count = 1 + (sums is not None)
        figure = Figure(figsize=(4.4, 3.1 * count), layout="constrained")
        draw(figure.add_subplot(count, 1, 1), fit, sample, outliers, _OF_THE_PAGE)
        if sums is not None:
            draw_sums(figure.add_subplot(count, 1, 2), *sums, _OF_THE_PAGE)
        figure.savefig(buffer, format="svg", transparent=True)
    svg = buffer.getvalue()
    # As an element of a page: no headers, short numbers, the page's colours and font.
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r'\s(?:xmlns(?::xlink)?|version|width|height)="[^"]*"', "", svg, count=5)
    svg = re.sub(r"(\d\.\d{2})\d+", r"\1", svg)
    for use, color in _OF_THE_PAGE.items():
        svg = svg.replace(color, f"var(--{use})")
    return svg.replace("<svg", f'<svg role="img" aria-label="{escape(words)}"', 1)


def draw(
    axes: "Axes", fit: CoreFit, sample: Picture, outliers: Points | None, colors: Mapping[str, str]
) -> None:
    """Draw points first, then bounds and curves, error bars or outliers on top; x is counted from the centre.

    ``outliers`` are x and y of the points that the curves were fitted on, where these are outliers
    alone; ``colors`` are by use: a function's name, "soft", "edge", "point", "bar" and "outlier".
    """
    knee = PICTURE_KNEE * sample.sigma
    x = [x - fit.center for x in sample.x]
    far, far_y = ([], []) if outliers is None else outliers
    far = [x - fit.center for x in far]
    low, high = (math.asinh(end / knee) for end in (min(x + far), max(x + far)))
    margin = 0.06 * max(high - low, 1.0)
    low, high, top = low - margin, high + margin, math.asinh(1.35 * fit.scale / PICTURE_KNEE)
    _scale(axes, "x", low, high, knee)
    _scale(axes, "y", -top, top, PICTURE_KNEE)
    _frame(axes, "input x − centre" if fit.center else "input x", "norm's core y", colors)
    _draw_dots(axes, x, sample.y, colors["point"])
    for side in (-1, 1):
        axes.axhline(side * fit.scale, color=colors["soft"], linewidth=0.8, linestyle=(0, (4, 3)))
    _draw_dots(axes, far, far_y, colors["outlier"])
    curve = knee * torch.linspace(low, high, 121, dtype=torch.float64, device="cpu").sinh()
    for name, function in FUNCTIONS.items():
        y = function(
            curve, torch.tensor(fit.betas[name], dtype=torch.float64, device="cpu"), 0.0, fit.scale
        )
        axes.plot(
            curve.tolist(), y.tolist(), color=colors[name], linewidth=1.5, linestyle=_STYLES[name]
        )
    if outliers is None:
        places, means, stds = (
            [getattr(b, name) for b in sample.bins] for name in ("x", "mean", "std")
        )
        places = [place - fit.center for place in places]
        axes.errorbar(places, means, stds, fmt="none", ecolor=colors["bar"], elinewidth=1.1)


def draw_sums(
    axes: "Axes", told: list[float], sums: list[float], colors: Mapping[str, str]
) -> None:
    """Draw the norm's sum of each token against what tells it, beside the best constant; both axes logarithmic."""
    from matplotlib.ticker import LogLocator, NullLocator

    _frame(axes, "told by the layer", "the norm's own sum", colors)
    axes.set(xscale="log", yscale="log")
    for axis, values in ((axes.xaxis, told + sums), (axes.yaxis, sums)):
        span = math.log10(max(values) / min(values))
        # Decades alone where there are many, else round numbers between them.
        steps = next(
            (
                s
                for limit, s in ((0.7, (1, 2, 3, 5)), (1.6, (1, 2, 5)), (3, (1, 3)))
                if span < limit
            ),
            (1,),
        )
        axis.set_major_locator(LogLocator(subs=steps, numticks=20))
        axis.set_major_formatter(
            lambda tick, _: f"{tick:,.0f}" if 1 <= tick < 1e6 else f"{tick:.0e}"
        )
        axis.set_minor_locator(NullLocator())
    _draw_dots(
        axes,
        [math.exp(fmean(map(math.log, sums)))] * len(sums),
        sums,
        colors["point"],
        1e-4 * min(sums),
    )
    ends = min(sums), max(sums)
    axes.plot(ends, ends, color=colors["soft"], linewidth=0.8, linestyle=(0, (4, 3)))
    _draw_dots(axes, told, sums, colors["outlier"], 1e-4 * min(sums))


def _frame(axes: "Axes", x_label: str, y_label: str, colors: Mapping[str, str]) -> None:
    axes.set_xlabel(x_label, color=colors["soft"])
    axes.set_ylabel(y_label, color=colors["soft"])
    axes.tick_params(which="both", colors=colors["edge"], labelcolor=colors["soft"], labelsize=9)
    for spine in axes.spines.values():
        spine.set_color(colors["edge"])


def _draw_dots(
    axes: "Axes", x: list[float], y: list[float], color: str, size: float = 1e-4
) -> None:
    # A dot is a line of next to no length (of none, a PNG would not show it): one path for all is a
    # fifth of as many markers.
    dots = [
        [end for v in values for end in (v, v + length, math.nan)]
        for values, length in ((x, 0.0), (y, size))
    ]
    axes.plot(*dots, color=color, linewidth=3, solid_capstyle="round")


def _scale(axes: "Axes", letter: str, low: float, high: float, knee: float) -> None:
    """Let an axis be linear up to the knee and logarithmic beyond; ``low`` and ``high`` are places on that scale."""
    from matplotlib.ticker import AsinhLocator

    getattr(axes, f"set_{letter}scale")("asinh", linear_width=knee)
    axes.set(**{f"{letter}lim": (knee * math.sinh(low), knee * math.sinh(high))})
    axis = getattr(axes, f"{letter}axis")
    # A base of 0 rounds the ticks to one digit.
    axis.set_major_locator(AsinhLocator(knee, numticks=7, base=0))
    axis.set_major_formatter(lambda value, _: f"{value:g}".replace("-", "−"))
