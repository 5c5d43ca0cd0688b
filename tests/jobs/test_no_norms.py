"""``to="none"``: every norm a line, and the lines folded away."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, BertModel, LlamaForCausalLM

import dynorm
from benchmarks.fold_models import build, inputs, linear_
from dynorm.errors import ModelError
from dynorm.fold import attribution, fold_
from dynorm.jobs.convert import convert_pretrained
from dynorm.recipe import Recipe
from dynorm.replace.converted import is_ours
from tests.jobs.conftest import save, tiny_bert

QUICK = Recipe(to="none", steps=2, held_out=16, max_length=16, batch=8, calibration=24)
pytestmark = pytest.mark.filterwarnings("ignore::dynorm.errors.CalibrationWarning")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = build("llama", vocab_size=256, tie_word_embeddings=True)
    return save(model, tmp_path_factory.mktemp("models") / "tiny-llama")


def batches(count: int = 4) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [{"input_ids": torch.randint(0, 90, (4, 16), generator=generator)} for _ in range(count)]


def without_norms(name: str) -> tuple[Any, dict[str, Tensor]]:
    model = build(name).float()
    given = inputs(name, model)
    linear_(model, **given)
    fold_(model, untie=True, add_bias=True, **given)
    return model, given


@pytest.mark.parametrize(("name", "count"), [("llama", 5), ("gpt2", 6), ("gptj", 5), ("opt", 6)])
def test_logits_are_the_sum_of_their_parts(name: str, count: int) -> None:
    model, given = without_norms(name)
    found = attribution(model, given)
    assert found is not None
    assert found["parts"] == count
    assert found["error"] < 1e-5


class Biased(nn.Module):
    """A stream with a bias for all tokens, and a number."""

    def __init__(self, number: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.bias = nn.Parameter(torch.rand(4))
        self.head = nn.Linear(4, 8)
        self.number = number

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return the logits."""
        x = self.embed(input_ids) + self.bias
        return self.head(x + self.number if self.number else x)


def test_a_bias_is_a_part_of_the_logits_and_a_number_is_not() -> None:
    given = {"input_ids": torch.arange(6).reshape(2, 3)}
    found = attribution(Biased(0.0), given)
    assert found is not None
    assert found["parts"] == 2
    assert found["error"] < 1e-5
    assert attribution(Biased(1.0), given) is None


def test_logits_behind_a_norm_or_a_softcap_are_no_sum() -> None:
    for name in ("llama", "gemma2"):
        model = build(name).float()
        assert attribution(model, inputs(name, model)) is None


def test_a_llama_is_saved_in_its_own_class(llama: Path, texts: Path, tmp_path: Path) -> None:
    said: list[str] = []
    recipe = replace(QUICK, stock=True)
    report = convert_pretrained(llama, tmp_path / "out", recipe, texts=[texts], say=said.append)
    lines = "\n".join(said)
    assert "tried on a copy: 5 of 5 linear layers removed" in lines
    assert "folded, in" in lines
    stage = report.meta["stages"]["fold"]
    assert stage["attribution"]["error"] < 1e-5
    assert "All lines are folded away into the weights." in report.verdict()
    assert "Each logit is the sum of 5 parts" in report.verdict()
    assert Recipe.load(tmp_path / "out" / "recipe.json") == Recipe(**report.meta["recipe"])
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "model")
    assert type(loaded) is LlamaForCausalLM
    assert not any(map(is_ours, loaded.modules()))
    assert "import dynorm" not in (tmp_path / "out" / "model" / "README.md").read_text()
    # A rerun without the class gives the same model with identities.
    model = AutoModelForCausalLM.from_pretrained(llama)
    samples = batches()
    dynorm.convert_model(model, samples, to="none", steps=0)
    assert sum(map(is_ours, model.modules())) == 5
    assert not any(isinstance(module, dynorm.LinearControl) for module in model.modules())


def test_a_gpt2_keeps_its_class_with_identities(
    language_model: Path, texts: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    report = convert_pretrained(language_model, out, QUICK, texts=[texts])
    assert report.meta["stages"]["fold"]["attribution"]["error"] < 1e-5
    loaded = AutoModelForCausalLM.from_pretrained(out / "model")
    kinds = {type(module) for module in loaded.modules() if is_ours(module)}
    assert kinds == {nn.Identity}
    with pytest.raises(ModelError, match=r"LayerNorm.*dynorm\.save"):
        convert_pretrained(
            language_model, tmp_path / "new", replace(QUICK, stock=True), texts=[texts]
        )
    assert not (tmp_path / "new").exists()


def test_lines_of_a_post_norm_encoder_stay_and_are_named() -> None:
    torch.manual_seed(0)
    model = BertModel(tiny_bert()).eval()
    report = dynorm.convert_model(model, batches(), to="none", steps=0)
    left = [
        path for path, module in model.named_modules() if isinstance(module, dynorm.LinearControl)
    ]
    assert left
    assert f"because not all that reads them is a matrix: {left[0]}" in report.verdict()
    assert "attribution" not in report.meta["stages"]["fold"]


def test_a_norm_may_be_kept(llama: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(llama)
    dynorm.convert_model(model, batches(), to={"*.norm": "keep", "*": "none"}, steps=0)
    assert type(model.model.norm).__name__ == "LlamaRMSNorm"
    assert sum(map(is_ours, model.modules())) == 4


def test_an_error_at_the_end_puts_everything_back(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise ModelError("too late")

    monkeypatch.setattr("dynorm.jobs.stages.attribution", fail)
    model = LlamaForCausalLM.from_pretrained(llama)
    before = copy.deepcopy(model)
    with pytest.raises(ModelError, match="too late"):
        dynorm.convert_model(model, batches(), to="none", steps=2)
    assert repr(model) == repr(before)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.config.to_dict() == before.config.to_dict()
    for ours, theirs in zip(model.parameters(), before.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_line_that_must_stay_is_refused_before_the_training(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dynorm.jobs.stages.distill_", lambda *_, **__: pytest.fail("trained"))
    model = build("qwen3").float()
    with pytest.raises(ModelError, match=r"4 layers are still there.*q_norm"):
        dynorm.convert_model(model, batches(), recipe=Recipe(to="none", steps=2, stock=True))
