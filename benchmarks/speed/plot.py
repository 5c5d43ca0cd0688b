"""The results as a picture: time over a plain copy's against the size of the input."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.speed.machine import summary
from dynorm.family import FAMILY

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PASSES = {"forward": "forward, no grad", "backward": "backward alone", "both": "forward + backward"}
COLORS = {"LayerNorm": "#000000", "RMSNorm": "#8A8A8A"} | {row.title: row.color for row in FAMILY.values()}
# Contender: its line's name, the same for the function and the module of torch.
TORCH = {
    "forward": {"F.layer_norm": "LayerNorm, torch", "F.rms_norm": "RMSNorm, torch"},
    "backward": {"nn.LayerNorm": "LayerNorm, torch", "nn.RMSNorm": "RMSNorm, torch"},
}
TORCH["both"] = TORCH["backward"]
OURS = (
    *(name + kind for name in ("DyISRU", "DyT") for kind in ("", ", output given", " compiled", " eager")),
    "Derf",
    "Derf eager",
)
LINES = {"given": (0, (1, 1.2)), "compiled": (0, (5, 1.5)), "eager": (0, (4, 1.5, 1, 1.5)), "": "-"}
MARKERS = {"given": ".", "compiled": "s", "eager": "x", "": "o"}


def draw(document: dict[str, Any]) -> bytes:
    """Return a PNG of a run's document: one row per dtype, one column per pass, for the first number of threads."""
    import matplotlib
    from matplotlib.figure import Figure

    threads = document["settings"]["threads"][0]
    groups = [group for group in document["operations"] if group["threads"] == threads]
    dtypes = list(dict.fromkeys(group["dtype"] for group in groups))
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
        figure = Figure(figsize=(13, 1.1 + 3.9 * len(dtypes)), layout="constrained")
        grid = figure.subplots(len(dtypes), len(PASSES), squeeze=False, sharey="row")
        for line, dtype in zip(grid, dtypes, strict=True):
            for axes, stage in zip(line, PASSES, strict=True):
                mine = [group for group in groups if (group["dtype"], group["pass"]) == (dtype, stage)]
                _draw_pass(axes, mine)
                axes.set_title(f"{PASSES[stage]}, {dtype}", fontsize=10)
            line[0].set_ylabel("time / a copy's, output given")
        # Each name once, whichever pass it appears in.
        named = {
            label: handle for axes in grid.flat for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        order = [
            name for name in ("LayerNorm, torch", "RMSNorm, torch", *OURS, "least memory traffic") if name in named
        ]
        figure.legend([named[name] for name in order], order, loc="outside right upper", frameon=False, fontsize=8.5)
        plural = "s" * (threads != 1)
        figure.suptitle(f"{summary(document['machine'])}, {threads} thread{plural}", fontsize=9, color="#606060")
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()


def _draw_pass(axes: Axes, groups: Sequence[dict[str, Any]]) -> None:
    """Draw one pass: one line per contender, quartiles as bars, the least that memory allows dashed."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    places = list(range(len(groups)))
    stage = groups[0]["pass"] if groups else "forward"
    for name, label in (TORCH[stage] | {name: name for name in OURS}).items():
        contenders = [(place, group["contenders"].get(name)) for place, group in enumerate(groups)]
        here = [(place, entry["over_copy"]) for place, entry in contenders if entry is not None]
        if not here:
            continue
        kind = next((kind for kind in LINES if kind and name.endswith(kind)), "")
        color = next(color for start, color in COLORS.items() if label.startswith(start))
        middle = [values[0] for _, values in here]
        bars = [[values[0] - values[1] for _, values in here], [values[2] - values[0] for _, values in here]]
        style: dict[str, Any] = {"color": color, "linestyle": LINES[kind], "marker": MARKERS[kind], "markersize": 4}
        axes.errorbar([place for place, _ in here], middle, bars, label=label, elinewidth=0.8, linewidth=1.4, **style)
    floor = groups[0]["floor_over_copy"] if groups else 1.0
    axes.axhline(floor, color="#404040", linewidth=0.8, linestyle="--", label="least memory traffic")
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=20))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.tick_params(labelleft=True)
    axes.set_xticks(places, [f"{group['rows']}\n× {group['channels']}" for group in groups])
    axes.grid(axis="y", color="#E4E4E4", linewidth=0.6)
