"""Texts to calibrate and test with: the user's files, or the docstrings of Python's standard library."""

import ast
import random
import re
import sysconfig
import warnings
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from dynorm.errors import ArgumentError, DataError
from dynorm.jobs.sources import files_of

_SHORTEST, _FEWEST = 20, 8
_SUFFIXES = (".txt", ".md", ".rst", ".py")


def read_texts(paths: str | Path | Iterable[str | Path], *, whole: bool = False) -> list[str]:
    """Read texts from files and folders, one text per paragraph, or per line of a file without blank lines.

    Of a ``.py`` file the docstrings' first paragraphs are taken. Folders are searched for .txt,
    .md, .rst and .py files. ``whole`` takes whole docstrings and keeps line breaks, for a language
    model. The texts have at least 20 characters, white space folded, each once, in the order of the
    files. A path without any is a DataError.
    """
    texts: list[str] = []
    for path in map(Path, [paths] if isinstance(paths, (str, Path)) else paths):
        found = [
            text for file in files_of(path, "texts", _SUFFIXES) for text in _texts_of(file, whole)
        ]
        if not found:
            raise DataError(
                f"texts must have a paragraph or line of {_SHORTEST} characters, but {path} has "
                "none"
            )
        texts += found
    if not texts:
        raise DataError("texts must come from at least one file, got none")
    return list(dict.fromkeys(texts))


# They take five seconds to read.
@cache
def standard_library_docstrings(*, whole: bool = False) -> tuple[str, ...]:
    """Return the first paragraphs of the docstrings of Python's standard library, its tests left out.

    ``whole`` takes whole docstrings, as they are written, for a language model. There are about
    6,000 texts, each once, in the order of the files; the same for the same version of Python.
    """
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {
        "site-packages",
        "dist-packages",
        "test",
        "tests",
        "idlelib",
        "lib2to3",
        "__pycache__",
    }
    files = (
        file
        for file in sorted(root.rglob("*.py"))
        if not left_out & set(file.relative_to(root).parts)
    )
    return tuple(dict.fromkeys(text for file in files for text in _texts_of(file, whole)))


def split_texts(
    texts: Sequence[Any], held_out: int, seed: int = 0, noun: str = "texts"
) -> tuple[list[Any], list[Any]]:
    """Shuffle texts, or whatever the ``noun`` says, and put some aside, to be used for measuring only.

    Of fewer than twice ``held_out`` texts a quarter is put aside. Returned are those to fit on, and
    those held out.
    """
    if held_out < 1:
        raise ArgumentError(f"held_out must be at least 1, got {held_out}")
    if len(texts) < _FEWEST:
        raise DataError(
            f"{noun} must be at least {_FEWEST}, to hold some out (--held-out), got {len(texts)}: "
            "give more"
        )
    held_out = held_out if len(texts) >= 2 * held_out else len(texts) // 4
    shuffled = random.Random(seed).sample(texts, len(texts))
    return shuffled[held_out:], shuffled[:held_out]


def split_audio(
    clips: list[Any], held_out: int, seed: int = 0, noun: str = "audio"
) -> tuple[list[Any], list[Any]]:
    """Split audio files; of eight folders or more, whole ones are put aside, for a folder may hold one speaker."""
    folders: dict[Path, list[Any]] = {}
    for clip in clips:
        folders.setdefault(clip.file.parent, []).append(clip)
    if len(folders) < _FEWEST:
        return split_texts(clips, held_out, seed, noun)
    parts = split_texts(
        list(folders.values()), max(1, round(held_out * len(folders) / len(clips))), seed, noun
    )
    fit, apart = ([clip for folder in part for clip in folder] for part in parts)
    return random.Random(seed).sample(fit, len(fit)), apart


def _texts_of(file: Path, whole: bool) -> Iterator[str]:
    try:
        # Editors on Windows begin files with a byte order mark.
        content = file.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            f"texts must be UTF-8, but {file} is not, at byte {error.start}: convert it first"
        ) from error
    except OSError as error:
        raise DataError(f"texts must be readable, but {file} is not: {error.strerror}") from error
    if "\0" in content:
        raise DataError(f"texts must be text, but {file} has NUL bytes: is it binary?")
    blank = re.search(r"\n\s*\n", content.strip())
    parts = re.split(r"\n\s*\n", content) if blank else content.splitlines()
    paragraphs = _docstrings(file, content, whole) if file.suffix == ".py" else parts
    for paragraph in paragraphs:
        text = paragraph.strip() if whole else " ".join(paragraph.split())
        if len(text) >= _SHORTEST:
            yield text


def _docstrings(file: Path, content: str, whole: bool) -> Iterator[str]:
    try:
        with warnings.catch_warnings():
            # Of other people's escape sequences.
            warnings.simplefilter("ignore")
            tree = ast.parse(content)
    except SyntaxError as error:
        raise DataError(
            f"a .py file must be Python, but {file} is not, at line {error.lineno}"
        ) from error
    except (RecursionError, MemoryError) as error:
        raise DataError(
            f"a .py file must nest less deep than {file}, which Python cannot read"
        ) from error
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node) or ""
            yield text if whole else text.split("\n\n")[0]
