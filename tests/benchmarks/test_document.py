"""The results of a run: the document, its tables, its picture, and the ratios with their goals."""

from __future__ import annotations

import copy
import io
import json
import re
from typing import Any

import pytest
from rich.console import Console

from benchmarks.speed import table
from benchmarks.speed.figures import COPY, GOALS, Group, ModelGroup, ratios, reached
from benchmarks.speed.machine import describe, summary
from benchmarks.speed.plot import draw

STAGES = ("forward", "backward", "both")


def group(rows: int, channels: int, dtype: str, stage: str, **microseconds: float) -> Group:
    """Three rounds, the last slow for all; in names _ replaces characters that a keyword cannot have."""
    names = {key.replace("__", ", ").replace("_", " ").replace("F ", "F.").replace("nn ", "nn."): value
             for key, value in microseconds.items()}  # fmt: skip
    names = {name.replace("F.layer norm", "F.layer_norm"): value for name, value in names.items()}
    times = {name: [value * 1e-6, value * 1e-6, value * 5e-6] for name, value in names.items()}
    outputs = {name: "given" if "given" in name else "allocated" for name in names}
    return Group(rows, channels, dtype, 2, stage, {COPY: [1e-5, 1e-5, 5e-5], **times}, outputs | {COPY: "given"},
                 dict.fromkeys([COPY, *times], 7))  # fmt: skip


def test_the_document_is_plain_and_whole(document: dict[str, Any]) -> None:
    assert json.loads(json.dumps(document)) == document
    described = [(g["rows"], g["channels"], g["dtype"], g["pass"]) for g in document["operations"]]
    sizes = ((4, 8), (6, 16))
    assert described == [(*size, dtype, stage) for dtype in ("float32", "bfloat16") for size in sizes
                         for stage in STAGES]  # fmt: skip
    assert document["tensors_checked"] > 300
    assert len(document["targets"]) == len(GOALS) == 15
    assert document["models"] == []


def test_figures_of_a_group_fit_together(document: dict[str, Any]) -> None:
    for found in document["operations"]:
        assert found["rounds"] == 3
        assert (
            found["floor_over_copy"]
            == {"forward": 1.0, "backward": 1.5, "both": 2.5}[found["pass"]]
        )
        norm = "F.layer_norm" if found["pass"] == "forward" else "nn.LayerNorm"
        assert found["contenders"][norm]["times_as_fast_as_layer_norm"] == [1.0, 1.0, 1.0]
        assert found["contenders"][COPY]["over_copy"] == [1.0, 1.0, 1.0]
        for name, entry in found["contenders"].items():
            assert entry["output"] == ("given" if name.endswith("output given") else "allocated")
            assert entry["repetitions"] >= 1
            for key in ("microseconds", "over_copy", "times_as_fast_as_layer_norm"):
                median, lower, upper = entry[key]
                assert 0 < lower <= median <= upper
            has_eager = name.split(" ")[0].rstrip(",") in (
                "DyISRU",
                "DyT",
                "Derf",
            ) and not name.endswith("eager")
            assert ("times_as_fast_as_eager" in entry) == has_eager


def test_the_machine_is_described() -> None:
    found = describe()
    assert found["cores"] >= 1
    assert set(found) >= {
        "cpu",
        "flags",
        "caches",
        "torch",
        "python",
        "backend",
        "memory_gib",
        "date",
    }
    line = summary(found)
    assert found["cpu"] in line
    assert f"kernels: {found['backend']}" in line


def test_tables_show_each_contender_once_with_time_and_ratio() -> None:
    one = group(512, 768, "float32", "forward", F_layer_norm=50, DyISRU=25, DyT_eager=480.4)
    two = group(16, 384, "float32", "forward", F_layer_norm=5, DyISRU=10)
    [rows] = table.operation_tables({"operations": [one.to_dict(), two.to_dict()]})
    assert rows.title == "forward, no grad, float32, 2 threads"
    assert rows.columns == ["", "512 x 768", "16 x 384"]
    assert rows.rows == [
        [COPY, "10 (5)", "10 (0.5)"],
        ["F.layer_norm", "50 (1)", "5 (1)"],
        ["DyISRU", "25 (2)", "10 (0.5)"],
        ["DyT eager", "480 (0.1)", ""],
    ]
    assert "times as fast as F.layer_norm in the same rounds" in rows.note
    assert "3 rounds; half the distance of the quartiles is 100%" in rows.note


def test_a_terminal_shows_all_of_it(document: dict[str, Any]) -> None:
    console = Console(file=io.StringIO(), width=132, record=True)
    for part in table.printed(document):
        console.print(part, markup=False)
    text = console.export_text()
    for words in ("forward, no grad, float32, 1 thread", "backward alone, bfloat16", "4 x 8", "6 x 16", "DyISRU eager",
                  "Ratios, 1 thread", "tensors were right before anything was timed"):  # fmt: skip
        assert words in text
    assert "…" not in text


@pytest.mark.parametrize(
    ("load", "busy"), [([0.1, 2.0, 2.0], False), ([0.6, 0.0, 0.0], True), ([], False)]
)
def test_a_busy_machine_is_said_to_be_one(
    document: dict[str, Any], load: list[float], busy: bool
) -> None:
    changed = document | {"machine": document["machine"] | {"load_before": load}}
    assert ("those of a busy one" in table.headline(changed)) == busy
    assert ("do not rely on them" in table.ratios(changed).note) == busy


def test_ratios_are_looked_up_and_judged_plainly() -> None:
    groups = [
        group(512, 768, "float32", "forward", F_layer_norm=50, DyISRU=26, DyT=40, DyT_eager=480),
        group(512, 768, "bfloat16", "forward", F_layer_norm=50, DyISRU=10),
        group(8192, 1024, "float32", "forward", DyISRU__output_given=12, DyT__output_given=9),
        group(16, 384, "float32", "both", nn_LayerNorm=10),
    ]
    model = ModelGroup("all-MiniLM-L6-v2", "1 x 32 tokens", 13, 2, False,
                       {"norms": [1.08, 2.16], "DyISRU": [1.02, 2.04], "identities": [1.0, 2.0]}, {})  # fmt: skip
    found = {row["what"]: row for row in ratios(groups, [model], 2)}
    assert len(found) == len(GOALS)

    def judged(start: str) -> tuple[float | None, bool | None, bool | None]:
        [row] = [row for what, row in found.items() if what.startswith(start)]
        median = None if row["measured"] is None else round(row["measured"][0], 3)
        return median, reached(row), reached(row, "better")

    assert judged("DyISRU forward, float32") == (1.923, True, False)
    assert judged("DyT forward, float32") == (12.0, True, False)
    assert judged("DyISRU forward, bfloat16") == (5.0, True, True)
    assert judged("DyISRU forward at 8192") == (1.2, False, False)
    assert judged("DyT forward at 8192") == (0.9, True, True)
    assert judged("all-MiniLM-L6-v2") == (0.02, True, False)
    # Sizes, contenders and machines that are not there.
    assert (
        judged("DyISRU backward")
        == judged("DyISRU forward + backward, 16")
        == judged("H200: DyT")
        == (None,) * 3
    )
    assert next(row for what, row in found.items() if "16 x 384, over" in what and "+" in what)[
        "note"
    ].startswith("DyISRU")
    # Of another number of threads, or another device.
    assert all(row["measured"] is None for row in ratios(groups, [model], 1))
    assert all(row["measured"] is None for row in ratios(groups, [model], 2, "cuda"))


def test_ratios_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "H200")
    groups = [
        group(8192, 4096, "bfloat16", "forward", DyISRU__output_given=11),
        group(8192, 4096, "bfloat16", "both", DyISRU=30, DyT=30, Liger_DyT=75),
    ]
    found = [row for row in ratios(groups, [], 2, "cuda") if row["what"].startswith("H200")]
    assert [row["measured"][0] for row in found] == pytest.approx([1.1, 1.2, 2.5])
    assert [reached(row) for row in found] == [True, True, True]
    assert [reached(row, "better") for row in found] == [False, False, False]
    assert [row["note"] for row in found] == ["H200"] * 3
    assert all(row["measured"] is None for row in ratios(groups, [], 2, "cpu"))


def test_ratios_in_words() -> None:
    rows = [
        {"what": "a", "unit": "times as fast", "measured": None, "note": "why"},
        {"what": "b", "unit": "times as fast", "measured": [2.0, 1.0, 3.0], "note": ""},
        {"what": "c", "unit": "share", "measured": [0.02, 0.01, 0.03], "note": "LayerNorm's: 1.0%"},
    ]
    shown = table.ratios(
        {"targets": rows, "settings": {"threads": [1]}, "machine": {"load_before": [0.0]}}
    )
    assert shown.rows == [
        ["b", "2 (1 to 3) times", ""],
        ["c", "2.0% (1.0% to 3.0%)", "LayerNorm's: 1.0%"],
    ]


def test_the_picture_is_a_png_of_every_pass(document: dict[str, Any]) -> None:
    from matplotlib.image import imread

    drawn = draw(document)
    assert re.match(rb"\x89PNG", drawn)
    height, width = imread(io.BytesIO(drawn)).shape[:2]
    assert width > 2 * height > 600
    without = copy.deepcopy(document)
    for group in without["operations"]:
        group["contenders"].pop("DyT", None)
    assert draw(without) != drawn
