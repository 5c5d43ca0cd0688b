"""Norms before their replacement: outliers, curves, sizes of tokens, and the model unchanged."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dynorm
from dynorm import functional
from dynorm.site import NormSite
from tests.report.cases import toy, toy_batches

LN = NormSite("0", kind="layernorm", normalized_shape=(24,))


def test_the_papers_simulation_through_a_model() -> None:
    simulation = pytest.importorskip("dynorm.paper.simulation").simulate()
    rows = torch.from_numpy(simulation.tokens[1:])
    norm = nn.LayerNorm(100, eps=0.0, elementwise_affine=False).double()
    site = NormSite("0", kind="layernorm", normalized_shape=(100,))
    (row,) = dynorm.inspect_norms(nn.Sequential(norm), [rows], sites=[site]).sites
    assert row.ratio > 10
    # The outliers' own constant: alpha is the paper's.
    assert row.outliers.betas["dyisru"] == pytest.approx(
        dynorm.theory.leave_one_out_beta(rows)[0, -1].item(), rel=0.05
    )
    alpha = 1 / math.sqrt(row.outliers.betas["dyt"])
    assert alpha == pytest.approx(0.0486, rel=0.05)


def test_where_all_tokens_are_alike_a_straight_line_is_the_norm() -> None:
    x = torch.randn(200, 24, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = 3 * functional.layer_norm(x, eps=0.0) + 1
    model = nn.Sequential(nn.LayerNorm(24, eps=0.0)).double()
    report = dynorm.inspect_norms(model, [x], sites=[LN])
    (row,) = report.sites
    assert row.core.errors["linear"] < 1e-3 < row.core.errors["dyisru"]
    assert row.sigma_spread <= 1e-6
    assert "loses little at 1 of 1 norm" in " ".join(str(report).split())


def test_norms_are_found_and_the_model_stays_as_it_was() -> None:
    model = toy().train()
    before = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    report = dynorm.inspect_norms(model, iter(toy_batches()))
    assert [(row.path, row.kind, row.channels, row.tokens) for row in report.sites] == [
        ("1", "layernorm", 16, 120),
        ("4", "rmsnorm", 16, 120),
    ]
    assert report.batches == 3
    assert str(report).startswith("Sequential: 2 norms")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(module.training and not module._forward_hooks for module in model.modules())
    assert torch.equal(torch.get_rng_state(), state)
    assert dynorm.inspect_norms(model, toy_batches()) == report


@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.RMSNorm])
def test_the_largest_token_and_its_channel(kind: Any) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4, 6, 9, 24, generator=generator, dtype=torch.float64)
    # In each text the first token is large in one channel, and its last place is padding.
    x[:, :, 0, 5] = 100 + 50 * torch.rand(4, 6, generator=generator, dtype=torch.float64)
    x[:, :, -1] = 1e4
    mask = torch.ones(6, 9).long()
    mask[:, -1] = 0
    model = Masked(kind(24).double())
    batches = [{"x": part, "attention_mask": mask} for part in x]
    report = dynorm.inspect_norms(model, batches)
    (row,) = report.sites
    tokens = x[:, :, :-1].reshape(-1, 24)
    deviation = tokens - tokens.mean(1, keepdim=True) if kind is nn.LayerNorm else tokens
    sigma = deviation.square().mean(1).sqrt()
    squares = deviation[sigma.argmax()].square()
    assert row.largest == pytest.approx(float(sigma.max() / sigma.log().mean().exp()), rel=1e-4)
    assert row.channel == 5
    assert row.share == pytest.approx(float(squares[5] / squares.sum()), rel=1e-5)
    assert row.massive
    assert 0.8 < row.explained[1] <= row.explained[4] <= 1
    words = " ".join(str(report).split())
    assert "Massive activations at 1 of 1 norm, in channel 5." in words
    assert "witnesses=4 would help" in words
    assert set(json.loads(json.dumps(report.to_dict()))["sites"][0]["explained"]) == {"1", "4"}


def test_without_large_tokens() -> None:
    x = torch.randn(64, 24, generator=torch.Generator().manual_seed(0))
    report = dynorm.inspect_norms(nn.Sequential(nn.LayerNorm(24)), [x])
    assert not report.sites[0].massive
    assert "No massive activations" in str(report)


@pytest.mark.parametrize(("channels", "count"), [(2, 1), (2, 5), (3, 1), (9, 3)])
def test_small_inputs_give_finite_figures(channels: int, count: int) -> None:
    x = torch.randn(count, channels, generator=torch.Generator().manual_seed(0))
    # find_norms refuses two channels.
    site = NormSite("0", kind="layernorm", normalized_shape=(channels,), eps=1e-5)
    report = dynorm.inspect_norms(nn.Sequential(nn.LayerNorm(channels)), [x], sites=[site])
    row = report.sites[0]
    for fit in (row.core, row.outliers):
        assert all(map(math.isfinite, [*fit.betas.values(), *fit.errors.values()]))
    assert str(report)


class Masked(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        return self.norm(x) * attention_mask[..., None]


class Never(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(24), nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class TestRefusals:
    def test_models_without_norms(self) -> None:
        with pytest.raises(dynorm.errors.ModelError, match="must have norms to inspect"):
            dynorm.inspect_norms(nn.Linear(8, 8), [torch.randn(2, 8)])
        model = toy()
        dynorm.convert_(model, dynorm.find_norms(model, toy_batches()[0]))
        with pytest.raises(dynorm.errors.ModelError, match="inspect the original"):
            dynorm.inspect_norms(model, toy_batches())
        sites = [NormSite("norm", kind="layernorm", normalized_shape=(24,))]
        with pytest.raises(dynorm.errors.ModelError, match="no 'norm'"):
            dynorm.inspect_norms(toy(), toy_batches(), sites=sites)
        for options in ({"sites": ["norm"]}, {"meta": 3}, {"seed": None}):
            with pytest.raises(dynorm.errors.ArgumentError, match=f"{next(iter(options))} must"):
                dynorm.inspect_norms(toy(), toy_batches(), **options)
        with pytest.raises(dynorm.errors.DataError, match=r"reach.*least"):
            dynorm.inspect_norms(Never(), [torch.randn(4, 8)], sites=sites)

    @pytest.mark.parametrize("batches", [[], ["text"], torch.randn(2, 8), [torch.randn(2, 9)]])
    def test_batches(self, batches: Any) -> None:
        with pytest.raises(dynorm.DynormError):
            dynorm.inspect_norms(toy(), batches)

    def test_values_that_are_not_finite(self) -> None:
        model, batches = toy(), toy_batches()
        batches[1][3, 2] = math.nan
        with pytest.raises(dynorm.errors.DataError, match=r"finite.*'1'"):
            dynorm.inspect_norms(model, batches)
        assert not any(module._forward_hooks for module in model.modules())
