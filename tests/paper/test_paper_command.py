"""``dynorm paper``: the files that it leaves, that they agree, and how it fails."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from dynorm.cli import app
from dynorm.errors import StorageError
from dynorm.paper.generality import reproduce
from dynorm.paper.table import document


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["paper", *arguments])


FILES = {"table.json", "fig1.png", "fig2.png", "fig3.png"}


@pytest.fixture
def unrendered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes longest, and has tests of its own."""
    monkeypatch.setattr("dynorm.paper.figures.draw", lambda name, _: name)
    monkeypatch.setattr("dynorm.paper.figures.render", lambda _: b"png")


@pytest.mark.usefixtures("unrendered")
def test_everything_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    result = run("--samples", "3")
    assert (result.exit_code, result.stderr) == (0, "")
    assert {path.name for path in Path("paper").iterdir()} == FILES
    assert Path("paper/fig2.png").read_text() == "png"
    for text in ("0.048610135", "301.05995", "0.327877", "0.049", "301.1", "298.137", "292.204"):
        assert text in result.stdout
    assert "0 of 3" in result.stdout
    studies = json.loads(Path("paper/table.json").read_text())["studies"]
    assert [study["samples"] for study in studies] == [3] * 10


@pytest.mark.usefixtures("unrendered")
def test_the_table_is_the_document_in_a_new_folder(tmp_path: Path) -> None:
    out = tmp_path / "a" / "b"
    run("--samples", "1", "--out", str(out))
    assert json.loads((out / "table.json").read_text()) == document(reproduce(1))


@pytest.mark.usefixtures("unrendered")
def test_files_are_not_replaced_unasked(tmp_path: Path) -> None:
    mine = tmp_path / "fig2.png"
    mine.write_text("mine")
    words = ("--samples", "1", "--out", str(tmp_path))
    refused = run(*words).exception
    assert isinstance(refused, StorageError)
    assert "fig2.png" in str(refused)
    assert "--overwrite" in str(refused)
    assert [path.name for path in tmp_path.iterdir()] == ["fig2.png"]
    assert mine.read_text() == "mine"
    assert run(*words, "--overwrite").exit_code == 0
    assert mine.read_text() == "png"


@pytest.mark.parametrize("blocked", ["fig2.png", "table.json"])
def test_a_path_that_cannot_be_written_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blocked: str
) -> None:
    def too_early(*_: object, **__: object) -> None:
        raise AssertionError("the work began")

    monkeypatch.setattr("dynorm.paper.generality.reproduce", too_early)
    (tmp_path / blocked).mkdir()
    result = run("--out", str(tmp_path))
    assert isinstance(result.exception, StorageError)
    assert blocked in str(result.exception)
    assert [path.name for path in tmp_path.iterdir()] == [blocked]


def test_the_document_agrees_with_the_functions() -> None:
    reproduction = reproduce(1)
    found = document(reproduction)
    results = {**found["fits"], "closed form": found["closed_form"]}  # type: ignore[dict-item]
    for name, fit in reproduction.fits.items():
        outputs = fit.function(reproduction.simulation.outliers)
        assert results[name]["outputs"] == pytest.approx(outputs, rel=1e-14)
        assert results[name]["residuals"] == fit.residuals.tolist()
        assert results[name][fit.constant] == fit.value
