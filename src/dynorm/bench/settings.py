"""What is to be measured, and the words for what cannot be."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from dynorm.errors import ArgumentError

__all__ = ["DTYPES", "SIZES", "Settings", "all_threads", "make_settings"]

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
SIZES = ((16, 384), (128, 768), (512, 768), (2048, 1024), (8192, 1024), (8192, 4096))
QUICK_SIZES = ((16, 384), (512, 768))
# Some twenty tensors of this size are held at once.
MOST_ELEMENTS = 1 << 27


@dataclass(frozen=True)
class Settings:
    """What is measured, and for how long.

    Args:
        sizes: rows and channels of each input.
        dtypes: names of :data:`DTYPES`.
        threads: numbers of threads; the targets are looked at with the first.
        only: globs of the contenders to measure; all where there is none. What the others are compared with stays.
        device: "cpu" or "cuda".
        compiled: measure what torch.compile makes, too.
        rounds: the most rounds a group gets.
        seconds: what a group may take; at least :data:`dynorm.bench.timing.LEAST_ROUNDS` rounds are made.
        seed: of the inputs and of the order in each round.
    """

    sizes: tuple[tuple[int, int], ...] = SIZES
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    threads: tuple[int, ...] = (1,)
    only: tuple[str, ...] = ()
    device: str = "cpu"
    compiled: bool = True
    rounds: int = 31
    seconds: float = 4.0
    seed: int = 0


def make_settings(
    *,
    sizes: Sequence[str] = (),
    dtypes: Sequence[str] = (),
    threads: Sequence[str] = (),
    only: Sequence[str] = (),
    device: str = "cpu",
    quick: bool = False,
    compiled: bool = True,
    seconds: float | None = None,
    seed: int = 0,
) -> Settings:
    """Return the settings that words from a command line stand for.

    Args:
        sizes: each as "512x768", rows by channels, or several with commas between.
        dtypes: names of :data:`DTYPES`, likewise.
        threads: numbers, or "all" for every core of this process.
        only: globs of contenders.
        device: "cpu" or "cuda".
        quick: two sizes, float32, all threads, few rounds, nothing compiled; what is given stays.
        compiled: as for :class:`Settings`.
        seconds: as for :class:`Settings`; 4, or 1 where it is to be quick.
        seed: as for :class:`Settings`.

    Returns:
        The settings, each thing once and in the order given.

    Raises:
        ArgumentError: a size, dtype, number of threads or device is not one, or is not here.

    Example:
        >>> make_settings(sizes=["16x384,512x768"], dtypes=["float32"], threads=["1"]).sizes
        ((16, 384), (512, 768))
        >>> make_settings(sizes=["16"])
        Traceback (most recent call last):
        dynorm.errors.ArgumentError: a size must be rows x channels, such as 512x768, got '16'
    """
    if seconds is not None and not 0 < seconds < float("inf"):
        raise ArgumentError(f"seconds must be a positive number, got {seconds}")
    _check_device(device)
    everything = "all" if quick or device != "cpu" else "all,1"
    chosen = tuple(dict.fromkeys(_size(text) for text in _split(sizes))) or (QUICK_SIZES if quick else SIZES)
    return Settings(
        sizes=chosen,
        dtypes=tuple(_dtype(text) for text in _split(dtypes)) or (("float32",) if quick else ("float32", "bfloat16")),
        threads=tuple(dict.fromkeys(_threads(text) for text in _split(threads or [everything]))),
        only=tuple(only),
        device=device,
        compiled=compiled and not quick,
        rounds=11 if quick else 31,
        seconds=seconds or (1.0 if quick else 4.0),
        seed=seed,
    )


def all_threads() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _split(texts: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(part.strip() for text in texts for part in text.split(",")))


def _size(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)\s*[x×]\s*(\d+)", text)
    if found is None:
        raise ArgumentError(f"a size must be rows x channels, such as 512x768, got {text!r}")
    rows, channels = int(found[1]), int(found[2])
    if rows < 1 or channels < 2 or rows * channels > MOST_ELEMENTS:
        raise ArgumentError(
            f"a size must have at least 1 row, 2 channels and at most {MOST_ELEMENTS:,} elements, got {text!r}"
        )
    return rows, channels


def _dtype(text: str) -> str:
    if text not in DTYPES:
        raise ArgumentError(f"a dtype must be one of {', '.join(DTYPES)}, got {text!r}")
    return text


def _threads(text: str) -> int:
    most = all_threads()
    if text == "all":
        return most
    if not text.isdecimal() or not 1 <= int(text) <= most:
        raise ArgumentError(f"threads must be 'all' or from 1 to the {most} cores of this process, got {text!r}")
    return int(text)


def _check_device(device: str) -> None:
    if device not in ("cpu", "cuda"):
        raise ArgumentError(f"device must be cpu or cuda, got {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ArgumentError(
            "device must be one that torch can use here, got 'cuda': there is no GPU, or torch has none"
        )
