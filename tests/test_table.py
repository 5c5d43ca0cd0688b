"""The table of every report: aligned, its paths whole, and plain text anywhere."""

from __future__ import annotations

from dynorm.table import Table


def test_numbers_are_on_the_right_and_texts_on_the_left() -> None:
    rows = [("a", "LN", 1.25, None), ("[14].b", "RMS", 100.0, "5%")]
    assert str(Table(["site", "norm", "beta", "share"], rows)).splitlines() == [
        "site    norm  beta  share",
        "a       LN    1.25      –",
        "[14].b  RMS    100     5%",
    ]


def test_a_long_path_stays_whole_in_a_narrow_terminal(monkeypatch: object) -> None:
    monkeypatch.setenv("COLUMNS", "40")  # type: ignore[attr-defined]
    path = "model.layers.11.post_attention_layernorm." * 3
    assert str(Table(["site", "a", "b"], [(path, 1.0, "y" * 60)])).splitlines()[1] == (
        f"{path}  1  {'y' * 60}"
    )


def test_without_rows_the_title_and_the_notes_are_left() -> None:
    assert str(Table(["site"], [], ["head: not reached"], "0 sites")) == (
        "0 sites\n\nhead: not reached"
    )
