"""The table of every report: aligned, at most 80 columns wide, and printable anywhere."""

from __future__ import annotations

from dynorm.table import Column, Table

PATHS = [
    f"model.layers.{i}.{name}_layernorm" for i in (1, 11) for name in ("input", "post_attention")
]


def test_numbers_stand_right_and_text_left() -> None:
    lines = str(
        Table(["site", "norm", Column("beta", ".1f")], [("a", "LN", 1.25), ("b", "RMS", 100)])
    ).splitlines()
    assert lines == ["site  norm   beta", "a     LN      1.2", "b     RMS   100.0"]


def test_long_paths_are_shortened_and_still_told_apart() -> None:
    columns = ["site", *(Column("eleven char", ".3f") for _ in range(5))]
    lines = str(Table(columns, [(path, *[1.0] * 5) for path in PATHS])).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[-1] == "site: shortened, a letter for a word"
    assert [line.split()[0] for line in lines[1:-2]] == [
        "m.l.1.i_layernorm",
        "m.l.1.p_a_layernorm",
        "m.l.11.i_layernorm",
        "m.l.11.p_a_layernorm",
    ]


def test_a_word_is_cut_in_all_long_paths_or_in_none() -> None:
    paths = ["encoder.layer.0.attention.output.norm", "encoder.layer.0.output.norm", "norm"]
    columns = ["site", *(Column("eleven char", ".3f") for _ in range(5))]
    lines = str(Table(columns, [(path, *[1.0] * 5) for path in paths])).splitlines()
    assert [line.split()[0] for line in lines[1:4]] == [
        "e.l.0.a.output.norm",
        "e.l.0.output.norm",
        "norm",
    ]


def test_what_cannot_be_shortened_is_cut() -> None:
    lines = str(Table(["site", "reason"], [("x" * 99, "y" * 60)])).splitlines()
    assert lines[1] == f"{'x' * 11}..{'x' * 6} {'y' * 60}"


def test_groups_stand_above_their_columns_and_a_page_has_more() -> None:
    columns = [
        "site",
        Column("linear", group="outliers"),
        Column("DyT", group="outliers"),
        Column("C", page_only=True),
    ]
    lines = str(Table(columns, [("a", 1, 2, 3)])).splitlines()
    assert lines == ["         outliers", "site  linear  DyT", "a          1    2"]


def test_it_prints_where_the_console_is_not_utf8() -> None:
    table = Table(
        [Column("σ", lambda value: f"−{value}…")], [(1,)], notes=["√(C−1) · β"], title="– α"
    )
    assert str(table).encode("ascii").decode() == "- alpha\n\nsigma\n -1..\n\nsqrt(C-1) * beta"


def test_without_rows_the_title_and_the_notes_are_left() -> None:
    assert (
        str(Table(["site"], [], ["head  not reached"], "0 sites")) == "0 sites\n\nhead  not reached"
    )


def test_columns_say_what_they_mean_in_wrapped_lines() -> None:
    columns = [
        "site",
        Column("beta", note="the constant " * 9 + "²"),
        Column("C", note="channels", page_only=True),
    ]
    text = str(Table(columns, [("a", 1.0, 2)], ["b  not reached"], "a title " * 12))
    assert max(map(len, text.splitlines())) <= 80
    assert [part.split()[0] for part in text.split("\n\n")] == ["a", "site", "b", "beta:"]
    assert text.endswith("constant ^2")
