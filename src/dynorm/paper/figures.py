"""The paper's figures 1 to 3, and two that it does not have: the closed form, and how general the claim is."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dynorm.errors import ArgumentError
from dynorm.functional import dyisru, dyisru_general, dyt
from dynorm.paper.drawing import (
    COLORS,
    GREY,
    LOOKS,
    draw_bounds,
    draw_circles,
    draw_outliers,
    draw_residuals,
    empty_figure,
    label_decades,
    padded,
    styled,
    with_mean,
)
from dynorm.paper.generality import STEP, Reproduction, Study

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = ("png", "svg")
_NO_STUDY = "fig5 shows the study over many samples, but a seed means one sample alone: leave out the seed"


def draw(name: str, reproduction: Reproduction) -> Figure:
    """Draw one of :data:`FIGURES`, which belongs to no window.

    Raises:
        ArgumentError: If the name is unknown, the figure needs the study and there is none, or matplotlib is not
            installed.

    Example:
        >>> from dynorm.paper.generality import reproduce
        >>> len(draw("fig2", reproduce()).axes)
        4
    """
    check_figures([name], with_study=reproduction.generality is not None)
    with styled():
        figure = FIGURES[name](reproduction)
        # Once is enough, and takes as long as drawing: else every file would compute the layout anew.
        figure.draw_without_rendering()
        figure.set_layout_engine("none")
    return figure


def render(figure: Figure, format: str, dpi: int = 220) -> bytes:
    """Return a figure as the bytes of a png or svg file, the same in every run; ``dpi`` is for a png.

    Raises:
        ArgumentError: If the format is another.

    Example:
        >>> from dynorm.paper.generality import reproduce
        >>> render(draw("fig1", reproduce()), "png")[1:4]
        b'PNG'
    """
    if format not in FORMATS:
        raise ArgumentError(f"format must be one of {', '.join(FORMATS)}, got {format!r}: give one of those")
    buffer = io.BytesIO()
    with styled():
        figure.savefig(buffer, format=format, dpi=dpi, metadata={"Date": None} if format == "svg" else None)
    return buffer.getvalue()


def check_figures(names: Sequence[str], *, with_study: bool) -> None:
    """Refuse the name of a figure that does not exist, or that needs the study where there will be none.

    Raises:
        ArgumentError: If there is such a name.

    Example:
        >>> check_figures(["fig1", "fig3"], with_study=False)
    """
    for name in names:
        if name not in FIGURES:
            raise ArgumentError(f"a figure must be one of {', '.join(FIGURES)}, got {name!r}: give one of those")
        if name == "fig5" and not with_study:
            raise ArgumentError(_NO_STUDY)


def _figure_1(_: Reproduction) -> Figure:
    """DyT and DyISRU with two constants each, at C = 50."""
    figure = empty_figure(5.6, 3.6)
    axes, scale = figure.add_subplot(), math.sqrt(50 - 1)
    x = torch.linspace(-60, 60, 601, dtype=torch.float64)
    for name, function, constant, values in (
        ("DyT", dyt, "alpha", (0.1, 0.05)),
        ("DyISRU", dyisru, "beta", (100.0, 500.0)),
    ):
        for value, dashes in zip(values, ("-", (0, (5, 1.5))), strict=True):
            y, label = function(x, value, scale=scale), rf"{name}, $\{constant} = {value:g}$"
            axes.plot(x, y, color=COLORS[name], linestyle=dashes, label=label)
    draw_bounds(axes, scale, both=True)
    axes.set(xlabel="$x$", ylabel="$y$", xlim=(-60, 60), ylim=(-8, 8))
    axes.legend(loc="upper left", bbox_to_anchor=(0.01, 0.92))
    return figure


def _figure_2(reproduction: Reproduction) -> Figure:
    """The sample, and the same with its largest element raised by one, two and all steps."""
    simulation, figure = reproduction.simulation, empty_figure(7.0, 5.4)
    shown = sorted({0, min(1, simulation.steps), min(2, simulation.steps), simulation.steps})
    panels = figure.subplots(2, 2).flat
    near = padded(simulation.tokens[: shown[-2] + 1], simulation.normalized[: shown[-2] + 1])
    far = padded(simulation.tokens, simulation.normalized)
    for axes, step, letter in zip(panels, shown, "abcd", strict=False):
        _draw_step(axes, reproduction, step)
        axes.set_title(f"({letter})  $S = {step}$", loc="left")
        x_range, y_range = far if step == simulation.steps else near
        axes.set(xlabel="$x$", ylabel="$y$", xlim=x_range, ylim=y_range)
        axes.legend(loc="lower right", handlelength=1.4)
    return figure


def _draw_step(axes: Axes, reproduction: Reproduction, step: int) -> None:
    simulation = reproduction.simulation
    x, y = simulation.tokens[step], simulation.normalized[step]
    if step == 0:
        draw_circles(axes, x, y, "sample")
        return
    first = simulation.normalized[0]
    slope = (first[-1] - first[0]) / (simulation.tokens[0, -1] - simulation.tokens[0, 0])
    start = simulation.tokens[0, 0], first[0]
    axes.axline(start, slope=slope, color=GREY, linewidth=1, linestyle=":", label="slope at $S = 0$")
    draw_circles(axes, x[:-1], y[:-1], "other channels")
    if step > 1:
        curve = np.linspace(simulation.outliers[0], simulation.outliers[step - 1], 200)
        center, beta, _ = reproduction.closed
        y = dyisru_general(torch.from_numpy(curve), beta, center, scale=math.sqrt(simulation.channels - 1))
        axes.plot(curve, y.numpy(), color=GREY, linewidth=1.2, label="through the outliers")
    draw_outliers(axes, simulation, step)


def _figure_3(reproduction: Reproduction) -> Figure:
    """The fitted functions over the data, and their residuals."""
    simulation, figure = reproduction.simulation, empty_figure(6.0, 5.6)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(2.1, 1))
    (low, high), y_range = padded(simulation.tokens, simulation.normalized)
    x = np.linspace(low, high, 400)
    draw_bounds(top, math.sqrt(simulation.channels - 1))
    draw_circles(
        top, simulation.tokens[-1, :-1], simulation.normalized[-1, :-1], f"other channels, $S = {simulation.steps}$"
    )
    bottom.axhline(0, color=GREY, linewidth=0.8)
    for name in ("DyT", "DyISRU"):
        fit = reproduction.fits[name]
        label = rf"{name}, $\{fit.constant} = {fit.value:.4g}$"
        top.plot(x, fit.function(x), color=COLORS[name], label=label)
        draw_residuals(bottom, name, simulation.outliers, fit.residuals, with_mean(name, fit.mean_absolute_residual))
    draw_outliers(top, simulation, simulation.steps)
    top.set(
        ylabel="$y$", xlim=(low, high), ylim=(y_range[0], max(y_range[1], math.sqrt(simulation.channels - 1) * 1.06))
    )
    top.legend(loc="lower right")
    bottom.set(xlabel="$x$", ylabel="residual")
    bottom.margins(y=0.12)
    _residuals_legend(bottom, loc="upper left")
    for axes in (top, bottom):
        axes.yaxis.set_label_coords(-0.085, 0.5)
    return figure


def _figure_4(reproduction: Reproduction) -> Figure:
    """The size of every residual on one scale, down to the closed form's, which is rounding."""
    simulation, figure = reproduction.simulation, empty_figure(6.0, 4.0)
    axes, floor = figure.add_subplot(), 1e-17
    residuals = {name: reproduction.fits[name].residuals for name in ("linear", "Derf", "DyT", "DyISRU")}
    residuals["closed form"] = reproduction.closed.residuals
    axes.axhspan(floor / 50, float(np.spacing(simulation.outputs.max())), color="#EDEDED", linewidth=0)
    for name, values in residuals.items():
        label = with_mean(name, float(np.abs(values).mean()))
        draw_residuals(axes, name, simulation.outliers, np.maximum(np.abs(values), floor), label)
    axes.set_yscale("log")
    axes.set(xlabel="outlier $x_o$", ylabel="|function − LayerNorm|", ylim=(floor / 50, 30))
    axes.set_yticks([10.0**k for k in range(-16, 1, 4)])
    label_decades(axes.yaxis)
    note = "last digit of float64; a residual of 0 is drawn at $10^{-17}$"
    axes.annotate(note, (0.015, 0.012), xycoords="axes fraction", fontsize=8, color="#505050")
    _residuals_legend(axes, loc="center left", bbox_to_anchor=(0.0, 0.5))
    return figure


def _residuals_legend(axes: Axes, **place: Any) -> None:
    axes.legend(title="mean absolute residual", title_fontsize=8.5, alignment="left", **place)


def _figure_5(reproduction: Reproduction) -> Figure:
    """The residuals over many samples, over C, over sigma and over the mean."""
    if reproduction.generality is None:
        raise ArgumentError(_NO_STUDY)
    generality = reproduction.generality
    base, figure = generality.base, empty_figure(7.4, 6.0)
    samples, over_channels, over_sigma, over_mean = figure.subplots(2, 2).flat
    channels, sigma = f"$C = {base.channels}$", rf"$\sigma = {base.sigma:g}$"
    _draw_histogram(samples, base)
    samples.set_title(f"(a)  {len(base.seeds):,} samples, {channels}, {sigma}", loc="left")
    _draw_axis(over_channels, generality.over_channels, [study.channels for study in generality.over_channels])
    _scale_log(over_channels)
    over_channels.set_xlabel("channels $C$")
    over_channels.set_title(f"(b)  over $C$, {sigma}: median, 5 to 95 %", loc="left")
    over_channels.legend(loc="lower right", handlelength=1.6)
    _draw_axis(over_sigma, generality.over_sigma, [study.sigma for study in generality.over_sigma])
    _scale_log(over_sigma)
    over_sigma.set_xlabel(rf"$\sigma$ (a step of the outlier is {STEP:g})")
    over_sigma.set_title(rf"(c)  over $\sigma$, {channels}", loc="left")
    _draw_axis(over_mean, generality.over_mean, [study.mean / study.sigma for study in generality.over_mean])
    over_mean.set_xlabel(r"mean $\mu / \sigma$")
    over_mean.set_title(rf"(d)  over $\mu$, {channels}, {sigma}", loc="left")
    return figure


def _draw_histogram(axes: Axes, base: Study) -> None:
    names = ("DyISRU", "DyT", "Derf")
    values = {name: np.maximum(base.residuals[name], 1e-16) for name in names}
    every = np.concatenate(list(values.values()))
    bins = np.geomspace(every.min() / 1.2, every.max() * 1.2, 45).tolist()
    for name in names:
        axes.hist(values[name], bins, color=COLORS[name], alpha=0.75, label=name)
    axes.axvline(0.01, color=GREY, linewidth=1, linestyle="--", label="0.01, the paper's\nbound for DyISRU")
    axes.set(xscale="log", xlabel="mean absolute residual", ylabel="samples")
    label_decades(axes.xaxis)
    axes.legend(loc="upper left", handlelength=1.2)


def _draw_axis(axes: Axes, studies: Sequence[Study], places: Sequence[float]) -> None:
    """Medians and the middle nine tenths; above, how often DyT wins where it does."""
    for name in ("DyT", "Derf", "DyISRU"):
        low, middle, high = (
            np.maximum([np.quantile(study.residuals[name], share) for study in studies], 1e-16)
            for share in (0.05, 0.5, 0.95)
        )
        axes.fill_between(places, low, high, color=COLORS[name], alpha=0.18, linewidth=0)
        axes.plot(places, middle, **LOOKS[name], markersize=3.5, label=name)
    axes.set_yscale("log")
    label_decades(axes.yaxis)
    axes.set_ylabel("mean absolute residual")
    # In room made for them, above their places.
    wins = [(place, study.dyt_wins) for study, place in zip(studies, places, strict=True) if study.dyt_wins]
    low, high = axes.get_ylim()
    axes.set_ylim(low, high * (high / low) ** 0.1)
    small: dict[str, Any] = {"fontsize": 7.5, "color": COLORS["DyT"]}
    for place, share in wins:
        above: dict[str, Any] = {"xytext": (0, 2), "textcoords": "offset points", "ha": "center", "va": "bottom"}
        axes.annotate(f"{100 * share:.3g}%", (place, high), **above, **small)
    if wins:
        axes.set_title("samples won by DyT", loc="right", **small)


def _scale_log(axes: Axes) -> None:
    """Scale x by powers of 4, written out."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(base=4))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_locator(LogLocator(base=2))
    axes.xaxis.set_minor_formatter(NullFormatter())


FIGURES: dict[str, Callable[[Reproduction], Figure]] = {
    f"fig{i}": figure for i, figure in enumerate((_figure_1, _figure_2, _figure_3, _figure_4, _figure_5), start=1)
}
