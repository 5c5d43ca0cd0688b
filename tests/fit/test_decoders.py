"""Calibration of a decoder whose first tokens are massive."""

from __future__ import annotations

import copy
import warnings
from functools import cache

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import dynorm

VOCABULARY, LENGTH, HIDDEN, LAYERS = 200, 32, 32, 12
MASSIVE_CHANNEL, BEGINNING = 7, 0


def blocks(count: int, seed: int) -> Tensor:
    """Return blocks of random tokens, each after the one that begins a text."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, VOCABULARY, (count, LENGTH), generator=generator)
    tokens[:, 0] = BEGINNING
    return tokens


@torch.no_grad()
def sizes(model: LlamaForCausalLM, tokens: Tensor) -> Tensor:
    """Return the sizes of the tokens at the first norm of each layer, (layers, blocks, length)."""
    seen: list[Tensor] = []
    handles = []
    for layer in model.model.layers:
        hook = layer.input_layernorm.register_forward_pre_hook(
            lambda _, args: seen.append(args[0].norm(dim=-1))
        )
        handles.append(hook)
    model(tokens)
    for handle in handles:
        handle.remove()
    return torch.stack(seen)


@cache
@torch.no_grad()
def decoder() -> LlamaForCausalLM:
    """Return a random Llama whose blocks write as much as the embedding, with massive first tokens.

    One channel, into which no layer writes, holds 150 times the median size at the first token.
    """
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=LENGTH,
    )
    model = LlamaForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if "mlp" in name or "self_attn" in name:
            parameter.mul_(12.0)
    table = model.model.embed_tokens.weight
    table.mul_(50.0 * torch.exp(0.5 * torch.randn(VOCABULARY, 1)))
    for layer in model.model.layers:
        layer.mlp.down_proj.weight[MASSIVE_CHANNEL] = 0.0
        layer.self_attn.o_proj.weight[MASSIVE_CHANNEL] = 0.0
    typical = sizes(model, blocks(4, 5)).median()
    table[:, MASSIVE_CHANNEL] = 0.0
    table[BEGINNING, MASSIVE_CHANNEL] = 150.0 * typical
    return model


@torch.no_grad()
def divergence(model: LlamaForCausalLM) -> float:
    """Return the Kullback-Leibler divergence from the original on held-out blocks, nats per token."""
    held_out = blocks(16, 99)
    expected = decoder()(held_out).logits.log_softmax(-1)
    logits = model(held_out).logits.log_softmax(-1)
    return float((expected.exp() * (expected - logits)).sum(-1).mean())


def calibrated(batches: list[Tensor]) -> LlamaForCausalLM:
    model = copy.deepcopy(decoder())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dynorm.convert_(model, dynorm.find_norms(model, batches[0]), witnesses=4)
        dynorm.calibrate_(model, batches, lean=0)
    return model


def test_the_first_tokens_are_massive() -> None:
    seen = sizes(decoder(), blocks(4, 1))
    for layer in seen:
        assert layer[:, 0].min() > 100 * layer[:, 1:].median()


@pytest.mark.parametrize("draw", range(3))
def test_the_order_and_the_split_of_the_text_do_not_matter(draw: int) -> None:
    """The first batch once fitted all layers, and what they then fed to others stayed in the sums."""
    text = blocks(8, draw)
    together = divergence(calibrated([text]))
    one_by_one = divergence(calibrated(list(text.split(1))))
    backwards = divergence(calibrated(list(text.flip(0).split(1))))
    assert one_by_one == pytest.approx(together, rel=0.02)
    # Which tokens are held out for the choice of witnesses depends on their number.
    assert backwards == pytest.approx(together, rel=0.4)


def test_more_text_is_not_worse() -> None:
    few = []
    many = []
    for draw in range(3):
        few.append(divergence(calibrated(list(blocks(4, draw).split(1)))))
        many.append(divergence(calibrated(list(blocks(32, draw).split(1)))))
    assert max(many) < min(few)
