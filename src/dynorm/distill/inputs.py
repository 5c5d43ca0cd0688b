"""What a pretrained model is fitted to and measured on: texts, images or audio, as samples and as batches of them."""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

from torch import Tensor

from dynorm.distill.media import Clip, Crop
from dynorm.distill.pretrained import Pretrained, encode, make_batches
from dynorm.distill.speech import Listener

Batches = Sequence[dict[str, Tensor]]

# Each image is fitted to as a whole, and in so many crops less one.
CROPS = 16


@dataclass(frozen=True)
class Inputs:
    """Samples of a kind, and how they become batches.

    Args:
        noun: "texts", "images" or "audio".
        fit: samples to fit on.
        held_out: samples to measure on, of other texts or files.
        batches: returns samples in batches of a size, shuffled where there is a seed.
        name: returns for a reader the held-out sample at a place of the batches that are not shuffled.
        facts: where they come from, and what could not be read.
        counts: how much there is to fit on.
    """

    noun: str
    fit: list[Any]
    held_out: list[Any]
    batches: Callable[..., Batches]
    name: Callable[[int], str]
    facts: dict[str, Any]
    counts: dict[str, int]


def text_inputs(
    pretrained: Pretrained, fit: list[str], held_out: list[str], facts: dict[str, Any], max_length: int
) -> Inputs:
    """Return texts as lists of token ids, of at most ``max_length``, in batches of samples of about equal length."""
    ids, others = (encode(pretrained, texts, max_length) for texts in (fit, held_out))

    def name(place: int) -> str:
        return str(pretrained.tokenizer.decode(sorted(others, key=len)[place], skip_special_tokens=True))

    counts = {"texts_to_fit": len(ids), "tokens_to_fit": sum(map(len, ids))}
    return Inputs("texts", ids, others, partial(make_batches, pretrained), name, facts, counts)


def image_inputs(pretrained: Pretrained, fit: list[Path], held_out: list[Path], facts: dict[str, Any]) -> Inputs:
    """Return images as crops: those that are measured on whole, the others in squares too."""

    def read(crops: Sequence[Crop]) -> dict[str, Tensor]:
        images = [crop.read() for crop in crops]
        return {"pixel_values": pretrained.tokenizer(images, return_tensors="pt")["pixel_values"]}

    crops, whole = ([Crop(file, k) for k in range(n) for file in files] for n, files in ((CROPS, fit), (1, held_out)))
    counts = {"images_to_fit": len(fit), "crops": CROPS}
    return Inputs("images", crops, whole, partial(_read_later, read), lambda k: held_out[k].name, facts, counts)


def audio_inputs(listener: Listener, fit: list[Clip], held_out: list[Clip], facts: dict[str, Any]) -> Inputs:
    """Return audio files in batches of about equal length; note how many have another rate than the model takes."""
    length, counts = attrgetter("seconds"), {"audio_to_fit": len(fit)}

    def batches(samples: Sequence[Clip], size: int, seed: int | None = None) -> Batches:
        return _read_later(listener.batch, sorted(samples, key=length), size, seed)

    def name(place: int) -> str:
        # Of a speaker's folder, maybe.
        return "/".join(sorted(held_out, key=length)[place].file.parts[-2:])

    if rates := Counter(clip.rate for clip in fit + held_out if clip.rate != listener.rate):
        facts = facts | {"audio_at_another_rate": dict(rates)}
    return Inputs("audio", fit, held_out, batches, name, facts, counts)


def _read_later(read: Callable[[Any], Any], samples: Sequence[Any], size: int, seed: int | None = None) -> Batches:
    parts = [samples[start : start + size] for start in range(0, len(samples), size)]
    if seed is not None:
        random.Random(seed).shuffle(parts)
    return _Reading(read, parts)


@dataclass(frozen=True)
class _Reading(Sequence[Any]):
    """Batches of files that are read when they are taken, for all together may not fit into memory."""

    read: Callable[[Any], Any]
    parts: Sequence[Sequence[Any]]

    def __len__(self) -> int:
        return len(self.parts)

    def __getitem__(self, index: Any) -> Any:
        return _Reading(self.read, self.parts[index]) if isinstance(index, slice) else self.read(self.parts[index])
