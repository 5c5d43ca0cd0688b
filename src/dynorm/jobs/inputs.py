"""What a pretrained model is fitted to and measured on: texts, images or audio, as samples and as batches of them."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

from torch import Tensor

from dynorm.errors import DataError
from dynorm.jobs.audio import Clip
from dynorm.jobs.checkpoint import Batches, Pretrained, encode, in_batches
from dynorm.jobs.images import Crop
from dynorm.jobs.speech import Listener

# Each image is fitted to as a whole, and in so many crops less one.
CROPS = 16


@dataclass(frozen=True)
class Inputs:
    """Samples of a kind to fit on, and others, of other texts or files, to measure on."""

    noun: str  # "texts", "images" or "audio"
    fit: list[Any]
    held_out: list[Any]
    facts: dict[str, Any]  # where they come from, and what could not be read
    counts: dict[str, int]  # how much there is to fit on
    batch: Callable[[Sequence[Any]], dict[str, Tensor]]  # makes one of samples
    label: Callable[[Any], str]  # names a sample for a reader
    length: Callable[[Any], float]  # samples of about equal length make a batch

    def batches(self, samples: Sequence[Any], size: int, seed: int | None = None) -> Batches:
        """Return samples in batches of a size, shuffled where there is a seed."""
        return in_batches(self.batch, samples, size, seed, self.length)

    def name(self, place: int) -> str:
        """Return for a reader the held-out sample at a place of the batches that are not shuffled."""
        return self.label(sorted(self.held_out, key=self.length)[place])


def text_inputs(
    pretrained: Pretrained,
    fit: list[str],
    held_out: list[str],
    facts: dict[str, Any],
    max_length: int,
) -> Inputs:
    """Return texts as lists of token ids, of at most ``max_length``."""
    ids, others = (encode(pretrained, texts, max_length) for texts in (fit, held_out))
    words = partial(pretrained.tokenizer.decode, skip_special_tokens=True)
    counts = {"texts_to_fit": len(ids), "tokens_to_fit": sum(map(len, ids))}
    return Inputs("texts", ids, others, facts, counts, pretrained.padded, words, len)


def image_inputs(
    pretrained: Pretrained, fit: list[Path], held_out: list[Path], facts: dict[str, Any]
) -> Inputs:
    """Return images as crops: those that are measured on whole, the others in squares too."""

    def batch(crops: Sequence[Crop]) -> dict[str, Tensor]:
        images = [crop.read() for crop in crops]
        try:
            return {
                "pixel_values": pretrained.tokenizer(images, return_tensors="pt")["pixel_values"]
            }
        # Of any kind: the processor is the model's own code.
        except Exception as error:
            raise DataError(
                f"the model's image processor must make one batch of the images, but {error}"
            ) from error

    crops, whole = (
        [Crop(file, k) for k in range(n) for file in files]
        for n, files in ((CROPS, fit), (1, held_out))
    )
    counts = {"images_to_fit": len(fit), "crops": CROPS}
    return Inputs(
        "images", crops, whole, facts, counts, batch, lambda crop: crop.file.name, lambda crop: 0
    )


def audio_inputs(
    listener: Listener, fit: list[Clip], held_out: list[Clip], facts: dict[str, Any]
) -> Inputs:
    """Return audio files; note how many have another rate than the model takes."""
    if rates := Counter(clip.rate for clip in fit + held_out if clip.rate != listener.rate):
        facts = facts | {"audio_at_another_rate": dict(rates)}
    counts = {"audio_to_fit": len(fit)}
    # The folder may be a speaker's.
    name, length = (lambda clip: "/".join(clip.file.parts[-2:])), attrgetter("seconds")
    return Inputs("audio", fit, held_out, facts, counts, listener.batch, name, length)
