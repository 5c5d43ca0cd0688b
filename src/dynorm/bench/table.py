"""The results as tables: rows of text for a terminal or a page, made from the document that JSON holds."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from rich.console import Group as Rendered
from rich.table import Table
from rich.text import Text

from dynorm.bench.contenders import NAMES
from dynorm.bench.machine import summary

__all__ = ["Rows", "headline", "models", "operation_tables", "printed", "targets"]

TITLES = {
    "forward": "forward, no grad",
    "backward": "backward alone",
    "both": "forward + backward through autograd",
}
LEGEND = "microseconds a call, the median of the rounds (times as fast as {norm} in the same rounds)"


class Rows(NamedTuple):
    """A table of text.

    Args:
        title: what it shows.
        columns: the heads.
        rows: a text for each column.
        note: what to know of the figures.
    """

    title: str
    columns: list[str]
    rows: list[list[str]]
    note: str = ""


def headline(document: dict[str, Any]) -> str:
    """Return in a few lines what the figures hold for."""
    machine = document["machine"]
    before, after = (_first(machine[key]) for key in ("load_before", "load_after"))
    lines = [
        f"{summary(machine)}, {machine['date']}",
        f"{document['tensors_checked']} tensors were right before anything was timed; load average {before} at the "
        f"start, {after} at the end.",
    ]
    if _busy(document):
        lines.append("Something else ran on this machine: the figures are those of a busy one.")
    if not document["settings"]["compiled"]:
        lines.append("Nothing was compiled in this run.")
    return "\n".join(lines)


def targets(document: dict[str, Any]) -> Rows:
    """Return the table of issue 5: what, measured, asked, aim, met or not."""
    rows = [
        [row["what"], _measured(row), _bound(row, row["asked"]), _bound(row, row["aim"]), _verdict(row), row["note"]]
        for row in document["targets"]
    ]
    threads = document["settings"]["threads"][0]
    title = f"What is asked for, {threads} thread{'s' * (threads != 1)}"
    columns = ["what", "measured (quartiles)", "asked", "aim", "met", "note"]
    note = "Ratios are medians of the ratios in each round."
    return Rows(title, columns, rows, f"{note} The machine was busy: do not rely on them." if _busy(document) else note)


def operation_tables(document: dict[str, Any]) -> list[Rows]:
    """Return a table for each number of threads, dtype and pass, with a column a size."""
    groups = document["operations"]
    keys = dict.fromkeys((group["threads"], group["dtype"], group["pass"]) for group in groups)
    return [_operations([g for g in groups if (g["threads"], g["dtype"], g["pass"]) == key]) for key in keys]


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
                *(_number(found[name]["milliseconds"][0]) for name in ("norms", "DyISRU", "identities")),
                *(_share(found[name]["share_over_identities"]) for name in ("norms", "DyISRU")),
            ]
        )
    columns = ["model", "mode", "threads", "norms", "its norms, ms", "DyISRU, ms", "identities, ms"]
    note = "The share is the time over that with identities in the same rounds, less 1: median and quartiles."
    return Rows("Whole models", [*columns, "share of its norms", "share of DyISRU"], rows, note)


def printed(document: dict[str, Any]) -> list[Any]:
    """Return what a terminal shows, in order."""
    tables = [*operation_tables(document), *([models(document)] if document["models"] else []), targets(document)]
    return [Text(headline(document)), *(_rendered(table) for table in tables)]


def _busy(document: dict[str, Any]) -> bool:
    """Say whether half a core or more was at work before the run began."""
    return bool((document["machine"]["load_before"] or [0.0])[0] > 0.5)


def _operations(groups: Sequence[dict[str, Any]]) -> Rows:
    first = groups[0]
    threads, norm = first["threads"], "F.layer_norm" if first["pass"] == "forward" else "nn.LayerNorm"
    entered = {name for group in groups for name in group["contenders"]}
    rows = [
        [name, *(_cell(group["contenders"].get(name), name) for group in groups)] for name in NAMES if name in entered
    ]
    spreads = [
        (upper - lower) / 2 / median
        for group in groups
        for median, lower, upper in (entry["microseconds"] for entry in group["contenders"].values())
    ]
    rounds = [group["rounds"] for group in groups]
    note = (
        f"{LEGEND.format(norm=norm)}; {_range(rounds)} rounds; half the distance of the quartiles is "
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
    if row["measured"] is None:
        return "" if row["met"] is not None else "not measured"
    median, lower, upper = row["measured"]
    if row["unit"] == "share":
        return _share(row["measured"])
    return f"{median:.3g} ({lower:.3g} to {upper:.3g}){' times' if row['unit'] == 'times as fast' else ''}"


def _bound(row: dict[str, Any], value: float | None) -> str:
    if value is None:
        return ""
    if row["unit"] == "share":
        return f"{value:.0%}"
    return f"{value:g} times" if row["unit"] == "times as fast" else f"{value:g}"


def _verdict(row: dict[str, Any]) -> str:
    if row["met"] is None:
        return ""
    if not row["met"]:
        return "not met"
    return "met, and the aim" if row["aim_met"] and row["aim"] is not None else "met"


def _share(values: Sequence[float]) -> str:
    return f"{values[0]:.1%} ({values[1]:.1%} to {values[2]:.1%})"


def _number(value: float) -> str:
    """Return three digits, without an exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _range(values: Sequence[int]) -> str:
    least, most = min(values), max(values)
    return str(least) if least == most else f"{least} to {most}"


def _first(values: Sequence[float]) -> str:
    return f"{values[0]:.1f}" if values else "unknown"


def _rendered(table: Rows) -> Rendered:
    shown = Table(box=None, header_style="bold", pad_edge=False)
    for place, column in enumerate(table.columns):
        size = place > 0 and "x" in column
        shown.add_column(column, justify="right" if size else "left", no_wrap=size, overflow="fold")
    for row in table.rows:
        shown.add_row(*(Text(cell) for cell in row))
    return Rendered(Text(), Text(table.title, style="italic"), shown, Text(table.note, style="dim"))
