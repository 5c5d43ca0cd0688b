"""The main job in one call, on a model of plain modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import dynorm
from dynorm.errors import ArgumentError, DataError, ModelError


def model_of() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 16), nn.RMSNorm(16))


def data(count: int = 8) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(32, 16, generator=generator) for _ in range(count)]


# At the higher rate distillation makes the model worse, and says so.
@pytest.mark.filterwarnings("ignore::dynorm.errors.CalibrationWarning")
@pytest.mark.parametrize(("lr", "kept"), [(1e-3, True), (10.0, False)])
def test_a_distillation_that_does_harm_is_not_kept(lr: float, kept: bool) -> None:
    report = dynorm.convert_model(model_of(), data(), steps=4, lr=lr)
    stages = report.meta["stages"]
    assert stages["distill"]["kept"] is kept
    # Of eight batches two are held out, and these are compared after each stage.
    errors = [stages[name]["output"]["error"] for name in ("calibrate", "distill")]
    assert (errors[0] == errors[1]) is not kept
    assert report.output.error == pytest.approx(errors[1], rel=1e-5)
    assert report.output.cosine_mean > 0.9


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"batches": data(1)}, DataError),
        ({"batches": []}, DataError),
        ({"batches": torch.randn(32, 16)}, DataError),
        ({"held_out": [torch.zeros(3, 5)]}, DataError),
        ({"only": "5"}, ArgumentError),
        ({"witnesses": 17}, ArgumentError),
        ({"batches": [*data(6), torch.full((32, 16), torch.nan)]}, DataError),
    ],
)
def test_an_error_leaves_the_model_as_it_was(
    options: dict[str, Any], error: type[Exception]
) -> None:
    model = model_of()
    with pytest.raises(error):
        dynorm.convert_model(model, **{"batches": data(), "steps": 0} | options)
    assert [type(module) for module in model] == [type(module) for module in model_of()]
    for ours, theirs in zip(model.parameters(), model_of().parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_model_without_norms_or_converted_already_is_refused() -> None:
    with pytest.raises(ModelError):
        dynorm.convert_model(nn.Sequential(nn.Linear(16, 16)), data(), steps=0)
    model = model_of()
    dynorm.convert_model(model, data(), steps=0)
    with pytest.raises(ModelError, match="restore_"):
        dynorm.convert_model(model, data(), steps=0)
