"""The pictures of reports: points, bounds and curves, as SVG or on axes of matplotlib."""

import io
import math
import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING

import torch

from dynorm.errors import require_library
from dynorm.family import FAMILY
from dynorm.report.values import FUNCTIONS, CurveFit, Picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Matplotlib only knows fixed colours. These are replaced in the SVG by variables of the page, whose
# values differ by day and night.
_USES = (*FAMILY, "soft", "edge", "point", "outlier")
_OF_THE_PAGE = {use: f"#0101{place:02x}" for place, use in enumerate(_USES, start=1)}
_DASHED = (0, (4, 3))
_STYLES = {"linear": (0, (1, 1.5)), "dyt": (0, (4, 2)), "dyisru": "solid"}
# In inches.
_WIDTH = 4.4
_HEIGHT = 3.1
# Left, bottom, width and height of the axes, as parts of the figure. The margins have room for the
# widest labels, so the pictures of a page are aligned; matplotlib's layouts would measure all
# labels, which takes as long as the drawing.
_PLACE = (0.19, 0.16, 0.74, 0.81)
# Both axes are linear up to here and logarithmic beyond, in typical sigmas.
_KNEE = 2.0


def svg_picture(name: str, words: str, fit: CurveFit, sample: Picture) -> str:
    """Return the picture of :func:`draw` as an ``<svg>`` element, in colours of the page.

    The ``name`` keeps the ids of its parts different from those of other pictures in the page;
    ``words`` describe the picture to a reader who cannot see it.
    """
    require_library("matplotlib", "an HTML report", "plots")
    import matplotlib
    from matplotlib.figure import Figure

    buffer = io.StringIO()
    # The salt makes the ids of this picture differ from those of the others in the page.
    with matplotlib.rc_context(
        {"svg.fonttype": "none", "svg.hashsalt": name, "path.simplify": False}
    ):
        figure = Figure(figsize=(_WIDTH, _HEIGHT))
        draw(figure.add_axes(_PLACE), fit, sample, _OF_THE_PAGE)
        figure.savefig(buffer, format="svg", transparent=True)
    svg = buffer.getvalue()
    # As an element of a page: no headers, short numbers, the page's colours and font.
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r'\s(?:xmlns(?::xlink)?|version|width|height)="[^"]*"', "", svg, count=5)
    svg = re.sub(r"(\d\.\d{2})\d+", r"\1", svg)
    for use, color in _OF_THE_PAGE.items():
        svg = svg.replace(color, f"var(--{use})")
    return svg.replace("<svg", f'<svg role="img" aria-label="{escape(words)}"', 1)


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


def draw(axes: "Axes", fit: CurveFit, sample: Picture, colors: Mapping[str, str]) -> None:
    """Draw points first, then bounds, outliers and curves.

    The axis of x is counted from the centre. ``colors`` are by use: a function's name, "soft",
    "edge", "point" and "outlier".
    """
    knee = _KNEE * sample.sigma
    x = [value - fit.center for value in sample.x]
    outlier_x = [value - fit.center for value in sample.outlier_x]
    left = math.asinh(min(x + outlier_x) / knee)
    right = math.asinh(max(x + outlier_x) / knee)
    margin = 0.06 * max(right - left, 1.0)
    left -= margin
    right += margin
    top = math.asinh(1.35 * fit.scale / _KNEE)
    _scale(axes, "x", left, right, knee)
    _scale(axes, "y", -top, top, _KNEE)
    _frame(axes, "input x − centre" if fit.center else "input x", "norm's core y", colors)
    _draw_dots(axes, x, sample.y, colors["point"])
    for bound in (-fit.scale, fit.scale):
        axes.axhline(bound, color=colors["soft"], linewidth=0.8, linestyle=_DASHED)
    _draw_dots(axes, outlier_x, sample.outlier_y, colors["outlier"])
    curve = knee * torch.linspace(left, right, 121, dtype=torch.float64, device="cpu").sinh()
    for name in FUNCTIONS:
        y = fit.curve(name, curve + fit.center)
        axes.plot(
            curve.tolist(), y.tolist(), color=colors[name], linewidth=1.5, linestyle=_STYLES[name]
        )


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
) -> None:
    """Draw dots as short lines with round caps.

    Dots of length 0, or snapped to it, would not show in a PNG. One path for all, with gaps between them, takes a
    fifth of the space of markers.
    """
    line_x: list[float] = []
    line_y: list[float] = []
    for left, bottom in zip(x, y, strict=True):
        line_x += [left, left, math.nan]
        line_y += [bottom, bottom + 1e-4, math.nan]
    axes.plot(line_x, line_y, color=color, linewidth=3, solid_capstyle="round", snap=False)


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
