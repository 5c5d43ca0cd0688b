"""The words that a newcomer meets: reports when they are printed, and refusals of likely mistakes."""

from __future__ import annotations

import copy
import inspect
import pkgutil
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dynorm
from dynorm.cli import main
from dynorm.errors import CalibrationWarning, DataError, StorageError
from dynorm.plain import Plain
from dynorm.report.report import Report
from dynorm.train.distill import DistillationReport


def reports() -> list[type]:
    """Return every class of a report in the package."""
    found = []
    for module in pkgutil.walk_packages(dynorm.__path__, "dynorm."):
        if module.name.rpartition(".")[2].startswith(("_", "modeling_")):
            continue
        for value in vars(import_module(module.name)).values():
            is_report = inspect.isclass(value) and issubclass(value, (Plain, Report))
            if is_report and value.__module__ == module.name:
                found.append(value)
    return found


def test_every_report_prints_itself_as_text() -> None:
    raw = [kind.__name__ for kind in reports() if kind.__str__ is object.__str__]
    # Only the base class, of which nobody sees an object, and records in others.
    assert sorted(raw) == ["FoldedSite", "LayerSpec", "NormSite", "Plain"]


def test_a_distillation_prints_its_outcome() -> None:
    report = DistillationReport(1200, 9e-4, 61.4, -0.431, -0.489)
    assert "1,200 steps of distillation in 61 s" in str(report)
    assert "loss -0.431 -> -0.489" in str(report)


def test_the_verdict_on_default_constants_asks_for_calibration() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)).eval()
    original = copy.deepcopy(model)
    dynorm.convert_(model, dynorm.find_norms(model, torch.randn(4, 8)))
    batches = [torch.randn(32, 8) for _ in range(4)]
    with pytest.warns(CalibrationWarning, match="default constants"):
        report = dynorm.measure(model, batches, original=original)
    verdict = " ".join(report.verdict().split())
    assert "Next: call dynorm.calibrate_(model, batches)" in verdict
    assert "distill" not in verdict
    dynorm.calibrate_(model, batches)
    assert "calibrate_" not in dynorm.measure(model, batches, original=original).verdict()


@pytest.mark.parametrize("text", ["hello", ["hello", "world"]])
def test_texts_have_to_be_tokens(text: Any) -> None:
    with pytest.raises(DataError, match="turn texts into tokens"):
        dynorm.find_norms(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)), text)


def test_a_missing_folder_is_named() -> None:
    with pytest.raises(StorageError, match="no such directory"):
        dynorm.load("convx")


def test_a_recipe_in_a_message_is_not_an_option_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "recipe.json").write_text('{"witness": 3}')
    words = ["dynorm", "convert", "model", "out", "--recipe", str(tmp_path / "recipe.json")]
    monkeypatch.setattr("sys.argv", words)
    with pytest.raises(SystemExit):
        main()
    message = capsys.readouterr().err
    assert (
        "in a recipe every option must be known, got 'witness': do you mean 'witnesses'?" in message
    )
