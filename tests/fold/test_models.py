"""Folding on every sort of model: what folds, what is refused, and that outputs and generated texts stay."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from torch import Tensor, nn

from benchmarks.fold import PAGE, RESULTS, renewed
from benchmarks.fold_models import CAUSAL, LAYERS, NAMES, build, inputs
from dynorm.fold import fold_
from dynorm.fold.check import WideCasts, relative_error
from dynorm.stream.tensors import tensors_in

pytest.importorskip("transformers")

# Folded affine maps and folded means, by default, and with untie and add_bias; and how many norms
# there are.
EXPECTED: dict[str, tuple[tuple[int, int], tuple[int, int], int]] = {
    "gpt2": ((4, 0), (5, 5), 5),
    "opt": ((4, 0), (5, 5), 5),
    "gpt_neox": ((4, 5), (5, 5), 5),
    "gptj": ((1, 3), (3, 3), 3),
    "bloom": ((4, 0), (5, 1), 6),
    "falcon": ((0, 0), (3, 3), 3),
    "phi": ((3, 3), (3, 3), 3),
    "stablelm": ((0, 5), (5, 5), 5),
    "llama": ((5, 0), (5, 0), 5),
    "mistral": ((5, 0), (5, 0), 5),
    "qwen2": ((5, 0), (5, 0), 5),
    "qwen3": ((5, 0), (5, 0), 9),
    "gemma2": ((4, 0), (5, 0), 9),
    "gemma3": ((4, 0), (5, 0), 13),
    "olmo": ((0, 5), (0, 5), 5),
    "olmo2": ((1, 0), (1, 0), 9),
    "cohere": ((2, 0), (3, 3), 7),
    "mpt": ((4, 0), (5, 5), 5),
    "mixtral": ((5, 0), (5, 0), 5),
    "mamba": ((2, 0), (3, 0), 3),
    "bert": ((0, 1), (0, 1), 5),
    "roberta": ((0, 1), (0, 1), 5),
    "modernbert": ((3, 1), (3, 1), 5),
    "t5": ((10, 0), (11, 0), 12),
    "bart": ((0, 0), (1, 2), 12),
    "vit": ((5, 5), (5, 5), 5),
    "dinov2": ((4, 5), (4, 5), 5),
    "convnext": ((8, 1), (8, 1), 9),
    "clip": ((8, 6), (9, 6), 11),
    "whisper": ((6, 0), (11, 7), 12),
    "wav2vec2": ((6, 2), (6, 2), 8),
    "encoder_pre": ((5, 5), (5, 5), 5),
    "encoder_post": ((1, 0), (1, 0), 4),
    "nanogpt": ((4, 0), (5, 5), 5),
}

# What is refused whatever is allowed, and why.
REASONS = {
    "bert": ("encoder.layer.0.output.LayerNorm", "center", "post-norm"),
    "roberta": ("encoder.layer.0.output.LayerNorm", "center", "post-norm"),
    "encoder_post": ("encoder.layers.0.norm2", "center", "post-norm"),
    "bart": ("model.encoder.layers.0.final_layer_norm", "center", "post-norm"),
    "bloom": ("transformer.h.0.input_layernorm", "center", "transformer.word_embeddings_layernorm"),
    "modernbert": ("layers.0.mlp_norm", "center", "embeddings.norm"),
    "convnext": ("convnext.layernorm", "center", "dwconv sees its mean"),
    "wav2vec2": ("wav2vec2.encoder.layer_norm", "center", "aten.gelu"),
    "whisper": ("model.encoder.layer_norm", "center", "aten.gelu"),
    "clip": ("vision_model.post_layernorm", "center", "vision_model.pre_layrnorm"),
    "t5": ("encoder.final_layer_norm", "affine", "the model returns it"),
    "qwen3": ("model.layers.0.self_attn.q_norm", "affine", "not linear"),
    "gemma2": ("model.layers.0.post_attention_layernorm", "affine", "aten.add"),
    "gemma3": ("model.layers.0.self_attn.k_norm", "affine", "not linear"),
    "olmo2": ("model.layers.0.self_attn.q_norm", "affine", "split or reordered"),
    "dinov2": ("dinov2.layernorm", "affine", "aten.cat"),
    "cohere": ("model.layers.0.self_attn.q_norm", "affine", "scale by position"),
}
WHOLE = ("gpt2", "llama", "gpt_neox", "mistral")


def outputs(model: nn.Module, given: dict[str, Tensor]) -> list[Tensor]:
    with torch.no_grad(), WideCasts():
        return [tensor for tensor in tensors_in(model(**given)) if tensor.is_floating_point()]


def shorter(given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Texts of another length than those that the graph was traced with."""
    return {
        name: value[:, :7] if value.dtype == torch.long else value for name, value in given.items()
    }


def double(name: str) -> nn.Module:
    # The kernel of the default implementation of experts knows no float64.
    return build(
        name, **({"experts_implementation": "batched_mm"} if name == "mixtral" else {})
    ).double()


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_all_that_may_fold_does_and_float64_outputs_stay(name: str) -> None:
    model = double(name)
    given = shorter(inputs(name, model, seed=5))
    exact = outputs(model, given)
    report = fold_(model, untie=True, add_bias=True, **inputs(name, model))
    assert report.error is not None
    assert report.error <= 1e-12
    assert relative_error(outputs(model, given), exact) <= 1e-12
    assert (report.count("affine"), report.count("center")) == EXPECTED[name][1]
    assert len(report.sites) == EXPECTED[name][2]
    if name in REASONS:
        path, rewrite, words = REASONS[name]
        row = next(site for site in report.sites if site.path == path)
        assert words in (getattr(row, rewrite).reason or "")


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_by_default_ties_and_missing_biases_stay_and_texts_are_the_same(name: str) -> None:
    model = build(name)
    original = copy.deepcopy(model)
    before = {key: value.shape for key, value in model.state_dict().items()}
    report = fold_(model, check=name not in CAUSAL, **inputs(name, model))
    assert (report.count("affine"), report.count("center")) == EXPECTED[name][0]
    assert report.added_biases == report.untied == []
    if not report.count("center"):
        assert {key: value.shape for key, value in model.state_dict().items()} == before
    if name in CAUSAL:
        assert_same_text(name, model, original)


def test_64_tokens_are_the_same_with_everything_folded() -> None:
    model = build("gpt2")
    original = copy.deepcopy(model)
    fold_(model, untie=True, add_bias=True, **inputs("gpt2", model))
    assert_same_text("gpt2", model, original)


def assert_same_text(name: str, model: nn.Module, original: nn.Module) -> None:
    prompt = inputs(name, model, seed=9)["input_ids"][:1]
    length = 64 if name in WHOLE else 12
    options = {
        "max_new_tokens": length,
        "min_new_tokens": length,
        "do_sample": False,
        "use_cache": True,
    }
    one, other = (
        m.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
        for m in (model, original)
    )  # type: ignore[operator]
    assert one.shape[1] == prompt.shape[1] + length
    assert torch.equal(one, other)


def test_half_precision_is_judged_by_its_own_noise() -> None:
    for name in ("llama", "vit"):
        model = build(name).bfloat16()
        report = fold_(model, **inputs(name, model))
        assert report.noise is not None
        assert report.error is not None
        assert 0 < report.error <= 2 * report.noise == report.tolerance
        assert report.count("affine") == 2 * LAYERS + 1


def test_the_page_says_what_the_committed_results_say() -> None:
    document = json.loads(RESULTS.read_text("utf-8"))
    page = PAGE.read_text("utf-8")
    assert renewed(page, document) == page
    for row in document["models"]:
        for mode, expected in zip(("default", "allowed"), EXPECTED[row["model"]], strict=False):
            assert (row[mode]["affine"][0], row[mode]["center"][0]) == expected
            assert row[mode]["error"] is None or row[mode]["error"] <= 1e-12
