"""The data of the study: the bytes of Python's standard library, or scikit-learn's digits."""

from __future__ import annotations

import random
import sysconfig
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset

from dynorm.errors import ArgumentError
from studies.settings import Settings

Item = dict[str, Tensor]
# As dynorm.jobs.texts: tests hold data of all kinds, the other two are no longer part of the
# language.
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
HELD_OUT_SHARE = 0.05
HELD_OUT_DIGITS = 500


@dataclass(frozen=True)
class Data:
    """Training items, and held-out ones in an order that makes any first part of them a fair sample.

    Args:
        train: the training items.
        held_out: the items to measure on, in a fixed random order.
        words: a description with the size, for the record.
    """

    train: Dataset[Item]
    held_out: Dataset[Item]
    words: dict[str, Any]


class Blocks(Dataset[Item]):
    """Consecutive blocks of a long row of bytes; the target of each byte is the next one."""

    def __init__(self, data: Tensor, context: int) -> None:
        self.data, self.context = data, context

    def __len__(self) -> int:
        return (len(self.data) - 1) // self.context

    def __getitem__(self, index: int) -> Item:
        start = index * self.context
        block = self.data[start : start + self.context + 1].long()
        return {"input_ids": block[:-1], "labels": block[1:]}


class Images(Dataset[Item]):
    """Images of one channel and their classes."""

    def __init__(self, pixels: Tensor, labels: Tensor) -> None:
        self.pixels, self.targets = pixels, labels

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> Item:
        return {"pixel_values": self.pixels[index], "labels": self.targets[index]}


def load(settings: Settings) -> Data:
    """Return the data of a run; the split depends on no seed of the run."""
    return digits() if settings.task == "digits" else text(settings.size_spec.context)


def text(context: int) -> Data:
    """Return blocks of the standard library's sources, whole files held out."""
    train, held_out = _bytes()
    words = {
        "what": "sources of Python's standard library without its tests, as bytes",
        "train_bytes": len(train),
        "held_out_bytes": len(held_out),
    }
    return Data(Blocks(train, context), _shuffled(Blocks(held_out, context)), words)


def digits() -> Data:
    """Return scikit-learn's 1,797 digits, 8 x 8 pixels, 500 of them held out.

    Raises:
        ArgumentError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits  # type: ignore[import-untyped]
    except ImportError as error:
        raise ArgumentError("the digits need scikit-learn: pip install scikit-learn") from error
    loaded = load_digits()
    pixels = torch.tensor(loaded.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    labels = torch.tensor(loaded.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, held_out = order[HELD_OUT_DIGITS:], order[:HELD_OUT_DIGITS]
    words = {
        "what": "scikit-learn's digits, 8 x 8",
        "train_images": len(train),
        "held_out_images": len(held_out),
    }
    return Data(
        Images(pixels[train], labels[train]), Images(pixels[held_out], labels[held_out]), words
    )


def draw_batch(data: Data, size: int, draw: int = 0) -> Item:
    """Return a batch of training items; the same for the same draw, whatever the run's seed."""
    generator = torch.Generator().manual_seed(draw)
    rows = torch.randint(len(data.train), (size,), generator=generator).tolist()  # type: ignore[arg-type]
    items = [data.train[row] for row in rows]
    return {key: torch.stack([item[key] for item in items]) for key in items[0]}


@lru_cache(maxsize=1)
def _bytes() -> tuple[Tensor, Tensor]:
    """The files of the standard library in a fixed random order, the first twentieth held out."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [
        file
        for file in sorted(root.rglob("*.py"))
        if not LEFT_OUT & set(file.relative_to(root).parts)
    ]
    random.Random(0).shuffle(files)
    contents = [file.read_bytes() + b"\0" for file in files]
    wanted = HELD_OUT_SHARE * sum(map(len, contents))
    count = taken = 0
    while taken < wanted:
        taken += len(contents[count])
        count += 1
    held_out, train = b"".join(contents[:count]), b"".join(contents[count:])
    return tuple(torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in (train, held_out))  # type: ignore[return-value]


def _shuffled(items: Blocks) -> Subset[Item]:
    order = torch.randperm(len(items), generator=torch.Generator().manual_seed(0))
    return Subset(items, order.tolist())
