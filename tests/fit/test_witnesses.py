"""Witness channels: the choice of channels and gains, and every stage that moves them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import dynorm
from dynorm.errors import DataError
from dynorm.fit.witnesses import TokenScales

CHANNELS, WITNESSES = 24, (5, 17)


def tokens(count: int = 2000, seed: int = 0) -> Tensor:
    """Tokens whose scale two channels tell: massive ones, each on a tenth of the tokens, as in real models."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, CHANNELS, generator=generator)
    for channel in WITNESSES:
        massive = torch.rand(count, generator=generator) < 0.1
        x[:, channel] *= torch.where(massive, 60.0, 1.0)
    return x


def model(kind: type[nn.Module] = nn.RMSNorm) -> nn.Module:
    """Two norms that see such tokens: the model's input is theirs, up to a rotation of nothing."""
    torch.manual_seed(0)
    return nn.Sequential(kind(CHANNELS), nn.Linear(CHANNELS, CHANNELS), kind(CHANNELS))


def converted(witnesses: int, kind: type[nn.Module] = nn.RMSNorm) -> nn.Module:
    made = model(kind)
    dynorm.convert_(made, dynorm.find_norms(made, tokens(8)), witnesses=witnesses)
    return made


@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
def test_the_channels_that_carry_the_scale_are_found(kind: str) -> None:
    pair = TokenScales(kind, 1e-6, 2)
    scales = TokenScales(kind, 1e-6, 4)
    for part in tokens().split(500):
        pair.update(part)
        scales.update(part)
    found = scales.choose()
    assert set(found.channels[:2]) == set(WITNESSES)
    assert found.gains[:2] == pytest.approx((1.0, 1.0), rel=0.1)
    assert pair.choose().beta == pytest.approx(CHANNELS - 2, rel=0.2)
    assert found.explained[0] == 0
    assert found.explained[2] > 0.8
    assert list(found.explained) == sorted(found.explained)


def test_channels_that_are_large_in_all_tokens_do_not_hide_one_that_varies() -> None:
    """There are more of them than channels that are tried."""
    x = 0.1 * torch.randn(2000, 200)
    x[:, :100] = 10.0
    x[:, 150] = torch.where(torch.rand(2000) < 0.1, 20.0, 1.0)
    scales = TokenScales("rmsnorm", 1e-6, 4)
    scales.update(x)
    assert scales.choose().channels == (150,)


def test_no_more_are_taken_than_wanted_and_none_that_tells_nothing() -> None:
    for most in (0, 1):
        scales = TokenScales("rmsnorm", 0.0, most)
        scales.update(tokens())
        assert len(scales.choose().channels) == most


@pytest.mark.parametrize("count", range(100, 110))
def test_tokens_of_one_size_have_no_witnesses_whatever_rounding_leaves(count: int) -> None:
    alike = TokenScales("rmsnorm", 0.0, 4)
    alike.update(torch.ones(count, CHANNELS))
    found = alike.choose()
    assert found.channels == ()
    assert set(found.explained) == {0.0}


def test_parts_of_the_tokens_give_the_sums_of_all() -> None:
    whole, parts = (TokenScales("rmsnorm", 0.0, 2) for _ in range(2))
    x = tokens(400)
    whole.update(x)
    # The golden ratio counts from each part's start, so equal parts of one period split alike.
    parts.update(x[:0])
    parts.update(x)
    assert parts.choose() == whole.choose()


@pytest.mark.parametrize("kind", [nn.RMSNorm, nn.LayerNorm])
def test_calibrating_with_witnesses_is_closer_to_the_norm(kind: type[nn.Module]) -> None:
    batches = [tokens(500, seed) for seed in range(3)]
    x = tokens(500, 9)
    errors = []
    for witnesses in (0, 2):
        made = converted(witnesses, kind)
        dynorm.calibrate_(made, batches)
        errors.append(float((made(x) - model(kind)(x)).square().mean().detach()))
    assert errors[1] < 0.7 * errors[0]


def test_calibration_gives_the_layer_its_witnesses_and_reports_them() -> None:
    made = converted(2)
    assert made[0].witness_channels == ()
    report = dynorm.calibrate_(made, [tokens(500, seed) for seed in range(3)])
    assert set(made[0].witness_channels) == set(WITNESSES)
    assert torch.allclose(made[0].log_gain.exp(), torch.tensor(1.0), rtol=0.1)
    found = report.sites[0].witnesses
    assert found is not None
    assert found.channels == made[0].witness_channels
    assert report.to_dict()["sites"][0]["witnesses"]["channels"]
    assert "witnesses" in str(report)


@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
@pytest.mark.parametrize("odd", [0.0, 1e-3, 3.0])
def test_a_blank_token_takes_no_witness_away(kind: str, odd: float) -> None:
    x = tokens()
    x[7] = torch.full((CHANNELS,), 3.0) if odd == 3.0 else odd * x[7]
    scales = TokenScales(kind, 1e-6, 4)
    scales.update(x)
    found = scales.choose()
    assert set(found.channels[:2]) == set(WITNESSES)
    assert max(found.gains[:2]) < 1.2


def test_noise_in_single_tokens_is_no_witness() -> None:
    scales = TokenScales("rmsnorm", 0.0, 8)
    for token in torch.randn(64, CHANNELS, generator=torch.Generator().manual_seed(0)):
        scales.update(token[None])
    assert len(scales.choose().channels) < 3


def test_a_second_calibration_chooses_anew() -> None:
    made = converted(1)
    dynorm.calibrate_(made, [tokens()])
    other = tokens().roll(1, 1)
    dynorm.calibrate_(made, [other])
    assert set(made[0].witness_channels) < {k + 1 for k in WITNESSES}


def test_an_error_on_the_way_takes_the_witnesses_back() -> None:
    made = converted(2)
    with pytest.raises(DataError):
        dynorm.calibrate_(made, [tokens(), torch.full((4, CHANNELS), math.nan)])
    assert made[0].witness_channels == ()
    assert set(made[0].state_dict()) == {"log_beta", "weight"}


def test_refinement_moves_the_gains() -> None:
    made = converted(2)
    batches = [tokens(300, seed) for seed in range(2)]
    dynorm.calibrate_(made, batches)
    before = made[2].log_gain.detach().clone()
    report = dynorm.refine_(made, batches, steps=6)
    assert not torch.equal(made[2].log_gain, before)
    assert report.last_error < report.first_error
