"""Images and speech to calibrate and test with: the user's files, which are read when a batch needs them."""

import hashlib
import random
import wave
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dynorm.errors import DataError, require_library
from dynorm.jobs.sources import files_of

# The shortest side of a crop, in shorter sides of the image.
_SMALLEST = 0.5


@dataclass(frozen=True)
class Crop:
    """A part of an image file: number 0 is the whole image, each other number a square of it, at random."""

    file: Path
    number: int = 0

    def read(self) -> Any:
        """Return the part as an image of PIL in three colours, turned as the camera says."""
        from PIL import Image
        from transformers.image_utils import load_image

        with Image.open(self.file) as opened:
            image = load_image(opened)
        if not self.number:
            return image
        draw = random.Random(f"{self.file.name} {self.number}")
        side = draw.uniform(_SMALLEST, 1) * min(image.size)
        left, top = (draw.uniform(0, length - side) for length in image.size)
        return image.crop((int(left), int(top), int(left + side) + 1, int(top + side) + 1))


@dataclass(frozen=True)
class Clip:
    """An audio file, with the samples per second that it holds, and its length in seconds."""

    file: Path
    rate: int
    seconds: float

    def read(self, rate: int) -> Tensor:
        """Return its channels' mean, as ``rate`` samples per second from -1 to 1."""
        return resampled(_decoded(self.file)[0], self.rate, rate)


def resampled(samples: Tensor, rate: int, wanted: int) -> Tensor:
    """Return samples (N,) of ``rate`` per second at the rate ``wanted``, with the frequencies that both can hold."""
    length = max(1, round(len(samples) * wanted / rate))
    if length == len(samples):
        return samples
    found: Tensor = torch.fft.irfft(torch.fft.rfft(samples), length) * (length / len(samples))
    return found


def find_images(paths: Iterable[str | Path]) -> tuple[list[Path], list[str]]:
    """Find images in files and folders, each once; return those that can be read, and the names of the others.

    Of files with the same bytes the first is taken. All are decoded once, for a file may end too
    early. A path that does not exist, or has no image that can be read, is a DataError.
    """
    require_library("PIL.Image", "reading images", "plots")
    from PIL.Image import DecompressionBombError

    def look(file: Path) -> Path:
        Crop(file).read()
        return file

    suffixes = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
    return _found(paths, "images", "Pillow", suffixes, look, DecompressionBombError)


def find_audio(paths: Iterable[str | Path]) -> tuple[list[Clip], list[str]]:
    """Find audio as :func:`find_images` does images; without soundfile, .wav files of whole numbers alone are read."""

    def look(file: Path) -> Clip:
        samples, rate = _decoded(file)
        return Clip(file, rate, len(samples) / rate)

    reader = (
        "soundfile"
        if find_spec("soundfile")
        else "Python, which knows WAV alone (install soundfile for others),"
    )
    return _found(
        paths, "audio", reader, (".wav", ".flac", ".ogg", ".opus", ".mp3"), look, wave.Error
    )


def _decoded(file: Path) -> tuple[Tensor, int]:
    """Return an audio file's mean over its channels, and how many samples make a second."""
    if find_spec("soundfile"):
        values, rate = import_module("soundfile").read(file, dtype="float32", always_2d=True)
    else:
        with wave.open(str(file)) as opened:
            width, channels, rate = (
                opened.getsampwidth(),
                opened.getnchannels(),
                opened.getframerate(),
            )
            size, data = (
                opened.getnframes() * width * channels,
                np.frombuffer(opened.readframes(-1), np.uint8),
            )
        if data.size < size:
            raise EOFError(f"{size} bytes must follow the header, but {data.size} do")
        # Each sample becomes the upper bytes of 32 bits; those of one byte count from 128.
        whole = np.zeros((data.size // width, 4), np.uint8)
        whole[:, 4 - width :] = data.reshape(-1, width) ^ (128 if width == 1 else 0)
        values = (whole.view("<i4") / 2.0**31).astype(np.float32).reshape(-1, channels)
    if not (rate and len(values) and np.isfinite(values).all()):
        raise EOFError(f"there must be finite samples in {file}, and a rate")
    return torch.from_numpy(values).mean(1), rate


def _found(
    paths: Iterable[str | Path],
    noun: str,
    reader: str,
    suffixes: tuple[str, ...],
    look: Callable[[Path], Any],
    damage: type[Exception],
) -> tuple[list[Any], list[str]]:
    """Return what ``look`` makes of each file, and the names of those that it cannot read."""
    found: dict[bytes, Any] = {}
    damaged: list[str] = []
    for path in map(Path, paths):
        files, before = files_of(path, noun, suffixes), len(damaged)
        for file in files:
            try:
                sample = look(file)
                found.setdefault(hashlib.sha256(file.read_bytes()).digest(), sample)
            # Which of them the reader raises depends on the format.
            except (OSError, EOFError, SyntaxError, ValueError, RuntimeError, damage):
                damaged.append(str(file))
        if len(damaged) - before == len(files):
            raise DataError(
                f"{noun} must be files that {reader} can read, but {path} has none, of {len(files)}"
            )
    return list(found.values()), damaged
