"""Pretrained models of transformers: load one from a folder, and turn texts into its batches."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dynorm.errors import ArgumentError, DataError, StorageError


@dataclass(frozen=True)
class Pretrained:
    """A model with what turns texts into its inputs.

    Args:
        model: the model, in eval mode.
        tokenizer: its tokenizer.
        language_model: whether it predicts the next token; else it is taken for an encoder.
        folder: where it came from.
    """

    model: nn.Module
    tokenizer: Any
    language_model: bool
    folder: Path


def load_pretrained(folder: str | Path, device: str = "cpu") -> Pretrained:
    """Load a transformers model and its tokenizer from a folder, without the network.

    Args:
        folder: as ``save_pretrained`` writes it.
        device: where the model goes.

    Returns:
        The model, as the causal language model that its config names, else as the bare encoder.

    Raises:
        ArgumentError: torch cannot use the device.
        StorageError: the folder does not exist, or holds no model and tokenizer that transformers can read.

    Example:
        >>> load_pretrained("/nowhere")
        Traceback (most recent call last):
        dynorm.errors.StorageError: the model must be a folder with a config.json, but /nowhere has none: ...
    """
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise StorageError(
            f"the model must be a folder with a config.json, but {folder} has none: give what save_pretrained wrote"
        )
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        language_model = any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in config.architectures or [])
        auto = AutoModelForCausalLM if language_model else AutoModel
        model = auto.from_pretrained(folder, local_files_only=True)
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise StorageError(f"transformers must be able to read the model in {folder}, but: {error}") from error
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return Pretrained(_moved(model.eval(), device), tokenizer, language_model, folder)


def _moved(model: nn.Module, device: str) -> nn.Module:
    try:
        return model.to(device)
    # What torch raises for a device that it does not know, was not built for, or does not find.
    except (RuntimeError, AssertionError) as error:
        raise ArgumentError(f"device must be one that torch can use here, got {device!r}: {error}") from error


def encode(pretrained: Pretrained, texts: Sequence[str], max_length: int = 128) -> list[list[int]]:
    """Turn texts into token ids: a text each for an encoder, full blocks of joined texts for a language model.

    Args:
        pretrained: whose tokenizer is used.
        texts: any number.
        max_length: the longest text, and the size of a block; no longer than the model's positions.

    Returns:
        A list of token ids a text, or a block.

    Raises:
        DataError: there is no text, or too little for a block.
    """
    limit = getattr(pretrained.model.config, "max_position_embeddings", None) or max_length
    max_length = min(max_length, limit)
    if not texts:
        raise DataError("there must be at least one text, got none")
    if not pretrained.language_model:
        encoded: list[list[int]] = pretrained.tokenizer(list(texts), truncation=True, max_length=max_length)[
            "input_ids"
        ]
        return encoded
    end = pretrained.tokenizer.eos_token_id
    joined = [token for text in texts for token in [*_plain_ids(pretrained, text), *([] if end is None else [end])]]
    blocks = [joined[i : i + max_length] for i in range(0, len(joined) - max_length + 1, max_length)]
    if not blocks:
        raise DataError(f"texts must fill a block of {max_length} tokens, but they are {len(joined)} tokens: give more")
    return blocks


def collate(pretrained: Pretrained, encoded: Sequence[list[int]]) -> dict[str, Tensor]:
    """Return one padded batch."""
    batch = pretrained.tokenizer.pad({"input_ids": list(encoded)}, return_tensors="pt")
    return {name: batch[name] for name in ("input_ids", "attention_mask")}


def make_batches(
    pretrained: Pretrained, encoded: Sequence[list[int]], batch_size: int = 32, seed: int | None = None
) -> list[dict[str, Tensor]]:
    """Return padded batches of texts of about equal length, so that little is padding.

    Args:
        pretrained: whose tokenizer pads.
        encoded: what :func:`encode` returned.
        batch_size: texts a batch.
        seed: shuffles the batches; None leaves them from short to long.
    """
    by_length = sorted(encoded, key=len)
    batches = [collate(pretrained, part) for part in _parts(by_length, batch_size)]
    if seed is not None:
        random.Random(seed).shuffle(batches)
    return batches


def on_device(batch: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Return the batch where the model's parameters are."""
    device = next(model.parameters()).device
    return {name: value.to(device) for name, value in batch.items()}


def library_versions() -> dict[str, str]:
    """Return the versions that a result depends on."""
    import platform

    import transformers

    from dynorm import __version__

    return {
        "dynorm": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _plain_ids(pretrained: Pretrained, text: str) -> list[int]:
    ids: list[int] = pretrained.tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def _parts(items: Sequence[list[int]], size: int) -> Iterator[Sequence[list[int]]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
