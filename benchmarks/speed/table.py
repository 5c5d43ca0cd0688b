"""Make tables of text for a terminal or a page from the document of a run."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from rich.console import Group as Rendered
from rich.table import Table
from rich.text import Text

from benchmarks.speed.contenders import NAMES
from benchmarks.speed.machine import in_words, summary

TITLES = {
    "forward": "forward, no grad",
    "backward": "backward alone",
    "both": "forward + backward through autograd",
}
Row = dict[str, Any]


class Rows(NamedTuple):
    """A table of text, and a note to its figures."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    note: str = ""


def headline(document: dict[str, Any]) -> str:
    """Return machine and versions in a few lines."""
    machine = document["machine"]
    before = _load(machine["load_before"])
    after = _load(machine["load_after"])
    lines = [
        f"{summary(machine)}, {machine['date']}",
        f"{document['tensors_checked']} tensors were right before anything was timed; load average "
        f"{before} at the start, {after} at the end.",
    ]
    if _busy(document):
        lines.append("Something else ran on this machine: the figures are those of a busy one.")
    if not document["settings"]["compiled"]:
        lines.append("Nothing was compiled in this run.")
    return "\n".join(lines)


def ratios(document: dict[str, Any]) -> Rows:
    """Return the ratios of goals.json that were measured."""
    rows = []
    for row in document["targets"]:
        if row["measured"] is not None:
            rows.append([row["what"], _measured(row), row["note"]])
    title = f"Ratios, {in_words(document['settings']['threads'][0])}"
    note = "Ratios are medians of the ratios in each round."
    if _busy(document):
        note += " The machine was busy: do not rely on them."
    return Rows(title, ["what", "measured (quartiles)", ""], rows, note)


def operation_tables(document: dict[str, Any]) -> list[Rows]:
    """Return a table for each number of threads, dtype and pass, with one column per size."""
    groups_of_table: dict[tuple[int, str, str], list[Row]] = {}
    for group in document["operations"]:
        key = (group["threads"], group["dtype"], group["pass"])
        groups_of_table.setdefault(key, []).append(group)
    return [_operations(groups) for groups in groups_of_table.values()]


def models(document: dict[str, Any]) -> Rows:
    """Return a row for each model, input, mode and number of threads."""
    rows = []
    for group in document["models"]:
        norms = group["variants"]["norms"]
        dyisru = group["variants"]["DyISRU"]
        identities = group["variants"]["identities"]
        row = [
            f"{group['model']}, {group['batch']}",
            "compiled" if group["compiled"] else "eager",
            str(group["threads"]),
            str(group["norms"]),
            _number(norms["milliseconds"][0]),
            _number(dyisru["milliseconds"][0]),
            _number(identities["milliseconds"][0]),
            _share(norms["share_over_identities"]),
            _share(dyisru["share_over_identities"]),
        ]
        rows.append(row)
    columns = [
        "model",
        "mode",
        "threads",
        "norms",
        "its norms, ms",
        "DyISRU, ms",
        "identities, ms",
        "share of its norms",
        "share of DyISRU",
    ]
    note = (
        "The share is the time over that with identities in the same rounds, less 1: median and "
        "quartiles."
    )
    return Rows("Whole models", columns, rows, note)


def printed(document: dict[str, Any]) -> list[Any]:
    """Return the parts that a terminal shows, in order."""
    tables = operation_tables(document)
    if document["models"]:
        tables.append(models(document))
    tables.append(ratios(document))
    return [Text(headline(document)), *map(_rendered, tables)]


def _load(averages: Sequence[float]) -> str:
    return f"{averages[0]:.1f}" if averages else "unknown"


def _busy(document: dict[str, Any]) -> bool:
    """Return whether half a core or more was busy before the run began."""
    averages = document["machine"]["load_before"]
    return bool(averages) and averages[0] > 0.5


def _operations(groups: Sequence[Row]) -> Rows:
    """Return the table of groups that differ in their sizes."""
    first = groups[0]
    norm = "F.layer_norm" if first["pass"] == "forward" else "nn.LayerNorm"
    rows = []
    for name in NAMES:
        cells = [_cell(group["contenders"].get(name), name) for group in groups]
        if any(cells):
            rows.append([name, *cells])
    spreads = []
    for group in groups:
        for entry in group["contenders"].values():
            median, lower, upper = entry["microseconds"]
            spreads.append((upper - lower) / 2 / median)
    counts = [group["rounds"] for group in groups]
    rounds = str(min(counts))
    if max(counts) > min(counts):
        rounds += f" to {max(counts)}"
    note = (
        f"microseconds per call, the median of the rounds (times as fast as {norm} in the same "
        f"rounds); {rounds} rounds; half the distance of the quartiles is "
        f"{statistics.median(spreads):.0%} of the median in the middle, {max(spreads):.0%} at most."
    )
    title = f"{TITLES[first['pass']]}, {first['dtype']}, {in_words(first['threads'])}"
    sizes = [f"{group['rows']} x {group['channels']}" for group in groups]
    return Rows(title, ["", *sizes], rows, note)


def _cell(entry: Row | None, name: str) -> str:
    if entry is None:
        return ""
    time = _number(entry["microseconds"][0])
    median = entry["times_as_fast_as_layer_norm"][0]
    if name in ("F.layer_norm", "nn.LayerNorm") and median == 1:
        return f"{time} (1)"
    return f"{time} ({median:.2g})"


def _measured(row: Row) -> str:
    if row["unit"] == "share":
        return _share(row["measured"])
    median, lower, upper = row["measured"]
    text = f"{median:.3g} ({lower:.3g} to {upper:.3g})"
    if row["unit"] == "times as fast":
        text += " times"
    return text


def _share(values: Sequence[float]) -> str:
    median, lower, upper = values
    return f"{median:.1%} ({lower:.1%} to {upper:.1%})"


def _number(value: float) -> str:
    """Return three digits, without an exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _rendered(table: Rows) -> Rendered:
    shown = Table(box=None, header_style="bold", pad_edge=False)
    for place, column in enumerate(table.columns):
        is_size = place > 0 and "x" in column
        justify = "right" if is_size else "left"
        shown.add_column(column, justify=justify, no_wrap=is_size, overflow="fold")
    for row in table.rows:
        shown.add_row(*map(Text, row))
    title = Text(table.title, style="italic")
    note = Text(table.note, style="dim")
    return Rendered(Text(), title, shown, note)
