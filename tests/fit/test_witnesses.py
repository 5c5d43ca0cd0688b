"""Witness channels: the choice of channels and gains, and every stage that moves them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.optimize import nnls
from torch import Tensor, nn

import dynorm
from dynorm.errors import ArgumentError, DataError
from dynorm.fit.witnesses import Gram, TokenScales
from dynorm.ranks import Ranks

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


def converted(
    witnesses: int | tuple[int, ...], to: str = "dyisru", kind: type[nn.Module] = nn.RMSNorm
) -> nn.Module:
    made = model(kind)
    dynorm.convert_(made, dynorm.find_norms(made, tokens(8)), to, witnesses=witnesses)
    return made


@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
def test_the_channels_that_carry_the_scale_are_found(kind: str) -> None:
    pair = TokenScales(kind, 1e-6, Ranks(), 2)
    scales = TokenScales(kind, 1e-6, Ranks(), 4)
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
    scales = TokenScales("rmsnorm", 1e-6, Ranks(), 4)
    scales.update(x)
    assert scales.choose().channels == (150,)


def test_no_more_are_taken_than_wanted_and_none_that_tells_nothing() -> None:
    for most in (0, 1):
        scales = TokenScales("rmsnorm", 0.0, Ranks(), most)
        scales.update(tokens())
        assert len(scales.choose().channels) == most


@pytest.mark.parametrize("count", range(100, 110))
def test_tokens_of_one_size_have_no_witnesses_whatever_rounding_leaves(count: int) -> None:
    alike = TokenScales("rmsnorm", 0.0, Ranks(), 4)
    alike.update(torch.ones(count, CHANNELS))
    found = alike.choose()
    assert found.channels == ()
    assert set(found.explained) == {0.0}


def test_fixed_channels_are_all_kept_in_their_order() -> None:
    scales = TokenScales("rmsnorm", 0.0, Ranks(), fixed=(17, 3, 5))
    scales.update(tokens())
    found = scales.choose()
    assert found.channels == (17, 3, 5)
    assert found.gains[0] == pytest.approx(1.0, rel=0.1)
    assert min(found.gains) > 0
    assert found.explained[-1] > 0.8


def test_parts_of_the_tokens_give_the_sums_of_all() -> None:
    whole, parts = (TokenScales("rmsnorm", 0.0, Ranks(), fixed=WITNESSES) for _ in range(2))
    x = tokens(400)
    whole.update(x)
    # The golden ratio counts from each part's start, so equal parts of one period split alike.
    parts.update(x[:0])
    parts.update(x)
    assert parts.choose() == whole.choose()


@pytest.mark.parametrize(("tokens", "alike"), [(300, False), (300, True), (30, False)])
def test_least_squares_of_many_channels_are_as_good_as_scipys(tokens: int, alike: bool) -> None:
    rng = np.random.default_rng(0)
    columns = rng.random((tokens, 50)) ** 3
    columns[:, 49] = columns[:, :48] @ rng.normal(size=48)
    if alike:
        columns[:, 3], columns[:, 7] = columns[:, 2], 0
    gram = Gram.of(torch.from_numpy(columns.T @ columns))
    rows = torch.from_numpy(np.stack([rng.permutation(48)[:40] for _ in range(16)]))
    for row, found in zip(rows, gram.solve(rows), strict=True):
        expected, _ = nnls(columns[:, [*row, 48]], columns[:, 49])
        assert found.min() >= 0
        assert (expected == 0).sum() > 2
        assert gram.squared_error(row, found) == pytest.approx(
            gram.squared_error(row, torch.from_numpy(expected)), rel=1e-9
        )


def test_each_channel_of_a_growing_set_is_the_best_that_can_be_added() -> None:
    rng = np.random.default_rng(0)
    columns = rng.random((300, 10)) ** 3
    gram = Gram.of(torch.from_numpy(columns.T @ columns))
    chosen: list[int] = []
    for grown in gram.growing_sets(4):
        residuals = {}
        for added in set(range(8)) - set(chosen):
            residuals[added] = nnls(columns[:, [*chosen, added, 8]], columns[:, 9])[1]
        chosen.append(min(residuals, key=residuals.__getitem__))
        assert grown.indices.tolist() == chosen
        expected = nnls(columns[:, [*chosen, 8]], columns[:, 9])[0]
        assert grown.solution.numpy() == pytest.approx(expected, abs=1e-8)
    assert len(chosen) == 4


def test_no_channel_joins_a_growing_set_twice_when_no_other_helps() -> None:
    rng = np.random.default_rng(0)
    columns = rng.random((300, 10))
    columns[:, 2:8] = 0.0
    gram = Gram.of(torch.from_numpy(columns.T @ columns))
    *_, last = gram.growing_sets(8)
    assert sorted(last.indices.tolist()) == list(range(8))


@pytest.mark.parametrize("to", ["dyisru", "dyt", "derf", "linear"])
@pytest.mark.parametrize("kind", [nn.RMSNorm, nn.LayerNorm])
@pytest.mark.parametrize("lean", [0.0, 0.7])
def test_calibrating_with_witnesses_is_closer_to_the_norm(
    to: str, kind: type[nn.Module], lean: float
) -> None:
    batches = [tokens(500, seed) for seed in range(3)]
    x = tokens(500, 9)
    errors = []
    for witnesses in (0, 2):
        made = converted(witnesses, to, kind)
        dynorm.calibrate_(made, batches, lean=lean)
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
    scales = TokenScales(kind, 1e-6, Ranks(), 4)
    scales.update(x)
    found = scales.choose()
    assert set(found.channels[:2]) == set(WITNESSES)
    assert max(found.gains[:2]) < 1.2


def test_the_tokens_that_are_held_out_do_not_depend_on_the_batches() -> None:
    whole, parts = (TokenScales("rmsnorm", 0.0, Ranks(), fixed=WITNESSES) for _ in range(2))
    whole.update(tokens(400))
    for part in tokens(400).split(50):
        parts.update(part)
    assert parts.choose().explained == pytest.approx(whole.choose().explained, rel=5e-2)


def test_noise_in_single_tokens_is_no_witness() -> None:
    scales = TokenScales("rmsnorm", 0.0, Ranks(), 8)
    for token in torch.randn(64, CHANNELS, generator=torch.Generator().manual_seed(0)):
        scales.update(token[None])
    assert len(scales.choose().channels) < 3


def test_a_second_calibration_chooses_anew() -> None:
    made = converted(1)
    dynorm.calibrate_(made, [tokens()])
    other = tokens().roll(1, 1)
    dynorm.calibrate_(made, [other])
    assert set(made[0].witness_channels) < {k + 1 for k in WITNESSES}


def test_jagged_tensors_pass() -> None:
    layer = dynorm.DyISRU(CHANNELS, witnesses=WITNESSES)
    parts = [tokens(3), tokens(5)]
    nested = torch.nested.nested_tensor(parts, layout=torch.jagged)
    for found, part in zip(layer(nested).unbind(), parts, strict=True):
        assert torch.equal(found, layer(part))


def test_given_channels_stay_and_get_their_gains() -> None:
    made = converted(WITNESSES)
    assert made[2].witness_channels == WITNESSES
    dynorm.calibrate_(made, [tokens()])
    assert made[0].witness_channels == WITNESSES
    assert torch.allclose(made[0].log_gain.exp(), torch.tensor(1.0), rtol=0.1)


def test_an_error_on_the_way_takes_the_witnesses_back() -> None:
    made = converted(2)
    with pytest.raises(DataError):
        dynorm.calibrate_(made, [tokens(), torch.full((4, CHANNELS), math.nan)])
    assert made[0].witness_channels == ()
    assert set(made[0].state_dict()) == {"log_beta", "weight", "center"}


def test_without_witnesses_nothing_changes() -> None:
    batches = [tokens(300)]
    plain, none = converted(0), converted(())
    dynorm.calibrate_(plain, batches)
    dynorm.calibrate_(none, batches)
    assert torch.equal(plain(batches[0]), none(batches[0]))
    assert "log_gain" not in plain[0].state_dict()


def test_refinement_moves_the_gains() -> None:
    made = converted(2)
    batches = [tokens(300, seed) for seed in range(2)]
    dynorm.calibrate_(made, batches)
    before = made[2].log_gain.detach().clone()
    report = dynorm.refine_(made, batches, steps=6)
    assert not torch.equal(made[2].log_gain, before)
    assert report.last_error < report.first_error


@pytest.mark.parametrize("share", [0.1, 0.9])
def test_from_a_batch_the_witnesses_carry_their_share(share: float) -> None:
    layer = dynorm.DyISRU(CHANNELS, witnesses=4, center=True)
    x = torch.randn(4000, CHANNELS) * 3 + 5
    dynorm.init_from_batch_(nn.Sequential(layer), x, share=share)
    centred = x - x.mean()
    told = (layer.log_gain.detach().exp() * centred[:, :4].square().mean(0)).sum()
    whole = CHANNELS * float(centred.square().mean())
    assert float(told) == pytest.approx(share * whole, rel=1e-3)
    assert float(layer.beta().detach()) == pytest.approx((1 - share) * whole, rel=1e-3)


def test_from_a_batch_of_dead_witnesses_the_gains_are_finite() -> None:
    layer = dynorm.DyISRU(CHANNELS, witnesses=2)
    x = torch.randn(100, CHANNELS)
    x[:, :2] = 0
    dynorm.init_from_batch_(nn.Sequential(layer), x)
    assert bool(layer.log_gain.isfinite().all())


@pytest.mark.parametrize("share", [0, 1, -0.5, math.nan])
def test_a_share_is_between_0_and_1(share: float) -> None:
    with pytest.raises(ArgumentError, match=r"share.*between"):
        dynorm.init_from_batch_(
            nn.Sequential(dynorm.DyISRU(4, witnesses=1)), torch.randn(8, 4), share=share
        )


def test_annealed_layers_get_gains_at_the_start_and_keep_them_to_the_end() -> None:
    made = converted(WITNESSES, "annealed")
    x = tokens()
    with dynorm.AnnealStart(made):
        made(x)
    assert torch.allclose(made[0].log_gain.exp(), torch.tensor(1.0), rtol=0.1)
    dynorm.set_anneal_(made, 1.0)
    before = made(x)
    dynorm.finalize_(made)
    assert type(made[0]) is dynorm.DyISRU
    assert made[0].witness_channels == WITNESSES
    assert torch.equal(made(x), before)


@pytest.mark.parametrize(
    "wrong", [-1, True, "3", (3, 3), (CHANNELS,), (-1,), (0.5,), range(CHANNELS + 1)]
)
def test_witnesses_that_cannot_be(wrong: object) -> None:
    with pytest.raises(ArgumentError, match="witness"):
        converted(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("gains", [(0.0, 1.0), (math.inf, 1.0), (1.0,), (-1.0, 2.0)])
def test_gains_that_cannot_be(gains: tuple[float, ...]) -> None:
    with pytest.raises(ArgumentError, match="gain"):
        dynorm.DyISRU(CHANNELS).set_witnesses_(WITNESSES, gains)
