"""``dynorm paper``: the files that it leaves, that they agree, and how it fails."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from dynorm.cli import app
from dynorm.errors import ArgumentError, StorageError
from dynorm.paper.generality import reproduce
from dynorm.paper.table import document


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["paper", *arguments])


def test_everything_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    # Rendering takes longest; the next test has it.
    monkeypatch.setattr("dynorm.paper.figures.render", lambda _, format: format.encode())
    result = run("--samples", "3")
    assert (result.exit_code, result.stderr) == (0, "")
    files = {f"fig{number}.{format}" for number in range(1, 4) for format in ("png", "svg")}
    files.add("table.json")
    assert {path.name for path in Path("paper").iterdir()} == files
    assert Path("paper/fig2.svg").read_text() == "svg"
    for text in ("0.048610135", "301.05995", "0.327877", "0.049", "301.1", "298.137", "292.204"):
        assert text in result.stdout
    assert "0 of 3" in result.stdout
    studies = json.loads(Path("paper/table.json").read_text())["studies"]
    assert [study["samples"] for study in studies] == [3] * 10


def test_json_is_one_document_and_nothing_else(tmp_path: Path) -> None:
    out = tmp_path / "a" / "b"
    result = run("--seed", "1", "--json", "--figure", "fig1", "--figure", "fig1", "--out", str(out))
    found = json.loads(result.stdout)
    assert found == json.loads((out / "table.json").read_text()) == document(reproduce())
    assert "studies" not in found
    files = {path.name for path in out.iterdir()}
    assert files == {"fig1.png", "fig1.svg", "table.json"}


def test_another_seed_is_another_sample(tmp_path: Path) -> None:
    setting = ("--seed", "7", "--channels", "50", "--sigma", "1")
    result = run(*setting, "--figure", "fig1", "--out", str(tmp_path))
    assert "C = 50, sigma = 1, mean 0, seed 7" in result.stdout
    assert f"{reproduce(50, 1.0, 7).fits['DyISRU'].value:.8g}" in result.stdout
    # The paper prints no figures for this setting.
    assert "301.1" not in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--figure", "fig9"], "a figure must be one of fig1, fig2, fig3, got 'fig9'"),
        (["--channels", "2"], "channels must be at least 3, got 2"),
        (["--channels", "100000"], "channels must be at most 65,536, got 100,000"),
        (["--sigma", "nan"], "sigma must be positive"),
        (["--seed", "-1"], "seed must be from 0"),
        (["--seed", "1", "--samples", "5"], "leave out one of the two"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_made(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    result = run("--out", str(tmp_path / "out"), *arguments)
    assert isinstance(result.exception, ArgumentError)
    assert message in str(result.exception)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("blocked", ["fig2.svg", "table.json"])
def test_a_path_that_cannot_be_written_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blocked: str
) -> None:
    def too_early(*_: object, **__: object) -> None:
        raise AssertionError("the work began")

    monkeypatch.setattr("dynorm.paper.generality.study_all", too_early)
    (tmp_path / blocked).mkdir()
    result = run("--out", str(tmp_path))
    assert isinstance(result.exception, StorageError)
    assert blocked in str(result.exception)
    assert [path.name for path in tmp_path.iterdir()] == [blocked]


def test_the_document_agrees_with_the_functions() -> None:
    reproduction = reproduce()
    found = document(reproduction)
    results = {**found["fits"], "closed form": found["closed_form"]}  # type: ignore[dict-item]
    for name, fit in reproduction.fits.items():
        outputs = fit.function(reproduction.simulation.outliers)
        assert results[name]["outputs"] == pytest.approx(outputs, rel=1e-14)
        assert results[name]["residuals"] == fit.residuals.tolist()
        assert results[name][fit.constant] == fit.value
