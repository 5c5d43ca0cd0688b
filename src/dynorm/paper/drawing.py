"""The common parts of the figures: colours, style, and the marks that appear in several of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dynorm.errors import require_library
from dynorm.family import FAMILY
from dynorm.paper.simulation import Simulation

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

COLORS = {function.title: function.color for function in FAMILY.values()} | {"closed form": "#000000"}
_DASHES = {"Derf": (0, (5, 1.5)), "linear": (0, (1, 1.2))}
_MARKERS = {"DyT": "s", "Derf": "^", "DyISRU": "o", "linear": "v", "closed form": "D"}
LOOKS: dict[str, dict[str, Any]] = {
    name: {"color": color, "linestyle": _DASHES.get(name, "-"), "marker": _MARKERS.get(name, "P")}
    for name, color in COLORS.items()
}
"""Each function has its own dashes and marker too."""
GREY = "#8A8A8A"


@contextmanager
def styled() -> Iterator[None]:
    """Draw and save in the style of these figures, whatever the user's settings are; they return afterwards.

    Raises:
        ArgumentError: If matplotlib is not installed.
    """
    require_library("matplotlib", "the figures", "paper")
    import matplotlib

    with matplotlib.rc_context(fname=Path(__file__).with_name("figures.mplstyle")):
        yield


def empty_figure(width: float, height: float) -> Figure:
    """Return an empty figure of a size in inches; without pyplot, which would keep it and choose a window."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def draw_bounds(axes: Axes, scale: float, *, both: bool = False) -> None:
    """Draw LayerNorm's largest value, and the least too, as dashed lines."""
    for sign in (1, -1) if both else (1,):
        label = rf"$\pm\sqrt{{C - 1}} = \pm{scale:g}$" if both else r"bound $\sqrt{C - 1}$"
        axes.axhline(sign * scale, color=GREY, linewidth=1, linestyle="--", label=label if sign == 1 else None)


def draw_circles(axes: Axes, x: NDArray[np.float64], y: NDArray[np.float64], label: str) -> None:
    """Draw channels that are no outliers."""
    axes.plot(x, y, "o", markerfacecolor="none", markeredgecolor=GREY, markeredgewidth=0.7, markersize=4, label=label)


def draw_outliers(axes: Axes, simulation: Simulation, step: int) -> None:
    """Draw the outliers of the first steps, darkest first."""
    from matplotlib import colormaps

    shades = colormaps["viridis"](np.linspace(0.0, 0.9, simulation.steps))[:step]
    label = {1: "outlier, $S = 1$", 2: "outliers, $S = 1, 2$"}.get(step, f"outliers, $S = 1, \\ldots, {step}$")
    x, y = simulation.outliers[:step], simulation.outputs[:step]
    axes.scatter(x, y, c=shades, s=30, zorder=3, edgecolors="white", linewidths=0.5, label=label)


def draw_residuals(axes: Axes, name: str, x: NDArray[np.float64], y: NDArray[np.float64], label: str) -> None:
    """Draw a function's residuals in its own colour, dashes and marker."""
    axes.plot(x, y, **LOOKS[name], linewidth=1, markersize=4.5, label=label)


def with_mean(name: str, mean: float) -> str:
    """Return a legend's text: the function, and its mean absolute residual to two digits."""
    mantissa, _, exponent = f"{mean:.2g}".partition("e")
    return f"{name}: ${mantissa}" + (rf" \times 10^{{{int(exponent)}}}$" if exponent else "$")


def padded(x: NDArray[np.float64], y: NDArray[np.float64]) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return the ranges of x and y with a margin."""
    ranges = [(float(v.min()), float(v.max())) for v in (x, y)]
    (a, b), (c, d) = [(low - 0.05 * (high - low), high + 0.05 * (high - low)) for low, high in ranges]
    return (a, b), (c, d)


def label_decades(axis: Axis) -> None:
    """Write the powers of ten of a logarithmic axis as plain text, which is drawn in a tenth of the time."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    superscripts = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
    axis.set_major_formatter(FuncFormatter(lambda v, _: "10" + str(round(math.log10(v))).translate(superscripts)))
    axis.set_minor_formatter(NullFormatter())
