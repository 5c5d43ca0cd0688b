"""The pictures of reports: points, bounds and curves, as SVG or on axes of matplotlib."""

import io
import math
import re
from collections.abc import Mapping, Sequence
from html import escape
from statistics import fmean
from typing import TYPE_CHECKING

import torch

from dynorm.errors import require_library
from dynorm.family import FAMILY
from dynorm.report.stats import FUNCTIONS, PICTURE_KNEE, CoreFit, Picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Matplotlib only knows fixed colours. These are replaced in the SVG by variables of the page, whose
# values differ by day and night.
_USES = (*FAMILY, "soft", "edge", "point", "bar", "outlier")
_OF_THE_PAGE = {use: f"#0101{place:02x}" for place, use in enumerate(_USES, start=1)}
_DASHED = (0, (4, 3))
_STYLES = {"linear": (0, (1, 1.5)), "dyt": (0, (4, 2)), "dyisru": "solid"}
# In inches. The margins have room for the widest labels, such as 500,000 on the left or half of it on
# the right, so the pictures of a page are aligned. Matplotlib's layouts would measure all labels,
# which takes as long as the drawing.
_WIDTH = 4.4
_HEIGHT = 3.1
_LEFT = 0.85
_RIGHT = 0.3
_BELOW = 0.5
_ABOVE = 0.1
Points = tuple[list[float], list[float]]


def svg_picture(
    name: str,
    words: str,
    fit: CoreFit,
    sample: Picture,
    outliers: Points | None = None,
    sums: Points | None = None,
) -> str:
    """Return the picture of :func:`draw` as an ``<svg>`` element, in colours of the page.

    The ``name`` keeps the ids of its parts different from those of other pictures in the page;
    ``words`` describe the picture to a reader who cannot see it. ``sums`` are the layer's sums and
    the norm's own for some tokens, drawn as a second picture below.
    """
    require_library("matplotlib", "an HTML report", "plots")
    import matplotlib
    from matplotlib.figure import Figure

    buffer = io.StringIO()
    # The salt makes the ids of this picture differ from those of the others in the page.
    with matplotlib.rc_context(
        {"svg.fonttype": "none", "svg.hashsalt": name, "path.simplify": False}
    ):
        count = 1 if sums is None else 2
        figure = Figure(figsize=(_WIDTH, _HEIGHT * count))
        draw(_axes(figure, 0, count), fit, sample, outliers, _OF_THE_PAGE)
        if sums is not None:
            draw_sums(_axes(figure, 1, count), *sums, _OF_THE_PAGE)
        figure.savefig(buffer, format="svg", transparent=True)
    svg = buffer.getvalue()
    # As an element of a page: no headers, short numbers, the page's colours and font.
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r'\s(?:xmlns(?::xlink)?|version|width|height)="[^"]*"', "", svg, count=5)
    svg = re.sub(r"(\d\.\d{2})\d+", r"\1", svg)
    for use, color in _OF_THE_PAGE.items():
        svg = svg.replace(color, f"var(--{use})")
    return svg.replace("<svg", f'<svg role="img" aria-label="{escape(words)}"', 1)


def _axes(figure: "Figure", place: int, count: int) -> "Axes":
    """Return new axes at a place from the top of a figure that has room for so many."""
    width = (_WIDTH - _LEFT - _RIGHT) / _WIDTH
    height = (_HEIGHT - _BELOW - _ABOVE) / _HEIGHT
    bottom = count - 1 - place + _BELOW / _HEIGHT
    return figure.add_axes((_LEFT / _WIDTH, bottom / count, width, height / count))


def svg_curve(losses: Sequence[Sequence[float]]) -> str:
    """Return the curve of pairs of a step and a loss as an ``<svg>`` element, in the page's colours."""
    steps = [step for step, _ in losses]
    values = [loss for _, loss in losses]
    width, height = 600.0, 140.0
    span = max(max(values) - min(values), 1e-12)
    points = []
    for step, value in zip(steps, values, strict=True):
        x = width * (step - steps[0]) / max(steps[-1] - steps[0], 1)
        y = height * (max(values) - value) / span
        points.append(f"{x:.1f},{y:.1f}")
    words = f"The loss from {values[0]:.3f} at step {steps[0]} to {values[-1]:.3f} at {steps[-1]}"
    return (
        f'<svg role="img" aria-label="{escape(words)}" viewBox="-4 -4 {width + 8:g} {height + 8:g}">'
        f'<polyline points="{" ".join(points)}" fill="none" stroke="var(--dyisru)" '
        'stroke-width="2"></polyline></svg>'
    )


def draw(
    axes: "Axes",
    fit: CoreFit,
    sample: Picture,
    outliers: Points | None,
    colors: Mapping[str, str],
) -> None:
    """Draw points first, then bounds and curves, error bars or outliers on top.

    The axis of x is counted from the centre. ``outliers`` are x and y of outliers, if the curves
    were fitted only on such; ``colors`` are by use: a function's name, "soft", "edge", "point",
    "bar" and "outlier".
    """
    knee = PICTURE_KNEE * sample.sigma
    x = [value - fit.center for value in sample.x]
    outlier_x: list[float] = []
    outlier_y: list[float] = []
    if outliers is not None:
        outlier_x = [value - fit.center for value in outliers[0]]
        outlier_y = outliers[1]
    left = math.asinh(min(x + outlier_x) / knee)
    right = math.asinh(max(x + outlier_x) / knee)
    margin = 0.06 * max(right - left, 1.0)
    left -= margin
    right += margin
    top = math.asinh(1.35 * fit.scale / PICTURE_KNEE)
    _scale(axes, "x", left, right, knee)
    _scale(axes, "y", -top, top, PICTURE_KNEE)
    _frame(axes, "input x − centre" if fit.center else "input x", "norm's core y", colors)
    _draw_dots(axes, x, sample.y, colors["point"])
    for bound in (-fit.scale, fit.scale):
        axes.axhline(bound, color=colors["soft"], linewidth=0.8, linestyle=_DASHED)
    _draw_dots(axes, outlier_x, outlier_y, colors["outlier"])
    curve = knee * torch.linspace(left, right, 121, dtype=torch.float64, device="cpu").sinh()
    for name in FUNCTIONS:
        y = fit.curve(name, curve + fit.center)
        axes.plot(
            curve.tolist(), y.tolist(), color=colors[name], linewidth=1.5, linestyle=_STYLES[name]
        )
    if outliers is None:
        axes.errorbar(
            [interval.x - fit.center for interval in sample.bins],
            [interval.mean for interval in sample.bins],
            [interval.std for interval in sample.bins],
            fmt="none",
            ecolor=colors["bar"],
            elinewidth=1.1,
        )


def draw_sums(
    axes: "Axes",
    layer_sums: list[float],
    norm_sums: list[float],
    colors: Mapping[str, str],
) -> None:
    """Draw the norm's sum of each token against the layer's, and against the best constant.

    Both axes are logarithmic.
    """
    from matplotlib.ticker import LogLocator, NullLocator

    _frame(axes, "estimated by the layer", "the norm's own sum", colors)
    axes.set(xscale="log", yscale="log")
    for axis, values in ((axes.xaxis, layer_sums + norm_sums), (axes.yaxis, norm_sums)):
        steps = _tick_steps(math.log10(max(values) / min(values)))
        axis.set_major_locator(LogLocator(subs=steps, numticks=20))
        axis.set_major_formatter(
            lambda tick, _: f"{tick:,.0f}" if 1 <= tick < 1e6 else f"{tick:.0e}"
        )
        axis.set_minor_locator(NullLocator())
    least = min(norm_sums)
    constant = math.exp(fmean(map(math.log, norm_sums)))
    _draw_dots(axes, [constant] * len(norm_sums), norm_sums, colors["point"], 1e-4 * least)
    ends = (least, max(norm_sums))
    axes.plot(ends, ends, color=colors["soft"], linewidth=0.8, linestyle=_DASHED)
    _draw_dots(axes, layer_sums, norm_sums, colors["outlier"], 1e-4 * least)


def _tick_steps(decades: float) -> tuple[int, ...]:
    """Return the ticks in each decade of a logarithmic axis: fewer on a long axis."""
    if decades < 0.7:
        return (1, 2, 3, 5)
    if decades < 1.6:
        return (1, 2, 5)
    if decades < 3:
        return (1, 3)
    return (1,)


def _tick_label(value: float) -> str:
    """Return a number of one digit, short enough to be next to others: 3000, but 3e4."""
    text = f"{value:g}" if abs(value) < 1e4 else f"{value:.0e}".replace("e+0", "e")
    return text.replace("-", "−")


def _frame(
    axes: "Axes",
    x_label: str,
    y_label: str,
    colors: Mapping[str, str],
) -> None:
    axes.set_xlabel(x_label, color=colors["soft"])
    axes.set_ylabel(y_label, color=colors["soft"])
    axes.tick_params(which="both", colors=colors["edge"], labelcolor=colors["soft"], labelsize=9)
    for spine in axes.spines.values():
        spine.set_color(colors["edge"])


def _draw_dots(
    axes: "Axes",
    x: list[float],
    y: list[float],
    color: str,
    size: float = 1e-4,
) -> None:
    """Draw dots as short lines with round caps, ``size`` high.

    Dots of length 0 would not show in a PNG. One path for all, with gaps between them, takes a
    fifth of the space of markers.
    """
    line_x: list[float] = []
    line_y: list[float] = []
    for left, bottom in zip(x, y, strict=True):
        line_x += [left, left, math.nan]
        line_y += [bottom, bottom + size, math.nan]
    axes.plot(line_x, line_y, color=color, linewidth=3, solid_capstyle="round")


def _scale(
    axes: "Axes",
    letter: str,
    low: float,
    high: float,
    knee: float,
) -> None:
    """Make an axis linear up to the knee and logarithmic beyond, from low to high on that scale."""
    from matplotlib.ticker import AsinhLocator

    limits = (knee * math.sinh(low), knee * math.sinh(high))
    getattr(axes, f"set_{letter}scale")("asinh", linear_width=knee)
    getattr(axes, f"set_{letter}lim")(*limits)
    axis = getattr(axes, f"{letter}axis")
    # A base of 0 rounds the ticks to one digit.
    axis.set_major_locator(AsinhLocator(knee, numticks=7, base=0))
    axis.set_major_formatter(lambda value, _: _tick_label(value))
