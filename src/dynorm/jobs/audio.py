"""Audio to calibrate and test with, read from the user's files when a batch needs them."""

import wave
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dynorm.jobs.sources import read_samples


@dataclass(frozen=True)
class Clip:
    """An audio file, with its sample rate in Hz and its length in seconds."""

    file: Path
    rate: int
    seconds: float

    def read(self, rate: int) -> Tensor:
        """Return the mean of its channels at another sample rate, with values from -1 to 1."""
        samples, _ = _decoded(self.file)
        return resampled(samples, self.rate, rate)


def resampled(samples: Tensor, rate: int, new_rate: int) -> Tensor:
    """Return samples (N,) at a new rate, with the frequencies that both rates can represent."""
    length = max(1, round(len(samples) * new_rate / rate))
    if length == len(samples):
        return samples
    spectrum = torch.fft.rfft(samples)
    at_new_rate: Tensor = torch.fft.irfft(spectrum, length) * (length / len(samples))
    return at_new_rate


def find_audio(paths: Iterable[str | Path]) -> tuple[list[Clip], list[str]]:
    """Find audio like :func:`find_images`; without soundfile, only .wav files of integers."""

    def look(file: Path) -> Clip:
        samples, rate = _decoded(file)
        return Clip(file, rate, len(samples) / rate)

    reader = "Python, which reads only WAV (install soundfile for others),"
    if find_spec("soundfile"):
        reader = "soundfile"
    suffixes = (".wav", ".flac", ".ogg", ".opus", ".mp3")
    return read_samples(paths, "audio", reader, suffixes, look, wave.Error)


def _decoded(file: Path) -> tuple[Tensor, int]:
    """Return the mean over the channels of an audio file, and its sample rate."""
    if find_spec("soundfile"):
        values, rate = import_module("soundfile").read(file, dtype="float32", always_2d=True)
    else:
        with wave.open(str(file)) as opened:
            width = opened.getsampwidth()
            channels = opened.getnchannels()
            rate = opened.getframerate()
            size = opened.getnframes() * width * channels
            data: NDArray[np.uint8] = np.frombuffer(opened.readframes(-1), np.uint8)
        if data.size < size:
            raise EOFError(f"{size} bytes must follow the header, but {data.size} do")
        if width == 1:
            # Samples of one byte are unsigned, with 128 as zero; all others are signed.
            data = data ^ np.uint8(128)
        # Each sample becomes the upper bytes of an integer of 32 bits.
        integers = np.zeros((data.size // width, 4), np.uint8)
        integers[:, 4 - width :] = data.reshape(-1, width)
        values = (integers.view("<i4") / 2.0**31).astype(np.float32).reshape(-1, channels)
    if not (rate and len(values) and np.isfinite(values).all()):
        raise EOFError(f"there must be finite samples in {file}, and a rate")
    return torch.from_numpy(values).mean(1), rate
