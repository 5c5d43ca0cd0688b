"""The samples that a pretrained model is fitted to and measured on, and their batches."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from dynorm.errors import DataError
from dynorm.jobs.images import Crop
from dynorm.jobs.pretrained import Pretrained, encode
from dynorm.plain import JsonObject

Sample = Any  # a list of token ids, or a Crop
BatchOf = Callable[[Sequence[Sample]], dict[str, Tensor]]  # makes a batch of samples

# Samples made of each image to fit on: the whole image, and squares of it.
CROPS = 16


@dataclass(frozen=True)
class Batches(Sequence[dict[str, Tensor]]):
    """Groups of samples, each made a batch when it is taken, so that memory holds only one."""

    make: BatchOf
    parts: Sequence[Sequence[object]]

    def __len__(self) -> int:
        return len(self.parts)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return Batches(self.make, self.parts[index])
        return self.make(self.parts[index])


@dataclass
class ShuffledBatches:
    """Batches that are shuffled for each pass; ``make`` takes the samples, a size and a seed."""

    make: Callable[[Sequence[Sample], int, int], Sequence[dict[str, Tensor]]]
    samples: Sequence[object]
    batch_size: int
    seed: int

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """Begin the next pass."""
        samples = random.Random(self.seed).sample(self.samples, len(self.samples))
        self.seed += 1
        return iter(self.make(samples, self.batch_size, self.seed))


@dataclass(frozen=True)
class Inputs:
    """Samples of one kind to fit on, and samples from other texts or files to measure on."""

    noun: str  # "texts" or "images"
    fit: list[Sample]
    held_out: list[Sample]
    facts: JsonObject  # the sources, and how many samples there are to fit
    batch: BatchOf
    label: Callable[[Sample], str]  # names a sample for a reader
    length: Callable[[Sample], float]  # samples of similar length make a batch

    def batches(self, samples: Sequence[object], size: int, seed: int | None = None) -> Batches:
        """Return samples in batches from short to long; with a seed the batches are shuffled."""
        ordered = sorted(samples, key=self.length)
        parts = [ordered[start : start + size] for start in range(0, len(ordered), size)]
        if seed is not None:
            random.Random(seed).shuffle(parts)
        return Batches(self.batch, parts)

    def name(self, index: int) -> str:
        """Return the label of the held-out sample at this index of the batches, not shuffled."""
        return self.label(sorted(self.held_out, key=self.length)[index])


def make_batches(
    pretrained: Pretrained,
    encoded: list[list[int]],
    batch_size: int = 32,
    seed: int | None = None,
) -> list[dict[str, Tensor]]:
    """Return padded batches of texts of similar length, so that little is padding.

    Args:
        pretrained: the model with the tokenizer that pads.
        encoded: the lists that :func:`encode` returned.
        batch_size: texts per batch.
        seed: shuffles the batches; None keeps them in order of length.
    """
    return list(_texts(pretrained, encoded, [], {}).batches(encoded, batch_size, seed))


def text_inputs(
    pretrained: Pretrained,
    fit: list[str],
    held_out: list[str],
    facts: JsonObject,
    max_length: int,
) -> Inputs:
    """Return texts as lists of at most ``max_length`` token ids."""
    ids = encode(pretrained, fit, max_length)
    counts = {"texts_to_fit": len(ids), "tokens_to_fit": sum(map(len, ids))}
    return _texts(pretrained, ids, encode(pretrained, held_out, max_length), facts | counts)


def _texts(
    pretrained: Pretrained, fit: list[list[int]], held_out: list[list[int]], facts: JsonObject
) -> Inputs:
    return Inputs(
        noun="texts",
        fit=fit,
        held_out=held_out,
        facts=facts,
        batch=pretrained.padded,
        label=partial(pretrained.tokenizer.decode, skip_special_tokens=True),
        length=len,
    )


def image_inputs(
    pretrained: Pretrained, fit: list[Path], held_out: list[Path], facts: JsonObject
) -> Inputs:
    """Return images as crops: held-out images as they are, the others also in random squares."""

    def batch(crops: Sequence[Crop]) -> dict[str, Tensor]:
        images = [crop.read() for crop in crops]
        try:
            processed = pretrained.tokenizer(images, return_tensors="pt")
            return {"pixel_values": processed["pixel_values"]}
        # The processor may be the checkpoint's code, and raise anything.
        except Exception as error:
            raise DataError(
                f"the model's image processor must make one batch of the images, but {error}"
            ) from error

    return Inputs(
        noun="images",
        fit=[Crop(file, number) for number in range(CROPS) for file in fit],
        held_out=[Crop(file) for file in held_out],
        facts=facts | {"images_to_fit": len(fit), "crops": CROPS},
        batch=batch,
        label=lambda crop: crop.file.name,
        length=lambda crop: 0,
    )
