"""The figure that the paper does not have: how its residuals are spread over samples, C, sigma and the mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from dynorm.paper.drawing import COLORS, DASHES, GREY, MARKERS, empty_figure, label_decades
from dynorm.paper.generality import STEP, Generality, Study

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["figure_generality"]


def figure_generality(generality: Generality) -> Figure:
    """Draw the residuals over many samples, over C, over sigma and over the mean.

    Example:
        >>> from dynorm.paper.generality import study_all
        >>> len(figure_generality(study_all(samples=5)).axes)
        4
    """
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
        axes.plot(
            places, middle, color=COLORS[name], linestyle=DASHES[name], marker=MARKERS[name], markersize=3.5, label=name
        )
    axes.set_yscale("log")
    label_decades(axes.yaxis)
    axes.set_ylabel("mean absolute residual")
    _draw_wins(axes, [(place, study.dyt_wins) for study, place in zip(studies, places, strict=True) if study.dyt_wins])


def _draw_wins(axes: Axes, wins: list[tuple[float, float]]) -> None:
    """Write the shares of the samples in which DyT wins above their places, in room made for them."""
    low, high = axes.get_ylim()
    axes.set_ylim(low, high * (high / low) ** 0.1)
    for place, share in wins:
        axes.annotate(
            f"{100 * share:.3g}%",
            (place, high),
            (0, 2),
            textcoords="offset points",
            ha="center",
            va="bottom",
            fontsize=7.5,
            color=COLORS["DyT"],
        )
    if wins:
        axes.set_title("samples won by DyT", loc="right", fontsize=7.5, color=COLORS["DyT"])


def _scale_log(axes: Axes) -> None:
    """Scale x by powers of 4, written out."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(base=4))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_locator(LogLocator(base=2))
    axes.xaxis.set_minor_formatter(NullFormatter())
