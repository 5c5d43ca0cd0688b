"""The paper's figures 1 to 3."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dynorm.errors import require_library
from dynorm.functional import dyisru, dyt
from dynorm.paper.fits import CLOSED
from dynorm.paper.generality import Reproduction
from dynorm.paper.simulation import STEPS, Array, Simulation
from dynorm.report.colours import COLOURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLORS = {"DyT": COLOURS["dyt"], "DyISRU": COLOURS["dyisru"]}
_MARKERS = {"DyT": "s", "DyISRU": "o"}
_DASHED = (0, (5, 1.5))
GREY = "#8A8A8A"
# Figures are drawn and saved in this style; the user's settings return afterwards.
_STYLE = Path(__file__).with_name("figures.mplstyle")
_BOUND: dict[str, Any] = {"color": GREY, "linewidth": 1, "linestyle": "--"}


def draw(name: str, reproduction: Reproduction) -> Figure:
    """Draw one of :data:`FIGURES`, without a window."""
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


def render(figure: Figure, dpi: int = 220) -> bytes:
    """Return a figure as the bytes of a PNG file, the same in every run."""
    from matplotlib import rc_context

    buffer = io.BytesIO()
    with rc_context(fname=_STYLE):
        figure.savefig(buffer, format="png", dpi=dpi)
    return buffer.getvalue()


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
    axes.scatter(
        simulation.outliers[:step],
        simulation.outputs[:step],
        c=shades[:step],
        s=30,
        zorder=3,
        edgecolors="white",
        linewidths=0.5,
        label=f"outliers, $S = 1$ to ${step}$" if step > 1 else "outlier, $S = 1$",
    )


def _padded(values: Array) -> tuple[float, float]:
    """Return the range of values with a margin."""
    low = float(values.min())
    high = float(values.max())
    margin = 0.05 * (high - low)
    return low - margin, high + margin


def _draw_functions(figure: Figure, _: Reproduction) -> None:
    """Draw DyT and DyISRU with two constants each, at C = 50."""
    axes = figure.add_subplot()
    scale = math.sqrt(50 - 1)
    x = torch.linspace(-60, 60, 601, dtype=torch.float64)
    for alpha, dashes in ((0.1, "-"), (0.05, _DASHED)):
        y = dyt(x, alpha, scale=scale)
        label = rf"DyT, $\alpha = {alpha:g}$"
        axes.plot(x, y, color=_COLORS["DyT"], linestyle=dashes, label=label)
    for beta, dashes in ((100.0, "-"), (500.0, _DASHED)):
        y = dyisru(x, beta, scale=scale)
        label = rf"DyISRU, $\beta = {beta:g}$"
        axes.plot(x, y, color=_COLORS["DyISRU"], linestyle=dashes, label=label)
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
        top.plot(x, fit.function(x), color=_COLORS[name], label=label)
        bottom.plot(
            simulation.outliers,
            fit.residuals,
            linewidth=1,
            markersize=4.5,
            label=f"{name}: {fit.mean_absolute_residual:.2g}",
            color=_COLORS[name],
            marker=_MARKERS[name],
        )
    _draw_outliers(top, simulation, STEPS)
    top.set(ylabel="$y$", xlim=(left, right), ylim=(lowest, max(highest, bound * 1.06)))
    top.legend(loc="lower right")
    bottom.set(xlabel="$x$", ylabel="residual")
    bottom.margins(y=0.12)
    bottom.legend(title="mean absolute residual", alignment="left", loc="upper left")
    for axes in (top, bottom):
        axes.yaxis.set_label_coords(-0.085, 0.5)


FIGURES: dict[str, tuple[Callable[[Figure, Reproduction], None], tuple[float, float]]] = {
    "fig1": (_draw_functions, (5.6, 3.6)),
    "fig2": (_draw_samples, (7.0, 5.4)),
    "fig3": (_draw_fits, (6.0, 5.6)),
}
"""The function that draws each figure, and its size in inches."""
