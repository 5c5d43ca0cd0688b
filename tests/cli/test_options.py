"""The command line: options become fields of a recipe, and errors name the options."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from dynorm.cli import application, main
from dynorm.cli.application import format_warning
from dynorm.cli.pretrained import layers_of
from dynorm.errors import ArgumentError, CalibrationWarning
from dynorm.recipe import Recipe

PAIRS: list[tuple[list[str], dict[str, Any]]] = [
    (["--to", "dyt"], {"to": "dyt"}),
    (["--to", "none", "--stock"], {"to": "none", "stock": True}),
    (["--witnesses", "4"], {"witnesses": 4}),
    (["--keep-means"], {"fold_means": False}),
    (["--steps", "7"], {"steps": 7}),
    (["--lr", "1e-3", "--bf16"], {"lr": 1e-3, "bf16": True}),
    (["--checkpoints", "kept"], {"checkpoints": Path("kept")}),
    (["--held-out", "9", "--batch", "3", "--seed", "5"], {"held_out": 9, "batch": 3, "seed": 5}),
]


@pytest.mark.parametrize(("words", "changes"), PAIRS)
def test_options_are_fields_of_the_recipe(
    monkeypatch: pytest.MonkeyPatch, words: list[str], changes: dict[str, Any]
) -> None:
    taken: list[Recipe] = []

    def job(model: str, out: Path, recipe: Recipe, **options: object) -> str:
        taken.append(recipe)
        return ""

    monkeypatch.setattr("dynorm.cli.pretrained.convert_pretrained", job)
    monkeypatch.setattr("sys.argv", ["dynorm", "convert", "model", "out", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    assert taken == [Recipe().changed(**changes)]


@pytest.mark.parametrize(
    ("words", "layers"),
    [
        (["derf"], "derf"),
        (["*.attn.*=keep"], {"*.attn.*": "keep", "*": "dyisru"}),
        (["keep"], "keep"),
        (["*=keep"], "keep"),
        (["a=dyt", "linear", "b=keep"], {"a": "dyt", "b": "keep", "*": "linear"}),
    ],
)
def test_layers_by_globs(words: list[str], layers: object) -> None:
    assert layers_of(words) == layers


@pytest.mark.parametrize("words", [["dyt", "*=keep"], ["a=dyt", "a=keep"]])
def test_a_glob_is_named_once(words: list[str]) -> None:
    with pytest.raises(ArgumentError, match=r"a glob once, got '.*=keep' after another"):
        layers_of(words)


def test_wrong_values_are_named_with_status_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["dynorm", "convert", "model", "out", "--held-out", "1"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    said = "dynorm: held_out must be an integer, at least 2, got 1\n"
    assert capsys.readouterr().err.startswith(said)


def test_sigterm_is_an_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(application, "app", lambda: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(SystemExit, match="143"):
        main()


def test_only_warnings_of_dynorm_bear_its_name() -> None:
    ours = format_warning("saturates", CalibrationWarning, "layer.py", 3)
    assert ours == "dynorm: saturates\n"
    theirs = format_warning("deprecated", FutureWarning, "other.py", 3, "call()")
    assert theirs == "other.py:3: FutureWarning: deprecated\n  call()\n"
