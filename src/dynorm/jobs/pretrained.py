"""A pretrained model with its tokenizer: texts become token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from dynorm.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Pretrained:
    """A model, with the tokenizer or processor that makes its inputs from texts or images.

    Args:
        model: the model, in eval mode.
        tokenizer: its tokenizer or image processor.
        language_model: whether it predicts the next token; if not, it is treated as an encoder.
        source: the folder or file that it was loaded from.
        remarks: a sentence about the weights that only the checkpoint has, and one about those
            that only the model has.
    """

    model: nn.Module
    tokenizer: Any
    language_model: bool
    source: Path
    remarks: tuple[str, ...] = ()

    def padded(self, ids: Sequence[list[int]]) -> dict[str, Tensor]:
        """Return a batch of texts that :func:`encode` returned."""
        padded = self.tokenizer.pad({"input_ids": ids}, return_tensors="pt")
        return {"input_ids": padded["input_ids"], "attention_mask": padded["attention_mask"]}

    def within_positions(self, max_length: int) -> int:
        """Return ``max_length``, or the number of the model's positions if that is smaller."""
        positions = getattr(_text_config(self.model), "max_position_embeddings", None)
        return min(max_length, positions or max_length)


def encode(pretrained: Pretrained, texts: Sequence[str], max_length: int = 128) -> list[list[int]]:
    """Turn texts into lists of token ids.

    An encoder gets one list per text. For a language model the texts are joined and cut into
    blocks; an incomplete last block is dropped.

    Args:
        pretrained: the model with its tokenizer.
        texts: one or more texts.
        max_length: the length of the longest list, and of a block; at most the number of the
            model's positions is used.

    Returns:
        One list of token ids per text, or per block.

    Raises:
        DataError: the texts are empty or too short for a block, or the tokenizer or the model does
            not know most of it.
    """
    if not texts:
        raise DataError("there must be at least one text, got none")
    max_length = pretrained.within_positions(max_length)
    tokenizer = pretrained.tokenizer
    options: dict[str, object] = {"truncation": True, "max_length": max_length}
    if pretrained.language_model:
        options = {"add_special_tokens": False}
    encoded: list[list[int]] = tokenizer(list(texts), **options)["input_ids"]
    size = getattr(_text_config(pretrained.model), "vocab_size", None)
    _require_known_words(tokenizer, encoded, size)
    if not pretrained.language_model:
        return encoded
    joined: list[int] = []
    for ids in encoded:
        joined += ids
        if tokenizer.eos_token_id is not None:
            joined.append(tokenizer.eos_token_id)
    starts = range(0, len(joined) - max_length + 1, max_length)
    blocks = [joined[start : start + max_length] for start in starts]
    if not blocks:
        raise DataError(
            f"texts must fill a block of {max_length} tokens, but they are {len(joined)} tokens: "
            "give more"
        )
    return blocks


def _text_config(model: PreTrainedModel) -> object:
    """Return the part of a model's config about its text model, or all of it."""
    return getattr(model.config, "text_config", model.config)


def _require_known_words(
    tokenizer: PreTrainedTokenizerBase, encoded: Sequence[list[int]], size: int | None
) -> None:
    """Check that the tokenizer knows the texts, and that the model's vocabulary has their tokens.

    ``size`` is the number of tokens in that vocabulary.
    """
    largest = max((max(ids) for ids in encoded if ids), default=0)
    if size is not None and largest >= size:
        raise DataError(
            f"the tokenizer must give ids below the model's vocab_size of {size}, but gave "
            f"{largest}: take the one that belongs to the model"
        )
    special = {*tokenizer.all_special_ids}
    lost = 0
    for ids in encoded:
        known = [i for i in ids if i not in special]
        if len(known) <= ids.count(tokenizer.unk_token_id):
            lost += 1
    if 2 * lost > len(encoded):
        raise DataError(
            f"the tokenizer must know the texts, but {lost} of {len(encoded)} became nothing or "
            "unknown tokens: give texts in the model's language, or the tokenizer that belongs to "
            "the model"
        )
