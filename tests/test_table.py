"""The table of every report: aligned, its paths whole, and plain text anywhere."""

from __future__ import annotations

import pytest

from dynorm.report.rendering import table_html
from dynorm.table import Table


def test_numbers_are_on_the_right_and_texts_on_the_left() -> None:
    rows = [("a", "LN", 1.25, None), ("[14].b", "RMS", 100.0, "5%")]
    assert str(Table(["site", "norm", "beta", "share"], rows)).splitlines() == [
        "site    norm  beta  share",
        "a       LN    1.25      –",
        "[14].b  RMS    100     5%",
    ]


def test_a_page_aligns_columns_like_the_terminal() -> None:
    table = Table(["stage", "mean cosine", "layer"], [("distilled", 0.98, "dyt")])
    page = table_html(table)
    assert '<th scope="col" class="right">mean cosine</th>' in page
    assert '<td class="right">0.98</td><td class="left">dyt</td>' in page
    assert "<td" not in table_html(Table(["stage", "mean cosine"], []))


@pytest.mark.parametrize("width", [None, "40"])
def test_a_long_path_stays_whole(monkeypatch: pytest.MonkeyPatch, width: str | None) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    path = "model.layers.11.post_attention_layernorm"
    lines = [f"{'site':{len(path)}}  norm  beta", f"{path}  LN       1"]
    if width:
        monkeypatch.setenv("COLUMNS", width)
        lines = ["site", "  norm  beta", path, "  LN       1"]
    assert str(Table(["site", "norm", "beta"], [(path, "LN", 1.0)])).splitlines() == lines


def test_without_rows_the_title_and_the_notes_are_left() -> None:
    assert str(Table(["site"], [], ["head: not reached"], "0 sites")) == (
        "0 sites\n\nhead: not reached"
    )
