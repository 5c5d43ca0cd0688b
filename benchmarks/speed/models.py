"""Make whole models with their norms, with DyISRU, and with identities, which are the limit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import BaseTorchFunctionMode

from benchmarks.speed.check import WrongResultError
from dynorm import calibrate_, convert_, find_norms

VARIANTS = ("norms", "DyISRU", "identities")
# Relative to the largest value of the output, because the error of one layer grows in the next.
TOLERANCE = 2e-3
VOCABULARY = 1000


@dataclass(frozen=True)
class WholeModel:
    """A model in its variants, all in eval mode, with one input.

    Args:
        name: the model's name.
        batch: the input in words.
        norms: the number of norms.
        variants: the model in its variants, by name.
        inputs: the input as keyword arguments.
    """

    name: str
    batch: str
    norms: int
    variants: dict[str, nn.Module]
    inputs: dict[str, Tensor]


def pretrained(
    folder: str | Path,
    batches: Sequence[tuple[int, int]],
    device: str = "cpu",
    name: str | None = None,
) -> list[WholeModel]:
    """Load a transformers model and make its variants, which all batches share.

    A batch is a pair of numbers of texts and of tokens per text; the latter is at most the number
    of the model's positions. The tokens are random, and none is padding.
    """
    from dynorm.jobs.checkpoint import load_pretrained

    loaded = load_pretrained(folder, device)
    generator = torch.Generator().manual_seed(0)
    config: Any = loaded.model.config
    words = min(VOCABULARY, config.vocab_size)
    inputs = {}
    for texts, tokens in batches:
        tokens = min(tokens, getattr(config, "max_position_embeddings", tokens))
        ids = torch.randint(words, (texts, tokens), generator=generator).to(device)
        inputs[_in_words(texts, tokens)] = {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
        }
    return _with_variants(name or Path(folder).resolve().name, loaded.model, inputs)


def gpt2_block(batches: Sequence[tuple[int, int]], device: str = "cpu") -> list[WholeModel]:
    """Make the variants of one block of GPT-2 (768 channels, 12 heads) with random weights."""
    from transformers import GPT2Config
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = GPT2Config(attn_implementation="sdpa")
        block = GPT2Block(config, layer_idx=0).eval().to(device)
        inputs = {}
        for texts, tokens in batches:
            hidden = torch.randn(texts, tokens, 768).to(device)
            inputs[_in_words(texts, tokens)] = {"hidden_states": hidden}
    return _with_variants("GPT-2 block", block, inputs)


def _in_words(texts: int, tokens: int) -> str:
    return f"{texts} x {tokens} tokens"


def _with_variants(
    name: str,
    model: nn.Module,
    inputs: Mapping[str, dict[str, Tensor]],
) -> list[WholeModel]:
    """Make the variants of a model, calibrated on the first of its inputs, which are by their words."""
    # Nothing here is trained, and calls need not look for gradients.
    model.requires_grad_(False)
    converted = copy.deepcopy(model)
    without = copy.deepcopy(model)
    first = next(iter(inputs.values()))
    sites = find_norms(converted, **first)
    report = convert_(converted, sites, to="dyisru", per_channel=False, witnesses=0)
    calibrate_(converted, [first])
    converted.requires_grad_(False)
    for site in report.converted:
        for path in (site.path, *site.aliases):
            without.set_submodule(path, nn.Identity())
    variants = {"norms": model, "DyISRU": converted.eval(), "identities": without}
    norms = len(report.converted)
    models = []
    for words, example in inputs.items():
        models.append(WholeModel(name, words, norms, variants, example))
    return models


def calls(model: WholeModel, compiled: bool) -> dict[str, Callable[[], Any]]:
    """Return a forward pass of each variant, to be called under ``torch.no_grad()``."""
    by_variant: dict[str, Callable[[], Any]] = {}
    for name, variant in model.variants.items():
        call: Callable[..., Any] = variant
        if compiled:
            call = torch.compile(variant, dynamic=False)
        by_variant[name] = partial(call, **model.inputs)
    return by_variant


def check_model(model: WholeModel, timed: Mapping[str, Callable[[], Any]]) -> int:
    """Compare each variant with its float64 copy, whose point-wise layers use the plain definition."""
    inputs = {}
    for key, value in model.inputs.items():
        inputs[key] = value.double() if value.is_floating_point() else value
    for name, call in timed.items():
        exact_model = copy.deepcopy(model.variants[name]).double()
        # Under a mode the layers do not use their kernels, but the plain definition.
        with torch.no_grad(), BaseTorchFunctionMode():
            exact = first_tensor(exact_model(**inputs))
        with torch.no_grad():
            result = first_tensor(call()).double()
        error = float((result - exact).abs().max())
        size = float(exact.abs().max())
        if not error <= TOLERANCE * size:
            raise WrongResultError(
                f"{model.name} with {name}, {model.batch}, must give the same as in float64, but "
                f"it is off by {error / size:.2g} of its largest value, where {TOLERANCE:.2g} is "
                "allowed: nothing was timed"
            )
    return len(timed)


def first_tensor(output: Any) -> Tensor:
    """Return the first tensor of a model's output: hidden states or logits."""
    if isinstance(output, Tensor):
        return output
    values = output.values() if isinstance(output, Mapping) else output
    for value in values:
        if isinstance(value, Tensor):
            return value
    raise ValueError("the output of the model has no tensor")
