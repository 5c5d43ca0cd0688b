"""The samples that a pretrained model is fitted to and measured on: texts or images."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from dynorm.errors import DataError
from dynorm.jobs.checkpoint import Batches, Pretrained, encode, in_batches
from dynorm.jobs.images import Crop
from dynorm.plain import JsonObject

# Samples made of each image to fit on: the whole image, and squares of it.
CROPS = 16


@dataclass(frozen=True)
class Inputs:
    """Samples of one kind to fit on, and samples from other texts or files to measure on."""

    noun: str  # "texts" or "images"
    fit: list[Any]
    held_out: list[Any]
    facts: JsonObject  # the sources, and the files that could not be read
    counts: dict[str, int]  # the number of samples to fit on
    batch: Callable[[Sequence[Any]], dict[str, Tensor]]  # makes a batch of samples
    label: Callable[[Any], str]  # names a sample for a reader
    length: Callable[[Any], float]  # samples of similar length make a batch

    def batches(self, samples: Sequence[object], size: int, seed: int | None = None) -> Batches:
        """Return samples in batches; with a seed these are shuffled."""
        return in_batches(self.batch, samples, size, seed, self.length)

    def name(self, index: int) -> str:
        """Return the label of the held-out sample at this index of the batches, not shuffled."""
        return self.label(sorted(self.held_out, key=self.length)[index])


def text_inputs(
    pretrained: Pretrained,
    fit: list[str],
    held_out: list[str],
    facts: JsonObject,
    max_length: int,
) -> Inputs:
    """Return texts as lists of at most ``max_length`` token ids."""
    ids = encode(pretrained, fit, max_length)
    return Inputs(
        noun="texts",
        fit=ids,
        held_out=encode(pretrained, held_out, max_length),
        facts=facts,
        counts={"texts_to_fit": len(ids), "tokens_to_fit": sum(map(len, ids))},
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
        facts=facts,
        counts={"images_to_fit": len(fit), "crops": CROPS},
        batch=batch,
        label=lambda crop: crop.file.name,
        length=lambda crop: 0,
    )
