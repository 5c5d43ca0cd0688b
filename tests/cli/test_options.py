"""The options of the command line reach the jobs, and their defaults are those of the recipe."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from dynorm.cli import app, main
from dynorm.errors import ArgumentError
from dynorm.recipe import Recipe

# The fields of a recipe that only Python or a file sets.
NOT_OPTIONS = {"calibration", "center", "lean", "refine_lr", "sites"}
OPTIONS: list[tuple[list[str], dict[str, Any]]] = [
    (["--to", "derf"], {"to": "derf"}),
    (["--steps", "7"], {"steps": 7}),
    (["--minutes", "0.5"], {"minutes": 0.5}),
    (["--refine", "8"], {"refine": 8}),
    (["--held-out", "9"], {"held_out": 9}),
    (["--max-length", "10"], {"max_length": 10}),
    (["--batch", "11"], {"batch": 11}),
    (["--only", "a.*", "--only", "b"], {"only": ["a.*", "b"]}),
    (["--skip", "c"], {"skip": ["c"]}),
    (["--per-channel"], {"per_channel": True}),
    (["--per-layer"], {"per_channel": False}),
    (["--witnesses", "0"], {"witnesses": 0}),
    (["--fold-means"], {"fold_means": True}),
    (["--keep-means"], {"fold_means": False}),
    (["--tolerance", "0.25"], {"tolerance": 0.25}),
    (["--seed", "12"], {"seed": 12}),
    (["--lr", "0.125"], {"lr": 0.125}),
    (["--bf16"], {"bf16": True}),
    (["--accumulate", "13"], {"accumulate": 13}),
    (["--report-to", "wandb"], {"report_to": ["wandb"]}),
    (["--keep-on-interrupt"], {"keep_on_interrupt": True}),
    (["--checkpoints", "kept"], {"checkpoints": Path("kept")}),
]


class Report:
    """An empty result."""

    def to_dict(self) -> dict[str, Any]:
        return {}


def called(monkeypatch: pytest.MonkeyPatch, job: str, words: list[str]) -> dict[str, Any]:
    """Return the arguments that a command passes to its job, with the recipe under its name."""
    passed: dict[str, Any] = {}

    def record(*positional: object, **named: object) -> Report:
        passed.update(named)
        passed["positional"] = positional
        return Report()

    monkeypatch.setattr(f"dynorm.cli.pretrained.{job}", record)
    run = CliRunner().invoke(app, words, catch_exceptions=False)
    assert run.exit_code == 0, run.output
    passed["recipe"] = next(value for value in passed["positional"] if isinstance(value, Recipe))
    return passed


@pytest.mark.parametrize(("words", "values"), [([], {}), *OPTIONS])
def test_an_option_of_convert_sets_its_field_only(
    monkeypatch: pytest.MonkeyPatch, words: list[str], values: dict[str, Any]
) -> None:
    passed = called(monkeypatch, "convert_pretrained", ["convert", "model", "out", *words])
    assert passed["recipe"] == Recipe(**values)
    assert passed["positional"][:2] == ("model", Path("out"))


def test_every_field_of_the_recipe_is_an_option() -> None:
    set_by_options = {name for _, values in OPTIONS for name in values}
    assert set_by_options | NOT_OPTIONS == {field.name for field in fields(Recipe)}


@pytest.mark.parametrize(("words", "values"), [([], {}), *OPTIONS])
def test_an_option_replaces_one_field_of_a_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: list[str], values: dict[str, Any]
) -> None:
    written = Recipe(
        to="dyt", refine=3, per_channel=True, lean=0.25, sites={"*.ln_f": {"to": "linear"}}
    )
    written.save(tmp_path / "recipe.json")
    of_file = ["--recipe", str(tmp_path / "recipe.json")]
    passed = called(
        monkeypatch, "convert_pretrained", ["convert", "model", "out", *of_file, *words]
    )
    assert passed["recipe"] == written.changed(**values)


def test_an_option_with_its_default_value_replaces_the_field_of_a_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    Recipe(refine=3).save(tmp_path / "recipe.json")
    words = ["convert", "model", "out", "--recipe", str(tmp_path / "recipe.json"), "--refine", "50"]
    assert called(monkeypatch, "convert_pretrained", words)["recipe"] == Recipe()


def test_options_that_are_not_of_the_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    words = "--texts a --texts b --images c --audio d --name e --device cpu --dtype float64"
    flags = ["--keep-original", "--overwrite", "--json"]
    words_of_convert = ["convert", "model", "out", *words.split(), *flags]
    passed = called(monkeypatch, "convert_pretrained", words_of_convert)
    assert (passed["texts"], passed["images"], passed["audio"]) == (["a", "b"], ["c"], ["d"])
    assert (passed["name"], passed["device"], passed["dtype"]) == ("e", "cpu", "float64")
    assert passed["keep_original"] is True
    assert passed["overwrite"] is True
    assert passed["quiet"] is True


def test_options_of_inspect(monkeypatch: pytest.MonkeyPatch) -> None:
    words = "--samples 5 --max-length 6 --only a --skip b --seed 7 --texts c --json"
    passed = called(monkeypatch, "inspect_pretrained", ["inspect", "model", *words.split()])
    assert passed["recipe"] == Recipe(max_length=6, only=["a"], skip=["b"], seed=7)
    assert (passed["samples"], passed["texts"]) == (5, ["c"])


def test_every_option_has_a_help() -> None:
    group: Any = typer.main.get_command(app)
    for name, command in group.commands.items():
        for parameter in command.params:
            assert parameter.help, f"{name} {parameter.name}"


@pytest.mark.parametrize(
    ("message", "printed"),
    [
        ("held_out must be at least 2", "--held-out must be at least 2"),
        ("lr, accumulate and steps must come", "--lr, --accumulate and --steps must come"),
        ("give steps or minutes, got steps=3", "give steps or minutes, got --steps=3"),
        ("choose another, or pass overwrite=True", "choose another, or pass --overwrite"),
        ("the model's steps must be few", "the model's --steps must be few"),
        ("call model.to(device=...) first", "call model.to(device=...) first"),
        ("the out-of-place seed is odd", "the out-of-place seed is odd"),
    ],
)
def test_errors_name_options(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    message: str,
    printed: str,
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ArgumentError(message)

    monkeypatch.setattr("dynorm.cli.pretrained.convert_pretrained", fail)
    monkeypatch.setattr("sys.argv", ["dynorm", "convert", "model", "out"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    assert capsys.readouterr().err.strip() == f"dynorm: {printed}"
