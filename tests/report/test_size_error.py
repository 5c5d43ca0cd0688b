"""How far layers misjudge the sizes of tokens, and the warning where inputs are unlike those of the fit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import dynorm
from dynorm.errors import CalibrationWarning
from dynorm.replace.converted import dynorm_layers


def tokens(seed: int, massive: int) -> Tensor:
    """Return tokens with one channel that is massive on some of them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(512, 32, generator=generator)
    x[:, massive] *= 30 * torch.rand(512, generator=generator)
    return x


def converted() -> tuple[nn.Module, nn.Module]:
    original = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 4))
    model = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 4))
    model.load_state_dict(original.state_dict())
    dynorm.convert_(model, dynorm.find_norms(model, tokens(0, 3)), per_channel=False, witnesses=2)
    dynorm.calibrate_(model, [tokens(0, 3)])
    return model, original


def test_the_error_of_a_size_is_that_of_the_sums() -> None:
    model, original = converted()
    x = tokens(1, 3)
    report = dynorm.measure(model, [x], original=original, fit_on=[tokens(0, 3)])
    (site,) = report.sites
    (layer,) = dynorm_layers(model).values()
    u = x.double() - layer.center.detach().double()
    gains = layer.log_gain.detach().double().exp()
    predicted = (
        layer.beta().detach().double().flatten()[0]
        + u[:, list(layer.witness_channels)].square() @ gains
    )
    actual = 32 * (x.double().var(1, unbiased=False) + 1e-5)
    logs = (predicted / actual).log() / 2
    assert site.size_error == pytest.approx(float(logs.std(unbiased=False)), rel=1e-6)
    assert site.size_error_fit is not None
    assert 0.5 < site.size_error / site.size_error_fit < 2
    without = dynorm.measure(model, [x], original=original)
    assert without.sites[0].size_error_fit is None


def test_inputs_unlike_those_of_the_fit_are_warned_of() -> None:
    model, original = converted()
    with pytest.warns(CalibrationWarning, match=r"like.*fit"):
        dynorm.measure(model, [tokens(1, 7)], original=original, fit_on=[tokens(0, 3)])
