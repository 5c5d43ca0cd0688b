"""Several reports of conversions in one table."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from dynorm.errors import ArgumentError, StorageError
from dynorm.jobs.compare import Comparison, compare_reports
from dynorm.jobs.convert import convert_pretrained
from dynorm.recipe import Recipe

QUICK = Recipe(refine=2, held_out=16, max_length=16)


def test_reports_are_rows_and_differing_options_columns(
    encoder: Path,
    texts: Path,
    tmp_path: Path,
    status: Callable[..., int | str | None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    folders = [tmp_path / "four", tmp_path / "pure", tmp_path / "other"]
    four = QUICK.changed(witnesses=4)
    recipes = [four, four.changed(witnesses=0, refine=3), four.changed(held_out=20)]
    reports = []
    for folder, recipe in zip(folders, recipes, strict=True):
        reports.append(convert_pretrained(encoder, folder, recipe, texts=[texts]))
    found = compare_reports([folders[0], folders[1] / "report.json"])
    assert found.recipes == [
        {"to": "dyisru", "witnesses": 4, "refine": 2},
        {"to": "dyisru", "witnesses": 0, "refine": 3},
    ]
    cosines = [row["cosine_mean"] for row in found.figures]
    assert cosines == pytest.approx([report.output.cosine_mean for report in reports[:2]])
    assert found.remarks == []
    assert "held-out samples differ" in str(compare_reports(folders[::2]))
    assert status("compare", *folders[:2]) == 0
    printed = capsys.readouterr().out
    assert "2 conversions" in printed
    assert f"{cosines[1]:.3f}" in printed
    assert status("compare", *folders[:2], "--json") == 0
    assert json.loads(capsys.readouterr().out)["recipes"] == found.recipes
    # The page has the size and the latency, and the report a recommendation at its end.
    page = (folders[0] / "report.html").read_text()
    assert "Size and latency" in page
    assert "Recommendation" in page
    cost = reports[0].meta["cost"]
    assert cost["now"]["bytes"] == 4 * cost["now"]["parameters"]
    assert cost["now"]["parameters"] > cost["original"]["parameters"]
    assert cost["now"]["milliseconds"] > 0


def test_an_option_that_was_not_given_is_called_default() -> None:
    recipes = [{"to": "dyisru", "witnesses": number} for number in (None, 0)]
    figures = [{"cosine_mean": 0.9}, {"cosine_mean": 0.8}]
    lines = str(Comparison(["a", "b"], recipes, figures, [])).splitlines()
    assert lines[-2].split() == ["a", "dyisru", "default", "0.900"]
    assert lines[-1].split() == ["b", "dyisru", "0", "0.800"]


def test_what_is_no_report_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    with pytest.raises(ArgumentError, match="at least two"):
        compare_reports([file])
    with pytest.raises(StorageError, match="dynorm convert"):
        compare_reports([file, file])
    file.write_text("{}")
    with pytest.raises(StorageError, match="dynorm convert"):
        compare_reports([tmp_path, tmp_path])


def test_a_busy_machine_does_not_make_a_model_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    cost = importlib.import_module("dynorm.report.cost")
    model = nn.Sequential(nn.Linear(4, 4))
    original = nn.Sequential(nn.Linear(4, 4))
    runs = 0

    def seconds(timed: nn.Module, batch: object) -> float:
        nonlocal runs
        if timed is original:
            return 0.001
        runs += 1
        # Other programs disturb all runs but every third one.
        return 0.002 if runs % 3 == 0 else 0.016

    monkeypatch.setattr(cost, "_seconds", seconds)
    found = cost.costs(original, model, torch.randn(2, 4))
    assert found["original"]["milliseconds"] == 1.0
    assert found["now"]["milliseconds"] == 2.0
    # A slow model is run a few times only.
    monkeypatch.setattr(cost, "_seconds", lambda timed, batch: 60.0)
    assert cost.costs(original, model, torch.randn(2, 4))["now"]["milliseconds"] == 60000.0
