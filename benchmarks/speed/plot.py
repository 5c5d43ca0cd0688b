"""The results as a picture: how many times as fast as torch's LayerNorm each layer is, by the size of the input."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.speed.machine import summary
from dynorm.family import FAMILY
from dynorm.report.colours import COLOURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PASSES = {"forward": "forward", "backward": "backward alone", "both": "forward + backward"}
COLORS = {FAMILY[name].title: COLOURS[name] for name in ("dyisru", "dyt", "derf")}
COPY, LIMIT = "copy, output given", "all that memory allows"


def draw(document: dict[str, Any]) -> bytes:
    """Return a PNG of a run's document: a panel for each pass, for its first dtype and number of threads."""
    import matplotlib
    from matplotlib.figure import Figure

    settings = document["settings"]["threads"][0], document["operations"][0]["dtype"]
    groups = [
        group for group in document["operations"] if (group["threads"], group["dtype"]) == settings
    ]
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(
            {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}
        )
        figure = Figure(figsize=(9, 3.7), layout="constrained")
        panels = figure.subplots(1, len(PASSES), sharey=True)
        for axes, (stage, title) in zip(panels, PASSES.items(), strict=True):
            _draw_pass(axes, [group for group in groups if group["pass"] == stage])
            axes.set_title(title, fontsize=11)
        panels[0].set_ylabel("times as fast as torch's LayerNorm")
        handles, names = panels[0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside upper center", ncols=len(names), frameon=False)
        words = f"{summary(document['machine'])}, {settings[0]} thread{'s' * (settings[0] != 1)}, {settings[1]}"
        figure.supxlabel(words, fontsize=8, color="#606060")
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()


def _draw_pass(axes: Axes, groups: Sequence[dict[str, Any]]) -> None:
    """Draw one pass: a line for each layer, quartiles as bars, LayerNorm at 1, and the limit of memory dashed."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    axes.axhline(1, color="#111111", linewidth=1.2, label="LayerNorm")
    for name, color in COLORS.items():
        found = [(place, group["contenders"].get(name)) for place, group in enumerate(groups)]
        here = [
            (place, entry["times_as_fast_as_layer_norm"])
            for place, entry in found
            if entry is not None
        ]
        bars = [[y - low for _, (y, low, _) in here], [high - y for _, (y, _, high) in here]]
        x, y = [place for place, _ in here], [values[0] for _, values in here]
        axes.errorbar(
            x,
            y,
            bars,
            label=name,
            color=color,
            marker="o",
            markersize=4,
            elinewidth=0.8,
            linewidth=1.8,
        )
    floors = [
        group["contenders"][COPY]["times_as_fast_as_layer_norm"][0] / group["floor_over_copy"]
        for group in groups
    ]
    axes.plot(
        range(len(groups)), floors, color="#808080", linewidth=1.2, linestyle="--", label=LIMIT
    )
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(FixedLocator([0.5, 1, 2, 5, 10, 20]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.tick_params(labelleft=True)
    sizes = [f"{group['rows']}\n× {group['channels']}" for group in groups]
    axes.set_xticks(range(len(groups)), sizes, fontsize=7.5)
    axes.grid(axis="y", color="#E4E4E4", linewidth=0.6)
