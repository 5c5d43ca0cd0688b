"""What a pretrained model is fitted to and measured on: texts or images, as samples, and samples as batches."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

from torch import Tensor

from dynorm.distill.images import Crop
from dynorm.distill.pretrained import Pretrained, encode, make_batches

Batches = Sequence[dict[str, Tensor]]

# Each image is fitted to as a whole, and in so many crops less one.
CROPS = 16


@dataclass(frozen=True)
class Texts:
    """Texts: a sample is a list of token ids, of at most ``max_length``; batches hold samples of about equal length."""

    pretrained: Pretrained
    max_length: int
    noun: str = "texts"

    def samples(self, sources: list[str], *, fit: bool) -> list[list[int]]:
        """Return the samples of texts, to ``fit`` on or to measure on."""
        return encode(self.pretrained, sources, self.max_length)

    def batches(self, samples: Sequence[list[int]], size: int, seed: int | None = None) -> Batches:
        """Return samples in batches, shuffled where there is a seed."""
        return make_batches(self.pretrained, samples, size, seed)

    def name(self, samples: Sequence[list[int]], place: int) -> str:
        """Return the text at a place of the batches that are not shuffled, for a reader."""
        words: str = self.pretrained.tokenizer.decode(sorted(samples, key=len)[place], skip_special_tokens=True)
        return words

    def facts(self, fit: Sequence[list[int]]) -> dict[str, Any]:
        """Return how much there is to fit on."""
        return {"texts_to_fit": len(fit), "tokens_to_fit": sum(map(len, fit))}


@dataclass(frozen=True)
class Images:
    """Images: a sample is a :class:`Crop`. Files are measured on as a whole, and fitted to in crops too."""

    pretrained: Pretrained
    noun: str = "images"

    def samples(self, sources: list[Path], *, fit: bool) -> list[Crop]:
        """Return the samples of files, to ``fit`` on or to measure on."""
        return [Crop(file, number) for number in range(CROPS if fit else 1) for file in sources]

    def batches(self, samples: Sequence[Crop], size: int, seed: int | None = None) -> Batches:
        """Return samples in batches, shuffled where there is a seed."""
        parts = [samples[start : start + size] for start in range(0, len(samples), size)]
        if seed is not None:
            random.Random(seed).shuffle(parts)
        return _Reading(self.pretrained.tokenizer, parts)

    def name(self, samples: Sequence[Crop], place: int) -> str:
        """Return the file's name at a place of the batches that are not shuffled, for a reader."""
        return samples[place].file.name

    def facts(self, fit: Sequence[Crop]) -> dict[str, Any]:
        """Return how much there is to fit on."""
        return {"images_to_fit": len({crop.file for crop in fit}), "crops": CROPS}


@dataclass(frozen=True)
class _Reading(Sequence[dict[str, Tensor]]):
    """Batches of images that are read when they are taken, for all together may not fit into memory."""

    processor: Any
    parts: Sequence[Sequence[Crop]]

    def __len__(self) -> int:
        return len(self.parts)

    @overload
    def __getitem__(self, index: int) -> dict[str, Tensor]: ...
    @overload
    def __getitem__(self, index: slice) -> _Reading: ...
    def __getitem__(self, index: int | slice) -> dict[str, Tensor] | _Reading:
        if isinstance(index, slice):
            return _Reading(self.processor, self.parts[index])
        images = [crop.read() for crop in self.parts[index]]
        return {"pixel_values": self.processor(images, return_tensors="pt")["pixel_values"]}
