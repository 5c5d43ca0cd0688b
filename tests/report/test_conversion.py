"""The report: every number against a plain computation on all activations at once, and the page that shows them."""

from __future__ import annotations

import copy
import json
import math
import re
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import optimize, stats
from torch import Tensor, nn

import dynorm
from dynorm import calibrate_, convert_, find_norms
from dynorm.errors import DataError, ModelError
from dynorm.find.recover import core
from dynorm.layers import PointwiseNorm
from dynorm.outputs import sample_vectors
from dynorm.replace.converted import dynorm_layers, replaced_by
from dynorm.report import ModelReport, OutputReport, measure
from dynorm.report.conversion import compare
from dynorm.report.stats import FUNCTIONS

transformers = pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

WIDTH = 32
VOCABULARY = 97


def bert(cls: Any = None) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=40,
        initializer_range=0.3,
    )
    return roughened((cls or transformers.BertModel)(config).double())


def gpt() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=WIDTH,
        n_layer=2,
        n_head=4,
        n_positions=40,
        initializer_range=0.2,
    )
    return roughened(transformers.GPT2LMHeadModel(config).double())


def roughened(model: nn.Module) -> nn.Module:
    """The model with norms that have learned something, one huge channel among it."""
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            with torch.no_grad():
                module.weight.add_(0.3 * torch.randn_like(module.weight))
                module.bias.add_(0.3 * torch.randn_like(module.bias))
                module.weight[3] = 6.0
    return model.train()


def text_batches(
    count: int, seed: int = 0, rows: int = 5, length: int = 12
) -> list[dict[str, Tensor]]:
    """Token ids of texts of several lengths, padded on the right."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(count):
        lengths = torch.randint(4, length + 1, (rows, 1), generator=generator)
        lengths[0] = length
        mask = (torch.arange(length) < lengths).long()
        ids = torch.randint(1, VOCABULARY, (rows, length), generator=generator) * mask
        batches.append({"input_ids": ids, "attention_mask": mask})
    return batches


def converted(
    model: nn.Module, batches: list[Any], to: str = "dyisru", **options: Any
) -> nn.Module:
    example = batches[0]
    sites = (
        find_norms(model, **example) if isinstance(example, dict) else find_norms(model, example)
    )
    convert_(model, sites, to=to, **{"per_channel": False, "witnesses": 0, **options})
    calibrate_(model, batches)
    return model


def toy(norm: nn.Module | None = None) -> nn.Module:
    torch.manual_seed(0)
    norm = nn.LayerNorm(WIDTH) if norm is None else norm
    return nn.Sequential(
        nn.Linear(8, WIDTH), norm, nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.RMSNorm(WIDTH, eps=1e-6)
    )


def toy_batches(count: int = 3, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [3 * torch.randn(50, 8, generator=generator) for _ in range(count)]


def activations(
    model: nn.Module, paths: list[str], batches: list[Any]
) -> dict[str, tuple[Tensor, Tensor]]:
    """All inputs and outputs of some modules, padding left out, (tokens, C)."""
    found: dict[str, list[tuple[Tensor, Tensor]]] = {path: [] for path in paths}
    mask = torch.empty(0)

    def keep(path: str) -> Any:
        return lambda module, args, output: found[path].append((args[0][mask], output[mask]))

    handles = [model.get_submodule(path).register_forward_hook(keep(path)) for path in paths]
    model.eval()
    with torch.no_grad():
        for batch in batches:
            mask = (
                batch["attention_mask"].bool()
                if isinstance(batch, dict)
                else torch.ones(len(batch)).bool()
            )
            model(**batch) if isinstance(batch, dict) else model(batch)
    for handle in handles:
        handle.remove()
    return {
        path: (torch.cat([x for x, _ in pairs]), torch.cat([y for _, y in pairs]))
        for path, pairs in found.items()
    }


def best_error(
    name: str, x: Tensor, y: Tensor, held_x: Tensor, held_y: Tensor, scale: float, center: float
) -> float:
    """The held-out relative error of a function with the constant that scipy finds."""
    guess = math.log(scale**2 * float(x.var()))

    def f(x: Tensor, log_beta: float) -> Tensor:
        return FUNCTIONS[name](
            x, torch.tensor(math.exp(log_beta), dtype=torch.float64), center, scale
        )

    def loss(log_beta: float) -> float:
        return float((f(x, log_beta) - y).square().sum())

    best = optimize.minimize_scalar(loss, bounds=(guess - 5, guess + 8), method="bounded").x
    return float((f(held_x, best) - held_y).norm() / held_y.norm())


def numbers(value: Any, path: str = "") -> dict[str, Any]:
    """A nested report as flat {path: leaf}, without the picture's bins."""
    if isinstance(value, dict):
        return {
            k: v
            for key, item in value.items()
            if key != "bins"
            for k, v in numbers(item, f"{path}/{key}").items()
        }
    if isinstance(value, list):
        return {
            k: v for i, item in enumerate(value) for k, v in numbers(item, f"{path}/{i}").items()
        }
    return {path: value}


def assert_same(a: ModelReport, b: ModelReport, rel: float) -> None:
    first, second = numbers(a.to_dict()), numbers(b.to_dict())
    assert first.keys() == second.keys()
    for key, value in first.items():
        if isinstance(value, float):
            assert second[key] == pytest.approx(value, rel=rel, abs=1e-9), key
        elif not key.endswith("/batches"):
            assert second[key] == value, key


class TestSites:
    @pytest.fixture(scope="class")
    @staticmethod
    def case() -> tuple[nn.Module, nn.Module, ModelReport]:
        original = bert()
        model = converted(copy.deepcopy(original), text_batches(3, seed=1))
        return (
            original,
            model,
            measure(model, text_batches(4, seed=2), fit_on=text_batches(3, seed=1)),
        )

    def test_a_row_a_site_in_call_order(self, case: Any) -> None:
        report = case[2]
        assert [site.path for site in report.sites] == [
            "embeddings.LayerNorm",
            "encoder.layer.0.attention.output.LayerNorm",
            "encoder.layer.0.output.LayerNorm",
            "encoder.layer.1.attention.output.LayerNorm",
            "encoder.layer.1.output.LayerNorm",
        ]
        assert {site.layer for site in report.sites} == {"dyisru"}
        tokens = sum(int(batch["attention_mask"].sum()) for batch in text_batches(4, seed=2))
        assert {site.tokens for site in report.sites} == {tokens}

    def test_sizes(self, case: Any) -> None:
        original, _, report = case
        seen = activations(original, [site.path for site in report.sites], text_batches(4, seed=2))
        for site in report.sites:
            x = seen[site.path][0]
            deviation = x - x.mean(1, keepdim=True)
            sigma = (deviation.square().mean(1) + 1e-12).sqrt()
            assert site.outlier == pytest.approx(
                float((deviation.abs() / sigma[:, None]).max()), rel=1e-9
            )
            assert site.outlier_site == pytest.approx(
                float(deviation.abs().max() / sigma.log().mean().exp()), rel=1e-9
            )
            assert site.sigma_spread == pytest.approx(
                float(sigma.log().std(correction=0)), rel=1e-6
            )
            low, high = np.quantile(sigma.numpy(), [0.01, 0.99], method="inverted_cdf")
            assert site.sigma_range == pytest.approx(high / low, rel=0.012)

    @pytest.mark.parametrize("name", list(FUNCTIONS))
    def test_errors_of_the_core(self, case: Any, name: str) -> None:
        original, _, report = case
        paths = [site.path for site in report.sites]
        fitted = activations(original, paths, text_batches(3, seed=1))
        held_out = activations(original, paths, text_batches(4, seed=2))
        for site in report.sites:
            x, held_x = fitted[site.path][0], held_out[site.path][0]
            y, held_y = core(x, "layernorm", 1e-12), core(held_x, "layernorm", 1e-12)
            expected = best_error(name, x, y, held_x, held_y, math.sqrt(WIDTH - 1), float(x.mean()))
            assert site.fit.errors[name] == pytest.approx(expected, rel=1e-3)
            assert site.fit.center == pytest.approx(float(x.mean()), rel=1e-9)

    def test_error_now_and_saturation(self, case: Any) -> None:
        original, model, report = case
        paths, batches = [site.path for site in report.sites], text_batches(4, seed=2)
        before, after = activations(original, paths, batches), activations(model, paths, batches)
        for site in report.sites:
            wanted, (x, now) = before[site.path][1], after[site.path]
            expected = (now - wanted).norm() / (wanted - wanted.mean(0)).norm()
            assert site.error_now == pytest.approx(float(expected), rel=1e-9)
            layer = model.get_submodule(site.path)
            beta, center = float(layer.beta().detach()), float(layer.center.detach())
            limit = 0.95 / math.sqrt(1 - 0.95**2) * math.sqrt(beta)
            assert site.saturated == pytest.approx(
                float(((x - center).abs() > limit).double().mean())
            )
            assert (site.beta, site.center) == (beta, center)

    def test_the_picture_is_of_held_out_values(self, case: Any) -> None:
        original, _, report = case
        for site in report.sites:
            x = activations(original, [site.path], text_batches(4, seed=2))[site.path][0]
            y = core(x, "layernorm", 1e-12)
            pairs = set(zip(x.flatten().tolist(), y.flatten().tolist(), strict=True))
            assert len(site.picture.x) == min(1500, x.numel())
            assert set(zip(site.picture.x, site.picture.y, strict=True)) <= pairs
            assert sum(b.count for b in site.picture.bins) <= x.numel()
            assert sum(b.count for b in site.picture.bins) > 0.9 * x.numel()
            for b in site.picture.bins:
                assert abs(b.mean) <= site.outlier

    def test_without_fit_on_each_batch_is_halved(self, case: Any) -> None:
        original, model, _ = case
        batches = text_batches(4, seed=2)
        report = measure(model, batches)
        path = report.sites[2].path
        parts = [activations(original, [path], [batch])[path][0] for batch in batches]
        x = torch.cat([part[: len(part) // 2] for part in parts])
        held_x = torch.cat([part[len(part) // 2 :] for part in parts])
        y, held_y = core(x, "layernorm", 1e-12), core(held_x, "layernorm", 1e-12)
        expected = best_error("dyisru", x, y, held_x, held_y, math.sqrt(WIDTH - 1), float(x.mean()))
        assert report.sites[2].fit.errors["dyisru"] == pytest.approx(expected, rel=1e-3)

    def test_how_the_data_is_cut_does_not_matter(self, case: Any) -> None:
        _, model, report = case

        def joined(batches: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
            return [{name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}]

        assert_same(
            report,
            measure(
                model,
                iter(joined(text_batches(4, seed=2))),
                fit_on=joined(text_batches(3, seed=1)),
            ),
            rel=2e-4,
        )

    def test_what_stands_in_the_padding_does_not_matter(self, case: Any) -> None:
        _, model, report = case
        noise = torch.Generator().manual_seed(7)
        changed = [
            batch
            | {
                "input_ids": torch.where(
                    batch["attention_mask"] == 1,
                    batch["input_ids"],
                    torch.randint(1, 97, (5, 12), generator=noise),
                )
            }
            for batch in text_batches(4, seed=2)
        ]
        assert_same(report, measure(model, changed, fit_on=text_batches(3, seed=1)), rel=1e-9)

    def test_the_same_seed_gives_the_same_report(self, case: Any) -> None:
        _, model, report = case
        again, other = (
            measure(model, text_batches(4, seed=2), fit_on=text_batches(3, seed=1), seed=s)
            for s in (0, 1)
        )
        assert again == report
        assert other.sites[0].picture.x != report.sites[0].picture.x
        assert other.to_dict() == report.to_dict()

    def test_an_rmsnorm_is_compared_without_a_centre(self) -> None:
        original = toy().double()
        batches = [batch.double() for batch in toy_batches()]
        report = measure(converted(copy.deepcopy(original), batches), batches, fit_on=batches)
        site = report.sites[1]
        x, _ = activations(original, ["4"], batches)["4"]
        y = core(x, "rmsnorm", 1e-6)
        assert (site.kind, site.fit.center) == ("rmsnorm", 0.0)
        assert site.outlier == pytest.approx(float(y.abs().max()), rel=1e-9)
        expected = best_error("dyisru", x, y, x, y, math.sqrt(WIDTH), 0.0)
        assert site.fit.errors["dyisru"] == pytest.approx(expected, rel=1e-3)

    @pytest.mark.parametrize("to", ["dyisru", "dyt", "derf", "linear"])
    @pytest.mark.parametrize("per_channel", [False, True])
    def test_every_layer(self, to: str, per_channel: bool) -> None:
        report = measure(
            converted(toy(), toy_batches(), to=to, per_channel=per_channel), toy_batches(seed=1)
        )
        assert [site.layer for site in report.sites] == [to, to]
        assert all(0 < site.error_now < 1 and 0 <= site.saturated < 1 for site in report.sites)

    def test_saturation_of_a_layer_driven_to_its_bound(self) -> None:
        model = converted(toy(), toy_batches())
        for layer in dynorm_layers(model).values():
            layer.set_slope_(1e-12)
        assert all(site.saturated > 0.99 for site in measure(model, toy_batches()).sites)

    def test_channels_first(self) -> None:
        class Last(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.norm = nn.LayerNorm(6)

            def forward(self, x: Tensor) -> Tensor:
                return self.norm(x.movedim(1, -1)).movedim(-1, 1)

        generator = torch.Generator().manual_seed(0)
        batches = [torch.randn(2, 6, 5, 4, generator=generator) for _ in range(2)]
        model = nn.Sequential(nn.Conv2d(6, 6, 1), Last())
        report = measure(converted(model, batches), batches)
        assert (report.sites[0].channels, report.sites[0].tokens) == (6, 80)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_half_precision(self, dtype: torch.dtype) -> None:
        batches = text_batches(2)
        full = measure(converted(bert(), batches), batches)
        half = measure(converted(bert().to(dtype), batches), batches)
        for a, b in zip(full.sites, half.sites, strict=True):
            assert b.fit.errors["dyisru"] == pytest.approx(a.fit.errors["dyisru"], rel=0.05)
            assert b.outlier == pytest.approx(a.outlier, rel=0.05)

    def test_activations_far_from_zero(self) -> None:
        original = nn.Sequential(nn.Linear(8, WIDTH), nn.LayerNorm(WIDTH)).double()
        batches = [batch.double() for batch in toy_batches()]
        near = measure(converted(copy.deepcopy(original), batches), batches).sites[0]
        with torch.no_grad():
            original[0].bias.add_(1e4)
        far = measure(converted(original, batches), batches).sites[0]
        assert far.fit.errors["dyisru"] == pytest.approx(near.fit.errors["dyisru"], rel=1e-3)
        assert far.outlier_site == pytest.approx(near.outlier_site, rel=1e-3)
        assert far.fit.center == pytest.approx(1e4, rel=1e-3)

    def test_a_model_that_draws_numbers_and_writes_in_place(self) -> None:
        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.norm = nn.LayerNorm(8)
                self.register_buffer("calls", torch.zeros(1))

            def forward(self, x: Tensor) -> Tensor:
                self.calls += 1
                return self.norm(nn.functional.dropout(x, 0.5)).mul_(2)

        model = converted(Model(), toy_batches())
        layer = model.norm
        layer.pointwise = replaced_by(layer).module.forward
        report = measure(model, toy_batches())
        assert (report.sites[0].error_now, float(model.calls)) == (0.0, 0.0)
        assert report.output.cosine_min == pytest.approx(1.0)

    def test_a_layer_that_is_called_twice_or_never(self) -> None:
        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.norm, self.other = nn.LayerNorm(8), nn.LayerNorm(8)

            def forward(self, x: Tensor, both: bool = False) -> Tensor:
                x = self.norm(1.5 * self.norm(x) + x)
                return self.other(x) if both else x

        model = Model()
        batches = [torch.randn(20, 8) for _ in range(2)]
        convert_(model, find_norms(model, batches[0], both=True))
        with pytest.warns(dynorm.errors.CalibrationWarning, match="default constants"):
            report = measure(model, batches)
        assert (report.sites[0].tokens, report.unreached) == (80, ["other"])
        assert "other  not reached" in str(report)


class TestWholeModel:
    def test_an_encoder(self) -> None:
        original, batches = bert(), text_batches(6, seed=3)
        model = converted(copy.deepcopy(original), text_batches(3))
        out = measure(model, batches).output
        before, after = (self._embeddings(m, batches) for m in (original, model))
        cosines = (before * after).sum(1)
        assert (out.kind, out.samples) == ("encoder", 30)
        assert out.cosine_mean == pytest.approx(float(cosines.mean()), abs=1e-7)
        assert out.cosine_min == pytest.approx(float(cosines.min()), abs=1e-7)
        assert out.cosine_p05 == pytest.approx(np.quantile(cosines.numpy(), 0.05), abs=1e-7)
        rows, columns = np.triu_indices(30, 1)
        expected = stats.spearmanr(
            (before @ before.T)[rows, columns], (after @ after.T)[rows, columns]
        ).statistic
        assert out.spearman == pytest.approx(expected, abs=1e-9)
        assert out.loss_now is None

    @staticmethod
    def _embeddings(model: nn.Module, batches: list[dict[str, Tensor]]) -> Tensor:
        found = []
        with torch.no_grad():
            for batch in batches:
                hidden, mask = model.eval()(**batch).last_hidden_state, batch["attention_mask"]
                found += [h[m.bool()].mean(0) for h, m in zip(hidden, mask, strict=True)]
        return nn.functional.normalize(torch.stack(found), dim=1)

    def test_a_language_model(self) -> None:
        original, batches = gpt(), text_batches(3, seed=3)
        model = converted(copy.deepcopy(original), text_batches(3))
        out = measure(model, batches).output
        losses, divergences = [], []
        with torch.no_grad():
            for batch in batches:
                pair = [m.eval()(**batch).logits.log_softmax(-1) for m in (original, model)]
                for row, length in enumerate(batch["attention_mask"].sum(1).tolist()):
                    p, q = (logits[row, : length - 1] for logits in pair)
                    target = batch["input_ids"][row, 1:length, None]
                    losses.append(torch.cat([-p.gather(1, target), -q.gather(1, target)], dim=1))
                    divergences.append((p.exp() * (p - q)).sum(1))
        before, after = torch.cat(losses).mean(0).tolist()
        assert (out.kind, out.tokens) == ("language", sum(len(part) for part in losses))
        assert out.loss_original == pytest.approx(before, rel=1e-5)
        assert out.loss_now == pytest.approx(after, rel=1e-5)
        assert out.loss_difference == pytest.approx(after - before, abs=1e-5)
        assert out.kl == pytest.approx(float(torch.cat(divergences).mean()), rel=1e-4)
        assert out.kl_worst == pytest.approx(float(torch.cat(divergences).max()), rel=1e-4)
        assert out.spearman is None

    def test_left_padding_is_left_out_too(self) -> None:
        batches = [{k: v.flip(1) for k, v in batch.items()} for batch in text_batches(2, seed=3)]
        out = measure(converted(gpt(), batches), batches).output
        assert (out.kind, out.tokens) == (
            "language",
            sum(int(b["attention_mask"].sum()) - 5 for b in batches),
        )

    def test_a_masked_language_model_is_no_language_model(self) -> None:
        batches = text_batches(2)
        out = measure(converted(bert(transformers.BertForMaskedLM), batches), batches).output
        assert (out.kind, out.samples, out.loss_now) == ("tensor", 10, None)

    def test_other_outputs(self) -> None:
        original, batches = toy(), toy_batches()
        model = converted(copy.deepcopy(original), batches)
        out = measure(model, batches).output
        x = torch.cat(batches)
        with torch.no_grad():
            cosines = nn.functional.cosine_similarity(
                original(x).double(), model(x).double(), dim=1
            )
        assert (out.kind, out.samples, out.spearman) == ("tensor", 150, None)
        assert out.cosine_mean == pytest.approx(float(cosines.mean()), abs=1e-6)
        assert out.cosine_min == pytest.approx(float(cosines.min()), abs=1e-6)

    def test_output_chooses_the_tensor(self) -> None:
        batches = text_batches(2)
        out = measure(
            converted(bert(), batches), batches, output=lambda out: out.pooler_output
        ).output
        assert (out.kind, out.samples) == ("tensor", 10)
        with pytest.raises(DataError, match="output="):
            measure(converted(bert(), batches), batches, output=lambda out: "text")

    def test_a_norm_in_place_of_the_layer_loses_nothing(self) -> None:
        batches = text_batches(2)
        model = converted(bert(), batches)
        for layer in dynorm_layers(model).values():
            layer.pointwise = replaced_by(layer).module.forward
        report = measure(model, batches)
        assert report.output.cosine_min == pytest.approx(1.0)
        assert report.output.spearman == pytest.approx(1.0)
        assert [site.error_now for site in report.sites] == [0.0] * 5

    def test_an_original_with_other_weights(self) -> None:
        original, batches = bert(), text_batches(3)
        model = converted(copy.deepcopy(original), batches)
        plain = measure(model, batches)
        assert measure(model, batches, original=original).to_dict() == plain.to_dict()
        with torch.no_grad():
            model.get_parameter("encoder.layer.0.output.dense.weight").mul_(1.5)
        moved = measure(model, batches, original=original)
        assert moved.sites[2].fit.errors["dyisru"] == plain.sites[2].fit.errors["dyisru"]
        assert moved.sites[2].error_now > plain.sites[2].error_now
        # The moved model with its old norms is not the original.
        with pytest.raises(dynorm.errors.ModelError, match="pass original="):
            measure(model, batches)

    def test_the_fast_path_of_torch_does_not_hide_the_norms(self) -> None:
        torch.manual_seed(0)
        original = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(WIDTH, 4, 64, batch_first=True), 2
        ).eval()
        padding = torch.arange(7) >= torch.tensor([[7], [4], [5]])
        batches = [
            {"src": torch.randn(3, 7, WIDTH), "src_key_padding_mask": padding} for _ in range(2)
        ]
        report = measure(converted(copy.deepcopy(original), batches), batches, original=original)
        assert report.output.kind == "encoder"
        assert [site.tokens for site in report.sites] == [32] * 4
        assert torch.backends.mha.get_fastpath_enabled()


class TestUntouched:
    def test_models_are_left_as_they_were(self) -> None:
        original, batches = bert(), text_batches(2)
        model = converted(copy.deepcopy(original), batches)
        model.encoder.layer[0].eval()
        before = [self._state(m) for m in (model, original)]
        random = torch.get_rng_state()
        measure(model, batches, original=original)
        with pytest.raises(DataError):
            measure(model, [{"input_ids": torch.ones(2, 999, dtype=torch.long)}], original=original)
        assert torch.equal(torch.get_rng_state(), random)
        assert [self._state(m) for m in (model, original)] == before

    @staticmethod
    def _state(model: nn.Module) -> list[Any]:
        modules = [
            (m.training, len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()
        ]
        tensors = {
            n: (t.requires_grad, t.grad, t.tolist())
            for n, t in model.state_dict(keep_vars=True).items()
        }
        return [modules, tensors]


class TestBadInput:
    @pytest.mark.parametrize(
        ("batches", "message"),
        [
            ([], "one batch"),
            (torch.zeros(4, 8), "pass a list"),
            (["text"], "must.*tensor"),
            ([torch.zeros(4, 9)], "run.*batch"),
            ([torch.full((4, 8), math.nan)], "'1'"),
            ([torch.full((4, 8), 1e38)], "'[14]'"),
        ],
    )
    def test_batches(self, batches: Any, message: str) -> None:
        model = converted(toy(), toy_batches())
        with pytest.raises(DataError, match=message):
            measure(model, batches)
        with pytest.raises(DataError, match=message):
            measure(model, toy_batches(), fit_on=batches)

    def test_an_output_that_is_not_finite(self) -> None:
        model = nn.Sequential(converted(toy(), toy_batches()), nn.Threshold(1e9, math.inf))
        with pytest.raises(DataError, match=r"original.*NaN"):
            measure(model, toy_batches())

    def test_a_model_that_is_not_converted(self) -> None:
        with pytest.raises(ModelError, match="convert_"):
            measure(toy(), toy_batches())
        with pytest.raises(ModelError, match="replaced a norm"):
            measure(nn.Sequential(nn.Linear(8, 8), PointwiseLayer()), toy_batches())

    def test_an_original_that_is_none(self) -> None:
        model = converted(toy(), toy_batches())
        with pytest.raises(ModelError, match="converted already"):
            measure(model, toy_batches(), original=copy.deepcopy(model))
        with pytest.raises(ModelError, match="has no '1'"):
            measure(model, toy_batches(), original=nn.Sequential(nn.Linear(8, 8)))
        other = nn.Sequential(*toy(), nn.Linear(WIDTH, 3))
        with pytest.raises(DataError, match="one shape"):
            measure(model, toy_batches(), original=other)

    def test_batches_that_reach_no_site(self) -> None:
        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.norm = nn.LayerNorm(8)

            def forward(self, x: Tensor, use: bool = True) -> Tensor:
                return self.norm(x) if use else x

        model = converted(Model(), toy_batches())
        with pytest.raises(DataError, match="reached none"):
            measure(model, [{"x": torch.randn(4, 8), "use": False}])


def PointwiseLayer() -> PointwiseNorm:  # noqa: N802
    from dynorm.layers import DyISRU

    return DyISRU(8)


def odd_report() -> ModelReport:
    """A report with names that are markup, and values that JSON has no word for."""
    torch.manual_seed(0)
    model = nn.Sequential(
        OrderedDict(
            [
                ("first", nn.Linear(8, 8)),
                ('<img src=x onerror="alert(1)">&', nn.LayerNorm(8)),
                ("2", nn.RMSNorm(8)),
            ]
        )
    )
    meta = {
        "model": "<script>alert(1)</script>",
        "loss": math.nan,
        "path": Path("a&b"),
        "seeds": (1, 2),
        "v": {"<b>": 1.5},
    }
    return measure(converted(model, toy_batches()), toy_batches(), meta=meta)


class TestForms:
    def test_json(self) -> None:
        values = odd_report().to_dict()
        text = json.dumps(values, allow_nan=False)
        assert json.loads(text) == values
        assert values["meta"]["loss"] is None
        assert values["meta"]["path"] == "a&b"
        assert values["sites"][0]["bins"][0].keys() == {"x", "mean", "std", "count"}
        assert "points" not in text

    def test_the_table_is_at_most_80_columns_wide(self) -> None:
        deep = nn.Sequential(OrderedDict([("a_block_with_a_rather_long_name_" * 3, toy())]))
        table = str(measure(converted(deep, toy_batches()), toy_batches()))
        assert max(map(len, table.splitlines())) <= 80
        assert (
            len({line.split()[0] for line in table.splitlines() if line.startswith("a_b_w_")}) == 2
        )
        for report in (table, str(odd_report())):
            assert len(re.findall(r" (LN|RMS) ", report)) == 2

    def test_a_language_models_losses_are_printed(self) -> None:
        batches = text_batches(2)
        assert re.search(
            r"loss \d\.\d+ -> \d\.\d+ \([+-]\d", str(measure(converted(gpt(), batches), batches))
        )


COSINE = "was lost: the mean cosine similarity between the converted and the original"
OUTPUTS = {
    "Little quality was lost: the loss is 2.04": {
        "kind": "language",
        "loss_original": 2.0,
        "loss_now": 2.04,
    },
    "Some quality was lost: the loss is 2.010 nats per token instead of 2.000, the divergence from the "
    "original is 0.100": {
        "kind": "language",
        "loss_original": 2.0,
        "loss_now": 2.01,
        "kl": 0.1,
    },
    "Some quality was lost: the loss is 2.2": {
        "kind": "language",
        "loss_original": 2.0,
        "loss_now": 2.2,
    },
    # A fine-tuned model.
    "The model differs from the original, but its loss is not worse: the loss is 0.010 nats per "
    "token instead of 0.890, the divergence from the original is 2.500": {
        "kind": "language",
        "loss_original": 0.89,
        "loss_now": 0.01,
        "kl": 2.5,
    },
    "Much of the quality was lost: the loss is 3.5": {
        "kind": "language",
        "loss_original": 2.0,
        "loss_now": 3.5,
        "agreement": 0.5,
    },
    f"Little quality {COSINE} outputs": {"kind": "tensor", "cosine_mean": 0.991},
    f"Some quality {COSINE} embeddings": {"kind": "encoder", "cosine_mean": 0.96},
    f"Much of the quality {COSINE} outputs": {"kind": "tensor", "cosine_mean": 0.9},
    # A large common part of all samples hides their differences.
    f"Some quality {COSINE} outputs": {
        "kind": "tensor",
        "cosine_mean": 1.0,
        "error": 0.4,
    },
    f"Much of the quality {COSINE} embeddings": {
        "kind": "encoder",
        "cosine_mean": 1.0,
        "spearman": 0.4,
    },
}


@pytest.mark.parametrize("words", list(OUTPUTS))
def test_the_verdict_says_what_was_lost_and_what_to_do_next(words: str) -> None:
    batches = toy_batches(2)
    report = measure(converted(toy(), batches), batches)
    figures: dict[str, Any] = {"samples": 10, "cosine_min": 0.5} | OUTPUTS[words]
    if "loss_now" in figures:
        figures["loss_difference"] = figures["loss_now"] - figures["loss_original"]
    said = replace(report, output=OutputReport(**figures)).verdict()
    assert said.startswith(words)
    nexts = {
        "": "dynorm.distill_",
        "calibrate": "so far only the constants",
        "distill": "longer, or keep the norm at",
    }
    for stage, todo in nexts.items():
        stages = {"stages": {stage: {"kept": True}}} if stage else {}
        said = replace(report, output=OutputReport(**figures), meta=stages).verdict()
        assert (
            "Next: try it on your own task."
            if said.startswith(("Little", "The model differs"))
            else todo
        ) in said
    assert max(report.sites, key=lambda site: site.error_now or 0).path == getattr(
        report.stray(), "path", None
    )


def test_the_error_is_of_the_spread_over_the_samples() -> None:
    model, batches = toy(), toy_batches(2)
    before = torch.cat([model(batch).flatten(1) for batch in batches]).detach().double()
    report = measure(converted(model, batches), batches)
    after = torch.cat([model(batch).flatten(1) for batch in batches]).detach().double()
    expected = ((after - before).square().sum() / (before - before.mean(0)).square().sum()).sqrt()
    assert report.output.error == pytest.approx(float(expected), rel=1e-5)
    assert measure(model, [batches[0][:1]]).output.error is None


def test_outputs_that_are_zero_in_both_models_are_the_same() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2), nn.ReLU())
    with torch.no_grad():
        model[2].bias.fill_(-100.0)
    batches = [torch.randn(16, 4)]
    assert measure(converted(model, batches), batches).output.cosine_min == 1.0


def test_the_worst_sample_is_named() -> None:
    original, batches = bert(), text_batches(3, seed=1)
    model = converted(copy.deepcopy(original), batches)
    report = measure(model, batches, original=original)
    cosines = []
    for batch in batches:
        with torch.no_grad():
            a, b = (
                sample_vectors(m.eval()(**batch).last_hidden_state, batch, pooled=True)
                for m in (original, model)
            )
        cosines += torch.cosine_similarity(a, b).tolist()
    assert report.output.worst == int(np.argmin(cosines))
    assert compare(model, original, batches) == report.output


def test_a_single_token_is_measured(tmp_path: Path) -> None:
    model = converted(toy(), toy_batches())
    report = measure(model, [torch.randn(1, 8)])
    assert [site.tokens for site in report.sites] == [1, 1]
    report.to_html(tmp_path / "page.html")


def test_a_batch_without_samples_changes_nothing() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    x = torch.randn(64, 8)
    dynorm.convert_(model, dynorm.find_norms(model, x))
    dynorm.calibrate_(model, [x])
    alone = dynorm.measure(model, [x])
    report = dynorm.measure(model, [x[:0], x, x[:0]])
    assert report.output == alone.output
    assert report.sites[0] == alone.sites[0]
    with pytest.raises(dynorm.errors.DataError, match="reached none"):
        dynorm.measure(model, [x[:0]])


@pytest.mark.parametrize("verb", ["calibrate_", "measure"])
def test_a_batch_on_the_meta_device_is_refused_by_the_reason(verb: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    dynorm.convert_(model, dynorm.find_norms(model, torch.randn(4, 8)))
    dynorm.calibrate_(model, [torch.randn(64, 8)])
    with pytest.raises(dynorm.errors.DataError, match="must hold values"):
        getattr(dynorm, verb)(model, [torch.randn(4, 8, device="meta")])
