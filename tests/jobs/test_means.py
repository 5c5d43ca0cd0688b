"""Means that go into the weights before LayerNorms are replaced."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
)

import dynorm
from dynorm.errors import CalibrationWarning, DataError, ModelError
from dynorm.hub import load, save
from dynorm.jobs.means import fold_means_
from dynorm.layers import PointwiseNorm
from dynorm.layers.rmsnorm import RMSNorm


class Stream(nn.Module):
    """A pre-norm stream whose tokens differ in their means.

    With ``bent`` the embedding is not linear, and its own means hardly differ.
    """

    bent = False

    def __init__(self, dim: int = 48) -> None:
        super().__init__()
        self.table = nn.Embedding(64, dim)
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(3))
        self.blocks = nn.ModuleList(nn.Linear(dim, dim) for _ in range(2))
        self.head = nn.Linear(dim, 5)
        with torch.no_grad():
            for block in self.blocks:
                block.weight += 0.3 * torch.randn(1, dim)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        if self.bent:
            x = x.relu()
        for norm, block in zip(self.norms, self.blocks, strict=False):
            x = x + block(norm(x))
        logits: Tensor = self.head(self.norms[-1](x))
        return logits


def stream(bent: bool = False) -> Stream:
    torch.manual_seed(0)
    model = Stream().eval()
    model.bent = bent
    if not bent:
        with torch.no_grad():
            model.table.weight += torch.linspace(-3, 3, 64)[:, None]
    return model


def batches(count: int = 12) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 64, (8, 16), generator=generator) for _ in range(count)]


def test_layers_are_nearer_to_norms_without_a_mean() -> None:
    errors = {}
    for fold_means in (True, False):
        model = stream()
        report = dynorm.convert_model(model, batches(), fold_means=fold_means, refine=0)
        assert all(isinstance(norm, PointwiseNorm) for norm in model.norms)
        errors[fold_means] = 1 - report.output.cosine_mean
        stages = report.meta.get("stages", {})
        assert stages.get("fold_means", {}).get("folded") == (3 if fold_means else None)
    assert errors[True] < 0.5 * errors[False]


def test_the_original_stays_the_same_function() -> None:
    model, (ids, *_) = stream(), batches()
    before = model(ids)
    model.train()
    means = fold_means_(model, ids)
    assert means is not None
    assert (means.folded, means.layernorms, means.refused) == (3, 3, ())
    assert all(isinstance(norm, RMSNorm) for norm in model.norms)
    assert all(module.training for module in model.modules())
    torch.testing.assert_close(model(ids), before)


def test_means_leave_the_linear_writers_of_a_stream_that_has_others() -> None:
    errors = {}
    for fold_means in (True, False):
        model = stream(bent=True)
        report = dynorm.convert_model(model, batches(), fold_means=fold_means, refine=0)
        errors[fold_means] = 1 - report.output.cosine_mean
        if fold_means:
            stage = report.meta["stages"]["fold_means"]
            assert (stage["folded"], stage["partly"]) == (0, 3)
            assert "not linear" in stage["refused"][0]
            for block in model.blocks:
                assert float(block.weight.detach().mean(0).abs().max()) < 1e-6
        assert all(isinstance(norm, PointwiseNorm) for norm in model.norms)
    assert errors[True] < 0.5 * errors[False]


def test_the_original_whose_means_left_partly_stays_the_same_function() -> None:
    model, (ids, *_) = stream(bent=True).double(), batches()
    with torch.no_grad():
        for norm in model.norms:
            norm.weight.uniform_(0.5, 2.0)
            norm.bias.uniform_(-1.0, 1.0)
    before = model(ids)
    means = fold_means_(model, ids)
    assert means is not None
    assert means.partly == 3
    assert all(type(norm) is nn.LayerNorm for norm in model.norms)
    torch.testing.assert_close(model(ids), before, rtol=1e-10, atol=1e-10)


def test_a_stream_that_others_see_keeps_its_means_with_the_reason() -> None:
    class Seen(Stream):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.table(ids)
            logits: Tensor = self.head(self.norms[0](x)) + x[..., :5].exp()
            return logits

    torch.manual_seed(0)
    report = dynorm.convert_model(Seen().eval(), batches(), fold_means=True, refine=0)
    stage = report.meta["stages"]["fold_means"]
    assert (stage["folded"], stage["partly"]) == (0, 0)
    assert "sees its mean" in stage["refused"][0]


def test_a_model_that_cannot_be_traced_is_converted_with_the_reason() -> None:
    class Branching(Stream):
        def forward(self, ids: Tensor) -> Tensor:
            if bool(self.table(ids).sum() > 1e9):
                return ids.float()
            return super().forward(ids)

    torch.manual_seed(0)
    model = Branching().eval()
    with pytest.warns(CalibrationWarning, match=r"foldable.*fold_means=False"):
        report = dynorm.convert_model(model, batches(), fold_means=True, refine=0)
    stage = report.meta["stages"]["fold_means"]
    assert stage["folded"] == 0
    assert "traceable" in stage["refused"][0]
    assert all(isinstance(norm, PointwiseNorm) for norm in model.norms)


def test_norms_that_are_not_selected_stay_layernorms() -> None:
    model = stream()
    dynorm.convert_model(model, batches(), fold_means=True, refine=0, skip="norms.1")
    kinds = [type(norm) for norm in model.norms]
    assert kinds[1] is nn.LayerNorm
    assert issubclass(kinds[0], PointwiseNorm)


def test_an_error_puts_norms_weights_and_ties_back() -> None:
    config = GPT2Config(n_embd=24, n_layer=1, n_head=2, vocab_size=64, n_positions=32)
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config).eval()
    before = copy.deepcopy(model.state_dict())
    good = [{"input_ids": ids} for ids in batches(4)]
    bad: list[dict[str, Any]] = [{"input_ids": torch.full((2, 4), 99)}]
    with pytest.raises(DataError):
        dynorm.convert_model(model, good, held_out=bad, fold_means=True, refine=0)
    assert model.lm_head.weight is model.transformer.wte.weight
    assert type(model.transformer.ln_f) is nn.LayerNorm
    assert config.tie_word_embeddings
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    report = dynorm.convert_model(model, good, fold_means=True, refine=0)
    assert report.meta["stages"]["fold_means"]["untied"] == ["transformer.wte.weight"]


def test_a_model_without_layernorms_has_no_means_to_fold() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.RMSNorm(8), nn.Linear(8, 8)).eval()
    assert fold_means_(model, torch.randn(4, 8)) is None


def test_such_a_model_is_saved_and_loaded(tmp_path: Path) -> None:
    model, (ids, *_) = stream(), batches()
    dynorm.convert_model(model, batches(), fold_means=True, refine=0)
    save(model, tmp_path / "whole")
    torch.testing.assert_close(load(tmp_path / "whole", Stream())(ids), model(ids))


def test_a_decoder_with_folded_means_loads_with_transformers(tmp_path: Path) -> None:
    config = GPT2Config(n_embd=48, n_layer=2, n_head=2, vocab_size=64, n_positions=32)
    config.bos_token_id = config.eos_token_id = 0
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config).eval()
    samples = [{"input_ids": ids} for ids in batches(6)]
    # Folding the means is the default for a decoder.
    report = dynorm.convert_model(model, samples, refine=0)
    assert report.meta["stages"]["fold_means"]["folded"] == 5
    assert report.meta["recipe"]["fold_means"] is True
    save(model, tmp_path / "model")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    with torch.no_grad():
        expected = model(**samples[0]).logits
        torch.testing.assert_close(loaded(**samples[0]).logits, expected)
    assert loaded.lm_head.weight is not loaded.transformer.wte.weight


def test_a_masked_language_model_is_saved_with_the_bias_of_its_head(tmp_path: Path) -> None:
    """Its class ties that bias only if it ties the embedding."""
    config = BertConfig(
        hidden_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=32,
        vocab_size=64,
    )
    torch.manual_seed(0)
    model = BertForMaskedLM(config).eval()
    nn.init.normal_(model.cls.predictions.bias)
    samples = [{"input_ids": ids} for ids in batches(6)]
    report = dynorm.convert_model(model, samples, refine=0)
    untied = report.meta["stages"]["fold_means"]["untied"]
    assert untied == ["bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.bias"]
    save(model, tmp_path / "model")
    with torch.no_grad():
        expected = model(**samples[0]).logits
        for loaded in (
            load(tmp_path / "model"),
            BertForMaskedLM.from_pretrained(tmp_path / "model"),
        ):
            torch.testing.assert_close(loaded(**samples[0]).logits, expected)


def test_means_that_only_rounding_shows_are_folded() -> None:
    """Means a thousand times as large as the rest make float32 round by more than ``fold_`` allows."""
    model, (ids, *_) = stream(), batches()
    with torch.no_grad():
        model.table.weight += 1000 * torch.rand(64, 1)
    with pytest.raises(ModelError, match="tolerance"):
        dynorm.fold_(copy.deepcopy(model), ids, affine=False)
    means = fold_means_(model, ids)
    assert means is not None
    assert means.folded == 3


class Branch(Stream):
    """A stream that a second head reads, if it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(48, 1)

    def forward(self, ids: Tensor, extra: bool = False) -> Any:
        x = self.table(ids)
        for norm, block in zip(self.norms, self.blocks, strict=False):
            x = x + block(norm(x))
        logits = self.head(self.norms[-1](x))
        return (logits, self.extra(x)) if extra else logits


def test_a_branch_that_only_later_batches_take_is_not_changed_silently() -> None:
    torch.manual_seed(0)
    model = Branch().eval()
    with torch.no_grad():
        model.table.weight += torch.linspace(-3, 3, 64)[:, None]
        model.extra.weight += 1
    before = copy.deepcopy(model.state_dict())
    first, *others = batches(4)
    data = [{"ids": first}, *({"ids": ids, "extra": True} for ids in others)]
    with pytest.raises(ModelError, match=r"fold_means=False"):
        dynorm.convert_model(model, data, refine=0)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert isinstance(model.norms[0], nn.LayerNorm)


def test_paths_with_the_letters_of_globs() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(64, 48)
            self.norms = nn.ModuleDict({name: nn.LayerNorm(48) for name in ("a[0]", "a*", "ab")})
            self.block = nn.Linear(48, 48)
            self.head = nn.Linear(48, 5)

        def forward(self, ids: Tensor) -> Tensor:
            x = self.table(ids)
            for norm in self.norms.values():
                x = x + self.block(norm(x))
            logits: Tensor = self.head(x)
            return logits

    torch.manual_seed(0)
    model = Named().eval()
    means = fold_means_(model, batches()[0], dynorm.Recipe(skip="norms.ab"))
    assert means is not None
    assert means.layernorms == 2
    assert isinstance(model.norms["ab"], nn.LayerNorm)


def test_a_batch_may_be_a_list_and_the_mode_stays() -> None:
    model = stream().train()
    report = dynorm.convert_model(model, [[ids] for ids in batches(6)], refine=0)
    assert report.meta["stages"]["fold_means"]["folded"] == 3
    assert all(module.training for module in model.modules())


class Wide(Stream):
    """Returns float32, as many heads do with their logits."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids).float()


def test_outputs_in_float32_of_a_model_in_half_precision_are_compared_as_its_own() -> None:
    torch.manual_seed(0)
    model = Wide(768).eval()
    with torch.no_grad():
        model.table.weight += torch.linspace(-3, 3, 64)[:, None]
    report = dynorm.convert_model(model.bfloat16(), batches(4), refine=0)
    assert report.meta["stages"]["fold_means"]["folded"] == 3


class Remembering(Stream):
    """Adds something of the batch before to its outputs."""

    last: Tensor | None = None

    def forward(self, ids: Tensor) -> Tensor:
        logits = super().forward(ids)
        if self.last is not None:
            logits = logits + self.last
        self.last = logits.detach().mean()
        return logits


def test_a_model_that_keeps_something_of_a_batch_is_compared_with_itself() -> None:
    torch.manual_seed(0)
    model = Remembering().eval()
    means = fold_means_(model, batches()[0], others=batches()[1:])
    assert means is not None
    assert means.folded == 3
