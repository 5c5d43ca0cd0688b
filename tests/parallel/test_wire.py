"""The figures of docs/parallel.md: counted anew where it is quick, and the tables those of the committed results."""

from __future__ import annotations

import json

import pytest

from benchmarks import wire


def test_the_counts_are_the_committed_ones_and_those_of_the_formulas() -> None:
    document = json.loads(wire.RESULTS.read_text("utf-8"))
    assert len(document["rows"]) == 2 * 3 * (5 + 4)
    rows = {
        row["arm"]: row
        for row in document["rows"]
        if (row["model"], row["ranks"]) == ("Llama 8B", 4)
    }
    shape = wire.MODELS["Llama 8B"]
    # Of 64 tokens of 4,096 channels in bfloat16, two gathers and two reductions, 3/4 of each.
    matrices = 4 * 64 * 4096 * 2 * 3 // 4
    # Of 64 tokens of one number in float32, two all-reduces.
    statistics = 2 * 2 * 64 * 4 * 3 // 4
    expected = {
        "whole stream, RMSNorm": ({"all_reduce": 2}, matrices),
        "over channels, RMSNorm by hand": (
            {"all_gather_into_tensor": 2, "all_reduce": 2, "reduce_scatter_tensor": 2}, matrices + statistics,
        ),
        "over channels, DyISRU": ({"all_gather_into_tensor": 2, "reduce_scatter_tensor": 2}, matrices),
    }  # fmt: skip
    for name, (collectives, size) in expected.items():
        found = wire.count(shape, 4, "decoding", wire.ARMS[name])
        assert (found["collectives"], found["bytes"]) == (collectives, size)
        assert {key: rows[name][key] for key in found} == found


def test_the_tables_are_those_of_the_committed_results() -> None:
    page = wire.PAGE.read_text("utf-8")
    assert wire.renewed(page, json.loads(wire.RESULTS.read_text("utf-8"))) == page


def test_what_is_not_known_is_not_counted_as_nothing() -> None:
    with pytest.raises(KeyError):
        wire.sent([("all_to_all_single", 8)], 2)
