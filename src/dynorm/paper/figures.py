"""The paper's figures 1 to 3, and the size of every residual."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dynorm.errors import ArgumentError, require_library
from dynorm.family import FAMILY
from dynorm.functional import dyisru, dyt
from dynorm.paper.fits import CLOSED
from dynorm.paper.generality import Reproduction
from dynorm.paper.simulation import STEPS, Array, Simulation
from dynorm.report.colours import COLOURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

FORMATS = ("png", "svg")
COLORS = {FAMILY[name].title: colour for name, colour in COLOURS.items()} | {CLOSED: "#000000"}
_DASHED = (0, (5, 1.5))
_DOTTED = (0, (1, 1.2))
# The functions differ in color, dashes and marker.
_LINES: dict[str, dict[str, Any]] = {
    "DyT": {"color": COLORS["DyT"], "linestyle": "-", "marker": "s"},
    "Derf": {"color": COLORS["Derf"], "linestyle": _DASHED, "marker": "^"},
    "DyISRU": {"color": COLORS["DyISRU"], "linestyle": "-", "marker": "o"},
    "linear": {"color": COLORS["linear"], "linestyle": _DOTTED, "marker": "v"},
    CLOSED: {"color": COLORS[CLOSED], "linestyle": "-", "marker": "D"},
}
GREY = "#8A8A8A"
# Figures are drawn and saved in this style; the user's settings return afterwards.
_STYLE = Path(__file__).with_name("figures.mplstyle")
_BOUND: dict[str, Any] = {"color": GREY, "linewidth": 1, "linestyle": "--"}


def draw(name: str, reproduction: Reproduction) -> Figure:
    """Draw one of :data:`FIGURES`, without a window."""
    check_figures([name])
    require_library("matplotlib", "the figures", "paper")
    from matplotlib import rc_context

    # Not pyplot, which would keep the figure and open a window.
    from matplotlib.figure import Figure

    with rc_context(fname=_STYLE):
        drawing, size = FIGURES[name]
        figure = Figure(figsize=size, layout="constrained")
        drawing(figure, reproduction)
        # The layout takes as long as the drawing. It is computed once, not for every file.
        figure.draw_without_rendering()
        figure.set_layout_engine("none")
    return figure


def render(figure: Figure, format: str, dpi: int = 220) -> bytes:
    """Return a figure as the bytes of a png or svg file, the same in every run.

    ``dpi`` is the resolution of a png.
    """
    if format not in FORMATS:
        raise ArgumentError(
            f"format must be one of {', '.join(FORMATS)}, got {format!r}: give one of those"
        )
    from matplotlib import rc_context

    metadata: dict[str, None] = {}
    if format == "svg":
        # No date, so that the files of two runs are equal.
        metadata["Date"] = None
    buffer = io.BytesIO()
    with rc_context(fname=_STYLE):
        figure.savefig(buffer, format=format, dpi=dpi, metadata=metadata)
    return buffer.getvalue()


def check_figures(names: Sequence[str]) -> None:
    """Reject the name of a figure that does not exist."""
    for name in names:
        if name not in FIGURES:
            raise ArgumentError(
                f"a figure must be one of {', '.join(FIGURES)}, got {name!r}: give one of those"
            )


def _draw_circles(axes: Axes, x: Array, y: Array, label: str) -> None:
    """Draw channels that are not outliers."""
    axes.plot(
        x,
        y,
        "o",
        markerfacecolor="none",
        markeredgecolor=GREY,
        markeredgewidth=0.7,
        markersize=4,
        label=label,
    )


def _draw_outliers(axes: Axes, simulation: Simulation, step: int) -> None:
    """Draw the outliers of the first steps, darkest first."""
    from matplotlib import colormaps

    shades = colormaps["viridis"](np.linspace(0.0, 0.9, STEPS))
    if step == 1:
        label = "outlier, $S = 1$"
    elif step == 2:
        label = "outliers, $S = 1, 2$"
    else:
        label = f"outliers, $S = 1, \\ldots, {step}$"
    axes.scatter(
        simulation.outliers[:step],
        simulation.outputs[:step],
        c=shades[:step],
        s=30,
        zorder=3,
        edgecolors="white",
        linewidths=0.5,
        label=label,
    )


def with_mean(name: str, mean: float) -> str:
    """Return a legend's text: the function, and its mean absolute residual to two digits."""
    mantissa, _, exponent = f"{mean:.2g}".partition("e")
    if not exponent:
        return f"{name}: ${mantissa}$"
    return rf"{name}: ${mantissa} \times 10^{{{int(exponent)}}}$"


def _padded(values: Array) -> tuple[float, float]:
    """Return the range of values with a margin."""
    low = float(values.min())
    high = float(values.max())
    margin = 0.05 * (high - low)
    return low - margin, high + margin


def _label_decades(axis: Axis) -> None:
    """Write the powers of ten of a logarithmic axis as plain text.

    matplotlib's own labels are formulas and take ten times as long to draw.
    """
    superscripts = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")

    def power_of_ten(value: float, _: float) -> str:
        exponent = round(math.log10(value))
        return "10" + str(exponent).translate(superscripts)

    axis.set_major_formatter(power_of_ten)
    axis.set_minor_formatter("")


def _draw_functions(figure: Figure, _: Reproduction) -> None:
    """Draw DyT and DyISRU with two constants each, at C = 50."""
    axes = figure.add_subplot()
    scale = math.sqrt(50 - 1)
    x = torch.linspace(-60, 60, 601, dtype=torch.float64)
    for alpha, dashes in ((0.1, "-"), (0.05, _DASHED)):
        y = dyt(x, alpha, scale=scale)
        label = rf"DyT, $\alpha = {alpha:g}$"
        axes.plot(x, y, color=COLORS["DyT"], linestyle=dashes, label=label)
    for beta, dashes in ((100.0, "-"), (500.0, _DASHED)):
        y = dyisru(x, beta, scale=scale)
        label = rf"DyISRU, $\beta = {beta:g}$"
        axes.plot(x, y, color=COLORS["DyISRU"], linestyle=dashes, label=label)
    axes.axhline(scale, **_BOUND, label=rf"$\pm\sqrt{{C - 1}} = \pm{scale:g}$")
    axes.axhline(-scale, **_BOUND)
    axes.set(xlabel="$x$", ylabel="$y$", xlim=(-60, 60), ylim=(-8, 8))
    axes.legend(loc="upper left", bbox_to_anchor=(0.01, 0.92))


def _draw_samples(figure: Figure, reproduction: Reproduction) -> None:
    """Draw the sample, and the same with its largest element raised by one, two and all steps."""
    simulation = reproduction.simulation
    steps = (0, 1, 2, STEPS)
    for axes, step, letter in zip(figure.subplots(2, 2).flat, steps, "abcd", strict=True):
        _draw_step(axes, reproduction, step)
        # The first three panels share their ranges.
        shown = slice(None) if step == STEPS else slice(3)
        axes.set_title(f"({letter})  $S = {step}$", loc="left")
        axes.set(
            xlabel="$x$",
            ylabel="$y$",
            xlim=_padded(simulation.tokens[shown]),
            ylim=_padded(simulation.normalized[shown]),
        )
        axes.legend(loc="lower right", handlelength=1.4)


def _draw_step(axes: Axes, reproduction: Reproduction, step: int) -> None:
    simulation = reproduction.simulation
    x = simulation.tokens[step]
    y = simulation.normalized[step]
    if step == 0:
        _draw_circles(axes, x, y, "sample")
        return
    # LayerNorm of the sample itself is a line.
    sample = simulation.tokens[0]
    outputs = simulation.normalized[0]
    slope = (outputs[-1] - outputs[0]) / (sample[-1] - sample[0])
    axes.axline(
        (sample[0], outputs[0]),
        slope=slope,
        color=GREY,
        linewidth=1,
        linestyle=":",
        label="slope at $S = 0$",
    )
    _draw_circles(axes, x[:-1], y[:-1], "other channels")
    if step > 1:
        curve = np.linspace(simulation.outliers[0], simulation.outliers[step - 1], 200)
        y = reproduction.fits[CLOSED].function(curve)
        axes.plot(curve, y, color=GREY, linewidth=1.2, label="through the outliers")
    _draw_outliers(axes, simulation, step)


def _draw_fits(figure: Figure, reproduction: Reproduction) -> None:
    """Draw the fitted functions over the data, and their residuals."""
    simulation = reproduction.simulation
    bound = math.sqrt(simulation.channels - 1)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(2.1, 1))
    left, right = _padded(simulation.tokens)
    lowest, highest = _padded(simulation.normalized)
    x = np.linspace(left, right, 400)
    top.axhline(bound, **_BOUND, label=r"bound $\sqrt{C - 1}$")
    _draw_circles(
        top,
        simulation.tokens[-1, :-1],
        simulation.normalized[-1, :-1],
        f"other channels, $S = {STEPS}$",
    )
    bottom.axhline(0, color=GREY, linewidth=0.8)
    for name in ("DyT", "DyISRU"):
        fit = reproduction.fits[name]
        label = rf"{name}, $\{fit.constant} = {fit.value:.4g}$"
        top.plot(x, fit.function(x), color=COLORS[name], label=label)
        mean = with_mean(name, fit.mean_absolute_residual)
        bottom.plot(
            simulation.outliers,
            fit.residuals,
            linewidth=1,
            markersize=4.5,
            label=mean,
            **_LINES[name],
        )
    _draw_outliers(top, simulation, STEPS)
    top.set(ylabel="$y$", xlim=(left, right), ylim=(lowest, max(highest, bound * 1.06)))
    top.legend(loc="lower right")
    bottom.set(xlabel="$x$", ylabel="residual")
    bottom.margins(y=0.12)
    bottom.legend(title="mean absolute residual", alignment="left", loc="upper left")
    for axes in (top, bottom):
        axes.yaxis.set_label_coords(-0.085, 0.5)


def _draw_sizes(figure: Figure, reproduction: Reproduction) -> None:
    """Draw the size of every residual on one scale; that of the closed form is rounding."""
    simulation = reproduction.simulation
    axes = figure.add_subplot()
    floor = 1e-17
    last_digit = float(np.spacing(simulation.outputs.max()))
    axes.axhspan(floor / 50, last_digit, color="#EDEDED", linewidth=0)
    for name in ("linear", "Derf", "DyT", "DyISRU", CLOSED):
        fit = reproduction.fits[name]
        sizes = np.maximum(np.abs(fit.residuals), floor)
        mean = with_mean(name, fit.mean_absolute_residual)
        axes.plot(
            simulation.outliers, sizes, linewidth=1, markersize=4.5, label=mean, **_LINES[name]
        )
    axes.set_yscale("log")
    axes.set(xlabel="outlier $x_o$", ylabel="|function − LayerNorm|", ylim=(floor / 50, 30))
    axes.set_yticks([10.0**k for k in range(-16, 1, 4)])
    _label_decades(axes.yaxis)
    note = "last digit of float64; a residual of 0 is drawn at $10^{-17}$"
    axes.annotate(note, (0.015, 0.012), xycoords="axes fraction", fontsize=8, color="#505050")
    axes.legend(
        title="mean absolute residual",
        alignment="left",
        loc="center left",
        bbox_to_anchor=(0.0, 0.5),
    )


FIGURES: dict[str, tuple[Callable[[Figure, Reproduction], None], tuple[float, float]]] = {
    "fig1": (_draw_functions, (5.6, 3.6)),
    "fig2": (_draw_samples, (7.0, 5.4)),
    "fig3": (_draw_fits, (6.0, 5.6)),
    "fig4": (_draw_sizes, (6.0, 4.0)),
}
"""The function that draws each figure, and its size in inches."""
