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
@pytest.mark.parametrize("lr", [1e-3, 10.0])
def test_the_values_of_the_best_stage_are_kept(lr: float) -> None:
    report = dynorm.convert_model(model_of(), data(), refine=4, steps=4, lr=lr)
    names = ["calibrate", "refine", "distill"]
    stages = {name: report.meta["stages"][name] for name in names}
    # Of eight batches two are held out, and these are compared after each stage.
    losses = [stages[name]["output"]["error"] for name in names]
    assert report.output.error == pytest.approx(min(losses), rel=1e-5)
    for name in names[losses.index(min(losses)) + 1 :]:
        assert stages[name]["kept"] is False
    assert report.output.cosine_mean > 0.9


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"batches": data(1)}, DataError),
        ({"batches": []}, DataError),
        ({"batches": torch.randn(32, 16)}, DataError),
        ({"held_out": [torch.zeros(3, 5)]}, DataError),
        ({"to": "nothing"}, ArgumentError),
        ({"to": "annealed"}, ArgumentError),
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
        dynorm.convert_model(model, **{"batches": data(), "refine": 2, "steps": 0} | options)
    assert [type(module) for module in model] == [type(module) for module in model_of()]
    for ours, theirs in zip(model.parameters(), model_of().parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_model_without_norms_or_converted_already_is_refused() -> None:
    with pytest.raises(ModelError):
        dynorm.convert_model(nn.Sequential(nn.Linear(16, 16)), data(), steps=0)
    model = model_of()
    dynorm.convert_model(model, data(), refine=0, steps=0)
    with pytest.raises(ModelError, match="restore_"):
        dynorm.convert_model(model, data(), steps=0)
