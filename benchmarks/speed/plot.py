"""Draw how many times as fast as torch's LayerNorm each layer is, by the size of the input."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.speed.machine import in_words, summary
from dynorm.family import FAMILY
from dynorm.report.colours import COLOURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PASSES = {"forward": "forward", "backward": "backward alone", "both": "forward + backward"}
COLORS = {
    FAMILY["dyisru"].title: COLOURS["dyisru"],
    FAMILY["dyt"].title: COLOURS["dyt"],
    FAMILY["derf"].title: COLOURS["derf"],
}
COPY = "copy, output given"
Row = dict[str, Any]


def draw(document: dict[str, Any]) -> bytes:
    """Return a PNG of a run's first dtype and number of threads, with a panel for each pass."""
    import matplotlib
    from matplotlib.figure import Figure

    threads = document["settings"]["threads"][0]
    dtype = document["operations"][0]["dtype"]
    groups_of_pass: dict[str, list[Row]] = {stage: [] for stage in PASSES}
    for group in document["operations"]:
        if group["threads"] == threads and group["dtype"] == dtype:
            groups_of_pass[group["pass"]].append(group)
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(
            {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}
        )
        figure = Figure(figsize=(9, 3.7), layout="constrained")
        panels = figure.subplots(1, len(PASSES), sharey=True)
        for axes, stage in zip(panels, PASSES, strict=True):
            _draw_pass(axes, groups_of_pass[stage])
            axes.set_title(PASSES[stage], fontsize=11)
        panels[0].set_ylabel("times as fast as torch's LayerNorm")
        handles, names = panels[0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside upper center", ncols=len(names), frameon=False)
        machine = summary(document["machine"])
        caption = f"{machine}, {in_words(threads)}, {dtype}"
        figure.supxlabel(caption, fontsize=8, color="#606060")
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()


def _draw_pass(axes: Axes, groups: Sequence[Row]) -> None:
    """Draw one pass: a line for each layer with its quartiles, LayerNorm at 1, and the limit of memory."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    axes.axhline(1, color="#111111", linewidth=1.2, label="LayerNorm")
    for name, color in COLORS.items():
        x = []
        y = []
        below = []
        above = []
        for place, group in enumerate(groups):
            entry = group["contenders"].get(name)
            if entry is not None:
                median, lower, upper = entry["times_as_fast_as_layer_norm"]
                x.append(place)
                y.append(median)
                below.append(median - lower)
                above.append(upper - median)
        axes.errorbar(
            x,
            y,
            [below, above],
            label=name,
            color=color,
            marker="o",
            markersize=4,
            elinewidth=0.8,
            linewidth=1.8,
        )
    limits = []
    for group in groups:
        copy_median = group["contenders"][COPY]["times_as_fast_as_layer_norm"][0]
        limits.append(copy_median / group["floor_over_copy"])
    axes.plot(
        range(len(groups)),
        limits,
        color="#808080",
        linewidth=1.2,
        linestyle="--",
        label="all that memory allows",
    )
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(FixedLocator([0.5, 1, 2, 5, 10, 20]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.tick_params(labelleft=True)
    sizes = [f"{group['rows']}\n× {group['channels']}" for group in groups]
    axes.set_xticks(range(len(groups)), sizes, fontsize=7.5)
    axes.grid(axis="y", color="#E4E4E4", linewidth=0.6)
