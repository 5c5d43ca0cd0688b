"""The loss of a conversion: every figure of a site against a computation on all activations at once."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dynorm
from benchmarks import fold_models
from dynorm.errors import DataError, ModelError
from dynorm.layers import DyISRU
from dynorm.replace.converted import dynorm_layers, replaced_by
from dynorm.report import ModelReport, measure
from tests.report.cases import (
    WIDTH,
    bert,
    converted,
    text_batches,
    toy,
    toy_batches,
    toy_report,
)


def outputs_of(model: nn.Module, path: str, batches: list[dict[str, Tensor]]) -> Tensor:
    """All outputs of a module, padding left out, (tokens, C)."""
    found: list[Tensor] = []
    module = model.get_submodule(path)
    handle = module.register_forward_hook(lambda module, args, output: found.append(output))
    model.eval()
    tokens = []
    with torch.no_grad():
        for batch in batches:
            model(**batch)
            tokens.append(found.pop()[batch["attention_mask"].bool()])
    handle.remove()
    return torch.cat(tokens)


class TestSites:
    @pytest.fixture(scope="class")
    @staticmethod
    def case() -> tuple[nn.Module, nn.Module, ModelReport]:
        original = bert()
        model = converted(original, text_batches(3, seed=1))
        return original, model, measure(model, text_batches(4, seed=2), original=original)

    def test_there_is_a_row_per_norm_in_call_order(self, case: Any) -> None:
        report = case[2]
        assert [site.path for site in report.sites] == [
            "embeddings.LayerNorm",
            "encoder.layer.0.attention.output.LayerNorm",
            "encoder.layer.0.output.LayerNorm",
            "encoder.layer.1.attention.output.LayerNorm",
            "encoder.layer.1.output.LayerNorm",
        ]
        tokens = sum(int(batch["attention_mask"].sum()) for batch in text_batches(4, seed=2))
        assert {site.tokens for site in report.sites} == {tokens}
        assert {site.layer for site in report.sites} == {"dyisru"}
        assert (report.kept, report.left, report.unreached) == ([], [], [])

    def test_the_error_is_the_distance_over_the_spread(self, case: Any) -> None:
        original, model, report = case
        for site in report.sites:
            wanted = outputs_of(original, site.path, text_batches(4, seed=2))
            now = outputs_of(model, site.path, text_batches(4, seed=2))
            expected = (now - wanted).norm() / (wanted - wanted.mean(0)).norm()
            assert site.error_now == pytest.approx(float(expected), rel=1e-9)
            assert site.beta == float(model.get_submodule(site.path).beta().detach())

    def test_padding_does_not_matter(self, case: Any) -> None:
        original, model, report = case
        changed = text_batches(4, seed=2)
        for batch in changed:
            noise = torch.randint(1, 96, batch["input_ids"].shape)
            is_token = batch["attention_mask"] == 1
            batch["input_ids"] = torch.where(is_token, batch["input_ids"], noise)
        again = measure(model, changed, original=original)
        for old, new in zip(report.sites, again.sites, strict=True):
            assert new.error_now == pytest.approx(old.error_now)
        assert again.output.cosine_mean == pytest.approx(report.output.cosine_mean)

    def test_the_same_batches_give_the_same_report(self, case: Any) -> None:
        original, model, report = case
        assert measure(model, iter(text_batches(4, seed=2)), original=original) == report

    def test_given_sites_are_not_searched_again(
        self, case: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        original, model, report = case
        batches = text_batches(4, seed=2)
        sites = dynorm.find_norms(original, **batches[0])
        monkeypatch.setattr("dynorm.report.sites.find_norms", None)
        assert measure(model, batches, original=original, sites=sites) == report

    @pytest.mark.parametrize("to", ["dyisru", "dyt", "derf", "linear"])
    def test_every_layer_and_a_kept_norm(self, to: str) -> None:
        original = toy()
        model = converted(original, toy_batches(), {"1": to, "*": "keep"})
        report = measure(model, toy_batches(seed=1), original=original)
        assert [(site.path, site.layer) for site in report.sites] == [("1", to)]
        assert report.sites[0].error_now < 1
        assert report.kept == ["4"]
        assert "1 norm replaced" in report.title()
        assert "1 kept" in report.title()
        assert "Not so at 1 norm that the model keeps." in report.verdict()

    def test_witnesses(self) -> None:
        original = toy()
        model = converted(original, toy_batches(), witnesses=2)
        for layer in dynorm_layers(model).values():
            layer.set_witnesses_((2, 5))
        for site in measure(model, toy_batches(), original=original).sites:
            assert site.witnesses == (2, 5)

    def test_a_norm_in_place_of_the_layer_loses_nothing(self) -> None:
        original = bert()
        batches = text_batches(2)
        model = converted(original, batches)
        for layer in dynorm_layers(model).values():
            layer.forward = replaced_by(layer).module.forward
        report = measure(model, batches, original=original)
        assert report.output.cosine_min == pytest.approx(1.0)
        assert [site.error_now for site in report.sites] == [0.0] * 5

    def test_a_model_without_its_norms_is_compared_with_the_original(self) -> None:
        """As after loading or distillation, when the layers do not know their norms."""
        original = toy()
        model = converted(original, toy_batches())
        known = measure(model, toy_batches(), original=original)
        for layer in dynorm_layers(model).values():
            layer.__dict__.pop("replaced")
        assert measure(model, toy_batches(), original=original) == known

    def test_channels_first_and_keyword_calls(self) -> None:
        class First(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.norm = nn.LayerNorm(6)

            def forward(self, x: Tensor) -> Tensor:
                return self.norm(input=x.movedim(1, -1)).movedim(-1, 1)

        original = nn.Sequential(nn.Conv2d(6, 6, 1), First())
        batches = [torch.randn(2, 6, 5, 4, generator=torch.Generator().manual_seed(0))]
        report = measure(converted(original, batches), batches, original=original)
        assert [site.tokens for site in report.sites] == [40]

    def test_the_fast_path_of_torch_does_not_hide_the_norms(self) -> None:
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 64, batch_first=True)
        original = nn.TransformerEncoder(layer, 2).eval()
        padding = torch.arange(7) >= torch.tensor([[7], [4], [5]])
        batches = [{"src": torch.randn(3, 7, WIDTH), "src_key_padding_mask": padding}]
        report = measure(converted(original, batches), batches, original=original)
        assert report.output.kind == "encoder"
        assert [site.tokens for site in report.sites] == [16] * 4
        assert torch.backends.mha.get_fastpath_enabled()


class TestUntouched:
    def test_models_are_left_as_they_were(self) -> None:
        original = bert()
        batches = text_batches(2)
        model = converted(original, batches)
        model.encoder.layer[0].eval()
        before = [self._state(each) for each in (model, original)]
        random = torch.get_rng_state()
        measure(model, batches, original=original)
        bad = [{"input_ids": torch.ones(2, 999, dtype=torch.long)}]
        with pytest.raises(DataError):
            measure(model, bad, original=original)
        assert torch.equal(torch.get_rng_state(), random)
        assert [self._state(each) for each in (model, original)] == before

    @staticmethod
    def _state(model: nn.Module) -> list[Any]:
        modules = [(m.training, len(m._forward_hooks)) for m in model.modules()]
        tensors = {name: tensor.tolist() for name, tensor in model.state_dict().items()}
        return [modules, tensors]


class TestRefusals:
    @pytest.mark.parametrize(
        ("batches", "message"),
        [
            ([], "one batch"),
            (torch.zeros(4, 8), "pass a list"),
            (["text"], "must.*tensor"),
            ([torch.zeros(4, 9)], "run.*fit its forward"),
            ([torch.zeros(50, 8), torch.full((4, 8), math.nan)], "'1'"),
            ([torch.zeros(50, 8, device="meta")], "must hold values"),
        ],
    )
    def test_batches(self, batches: Any, message: str) -> None:
        original = toy()
        with pytest.raises(DataError, match=message):
            measure(converted(original, toy_batches()), batches, original=original)

    def test_an_output_that_is_not_finite(self) -> None:
        original = nn.Sequential(toy(), nn.Threshold(1e9, math.inf))
        model = converted(original, toy_batches())
        with pytest.raises(DataError, match=r"original.*NaN"):
            measure(model, toy_batches(), original=original)

    def test_a_model_that_is_not_converted(self) -> None:
        with pytest.raises(ModelError, match="convert_"):
            measure(toy(), toy_batches(), original=toy())

    def test_an_original_that_is_none(self) -> None:
        model = converted(toy(), toy_batches())
        with pytest.raises(TypeError, match="original"):
            measure(model, toy_batches())  # type: ignore[call-arg]
        with pytest.raises(ModelError, match="converted already"):
            measure(model, toy_batches(), original=copy.deepcopy(model))
        with pytest.raises(ModelError, match="has no '1'"):
            measure(model, toy_batches(), original=nn.Sequential(nn.Linear(8, 8)))
        with pytest.raises(DataError, match="one shape"):
            measure(model, toy_batches(), original=nn.Sequential(*toy(), nn.Linear(WIDTH, 3)))

    def test_batches_that_reach_no_site(self) -> None:
        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.norm = nn.LayerNorm(8)

            def forward(self, x: Tensor, use: bool = True) -> Tensor:
                return self.norm(x) if use else x

        original = Model()
        model = converted(original, toy_batches())
        sites = dynorm.find_norms(original, torch.randn(4, 8))
        unused = [{"x": torch.randn(4, 8), "use": False}]
        with pytest.raises(DataError, match="reached none"):
            measure(model, unused, original=original, sites=sites)


def test_a_layer_of_the_original_has_no_row() -> None:
    first, second = toy(), DyISRU(WIDTH)
    model = nn.Sequential(converted(first, toy_batches()), second)
    report = measure(model, toy_batches(), original=nn.Sequential(first, second))
    assert [site.path for site in report.sites] == ["0.1", "0.4"]
    assert report.left == ["1"]


@pytest.mark.parametrize("share", [0.3, 1.0])
def test_an_annealed_layer_says_that_it_is_still_a_norm(share: float) -> None:
    original = toy()
    model = converted(original, toy_batches(), "annealed")
    dynorm.set_anneal_(model, share)
    report = measure(model, toy_batches(), original=original)
    assert ("until the annealing ends" in report.verdict()) == (share < 1)


def test_a_batch_without_samples_changes_nothing() -> None:
    original = toy()
    model = converted(original, toy_batches())
    x = toy_batches()[0]
    alone = measure(model, [x], original=original)
    report = measure(model, [x, x[:0]], original=original)
    assert (report.output, report.sites) == (alone.output, alone.sites)
    single = measure(model, [x[:1]], original=original)
    assert [site.tokens for site in single.sites] == [1, 1]


class TestForms:
    def test_a_report_is_plain_json(self) -> None:
        report = toy_report(meta={"loss": math.nan, "seeds": (1, 2)})
        values = json.loads(json.dumps(report.to_dict(), allow_nan=False))
        assert values["meta"] == {"loss": None, "seeds": [1, 2]}
        assert values["sites"][0]["error_now"] == report.sites[0].error_now
        assert values["output"]["error"] == report.output.error

    def test_a_language_models_losses_are_printed(self) -> None:
        original = fold_models.build("gpt2").double()
        batches = text_batches(2)
        report = measure(converted(original, batches), batches, original=original)
        assert "nats per token instead of" in " ".join(str(report).split())
        assert str(report).startswith("GPT2LMHeadModel: 5 norms replaced by DyISRU, 0 kept")
        assert "transformer.h.1.ln_2" in str(report)
