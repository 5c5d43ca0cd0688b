"""``dynorm paper``: the files that it leaves, that they agree, and how it fails."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

import dynorm
from dynorm.cli import app, main
from dynorm.paper.generality import Reproduction, reproduce, study_all
from dynorm.paper.table import document, outliers_csv, printed


@pytest.fixture(scope="module")
def reproduction() -> Reproduction:
    return reproduce(generality=study_all(samples=20))


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["paper", *arguments])


def dynorm_paper(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dynorm", "paper", *arguments]
    # A terminal's width and colours would show in the output.
    environment = {**os.environ, "COLUMNS": "80", "TERM": "dumb"}
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )


def rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(text.splitlines()))


def test_everything_by_default(tmp_path: Path) -> None:
    ran = dynorm_paper("--samples", "10", cwd=tmp_path)
    assert (ran.returncode, ran.stderr.strip()) == (0, "")
    figures = [f"fig{i}.{format}" for i in range(1, 6) for format in ("png", "svg")]
    tables = ["table.csv", "table.json"]
    assert sorted(path.name for path in (tmp_path / "paper").iterdir()) == sorted(
        [*figures, *tables]
    )
    for text in (
        "0.048610135",
        "301.05995",
        "0.327877",
        "0.00481421",
        "0.049",
        "301.1",
        "298.137",
        "292.204",
    ):
        assert text in ran.stdout
    assert "DyISRU is nearer to LayerNorm in 10 of 10" in " ".join(ran.stdout.split())
    assert "…" not in ran.stdout
    assert max(map(len, ran.stdout.splitlines())) <= 80


def test_json_is_one_document_and_nothing_else(tmp_path: Path) -> None:
    out = tmp_path / "a" / "b"
    result = run("--seed", "1", "--json", "--figure", "fig1", "--figure", "fig1", "--out", str(out))
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert found == json.loads((out / "table.json").read_text())
    assert found["fits"]["DyT"]["alpha"] == pytest.approx(0.0486101350961, rel=1e-11)
    assert found["fits"]["DyISRU"]["beta"] == pytest.approx(301.059953889, rel=1e-11)
    assert found["fits"]["DyT"]["mean_absolute_residual"] == pytest.approx(0.327877002522, rel=1e-9)
    assert found["fits"]["DyISRU"]["mean_absolute_residual"] == pytest.approx(
        0.00481420846386, rel=1e-9
    )
    assert "generality" not in found
    assert sorted(path.name for path in out.iterdir()) == [
        "fig1.png",
        "fig1.svg",
        "table.csv",
        "table.json",
    ]


def test_another_seed_is_another_sample(tmp_path: Path) -> None:
    result = run(
        "--seed",
        "7",
        "--channels",
        "50",
        "--sigma",
        "1",
        "--figure",
        "fig4",
        "--out",
        str(tmp_path),
    )
    assert result.exit_code == 0
    assert "C = 50, sigma = 1, mean 0, seed 7" in result.stdout
    assert f"{reproduce(50, 1.0, 7).fits['DyISRU'].value:.8g}" in result.stdout
    # The paper prints no figures for this setting.
    assert "301.1" not in result.stdout


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["--figure", "fig9"], "a figure must be one of fig1, fig2, fig3, fig4, fig5, got 'fig9'"),
        (["--seed", "2", "--figure", "fig5"], "leave out the seed"),
        (["--channels", "1"], "channels must be at least 3, got 1"),
        (["--channels", "100000"], "channels must be at most 65,536, got 100,000"),
        (["--channels", "2"], "channels must be at least 3, got 2"),
        (["--sigma", "0"], "sigma must be positive"),
        (["--sigma", "nan"], "sigma must be positive"),
        (["--seed", "-1"], "seed must be from 0"),
        (["--seed", "1", "--samples", "5"], "leave out one of the two"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_made(
    tmp_path: Path, arguments: list[str], match: str
) -> None:
    result = run("--out", str(tmp_path / "out"), *arguments)
    assert isinstance(result.exception, dynorm.errors.ArgumentError)
    assert match in str(result.exception)
    assert list(tmp_path.iterdir()) == []


def test_exit_statuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    def status(*arguments: str) -> tuple[int | str | None, str, str]:
        monkeypatch.setattr(sys, "argv", ["dynorm", "paper", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code, *capsys.readouterr()

    (tmp_path / "file").write_text("")
    code, printed, said = status("--sigma", "0")
    assert (code, printed) == (2, "")
    assert said.startswith("dynorm: --sigma must be positive")
    code, printed, said = status("--out", "file")
    assert (code, printed) == (1, "")
    assert "'file/table.json' cannot be written" in said
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize("blocked", ["fig2.svg", "table.csv", "table.json"])
def test_a_path_that_cannot_be_written_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blocked: str
) -> None:
    def too_early(*_: object, **__: object) -> None:
        raise AssertionError("the work began")

    monkeypatch.setattr("dynorm.paper.generality.study_all", too_early)
    (tmp_path / blocked).mkdir()
    result = run("--out", str(tmp_path))
    assert isinstance(result.exception, dynorm.errors.StorageError)
    assert blocked in str(result.exception)
    assert [path.name for path in tmp_path.iterdir()] == [blocked]


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = run("--out", str(tmp_path / "file" / "sub"))
    assert isinstance(result.exception, dynorm.errors.StorageError)
    assert "cannot be written" in str(result.exception)


def test_the_outliers_csv_agrees_with_the_document(reproduction: Reproduction) -> None:
    found, table = document(reproduction), rows(outliers_csv(reproduction))
    assert len(table) == 5 * 9
    for name in ("DyT", "Derf", "DyISRU", "linear", "closed form"):
        fit = found["closed_form"] if name == "closed form" else found["fits"][name]
        mine = [row for row in table if row["function"] == name]
        assert [row["S"] for row in mine] == [str(s) for s in range(1, 10)]
        assert [float(row["x"]) for row in mine] == found["simulation"]["outliers"]
        assert [float(row["layer_norm"]) for row in mine] == found["simulation"]["layer_norm"]
        assert [float(row["output"]) for row in mine] == fit["outputs"]
        assert [float(row["residual"]) for row in mine] == fit["residuals"]
        assert {float(row["value"]) for row in mine} == {fit[mine[0]["constant"]]}
        assert {float(row["mean_absolute_residual"]) for row in mine} == {
            fit["mean_absolute_residual"]
        }


def test_the_studies_document_agrees_with_its_samples(reproduction: Reproduction) -> None:
    assert reproduction.generality is not None
    base, found = reproduction.generality.base, document(reproduction)["generality"]
    assert [len(found[f"over_{axis}"]) for axis in ("channels", "sigma", "mean")] == [7, 8, 9]
    assert found["over_mean"][-1]["dyt_wins"] == 1
    assert base.seeds.tolist() == list(range(1, 21))
    assert np.median(base.residuals["DyISRU"]) == found["base"]["residuals"]["DyISRU"]["median"]
    assert base.betas[0] == pytest.approx(301.059953889, rel=1e-11)


def test_the_outputs_are_those_of_the_functions(reproduction: Reproduction) -> None:
    found = document(reproduction)
    for name, fit in reproduction.fits.items():
        mine = found["closed_form"] if name == "closed form" else found["fits"][name]
        np.testing.assert_allclose(
            mine["outputs"], fit.function(reproduction.simulation.outliers), rtol=1e-14
        )


def test_one_sample_alone_has_no_study() -> None:
    alone = reproduce()
    assert "generality" not in document(alone)
    assert len(list(printed(alone))) == 4
