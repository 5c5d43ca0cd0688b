"""Constants by theory from one batch: the slope of a norm at every site, whatever the function."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dynorm
from dynorm import Derf, DyISRU, DyT, LinearControl
from dynorm.errors import CalibrationWarning, DataError, ModelError


def net(cls: Any, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 32), cls(32, **options), nn.GELU(), nn.Linear(32, 16), cls(16, **options)
    )


@pytest.mark.parametrize("cls", [DyISRU, DyT, Derf, LinearControl])
def test_the_slope_at_0_is_one_over_sigma(cls: Any) -> None:
    model, x = net(cls, scale=6.0), 3 * torch.randn(200, 8)
    report = dynorm.init_from_batch_(model, x)
    h = x
    for layer in model:
        if isinstance(layer, dynorm.layers.PointwiseNorm):
            sigma = h.square().mean().sqrt()
            zero = torch.zeros(1, layer.channels, requires_grad=True)
            (slope,) = torch.autograd.grad(layer(zero).sum(), zero)
            torch.testing.assert_close(slope, torch.ones_like(slope) / sigma, rtol=1e-4, atol=0)
        h = layer(h).detach()
    assert list(report.beta) == ["1", "4"]
    assert report.sigma["4"] == pytest.approx(float(sigma), rel=1e-5)
    assert report.beta["4"] == pytest.approx(36 * float(sigma) ** 2, rel=1e-4)


def test_witnesses_carry_their_share_of_the_same_sum() -> None:
    layer: Any
    layer, x = DyISRU(8, witnesses=(5, 2)), torch.randn(200, 8) * torch.arange(1.0, 9.0)
    dynorm.init_from_batch_(nn.Sequential(layer), x)
    total = 8 * float(x.square().mean())
    assert layer.beta().item() == pytest.approx(0.9 * total, rel=1e-4)
    witnessed = (x[:, [5, 2]].square() * layer.log_gain.exp()).sum(1).mean()
    assert witnessed.item() == pytest.approx(0.1 * total, rel=1e-4)


def test_a_bound_below_the_norms_is_named() -> None:
    with pytest.warns(CalibrationWarning, match=r"'0'.*scale 1, where a norm gives.*sqrt\(C\)"):
        dynorm.init_from_batch_(nn.Sequential(DyT(16, scale=1)), torch.randn(50, 16))


def test_padding_is_left_out_and_the_rest_stays() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop, self.layer = nn.Dropout(0.5), DyISRU(8)

        def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
            return self.layer(self.drop(x) * 0 + x)

    x, mask = torch.randn(4, 6, 8), (torch.arange(6) < torch.tensor([[6], [3], [5], [2]])).long()
    model = Masked()
    state = torch.get_rng_state()
    dynorm.init_from_batch_(
        model, {"x": torch.where(mask[..., None].bool(), x, 1e4), "attention_mask": mask}
    )
    assert model.layer.beta().item() == pytest.approx(
        8 * float(x[mask.bool()].square().mean()), rel=1e-5
    )
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert not model.layer._forward_hooks
    assert torch.equal(model.layer.weight, torch.ones(8))


def test_errors_leave_the_constants_as_they_were() -> None:
    model = net(DyISRU)
    before = copy.deepcopy(model.state_dict())
    bad = torch.randn(4, 8)
    bad[1, 2] = math.nan
    for batch in (bad, torch.randn(4, 9), "text", torch.empty(0, 8)):
        with pytest.raises(DataError):
            dynorm.init_from_batch_(model, batch)
        assert all(torch.equal(v, before[name]) for name, v in model.state_dict().items())
    with pytest.raises(DataError, match=r"not all 0"):
        dynorm.init_from_batch_(nn.Sequential(DyISRU(8)), torch.zeros(4, 8))
    with pytest.raises(ModelError, match=r"point-wise.*layers"):
        dynorm.init_from_batch_(nn.Linear(8, 8), torch.randn(4, 8))


def test_layers_that_are_not_reached_are_named() -> None:
    model = net(DyISRU)
    model.idle = DyISRU(4)
    model.forward = lambda x: model[1](model[0](x))
    report = dynorm.init_from_batch_(model, torch.randn(4, 8))
    assert report.unreached == ["4", "idle"]
    assert "idle: not reached" in str(report)
