"""The command line: options become fields of a recipe, and errors name the options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dynorm.cli import main
from dynorm.cli.pretrained import layers_of
from dynorm.recipe import Recipe

PAIRS: list[tuple[list[str], dict[str, Any]]] = [
    (["--to", "dyt"], {"to": "dyt"}),
    (["--per-channel"], {"per_channel": True}),
    (["--witnesses", "4"], {"witnesses": 4}),
    (["--keep-means"], {"fold_means": False}),
    (["--refine", "0", "--steps", "7"], {"refine": 0, "steps": 7}),
    (["--lr", "1e-3", "--accumulate", "2", "--bf16"], {"lr": 1e-3, "accumulate": 2, "bf16": True}),
    (["--checkpoints", "kept"], {"checkpoints": Path("kept")}),
    (["--report-to", "a", "--report-to", "b"], {"report_to": ("a", "b")}),
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
        (["keep"], {"*": None}),
        (["*.attn.*=keep"], {"*.attn.*": None, "*": "dyisru"}),
        (["a=dyt", "linear", "b=keep"], {"a": "dyt", "b": None, "*": "linear"}),
    ],
)
def test_layers_by_globs(words: list[str], layers: object) -> None:
    assert layers_of(words) == layers


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--held-out", "1"], "--held-out must be an integer, at least 2"),
        (["--witnesses", "-1"], "witnesses must be a number from 0 to 16"),
        (["--lr", "0"], "--lr must be a positive finite number"),
    ],
)
def test_errors_name_the_options(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    said: str,
) -> None:
    monkeypatch.setattr("sys.argv", ["dynorm", "convert", "model", "out", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert said in " ".join(capsys.readouterr().err.split())
