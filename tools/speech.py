"""Have espeak-ng speak sentences of Python's documentation: ``python tools/speech.py build/speech``.

Each folder is a voice. It has WAV files of at most half a minute, each with its words in a text file
next to it. No two voices read the same sentence. Most voices read the standard library's
docstrings, and the last ones the reference of the language.
"""

from __future__ import annotations

import ctypes
import re
import sys
import wave
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import islice, product
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np

from dynorm.files import replaced_directory
from dynorm.jobs.texts import standard_library_docstrings

Samples = np.ndarray[Any, np.dtype[np.int16]]

# Accents of English, each with several speakers. The speakers of the reference read no docstrings.
ACCENTS = ("en-us", "en", "en-gb-x-rp", "en-gb-scotland")
SPEAKERS = ("m1", "f2", "m3", "f4")
OTHERS = ["en-us+m7", "en+f5", "en-gb-x-rp+m4", "en-us+f3"]
FILES_PER_VOICE = 12
# The most seconds in a file, and those of silence after each sentence.
SECONDS = 28.0
PAUSE = 0.3
# Plain words only: nothing can be learned from the way in which espeak-ng reads code.
SENTENCE = re.compile(r"(?:(?<=\. )|^)[A-Z][a-z]*(?:,? [a-z]+(?:'[a-z]+)?){7,29}\.(?=$|\s)")
# Constants of espeak-ng's speak_lib.h.
_SYNCHRONOUS = 2
_UTF8 = 1


def sentences(texts: Iterable[str]) -> list[str]:
    """Return the plain sentences in some texts, without repetitions."""
    unique: dict[str, None] = {}
    for text in texts:
        on_one_line = " ".join(text.split())
        unique.update(dict.fromkeys(SENTENCE.findall(on_one_line)))
    return list(unique)


@cache
def _load_espeak() -> tuple[Any, int]:
    """Return the library of espeak-ng, and the samples per second that it produces."""
    import espeakng_loader

    library = ctypes.CDLL(espeakng_loader.get_library_path())
    data_path = espeakng_loader.get_data_path().encode()
    rate = library.espeak_Initialize(_SYNCHRONOUS, 0, data_path, 0)
    return library, rate


def speak(text: str, voice: str = "en-us") -> tuple[Samples, int]:
    """Return a text as samples of 16 bits, and the number of samples per second."""
    library, rate = _load_espeak()
    parts: list[Samples] = []

    @ctypes.CFUNCTYPE(
        ctypes.c_int,
        ctypes.POINTER(ctypes.c_short),
        ctypes.c_int,
        ctypes.c_void_p,
    )
    def keep(samples: Any, count: int, events: Any) -> int:
        if samples and count:
            part = np.ctypeslib.as_array(samples, (count,))
            parts.append(part.copy())
        return 0

    library.espeak_SetSynthCallback(keep)
    if library.espeak_SetVoiceByName(voice.encode()):
        raise SystemExit(f"espeak-ng must have the voice {voice!r}, but does not know it")
    data = text.encode()
    library.espeak_Synth(data, len(data) + 1, 0, 1, 0, _UTF8, None, None)
    return np.concatenate(parts), rate


@dataclass
class Recording:
    """Some sentences, read one after another by the same voice."""

    sentences: list[str]
    samples: Samples
    rate: int  # samples per second

    def write(self, file: Path) -> None:
        """Write a WAV file of one channel, and the sentences into a text file next to it."""
        with wave.open(str(file), "wb") as opened:
            opened.setnchannels(1)
            opened.setsampwidth(2)
            opened.setframerate(self.rate)
            opened.writeframes(self.samples.tobytes())
        file.with_suffix(".txt").write_text("\n".join(self.sentences) + "\n")


def recordings(texts: Iterable[str], voice: str) -> Iterator[Recording]:
    """Yield recordings of at most ``SECONDS``, each with as many of the next sentences as fit into it."""
    spoken: list[str] = []
    sounds: list[Samples] = []
    length = 0
    for text in texts:
        samples, rate = speak(text, voice)
        pause = np.zeros(int(PAUSE * rate), np.int16)
        sound = np.concatenate([samples, pause])
        if spoken and length + len(sound) > SECONDS * rate:
            yield Recording(spoken, np.concatenate(sounds), rate)
            spoken = []
            sounds = []
            length = 0
        spoken.append(text)
        sounds.append(sound)
        length += len(sound)


def gather(folder: Path) -> Path:
    """Return a folder with the speech of all voices; on an error, write nothing."""
    if folder.is_dir():
        return folder
    readers = [f"{accent}+{speaker}" for accent, speaker in product(ACCENTS, SPEAKERS)]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with replaced_directory(folder) as new:
        _record_voices(new, readers, standard_library_docstrings(whole=True))
        _record_voices(new, OTHERS, topics.values())
    return folder


def _record_voices(folder: Path, voices: list[str], texts: Iterable[str]) -> None:
    """Divide the sentences of the texts among the voices, and write the recordings of each."""
    paragraphs: list[str] = []
    for text in texts:
        paragraphs += re.split(r"\n\s*\n", text)
    to_read = sentences(paragraphs)
    for number, voice in enumerate(voices):
        first = number * len(to_read) // len(voices)
        end = (number + 1) * len(to_read) // len(voices)
        (folder / voice).mkdir()
        of_voice = islice(recordings(to_read[first:end], voice), FILES_PER_VOICE)
        for file_number, recording in enumerate(of_voice):
            recording.write(folder / voice / f"{file_number:02}.wav")


if __name__ == "__main__":
    speech = gather(Path(sys.argv[1]))
    count = len(list(speech.glob("*/*.wav")))
    print(f"{count} files of speech are in {speech}", file=sys.stderr)
