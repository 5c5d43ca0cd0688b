"""The results as tables: rows of text for a terminal or a page, made from the document that JSON holds."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from rich.console import Group as Rendered
from rich.table import Table
from rich.text import Text

from benchmarks.speed.contenders import NAMES
from benchmarks.speed.machine import summary

TITLES = {
    "forward": "forward, no grad",
    "backward": "backward alone",
    "both": "forward + backward through autograd",
}


class Rows(NamedTuple):
    """A table of text, and a note to its figures."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    note: str = ""


def headline(document: dict[str, Any]) -> str:
    """Return machine and versions in a few lines."""
    machine = document["machine"]
    before, after = (
        f"{machine[k][0]:.1f}" if machine[k] else "unknown" for k in ("load_before", "load_after")
    )
    lines = [
        f"{summary(machine)}, {machine['date']}",
        f"{document['tensors_checked']} tensors were right before anything was timed; load average "
        f"{before} at the "
        f"start, {after} at the end.",
    ]
    if _busy(document):
        lines.append("Something else ran on this machine: the figures are those of a busy one.")
    if not document["settings"]["compiled"]:
        lines.append("Nothing was compiled in this run.")
    return "\n".join(lines)


def ratios(document: dict[str, Any]) -> Rows:
    """Return the ratios that were measured, of those that goals.json names."""
    rows = [
        [row["what"], _measured(row), row["note"]]
        for row in document["targets"]
        if row["measured"] is not None
    ]
    threads = document["settings"]["threads"][0]
    note = "Ratios are medians of the ratios in each round."
    if _busy(document):
        note += " The machine was busy: do not rely on them."
    return Rows(
        f"Ratios, {threads} thread{'s' * (threads != 1)}",
        ["what", "measured (quartiles)", ""],
        rows,
        note,
    )


def operation_tables(document: dict[str, Any]) -> list[Rows]:
    """Return a table for each number of threads, dtype and pass, with one column per size."""
    groups = document["operations"]
    keys = dict.fromkeys((group["threads"], group["dtype"], group["pass"]) for group in groups)
    return [
        _operations([g for g in groups if (g["threads"], g["dtype"], g["pass"]) == key])
        for key in keys
    ]


def models(document: dict[str, Any]) -> Rows:
    """Return a row for each model, input, mode and number of threads."""
    rows = []
    for group in document["models"]:
        found = group["variants"]
        rows.append(
            [
                f"{group['model']}, {group['batch']}",
                "compiled" if group["compiled"] else "eager",
                str(group["threads"]),
                str(group["norms"]),
                *(
                    _number(found[name]["milliseconds"][0])
                    for name in ("norms", "DyISRU", "identities")
                ),
                *(_share(found[name]["share_over_identities"]) for name in ("norms", "DyISRU")),
            ]
        )
    columns = ["model", "mode", "threads", "norms", "its norms, ms", "DyISRU, ms", "identities, ms"]
    note = "The share is the time over that with identities in the same rounds, less 1: median and quartiles."
    return Rows("Whole models", [*columns, "share of its norms", "share of DyISRU"], rows, note)


def printed(document: dict[str, Any]) -> list[Any]:
    """Return the parts that a terminal shows, in order."""
    tables = [
        *operation_tables(document),
        *([models(document)] if document["models"] else []),
        ratios(document),
    ]
    return [Text(headline(document)), *(_rendered(table) for table in tables)]


def _busy(document: dict[str, Any]) -> bool:
    """Say whether half a core or more was at work before the run began."""
    return bool((document["machine"]["load_before"] or [0.0])[0] > 0.5)


def _operations(groups: Sequence[dict[str, Any]]) -> Rows:
    first = groups[0]
    threads, norm = (
        first["threads"],
        "F.layer_norm" if first["pass"] == "forward" else "nn.LayerNorm",
    )
    entered = {name for group in groups for name in group["contenders"]}
    rows = [
        [name, *(_cell(group["contenders"].get(name), name) for group in groups)]
        for name in NAMES
        if name in entered
    ]
    spreads = [
        (upper - lower) / 2 / median
        for group in groups
        for median, lower, upper in (
            entry["microseconds"] for entry in group["contenders"].values()
        )
    ]
    rounds = sorted({bound([group["rounds"] for group in groups]) for bound in (min, max)})
    note = (
        f"microseconds per call, the median of the rounds (times as fast as {norm} in the same "
        "rounds); "
        f"{' to '.join(map(str, rounds))} rounds; half the distance of the quartiles is "
        f"{statistics.median(spreads):.0%} of the median in the middle, {max(spreads):.0%} at most."
    )
    title = f"{TITLES[first['pass']]}, {first['dtype']}, {threads} thread{'s' * (threads != 1)}"
    sizes = [f"{group['rows']} x {group['channels']}" for group in groups]
    return Rows(title, ["", *sizes], rows, note)


def _cell(entry: dict[str, Any] | None, name: str) -> str:
    if entry is None:
        return ""
    time = _number(entry["microseconds"][0])
    if name in ("F.layer_norm", "nn.LayerNorm") and entry["times_as_fast_as_layer_norm"][0] == 1:
        return f"{time} (1)"
    return f"{time} ({entry['times_as_fast_as_layer_norm'][0]:.2g})"


def _measured(row: dict[str, Any]) -> str:
    median, lower, upper = row["measured"]
    if row["unit"] == "share":
        return _share(row["measured"])
    return f"{median:.3g} ({lower:.3g} to {upper:.3g}){' times' if row['unit'] == 'times as fast' else ''}"


def _share(values: Sequence[float]) -> str:
    return f"{values[0]:.1%} ({values[1]:.1%} to {values[2]:.1%})"


def _number(value: float) -> str:
    """Return three digits, without an exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _rendered(table: Rows) -> Rendered:
    shown = Table(box=None, header_style="bold", pad_edge=False)
    for place, column in enumerate(table.columns):
        size = place > 0 and "x" in column
        shown.add_column(column, justify="right" if size else "left", no_wrap=size, overflow="fold")
    for row in table.rows:
        shown.add_row(*(Text(cell) for cell in row))
    return Rendered(Text(), Text(table.title, style="italic"), shown, Text(table.note, style="dim"))
