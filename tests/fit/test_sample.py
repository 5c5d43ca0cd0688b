"""Many witnesses: a sample of all channels."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import dynorm
from dynorm import functional
from dynorm.arguments import MOST_CHOSEN
from dynorm.fit.witnesses import Sample, TokenScales
from dynorm.ranks import Ranks
from dynorm.replace.converted import dynorm_layers

CHANNELS = 192
COUNT = 64


def tokens(count: int, seed: int, width: float = 1.0) -> Tensor:
    """Return tokens with channels of very different size, and a few massive channels on some tokens."""
    generator = torch.Generator().manual_seed(seed)
    # The channels are the same for every seed.
    size = torch.randn(CHANNELS, generator=torch.Generator().manual_seed(9)).exp()
    x = torch.randn(count, CHANNELS, generator=generator) * size
    massive = torch.rand(count, 1, generator=generator) < 0.1
    x[:, 7:9] *= torch.where(massive, 60.0, 1.0)
    return x * (width * torch.randn(count, 1, generator=generator)).exp()


def test_half_are_the_largest_and_the_others_represent_the_rest() -> None:
    parts = torch.rand(100, generator=torch.Generator().manual_seed(0))
    parts = parts / parts.sum()
    squared = torch.rand(100, generator=torch.Generator().manual_seed(1))
    sample = Sample.of(parts, squared, 30)
    order = squared.argsort(descending=True)
    assert sample.channels[:15].tolist() == order[:15].tolist()
    assert len(set(sample.channels.tolist())) == 30
    assert sample.gains[:15].tolist() == [1.0] * 15
    # On average the estimate is the sum.
    assert float((sample.gains * parts[sample.channels]).sum()) == pytest.approx(1.0)
    places = [order.tolist().index(channel) for channel in sample.channels[15:].tolist()]
    # 85 channels in 15 pieces: the middle of each.
    assert places == [15 + int((i + 0.5) * 85 / 15) for i in range(15)]


@pytest.mark.parametrize("count", [17, 99, 100])
def test_a_sample_may_be_of_any_size_up_to_all_channels(count: int) -> None:
    parts = torch.rand(100, generator=torch.Generator().manual_seed(0))
    sample = Sample.of(parts, parts.square(), count)
    assert len(set(sample.channels.tolist())) == count
    if count == 100:
        assert sample.gains.tolist() == pytest.approx([1.0] * 100)


@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
def test_the_error_of_a_sample_is_that_of_a_poll_on_other_tokens_too(kind: str) -> None:
    scales = TokenScales(kind, 1e-6, Ranks(), COUNT, least=1e-3)
    for part in tokens(4000, seed=0).split(1000):
        scales.update(part)
    chosen = scales.choose()
    assert len(chosen.channels) == COUNT
    assert chosen.channels[0] == 8
    assert len(chosen.explained) == 2
    # The sizes of these tokens differ much more than those of the fitted ones.
    other = tokens(2000, seed=1, width=3.0)
    gains = torch.tensor(chosen.gains)
    estimate = chosen.beta + other[:, list(chosen.channels)].square() @ gains
    total = other.square().sum(1)
    if kind == "layernorm":
        total = CHANNELS * other.var(1, correction=0)
    error = (estimate / total).log().square().mean().sqrt()
    largest = other[:, list(chosen.channels[: COUNT // 2])].square().sum(1)
    rest = float(((total - largest) / total).square().mean().sqrt())
    taken = COUNT // 2
    of_a_poll = rest * math.sqrt(2 / taken * (1 - taken / (CHANNELS - taken)))
    assert error < 1.5 * of_a_poll
    assert float((estimate / total).min()) > 0.5


def test_the_parts_of_the_tokens_do_not_matter() -> None:
    x = tokens(1000, seed=0)
    one = TokenScales("rmsnorm", 1e-6, Ranks(), COUNT, least=1e-3)
    one.update(x)
    other = TokenScales("rmsnorm", 1e-6, Ranks(), COUNT, least=1e-3)
    other.update(x[:800])
    other.update(x[800:])
    first = one.choose()
    second = other.choose()
    assert set(first.channels[:8]) == set(second.channels[:8])
    for chosen in (first, second):
        estimate = x[:, list(chosen.channels)].square() @ torch.tensor(chosen.gains) + chosen.beta
        assert (estimate / x.square().sum(1)).log().abs().mean() < 0.1


@pytest.mark.parametrize("to", ["dyisru", "dyt", "derf", "linear"])
@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.RMSNorm])
def test_with_a_sample_a_layer_is_nearly_its_norm(to: str, kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    norm = nn.Sequential(kind(CHANNELS), nn.Linear(CHANNELS, 4))
    model = nn.Sequential(*norm)
    x = tokens(2000, seed=0)
    expected = model[0](tokens(500, seed=2)).detach()
    errors = []
    for count in (4, COUNT):
        converted = nn.Sequential(*norm)
        sites = dynorm.find_norms(converted, x[:8])
        dynorm.convert_(converted, sites, to, witnesses=count, per_channel=False)
        dynorm.calibrate_(converted, [x], lean=0)
        difference = converted[0](tokens(500, seed=2)).detach() - expected
        errors.append(float(difference.norm() / expected.norm()))
    assert errors[1] < 0.5 * errors[0]
    assert errors[1] < 0.15


def test_by_default_at_most_a_third_of_the_channels_are_witnesses() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        vocab_size=100,
    )
    model: Any = transformers.LlamaForCausalLM(config).eval()
    ids = torch.randint(100, (8, 64), generator=torch.Generator().manual_seed(0))
    batches = [{"input_ids": part} for part in ids.split(2)]
    dynorm.convert_(model, dynorm.find_norms(model, batches[0]))
    dynorm.calibrate_(model, batches)
    counts = {len(layer.witness_channels) for layer in dynorm_layers(model).values()}
    # None where the tokens are alike.
    assert counts in ({21}, {0, 21})


def test_a_dead_sample_gets_no_infinite_gains() -> None:
    model = nn.Sequential(nn.RMSNorm(96), nn.Linear(96, 4))
    x = torch.randn(400, 96, generator=torch.Generator().manual_seed(0))
    x[:, 17:] *= 1e-30
    dynorm.convert_(model, dynorm.find_norms(model, x[:8]), witnesses=32)
    dynorm.calibrate_(model, [x])
    (layer,) = dynorm_layers(model).values()
    assert float(layer.log_gain.detach().exp().max()) <= 4 * 80 / 16
    assert model(x).isfinite().all()


def test_tokens_of_one_size_have_no_sample() -> None:
    x = torch.randn(4000, 96, generator=torch.Generator().manual_seed(0))
    x = nn.functional.normalize(x, dim=1) * 9.8
    model = nn.Sequential(nn.RMSNorm(96), nn.Linear(96, 4))
    dynorm.convert_(model, dynorm.find_norms(model, x[:8]), witnesses=32)
    report = dynorm.calibrate_(model, [x])
    assert report.sites[0].error < 1e-3
    (layer,) = dynorm_layers(model).values()
    assert layer.witness_channels == ()


def test_the_explained_share_is_that_over_a_constant() -> None:
    scales = TokenScales("rmsnorm", 1e-6, Ranks(), 32, least=1e-3)
    x = torch.randn(4000, 96, generator=torch.Generator().manual_seed(0))
    scales.update(x)
    # The sizes of such tokens vary by less than a sample's error.
    assert scales.choose().explained_by_all < 0.1


@pytest.mark.parametrize("function", ["dyisru", "dyt", "derf", "linear"])
@pytest.mark.parametrize("dim", [-1, 1, (1, 2)])
def test_the_sum_of_many_is_that_of_few(
    function: str, dim: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 20, 2, generator=generator, dtype=torch.float64)
    x = x * torch.randn(3, 1, 1, generator=generator, dtype=torch.float64).exp()
    x = x if dim != -1 else x.transpose(1, 2)
    channels = 40 if dim == (1, 2) else 20
    witnesses = torch.randperm(channels, generator=generator)[: MOST_CHOSEN + 2]
    gain = torch.rand(MOST_CHOSEN + 2, generator=generator, dtype=torch.float64)
    call = getattr(functional, function)
    results = []
    for one_by_one in (MOST_CHOSEN, 100):
        monkeypatch.setattr(functional, "MOST_CHOSEN", one_by_one)
        inputs = [x.clone().requires_grad_(), gain.clone().requires_grad_()]
        y = call(inputs[0], 2.0, dim=dim, witnesses=witnesses, gain=inputs[1])
        results.append([y, *torch.autograd.grad(y.sin().sum(), inputs)])
    assert_close(results[0], results[1])


def test_many_witnesses_take_infinite_and_missing_numbers_as_few_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = torch.randn(5, 40, generator=torch.Generator().manual_seed(0))
    x[0, 3] = math.inf
    x[1, 30] = -math.inf
    x[2, 4] = math.nan
    x[3] = 0.0
    witnesses = torch.arange(20)
    many = functional.dyisru(x, 2.0, witnesses=witnesses)
    monkeypatch.setattr(functional, "MOST_CHOSEN", 100)
    assert_close(many, functional.dyisru(x, 2.0, witnesses=witnesses), equal_nan=True)
