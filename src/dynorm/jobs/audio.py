"""Audio to calibrate and test with: the user's files, which are read when a batch needs them."""

import wave
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dynorm.jobs.sources import read_samples


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
    return read_samples(
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
