"""Folding on every sort of model: what folds, what is refused, and that outputs and generated texts stay."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks import fold_models
from benchmarks.fold import RESULTS, double
from benchmarks.fold_models import NAMES, build, linear_
from dynorm.errors import ModelError
from dynorm.fold import fold_
from dynorm.fold.check import WideCasts
from dynorm.fold.tensors import tensors_in
from dynorm.outputs import relative_error

pytest.importorskip("transformers")

# Folded affine maps, folded means and removed linear layers with untie and add_bias, and how many
# norms there are.
EXPECTED = {
    "gpt2": (5, 5, 5, 5),
    "opt": (5, 5, 5, 5),
    "gpt_neox": (5, 5, 5, 5),
    "gptj": (3, 3, 3, 3),
    "bloom": (5, 1, 5, 6),
    "falcon": (3, 3, 3, 3),
    "phi": (3, 3, 3, 3),
    "stablelm": (5, 5, 5, 5),
    "llama": (5, 0, 5, 5),
    "mistral": (5, 0, 5, 5),
    "qwen2": (5, 0, 5, 5),
    "qwen3": (5, 0, 5, 9),
    "gemma2": (5, 0, 5, 9),
    "gemma3": (5, 0, 5, 13),
    "olmo": (0, 5, 5, 5),
    "olmo2": (1, 0, 1, 9),
    "cohere": (3, 3, 3, 7),
    "mpt": (5, 5, 5, 5),
    "mixtral": (5, 0, 5, 5),
    "mamba": (3, 0, None, 3),
    "bert": (0, 1, 0, 5),
    "roberta": (0, 1, 0, 5),
    "modernbert": (3, 1, 3, 5),
    "t5": (11, 0, 11, 12),
    "bart": (1, 2, 1, 12),
    "vit": (5, 5, 5, 5),
    "dinov2": (4, 5, 4, 5),
    "convnext": (8, 1, 8, 9),
    "clip": (9, 6, 9, 11),
    "whisper": (11, 7, 11, 12),
    "wav2vec2": (6, 2, 6, 8),
    "encoder_pre": (5, 5, 5, 5),
    "encoder_post": (1, 0, 1, 4),
    "nanogpt": (5, 5, 5, 5),
}
# What is refused whatever is allowed, and why.
REASONS = {
    "bert": ("encoder.layer.0.output.LayerNorm", "center", "post-norm"),
    "bloom": ("transformer.h.0.input_layernorm", "center", "transformer.word_embeddings_layernorm"),
    "convnext": ("convnext.layernorm", "center", "dwconv sees its mean"),
    "wav2vec2": ("wav2vec2.encoder.layer_norm", "center", "aten.gelu"),
    "t5": ("encoder.final_layer_norm", "affine", "the model returns it"),
    "qwen3": ("model.layers.0.self_attn.q_norm", "affine", "not linear"),
    "gemma2": ("model.layers.0.post_attention_layernorm", "affine", "aten.add"),
    "olmo2": ("model.layers.0.self_attn.q_norm", "affine", "split or reordered"),
    "dinov2": ("dinov2.layernorm", "affine", "aten.cat"),
    "cohere": ("model.layers.0.self_attn.q_norm", "affine", "differs between positions"),
}
FREELY = {"untie": True, "add_bias": True}
QUICK = ("gpt2", "llama", "vit", "encoder_post", "nanogpt")
# Twins of others here in all that a fold sees.
TWINS = {"opt", "mistral", "qwen2", "stablelm", "gptj", "mpt", "gemma3", "roberta"}
EXHAUSTIVE = "DYNORM_EXHAUSTIVE" in os.environ
FOLDED = [name for name in NAMES if EXHAUSTIVE or name not in TWINS]
# One of each shape, because a line is folded by the plan of its norm.
SHAPES = [
    "gpt2",
    "bloom",
    "llama",
    "gemma2",
    "cohere",
    "mamba",
    "bert",
    "bart",
    "convnext",
    "clip",
    "olmo",
    "nanogpt",
]
LINES = [name for name in NAMES if EXHAUSTIVE or name in SHAPES]


def marked(names: Iterable[str]) -> list[Any]:
    return [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in names]


def inputs(name: str, model: nn.Module, seed: int = 1) -> dict[str, Tensor]:
    given = fold_models.inputs(name, model, seed)
    if name == "mamba":
        # Its graph has a part for each token.
        given["input_ids"] = given["input_ids"][:, :4]
    return given


def outputs(model: nn.Module, given: dict[str, Tensor]) -> list[Tensor]:
    with torch.no_grad(), WideCasts():
        return [tensor for tensor in tensors_in(model(**given)) if tensor.is_floating_point()]


def shorter(given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Texts of another length than those that the graph was traced with."""
    return {
        name: value[:, :-3] if value.dtype == torch.long else value for name, value in given.items()
    }


@pytest.mark.parametrize("name", marked(FOLDED))
def test_all_that_may_fold_does_and_float64_outputs_stay(name: str) -> None:
    model = double(name)
    given = shorter(inputs(name, model, seed=5))
    exact = outputs(model, given)
    report = fold_(model, **FREELY, **inputs(name, model))
    assert report.error is not None
    assert report.error <= 1e-12
    assert relative_error(outputs(model, given), exact) <= 1e-12
    affine, center, _, sites = EXPECTED[name]
    assert (report.count("affine"), report.count("center")) == (affine, center)
    assert len(report.sites) == sites
    if name in REASONS:
        path, rewrite, words = REASONS[name]
        row = next(site for site in report.sites if site.path == path)
        assert words in (getattr(row, rewrite).reason or "")


@pytest.mark.parametrize("name", marked(LINES))
def test_which_linear_layers_go(name: str) -> None:
    model = double(name)
    given = inputs(name, model)
    linear_(model, **given)
    other = shorter(inputs(name, model, seed=7))
    exact = outputs(model, other)
    before = copy.deepcopy(model.state_dict())
    if EXPECTED[name][2] is None:
        # It insists on the weight of its norm, and is then as it was.
        with pytest.raises(ModelError, match=r"attribute.*everything"):
            fold_(model, **FREELY, **given)
        assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
        return
    report = fold_(model, **FREELY, **given)
    assert relative_error(outputs(model, other), exact) <= 1e-12
    gone = sum(site.becomes == "Identity" for site in report.sites)
    assert gone == EXPECTED[name][2]
    assert f"{gone} of " in str(report)
    assert all(site.affine.reason for site in report.sites if site.becomes != "Identity")


def test_by_default_ties_and_missing_biases_stay_and_texts_are_the_same() -> None:
    for name, options in (("gpt2", {}), ("llama", {}), ("gpt2", FREELY)):
        model = build(name)
        original = copy.deepcopy(model)
        report = fold_(model, **options, **inputs(name, model))
        if not options:
            assert report.added_biases == report.untied == []
        prompt = inputs(name, model, seed=9)["input_ids"][:1]
        texts = []
        for one in (model, original):
            texts.append(
                one.generate(  # type: ignore[operator]
                    prompt,
                    attention_mask=torch.ones_like(prompt),
                    min_new_tokens=12,
                    max_new_tokens=12,
                    do_sample=False,
                )
            )
        assert torch.equal(*texts)


def test_the_committed_results_are_those_of_this_code() -> None:
    document = json.loads(RESULTS.read_text("utf-8"))
    assert [row["model"] for row in document["models"]] == list(EXPECTED)
    for row in document["models"]:
        affine, center, gone, sites = EXPECTED[row["model"]]
        assert (row["affine"][0], row["center"][0]) == (affine, center)
        assert row["lines"]["gone"] == (gone or 0)
        assert row["norms"] == sites
        assert row["error"] <= 1e-12
