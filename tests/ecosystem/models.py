"""Tiny converted models of transformers with a hand-made tokenizer, and what several tests ask of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn

import dynorm
from dynorm.replace.converted import dynorm_layers

VOCABULARY = 40
SPECIAL = {"pad_token": "[PAD]", "unk_token": "[UNK]", "eos_token": "[EOS]", "mask_token": "[MASK]"}


def ids(rows: int = 4, length: int = 7) -> torch.Tensor:
    return torch.randint(4, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(1))


def bert(head: str = "BertModel", **options: Any) -> Any:
    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, max_position_embeddings=32, pad_token_id=0, **sizes
    )
    return converted(getattr(transformers, head)(config), **options)


def gpt2(**options: Any) -> Any:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2, n_positions=32, bos_token_id=2, eos_token_id=2,
        pad_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        tie_word_embeddings=False,
    )  # fmt: skip
    return converted(transformers.GPT2LMHeadModel(config), **options)


def llama(**options: Any) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, bos_token_id=2, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    return converted(transformers.LlamaForCausalLM(config), **options)


def converted(model: Any, **options: Any) -> Any:
    """The model with all of its norms replaced, with values that differ from the initial ones."""
    model.eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Otherwise the logits are too close to one another for a comparison of generated tokens to
            # mean anything.
            parameter.add_(
                0.1 * torch.randn_like(parameter)
            ) if parameter.dim() == 1 else parameter.mul_(10)
    dynorm.convert_(model, dynorm.find_norms(model, input_ids=ids()), **options)
    dynorm.calibrate_(model, [{"input_ids": ids()}])
    return model


def tokenizer() -> Any:
    words = [*SPECIAL.values(), *(f"w{i}" for i in range(len(SPECIAL), VOCABULARY))]
    made = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=SPECIAL["unk_token"])
    )
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, **SPECIAL)


def checkpoint_activations(model: Any, **options: Any) -> None:
    """Recompute activations in the backward pass; transformers 5.0 calls it gradient checkpointing."""
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(options or None)
    else:
        model.gradient_checkpointing_enable(options or None)


def saved(model: Any, folder: Path) -> Path:
    """A folder with the model and its tokenizer."""
    dynorm.save(model, folder)
    tokenizer().save_pretrained(folder)
    return folder


def first(model: nn.Module, **inputs: Any) -> torch.Tensor:
    with torch.no_grad():
        output: torch.Tensor = model(**(inputs or {"input_ids": ids()}))[0]
    return output


def kinds(model: nn.Module) -> list[str]:
    return [type(layer).__name__ for layer in dynorm_layers(model).values()]
