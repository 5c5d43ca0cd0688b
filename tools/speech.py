"""Have sentences of Python's documentation spoken by espeak-ng: ``python tools/speech.py build/speech``.

Each folder is a voice that reads sentences which no other voice reads, and each WAV file in it half
a minute at most, with its words in a text file next to it. Most voices read the standard
library's docstrings, and the last ones the reference of the language.
"""

from __future__ import annotations

import ctypes
import re
import sys
import wave
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np

from dynorm.files import replaced_directory
from dynorm.jobs.texts import standard_library_docstrings

# Accents of English, each by several speakers; the speakers of the reference read no docstrings.
READERS = [f"{accent}+{speaker}" for accent in ("en-us", "en", "en-gb-x-rp", "en-gb-scotland") for speaker in
           ("m1", "f2", "m3", "f4")]  # fmt: skip
OTHERS = ["en-us+m7", "en+f5", "en-gb-x-rp+m4", "en-us+f3"]
FILES, SECONDS, PAUSE = 12, 28.0, 0.3
# Of plain words: how espeak-ng reads code is nothing to learn from.
SENTENCE = re.compile(r"(?:(?<=\. )|^)[A-Z][a-z]*(?:,? [a-z]+(?:'[a-z]+)?){7,29}\.(?=$|\s)")
_SYNCHRONOUS, _UTF8 = 2, 1


def sentences(texts: Iterable[str]) -> list[str]:
    """Return the plain sentences of texts, each once."""
    folded = (" ".join(text.split()) for text in texts)
    return list(dict.fromkeys(found for text in folded for found in SENTENCE.findall(text)))


@cache
def _library() -> tuple[Any, int]:
    """Return the library of espeak-ng, and the samples per second that it gives."""
    import espeakng_loader

    library = ctypes.CDLL(espeakng_loader.get_library_path())
    return library, library.espeak_Initialize(
        _SYNCHRONOUS, 0, espeakng_loader.get_data_path().encode(), 0
    )


def speak(text: str, voice: str = "en-us") -> tuple[np.ndarray[Any, np.dtype[np.int16]], int]:
    """Return a text as samples of 16 bits, and how many of them make a second."""
    (library, rate), parts = _library(), list[np.ndarray[Any, np.dtype[np.int16]]]()

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)
    def hear(samples: Any, count: int, events: Any) -> int:
        if samples and count:
            parts.append(np.ctypeslib.as_array(samples, (count,)).copy())
        return 0

    library.espeak_SetSynthCallback(hear)
    if library.espeak_SetVoiceByName(voice.encode()):
        raise SystemExit(f"espeak-ng must have the voice {voice!r}, but does not know it")
    data = text.encode()
    library.espeak_Synth(data, len(data) + 1, 0, 1, 0, _UTF8, None, None)
    return np.concatenate(parts), rate


def recordings(texts: Iterable[str], voice: str) -> Iterator[tuple[list[str], Any, int]]:
    """Yield sentences that a voice reads within ``SECONDS``, their samples, and the rate of these."""
    said: list[str] = []
    sounds: list[Any] = []
    for text in texts:
        samples, rate = speak(text, voice)
        sound = np.concatenate([samples, np.zeros(int(PAUSE * rate), np.int16)])
        if said and sum(map(len, sounds)) + len(sound) > SECONDS * rate:
            yield said, np.concatenate(sounds), rate
            said, sounds = [], []
        said.append(text)
        sounds.append(sound)


def gather(folder: Path) -> Path:
    """Return a folder with the speech of all voices; it is there whole, or not at all."""
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with replaced_directory(folder) as new:
        for voices, texts in (
            (READERS, standard_library_docstrings(whole=True)),
            (OTHERS, topics.values()),
        ):
            found = sentences(part for text in texts for part in re.split(r"\n\s*\n", text))
            for place, voice in enumerate(voices):
                own = found[
                    place * len(found) // len(voices) : (place + 1) * len(found) // len(voices)
                ]
                (new / voice).mkdir()
                for number, (said, samples, rate) in zip(
                    range(FILES), recordings(own, voice), strict=False
                ):
                    file = new / voice / f"{number:02}.wav"
                    write(file, samples, rate)
                    file.with_suffix(".txt").write_text("\n".join(said) + "\n")
    return folder


def write(file: Path, samples: Any, rate: int) -> None:
    """Write samples of 16 bits as a WAV file of one channel."""
    with wave.open(str(file), "wb") as opened:
        opened.setnchannels(1)
        opened.setsampwidth(2)
        opened.setframerate(rate)
        opened.writeframes(samples.tobytes())


if __name__ == "__main__":
    found = gather(Path(sys.argv[1]))
    print(f"{len(list(found.glob('*/*.wav')))} files of speech are in {found}", file=sys.stderr)
