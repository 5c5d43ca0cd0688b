"""The paper's figures 1 to 3, and two that it does not have: the closed form, and how general the claim is."""

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
from dynorm.paper.generality import Reproduction, Study
from dynorm.paper.simulation import STEP, STEPS, Array, Simulation

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

FORMATS = ("png", "svg")
COLORS = {function.title: function.color for function in FAMILY.values()} | {CLOSED: "#000000"}
_DASHES = {"Derf": (0, (5, 1.5)), "linear": (0, (1, 1.2))}
_MARKERS = {"DyT": "s", "Derf": "^", "DyISRU": "o", "linear": "v", CLOSED: "D"}
# Each function has its own dashes and marker too.
_LINES: dict[str, dict[str, Any]] = {
    name: {"color": COLORS[name], "linestyle": _DASHES.get(name, "-"), "marker": marker}
    for name, marker in _MARKERS.items()
}
GREY = "#8A8A8A"
# Drawn and saved in it, whatever the user's settings are; they return afterwards.
_STYLE = Path(__file__).with_name("figures.mplstyle")
_BOUND: dict[str, Any] = {"color": GREY, "linewidth": 1, "linestyle": "--"}


def draw(name: str, reproduction: Reproduction) -> Figure:
    """Draw one of :data:`FIGURES`, which belongs to no window."""
    check_figures([name], with_study=reproduction.generality is not None)
    require_library("matplotlib", "the figures", "paper")
    from matplotlib import rc_context

    # Without pyplot, which would keep it and choose a window.
    from matplotlib.figure import Figure

    with rc_context(fname=_STYLE):
        drawing, size = FIGURES[name]
        figure = Figure(figsize=size, layout="constrained")
        drawing(figure, reproduction)
        # Once is enough, and takes as long as drawing: else every file would compute the layout
        # anew.
        figure.draw_without_rendering()
        figure.set_layout_engine("none")
    return figure


def render(figure: Figure, format: str, dpi: int = 220) -> bytes:
    """Return a figure as the bytes of a png or svg file, the same in every run; ``dpi`` is for a png."""
    if format not in FORMATS:
        raise ArgumentError(
            f"format must be one of {', '.join(FORMATS)}, got {format!r}: give one of those"
        )
    from matplotlib import rc_context

    buffer = io.BytesIO()
    with rc_context(fname=_STYLE):
        figure.savefig(
            buffer, format=format, dpi=dpi, metadata={"Date": None} if format == "svg" else None
        )
    return buffer.getvalue()


def check_figures(names: Sequence[str], *, with_study: bool) -> None:
    """Refuse the name of a figure that does not exist, or that needs the study where there will be none."""
    for name in names:
        if name not in FIGURES:
            raise ArgumentError(
                f"a figure must be one of {', '.join(FIGURES)}, got {name!r}: give one of those"
            )
        if name == "fig5" and not with_study:
            raise ArgumentError(
                "fig5 shows the study over many samples, but a seed means one sample alone: leave "
                "out the seed"
            )


def _draw_circles(axes: Axes, x: Array, y: Array, label: str) -> None:
    """Draw channels that are no outliers."""
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

    shades = colormaps["viridis"](np.linspace(0.0, 0.9, STEPS))[:step]
    label = {1: "outlier, $S = 1$", 2: "outliers, $S = 1, 2$"}.get(
        step, f"outliers, $S = 1, \\ldots, {step}$"
    )
    x, y = simulation.outliers[:step], simulation.outputs[:step]
    axes.scatter(x, y, c=shades, s=30, zorder=3, edgecolors="white", linewidths=0.5, label=label)


def with_mean(name: str, mean: float) -> str:
    """Return a legend's text: the function, and its mean absolute residual to two digits."""
    mantissa, _, exponent = f"{mean:.2g}".partition("e")
    return f"{name}: ${mantissa}" + (rf" \times 10^{{{int(exponent)}}}$" if exponent else "$")


def _padded(x: Array, y: Array) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return the ranges of x and y with a margin."""
    (a, b), (c, d) = ((float(v.min()), float(v.max())) for v in (x, y))
    return (a - 0.05 * (b - a), b + 0.05 * (b - a)), (c - 0.05 * (d - c), d + 0.05 * (d - c))


def _label_decades(axis: Axis) -> None:
    """Write the powers of ten of a logarithmic axis as plain text, which is drawn in a tenth of the time."""
    superscripts = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
    axis.set_major_formatter(
        lambda value, _: "10" + str(round(math.log10(value))).translate(superscripts)
    )
    axis.set_minor_formatter("")


def _draw_functions(figure: Figure, _: Reproduction) -> None:
    """Draw DyT and DyISRU with two constants each, at C = 50."""
    axes, scale = figure.add_subplot(), math.sqrt(50 - 1)
    x = torch.linspace(-60, 60, 601, dtype=torch.float64)
    for name, function, constant, values in (
        ("DyT", dyt, "alpha", (0.1, 0.05)),
        ("DyISRU", dyisru, "beta", (100.0, 500.0)),
    ):
        for value, dashes in zip(values, ("-", (0, (5, 1.5))), strict=True):
            y, label = function(x, value, scale=scale), rf"{name}, $\{constant} = {value:g}$"
            axes.plot(x, y, color=COLORS[name], linestyle=dashes, label=label)
    for sign, named in ((1, rf"$\pm\sqrt{{C - 1}} = \pm{scale:g}$"), (-1, None)):
        axes.axhline(sign * scale, **_BOUND, label=named)
    axes.set(xlabel="$x$", ylabel="$y$", xlim=(-60, 60), ylim=(-8, 8))
    axes.legend(loc="upper left", bbox_to_anchor=(0.01, 0.92))


def _draw_samples(figure: Figure, reproduction: Reproduction) -> None:
    """Draw the sample, and the same with its largest element raised by one, two and all steps."""
    simulation = reproduction.simulation
    near = _padded(simulation.tokens[:3], simulation.normalized[:3])
    far = _padded(simulation.tokens, simulation.normalized)
    for axes, step, letter in zip(
        figure.subplots(2, 2).flat, (0, 1, 2, STEPS), "abcd", strict=True
    ):
        _draw_step(axes, reproduction, step)
        axes.set_title(f"({letter})  $S = {step}$", loc="left")
        x_range, y_range = far if step == STEPS else near
        axes.set(xlabel="$x$", ylabel="$y$", xlim=x_range, ylim=y_range)
        axes.legend(loc="lower right", handlelength=1.4)


def _draw_step(axes: Axes, reproduction: Reproduction, step: int) -> None:
    simulation = reproduction.simulation
    x, y = simulation.tokens[step], simulation.normalized[step]
    if step == 0:
        _draw_circles(axes, x, y, "sample")
        return
    first = simulation.normalized[0]
    slope = (first[-1] - first[0]) / (simulation.tokens[0, -1] - simulation.tokens[0, 0])
    start = simulation.tokens[0, 0], first[0]
    axes.axline(
        start, slope=slope, color=GREY, linewidth=1, linestyle=":", label="slope at $S = 0$"
    )
    _draw_circles(axes, x[:-1], y[:-1], "other channels")
    if step > 1:
        curve = np.linspace(simulation.outliers[0], simulation.outliers[step - 1], 200)
        y = reproduction.fits[CLOSED].function(curve)
        axes.plot(curve, y, color=GREY, linewidth=1.2, label="through the outliers")
    _draw_outliers(axes, simulation, step)


def _draw_fits(figure: Figure, reproduction: Reproduction) -> None:
    """Draw the fitted functions over the data, and their residuals."""
    simulation, bound = reproduction.simulation, math.sqrt(reproduction.simulation.channels - 1)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(2.1, 1))
    (low, high), y_range = _padded(simulation.tokens, simulation.normalized)
    x = np.linspace(low, high, 400)
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
    top.set(ylabel="$y$", xlim=(low, high), ylim=(y_range[0], max(y_range[1], bound * 1.06)))
    top.legend(loc="lower right")
    bottom.set(xlabel="$x$", ylabel="residual")
    bottom.margins(y=0.12)
    bottom.legend(title="mean absolute residual", alignment="left", loc="upper left")
    for axes in (top, bottom):
        axes.yaxis.set_label_coords(-0.085, 0.5)


def _draw_sizes(figure: Figure, reproduction: Reproduction) -> None:
    """Draw the size of every residual on one scale, down to the closed form's, which is rounding."""
    simulation, axes, floor = reproduction.simulation, figure.add_subplot(), 1e-17
    axes.axhspan(
        floor / 50, float(np.spacing(simulation.outputs.max())), color="#EDEDED", linewidth=0
    )
    for name in ("linear", "Derf", "DyT", "DyISRU", CLOSED):
        sizes = np.abs(reproduction.fits[name].residuals)
        mean, y = with_mean(name, float(sizes.mean())), np.maximum(sizes, floor)
        axes.plot(simulation.outliers, y, linewidth=1, markersize=4.5, label=mean, **_LINES[name])
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


def _draw_study(figure: Figure, reproduction: Reproduction) -> None:
    """Draw the residuals over many samples, over C, over sigma and over the mean."""
    from matplotlib.ticker import LogLocator

    assert reproduction.generality is not None
    base, studies = reproduction.generality.base, reproduction.generality.axes
    samples, *others = figure.subplots(2, 2).flat
    channels, sigma = f"$C = {base.channels}$", rf"$\sigma = {base.sigma:g}$"
    _draw_histogram(samples, base)
    samples.set_title(f"(a)  {len(base.seeds):,} samples, {channels}, {sigma}", loc="left")
    panels = (
        ("channels", "channels $C$", f"(b)  over $C$, {sigma}: median, 5 to 95 %"),
        (
            "sigma",
            rf"$\sigma$ (a step of the outlier is {STEP:g})",
            rf"(c)  over $\sigma$, {channels}",
        ),
        ("mean", r"mean $\mu / \sigma$", rf"(d)  over $\mu$, {channels}, {sigma}"),
    )
    for axes, (quantity, label, title) in zip(others, panels, strict=True):
        _draw_axis(axes, studies[quantity], "offset" if quantity == "mean" else quantity)
        axes.set_xlabel(label)
        axes.set_title(title, loc="left")
        if quantity != "mean":
            axes.set_xscale("log", base=4)
            axes.xaxis.set_minor_locator(LogLocator(base=2))
            axes.xaxis.set_major_formatter("{x:g}")
            axes.xaxis.set_minor_formatter("")
    others[0].legend(loc="lower right", handlelength=1.6)


def _draw_histogram(axes: Axes, base: Study) -> None:
    names = ("DyISRU", "DyT", "Derf")
    values = {name: np.maximum(base.residuals[name], 1e-16) for name in names}
    every = np.concatenate(list(values.values()))
    bins = np.geomspace(every.min() / 1.2, every.max() * 1.2, 45).tolist()
    for name in names:
        axes.hist(values[name], bins, color=COLORS[name], alpha=0.75, label=name)
    axes.axvline(0.01, **_BOUND, label="0.01, the paper's\nbound for DyISRU")
    axes.set(xscale="log", xlabel="mean absolute residual", ylabel="samples")
    _label_decades(axes.xaxis)
    axes.legend(loc="upper left", handlelength=1.2)


def _draw_axis(axes: Axes, studies: Sequence[Study], place: str) -> None:
    """Medians and the middle nine tenths; above, how often DyT wins where it does."""
    places = [getattr(study, place) for study in studies]
    for name in ("DyT", "Derf", "DyISRU"):
        middle, low, high = np.maximum([study.middle(name) for study in studies], 1e-16).T
        axes.fill_between(places, low, high, color=COLORS[name], alpha=0.18, linewidth=0)
        axes.plot(places, middle, markersize=3.5, label=name, **_LINES[name])
    axes.set_yscale("log")
    _label_decades(axes.yaxis)
    axes.set_ylabel("mean absolute residual")
    # In room made for them, above their places.
    wins = [(x, study.dyt_wins) for x, study in zip(places, studies, strict=True) if study.dyt_wins]
    low, high = axes.get_ylim()
    axes.set_ylim(low, high * (high / low) ** 0.1)
    small: dict[str, Any] = {"fontsize": 7.5, "color": COLORS["DyT"]}
    above: dict[str, Any] = {
        "xytext": (0, 2),
        "textcoords": "offset points",
        "ha": "center",
        "va": "bottom",
    }
    for x, share in wins:
        axes.annotate(f"{100 * share:.3g}%", (x, high), **above, **small)
    if wins:
        axes.set_title("samples won by DyT", loc="right", **small)


FIGURES: dict[str, tuple[Callable[[Figure, Reproduction], None], tuple[float, float]]] = {
    "fig1": (_draw_functions, (5.6, 3.6)),
    "fig2": (_draw_samples, (7.0, 5.4)),
    "fig3": (_draw_fits, (6.0, 5.6)),
    "fig4": (_draw_sizes, (6.0, 4.0)),
    "fig5": (_draw_study, (7.4, 6.0)),
}
"""What each figure shows, and its size in inches."""
