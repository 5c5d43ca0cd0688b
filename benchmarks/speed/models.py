"""Whole models with their norms, with ours, and with nothing in their place, which is the limit."""

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
# Relative to the largest value of the output: an error of one layer grows in the next ones.
TOLERANCE = 2e-3
VOCABULARY = 1000


@dataclass(frozen=True)
class WholeModel:
    """A model in its variants, all in eval mode, and one input in words and as keyword arguments."""

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

    A batch is so many texts of so many tokens, at most the model's positions; they are random, none
    is padding.
    """
    from dynorm.jobs.checkpoint import load_pretrained

    loaded = load_pretrained(folder, device)
    generator = torch.Generator().manual_seed(0)
    config: Any = loaded.model.config
    words = min(VOCABULARY, config.vocab_size)
    batches = [
        (texts, min(tokens, getattr(config, "max_position_embeddings", tokens)))
        for texts, tokens in batches
    ]
    inputs = []
    for texts, tokens in batches:
        ids = torch.randint(words, (texts, tokens), generator=generator).to(device)
        inputs.append({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    labels = [f"{texts} x {tokens} tokens" for texts, tokens in batches]
    return _entries(name or Path(folder).resolve().name, loaded.model, labels, inputs)


def gpt2_block(batches: Sequence[tuple[int, int]], device: str = "cpu") -> list[WholeModel]:
    """Make the variants of one block of GPT-2 (768 channels, 12 heads) with random weights."""
    from transformers import GPT2Config
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        block = GPT2Block(GPT2Config(attn_implementation="sdpa"), layer_idx=0).eval().to(device)
        inputs = [
            {"hidden_states": torch.randn(texts, tokens, 768).to(device)}
            for texts, tokens in batches
        ]
    return _entries(
        "GPT-2 block", block, [f"{texts} x {tokens} tokens" for texts, tokens in batches], inputs
    )


def _entries(
    name: str, model: nn.Module, labels: Sequence[str], inputs: Sequence[Any]
) -> list[WholeModel]:
    # Nothing here is trained: a gradient would be one more thing to look for in every call.
    model.requires_grad_(False)
    ours, without = copy.deepcopy(model), copy.deepcopy(model)
    sites = find_norms(ours, **inputs[0])
    report = convert_(ours, sites, to="dyisru")
    calibrate_(ours, [inputs[0]])
    ours.requires_grad_(False)
    for site in report.converted:
        for path in (site.path, *site.aliases):
            without.set_submodule(path, nn.Identity())
    variants = dict(zip(VARIANTS, (model, ours.eval(), without), strict=True))
    count = len(report.converted)
    return [
        WholeModel(name, label, count, variants, given)
        for label, given in zip(labels, inputs, strict=True)
    ]


def calls(model: WholeModel, compiled: bool) -> dict[str, Callable[[], Any]]:
    """Return a forward pass of each variant, to be called under ``torch.no_grad()``."""
    made: dict[str, Callable[[], Any]] = {}
    for name, variant in model.variants.items():
        call: Callable[..., Any] = torch.compile(variant, dynamic=False) if compiled else variant
        made[name] = partial(call, **model.inputs)
    return made


def check_model(model: WholeModel, timed: Mapping[str, Callable[[], Any]]) -> int:
    """Compare each variant with its float64 copy, whose point-wise layers are computed by the plain definition."""
    for name, call in timed.items():
        exact_model = copy.deepcopy(model.variants[name]).double()
        given = {
            key: value.double() if value.is_floating_point() else value
            for key, value in model.inputs.items()
        }
        # In a mode every operation is watched, so that the plain definition serves.
        with torch.no_grad(), BaseTorchFunctionMode():
            exact = first_tensor(exact_model(**given))
        with torch.no_grad():
            found = first_tensor(call()).double()
        error, size = float((found - exact).abs().max()), float(exact.abs().max())
        if not error <= TOLERANCE * size:
            raise WrongResultError(
                f"{model.name} with {name}, {model.batch}, must give the same as in float64, but "
                "it is off by "
                f"{error / size:.2g} of its largest value, where {TOLERANCE:.2g} is allowed: "
                "nothing was timed"
            )
    return len(timed)


def first_tensor(output: Any) -> Tensor:
    """Return the first part of a model's output: hidden states or logits."""
    if isinstance(output, Tensor):
        return output
    values = output.values() if isinstance(output, Mapping) else output
    return next(value for value in values if isinstance(value, Tensor))
