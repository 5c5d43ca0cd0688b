"""Models and batches of the tests of reports."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dynorm import calibrate_, convert_, find_norms
from dynorm.report import ModelReport, measure

WIDTH = 16
VOCABULARY = 96


def toy(width: int = WIDTH) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, width),
        nn.LayerNorm(width),
        nn.Tanh(),
        nn.Linear(width, width),
        nn.RMSNorm(width, eps=1e-6),
    )


def toy_batches(count: int = 3, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [3 * torch.randn(40, 8, generator=generator) for _ in range(count)]


def bert(name: str = "BertModel") -> nn.Module:
    transformers = pytest.importorskip("transformers")
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
    return _roughened(getattr(transformers, name)(config).double())


def _roughened(model: nn.Module) -> nn.Module:
    """The model with norms that have learned something, one huge channel among it."""
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            with torch.no_grad():
                module.weight.add_(0.3 * torch.randn_like(module.weight))
                module.bias.add_(0.3 * torch.randn_like(module.bias))
                module.weight[3] = 6.0
    return model.train()


def text_batches(count: int, seed: int = 0) -> list[dict[str, Tensor]]:
    """Token ids of texts of several lengths, padded on the right."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(count):
        lengths = torch.randint(4, 13, (5, 1), generator=generator)
        lengths[0] = 12
        mask = (torch.arange(12) < lengths).long()
        ids = torch.randint(1, VOCABULARY, (5, 12), generator=generator) * mask
        batches.append({"input_ids": ids, "attention_mask": mask})
    return batches


def converted(original: nn.Module, batches: list[Any], to: Any = "dyisru", **options: Any) -> Any:
    """A converted and calibrated copy."""
    model = copy.deepcopy(original)
    example = batches[0]
    if isinstance(example, dict):
        sites = find_norms(model, **example)
    else:
        sites = find_norms(model, example)
    convert_(model, sites, to, **options)
    calibrate_(model, batches)
    return model


def toy_report(**options: Any) -> ModelReport:
    original = toy()
    batches = toy_batches()
    return measure(converted(original, batches), batches, original=original, **options)
