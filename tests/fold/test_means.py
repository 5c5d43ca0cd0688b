"""Means that go into the weights before LayerNorms are replaced."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import dynorm
from benchmarks.fold_models import build
from dynorm.errors import CalibrationWarning, ModelError
from dynorm.fold import FoldReport, fold_means_
from dynorm.layers.rmsnorm import RMSNorm


class Stream(nn.Module):
    """A pre-norm stream whose tokens differ in their means.

    With ``bent`` the embedding is not linear; ``extra`` asks for a second head on the stream.
    """

    last: Tensor | None = None

    def __init__(self, dim: int = 48, bent: bool = False, remembers: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bent = bent
        self.remembers = remembers
        self.table = nn.Embedding(64, dim)
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(3))
        self.blocks = nn.ModuleList(nn.Linear(dim, dim) for _ in range(2))
        self.head = nn.Linear(dim, 5)
        self.second = nn.Linear(dim, 1)
        with torch.no_grad():
            self.table.weight += torch.linspace(-3, 3, 64)[:, None]
            self.second.weight += 1
            for block in self.blocks:
                block.weight += 0.3 * torch.randn(1, dim)
        self.eval()

    def forward(self, ids: Tensor, extra: bool = False) -> Any:
        x = self.table(ids)
        if self.bent:
            x = x.relu()
        for norm, block in zip(self.norms, self.blocks, strict=False):
            x = x + block(norm(x))
        logits: Tensor = self.head(self.norms[-1](x))
        if self.last is not None:
            logits = logits + self.last
        if self.remembers:
            self.last = logits.detach().mean()
        return (logits, self.second(x)) if extra else logits.float()


def batches(count: int = 6) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 64, (8, 16), generator=generator) for _ in range(count)]


def folded(model: nn.Module, others: Sequence[Any] = (), keep: str = "") -> FoldReport | None:
    ids = batches()[0]
    sites = dynorm.find_norms(model, ids)
    return fold_means_(model, sites, [s.path for s in sites if s.path != keep], ids, others)


def count(report: FoldReport | None) -> int:
    assert report is not None
    return report.count("center")


@pytest.mark.parametrize("bent", [False, True])
def test_the_model_stays_the_same_function(bent: bool) -> None:
    model = Stream(bent=bent).double().train()
    ids = batches()[0]
    with torch.no_grad():
        for norm in model.norms:
            norm.weight.uniform_(0.5, 2.0)
            norm.bias.uniform_(-1.0, 1.0)
    before = model(ids)
    means = folded(model, batches())
    assert count(means) == (0 if bent else 3)
    assert means is not None
    assert ("not linear" in str(means)) is bent
    assert all(type(norm) is (nn.LayerNorm if bent else RMSNorm) for norm in model.norms)
    means_left = [float(block.weight.detach().mean(0).abs().max()) for block in model.blocks]
    assert bent or max(means_left) < 1e-12
    assert all(module.training for module in model.modules())
    assert means.norms == dynorm.find_norms(model, ids)
    torch.testing.assert_close(model(ids), before, rtol=1e-6, atol=1e-6)


def test_layers_are_nearer_to_norms_without_a_mean() -> None:
    errors = []
    for fold_means in (True, False):
        report = dynorm.convert_model(Stream(), batches(), fold_means=fold_means, steps=0)
        errors.append(1 - report.output.cosine_mean)
    assert errors[0] < 0.5 * errors[1]


def test_norms_that_are_kept_stay_layernorms() -> None:
    model = Stream()
    means = folded(model, keep="norms.1")
    assert count(means) == 2
    assert means is not None
    assert [type(norm) for norm in model.norms] == [RMSNorm, nn.LayerNorm, RMSNorm]
    assert [site.kind for site in means.norms] == ["rmsnorm", "layernorm", "rmsnorm"]


def test_a_model_that_cannot_be_traced_stays_with_the_reason() -> None:
    class Branching(Stream):
        def forward(self, ids: Tensor, extra: bool = False) -> Any:
            return ids.float() if bool(self.table(ids).sum() > 1e9) else super().forward(ids)

    model = Branching()
    with pytest.warns(CalibrationWarning, match=r"foldable.*traceable.*fold_means=False"):
        assert folded(model) is None
    assert all(type(norm) is nn.LayerNorm for norm in model.norms)


def test_a_model_without_layernorms_has_no_means_to_fold() -> None:
    model = nn.Sequential(nn.Embedding(64, 8), nn.RMSNorm(8), nn.Linear(8, 8)).eval()
    assert folded(model) is None


def test_a_decoder_with_folded_means_loads_with_transformers(tmp_path: Path) -> None:
    model: Any = build("gpt2", bos_token_id=0, eos_token_id=0)
    samples = [{"input_ids": ids} for ids in batches(4)]
    report = dynorm.convert_model(model, samples, steps=0)
    stage = report.meta["stages"]["fold_means"]
    assert [site["center"]["state"] for site in stage["sites"]] == ["folded"] * 5
    assert stage["untied"] == ["lm_head.weight"]
    dynorm.save(model, tmp_path / "model")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    with torch.no_grad():
        expected = model(**samples[0]).logits
        torch.testing.assert_close(loaded(**samples[0]).logits, expected)
    assert loaded.lm_head.weight is not loaded.transformer.wte.weight


def test_means_that_only_rounding_shows_are_folded() -> None:
    """Means a thousand times as large as the rest make float32 round by more than ``fold_`` allows."""
    model = Stream()
    with torch.no_grad():
        model.table.weight += 1000 * torch.rand(64, 1)
    with pytest.raises(ModelError, match="tolerance"):
        dynorm.fold_(copy.deepcopy(model), batches()[0])
    assert count(folded(model)) == 3


def test_a_branch_that_only_later_batches_take_is_not_changed_silently() -> None:
    others = [{"ids": ids, "extra": True} for ids in batches()]
    model = Stream()
    with pytest.warns(CalibrationWarning, match=r"differ by.*fold_means=False"):
        assert folded(model, others) is None
    assert all(type(norm) is nn.LayerNorm for norm in model.norms)


def test_outputs_in_float32_of_a_model_in_half_precision_are_compared_as_its_own() -> None:
    assert count(folded(Stream(768).bfloat16(), batches())) == 3


def test_a_model_that_keeps_something_of_a_batch_is_compared_with_itself() -> None:
    assert count(folded(Stream(remembers=True), batches())) == 3
