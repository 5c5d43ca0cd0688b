"""The pictures of reports: points, bounds and curves, as SVG or on axes of matplotlib."""

import io
import math
import re
from collections.abc import Mapping
from html import escape
from typing import TYPE_CHECKING

import torch

from dynorm.errors import require_library
from dynorm.family import FAMILY
from dynorm.report.curves import FUNCTIONS, CurveFit, Picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Matplotlib only knows fixed colours. These are replaced in the SVG by variables of the page, whose
# values differ by day and night.
_USES = (*FAMILY, "soft", "edge")
_OF_THE_PAGE = {use: f"#0101{place:02x}" for place, use in enumerate(_USES, start=1)}
# The dots are drawn as pixels, which have one colour for day and night.
_DOTS = {"point": "#a4aab0", "outlier": "#9a5bff"}
_DASHED = (0, (4, 3))
_STYLES = {"linear": (0, (1, 1.5)), "dyt": (0, (4, 2)), "dyisru": "solid"}
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
    require_library("matplotlib", "an HTML report")
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.4, 3.1))
    draw(figure.add_axes(_PLACE), fit, sample, _OF_THE_PAGE | _DOTS)
    buffer = io.StringIO()
    # The salt makes the ids of this picture differ from those of the others in the page.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", transparent=True, dpi=200)
    svg = buffer.getvalue()
    # As an element of a page: no headers, the page's colours and font.
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r'\s(?:xmlns(?::xlink)?|version|width|height)="[^"]*"', "", svg, count=5)
    for use, color in _OF_THE_PAGE.items():
        svg = svg.replace(color, f"var(--{use})")
    return svg.replace("<svg", f'<svg role="img" aria-label="{escape(words)}"', 1)


def draw(axes: "Axes", fit: CurveFit, sample: Picture, colors: Mapping[str, str]) -> None:
    """Draw points first, then bounds, outliers and curves.

    The axis of x is counted from the centre. ``colors`` are by use: a function's name, "soft",
    "edge", "point" and "outlier".
    """
    x = [value - fit.center for value in sample.x]
    outlier_x = [value - fit.center for value in sample.outlier_x]
    shown = [*x, *outlier_x]
    knee = _KNEE * sample.sigma
    # The limits as they are on the paper: asinh of the values.
    left = math.asinh(min(shown) / knee)
    right = math.asinh(max(shown) / knee)
    margin = 0.06 * max(right - left, 1.0)
    left -= margin
    right += margin
    # A base of 0 rounds the ticks to one digit.
    axes.set_xscale("asinh", linear_width=knee, base=0)
    axes.set_yscale("asinh", linear_width=_KNEE, base=0)
    axes.locator_params(numticks=7)
    axes.set_xlim(knee * math.sinh(left), knee * math.sinh(right))
    axes.set_ylim(-1.35 * fit.scale, 1.35 * fit.scale)
    _label(axes, "input x − centre" if fit.center else "input x", colors)
    # As pixels: a thousand dots of an SVG are a hundred kilobytes.
    axes.plot(x, sample.y, "o", color=colors["point"], markersize=2.5, rasterized=True)
    for bound in (-fit.scale, fit.scale):
        axes.axhline(bound, color=colors["soft"], linewidth=0.8, linestyle=_DASHED)
    axes.plot(
        outlier_x, sample.outlier_y, "o", color=colors["outlier"], markersize=2.5, rasterized=True
    )
    line_x = knee * torch.linspace(left, right, 121, dtype=torch.float64, device="cpu").sinh()
    for name in FUNCTIONS:
        y = fit.curve(name, line_x + fit.center)
        axes.plot(line_x, y, color=colors[name], linewidth=1.5, linestyle=_STYLES[name])


def _label(axes: "Axes", label_of_x: str, colors: Mapping[str, str]) -> None:
    """Name the axes, and give lines and labels their colours."""
    axes.set_xlabel(label_of_x, color=colors["soft"])
    axes.set_ylabel("norm's core y", color=colors["soft"])
    axes.tick_params(which="both", colors=colors["edge"], labelcolor=colors["soft"], labelsize=9)
    for spine in axes.spines.values():
        spine.set_color(colors["edge"])
