"""Small converted models, plain and of transformers, and how they are compared."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dynorm
from dynorm.replace.converted import dynorm_layers

transformers = pytest.importorskip("transformers")

WITNESSES = (3, 0)


def build() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.RMSNorm(8))


def convert(model: nn.Module, batch: Any, to: str = "dyisru", **options: Any) -> nn.Module:
    model.eval()
    example = batch if isinstance(batch, dict) else {"input": batch}
    layer = {"witnesses": 0, **options}
    dynorm.convert_(model, dynorm.find_norms(model, **example), to=to, **layer)
    dynorm.calibrate_(model, [batch])
    return model


def converted(to: str = "dyisru", **options: Any) -> nn.Module:
    return convert(build(), torch.randn(64, 8), to, **options)


def witnessed(model: nn.Module) -> nn.Module:
    """Name the same witnesses in every layer: calibration leaves out those that tell nothing."""
    for layer in dynorm_layers(model).values():
        layer.set_witnesses_(WITNESSES, (0.5, 2.0))
    return model


def tokens() -> Tensor:
    return torch.randint(0, 50, (4, 7), generator=torch.Generator().manual_seed(1))


def bert(name: str = "BertModel", to: str = "dyisru") -> Any:
    config = transformers.BertConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=32,
    )
    return convert(getattr(transformers, name)(config), {"input_ids": tokens()}, to)


def gpt2() -> Any:
    config = transformers.GPT2Config(
        vocab_size=50,
        n_embd=16,
        n_layer=2,
        n_head=2,
        n_positions=32,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    return convert(transformers.GPT2LMHeadModel(config), {"input_ids": tokens()})


def first(model: Any) -> Tensor:
    with torch.no_grad():
        output: Tensor = model(tokens())[0]
    return output


def same_state(one: nn.Module, other: nn.Module) -> bool:
    a, b = one.state_dict(), other.state_dict()
    return list(a) == list(b) and all(
        a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a
    )
