"""The study's pictures, from its runs: loss over rate, loss over steps, and the constants as they moved."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping
from typing import Any

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullLocator

from dynorm.family import FAMILY
from dynorm.report import colours
from studies.arms import ARMS, SHOWN
from studies.plan import LONG, SMALL, Part
from studies.runs import Record
from studies.tables import rate

COLOURS = {"layernorm": "#111111", "rmsnorm": "#8a8a8a"}
COLOURS |= {
    name: colours.COLOURS[row.name]
    for row in FAMILY.values()
    for name in (row.name, row.annealed_name)
}
STYLES = {None: "-", "batch": "-", "published": ":", "tuned": "-.", "path": "--"}
# A single run has no line to tell it by.
MARKERS = {None: "o", "batch": "o", "published": "s", "tuned": "s", "path": "D"}
# How far above the best of a panel its top is, in nats; what lies higher is drawn at the top.
TALL = 1.2
Log = Callable[[str], list[Record]]


def draw(study: Mapping[str, Any], log: Log) -> dict[str, bytes]:
    """Return the pictures for which there are runs, as PNG by their name.

    Args:
        study: what ``studies.summary.summarize`` returned.
        log: gives the lines of a run's log by the run's name.
    """
    panels = [(part, groups) for part in (SMALL, LONG) if (groups := groups_of(part, study))]
    figures: dict[str, Figure] = {}
    if panels:
        figures["study-rates"] = rates(panels)
        figures["study-curves"] = curves(panels, log)
    if moved := constants_of(panels, log):
        figures["study-constants"] = constants(moved)
    return {name: _png(figure) for name, figure in figures.items()}


def groups_of(part: Part, study: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the groups of a part that have a run which did not diverge, by name."""
    names = [sweep[0].group for sweep in part.sweeps()]
    found = {name: study["groups"][name] for name in names if name in study["groups"]}
    return {name: group for name, group in found.items() if group["best_lr"] is not None}


def rates(panels: list[tuple[Part, dict[str, dict[str, Any]]]]) -> Figure:
    """Draw the held-out loss of each arm over the learning rate, a panel a part."""
    figure, axes = _panels(panels)
    for panel, (_, groups) in zip(axes, panels, strict=True):
        lowest = min(group["mean"] for group in groups.values())
        known = [y for group in groups.values() for y in group["rates"].values()]
        lost = any(y is None for y in known)
        top = (
            lowest + TALL
            if lost
            else min(lowest + TALL, max(y for y in known if y is not None) + 0.05)
        )
        for group in groups.values():
            points = [(float(lr), math.inf if y is None else y) for lr, y in group["rates"].items()]
            drawn = zip(*[(x, min(y, top)) for x, y in points], strict=True)
            panel.plot(*drawn, marker=MARKERS[ARMS[group["arm"]].start], ms=3.5, **_look(group))
            for x in (x for x, y in points if y > top):
                (mark,) = panel.plot(
                    x, top, marker="^", ms=7, color=_look(group)["color"], clip_on=False
                )
                mark.set_in_layout(False)
        panel.set(xscale="log", xlabel="highest learning rate", ylim=(lowest - 0.05, top))
        ticks = sorted({float(lr) for group in groups.values() for lr in group["rates"]})
        panel.set_xticks(ticks, labels=list(map(rate, ticks)), rotation=45)
        panel.xaxis.set_minor_locator(NullLocator())
    axes[0].set_ylabel("held-out loss (nats)")
    _legend(figure, panels)
    return figure


def curves(panels: list[tuple[Part, dict[str, dict[str, Any]]]], log: Log) -> Figure:
    """Draw the held-out loss over the steps at the best rate, seed 0, a panel a part."""
    figure, axes = _panels(panels)
    for panel, (part, groups) in zip(axes, panels, strict=True):
        lowest = min(group["mean"] for group in groups.values())
        for name, group in groups.items():
            seen = [
                (line["step"], line["held_out"])
                for line in log(run_name(name, group))
                if line.get("held_out")
            ]
            if seen:
                panel.plot(*zip(*seen, strict=True), **_look(group))
        panel.set(xlabel="step", xlim=(0, part.steps), ylim=(lowest - 0.05, lowest + 2 * TALL))
    axes[0].set_ylabel("held-out loss (nats)")
    _legend(figure, panels)
    return figure


def constants_of(
    panels: list[tuple[Part, dict[str, dict[str, Any]]]], log: Log
) -> list[tuple[str, list[int], list[list[float]]]]:
    """Return titles, steps and each site's beta, of the best run of each arm that is shown."""
    found = []
    for part, groups in panels:
        for name, group in groups.items():
            if group["arm"] not in SHOWN:
                continue
            seen = [line for line in log(run_name(name, group)) if line.get("beta")]
            if seen and None not in [value for line in seen for value in line["beta"]]:
                steps, sites = [line["step"] for line in seen], [line["beta"] for line in seen]
                found.append(
                    (
                        f"{ARMS[group['arm']].words}\n{part.title}",
                        steps,
                        [list(s) for s in zip(*sites, strict=True)],
                    )
                )
    return found


def constants(moved: list[tuple[str, list[int], list[list[float]]]]) -> Figure:
    """Draw every site's beta over the steps, a panel a run; sites from dark (first) to light (last)."""
    columns = min(4, len(moved))
    rows = math.ceil(len(moved) / columns)
    figure = Figure(figsize=(2.9 * columns, 2.4 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    for panel, (title, steps, sites) in zip(panels, moved, strict=False):
        for place, values in enumerate(sites):
            panel.plot(
                steps,
                values,
                lw=1.2,
                color=colormaps["viridis"](0.92 * place / max(1, len(sites) - 1)),
            )
        panel.set_title(title, fontsize=8.5)
        panel.set_yscale("log")
        # At least a factor of 4, so that there is a tick.
        values = [value for site in sites for value in site]
        middle, reach = (
            math.sqrt(min(values) * max(values)),
            max(2.0, 1.1 * math.sqrt(max(values) / min(values))),
        )
        panel.set_ylim(middle / reach, middle * reach)
        panel.yaxis.set_major_locator(LogLocator(subs=(1.0,) if reach > 10 else (1.0, 2.0, 5.0)))
        panel.yaxis.set_major_formatter("{x:g}")
        panel.yaxis.set_minor_locator(NullLocator())
        panel.tick_params(labelsize=7)
        panel.spines[["top", "right"]].set_visible(False)
    for panel in panels[len(moved) :]:
        panel.axis("off")
    figure.supxlabel("step", fontsize=9)
    figure.supylabel(r"$\beta$ of each site", fontsize=9)
    return figure


def run_name(name: str, group: Mapping[str, Any]) -> str:
    """Return the name of a group's run at its best rate, seed 0."""
    return f"{name}-lr{group['best_lr']:g}-seed0"


def _panels(panels: list[tuple[Part, dict[str, dict[str, Any]]]]) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(4.6 * len(panels) + 2.4, 4.2), layout="constrained")
    axes = list(figure.subplots(1, len(panels), squeeze=False).flatten())
    for panel, (part, _) in zip(axes, panels, strict=True):
        panel.set_title(part.title, fontsize=11)
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(alpha=0.25, lw=0.5)
    return figure, axes


def _look(group: Mapping[str, Any]) -> dict[str, Any]:
    arm = ARMS[group["arm"]]
    return {
        "color": COLOURS[arm.layer or arm.name],
        "ls": "-." if arm.witnesses else STYLES[arm.start],
        "lw": 1.6,
    }


def _legend(figure: Figure, panels: list[tuple[Part, dict[str, dict[str, Any]]]]) -> None:
    shown = {group["arm"]: group for _, groups in panels for group in groups.values()}
    handles = [
        Line2D([], [], label=ARMS[name].words, **_look(shown[name]))
        for name in ARMS
        if name in shown
    ]
    figure.legend(handles=handles, loc="outside right upper", frameon=False, fontsize=8.5)


def _png(figure: Figure) -> bytes:
    file = io.BytesIO()
    # Without the version of matplotlib in it, the same runs give the same bytes.
    figure.savefig(file, format="png", dpi=110, metadata={"Software": None})
    return file.getvalue()
