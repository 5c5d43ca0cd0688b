"""Texts to calibrate and test with: the user's, or the docstrings of Python's standard library."""

import ast
import random
import re
import sysconfig
import warnings
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from dynorm.errors import DataError

# Characters of the shortest text, and the fewest texts that are split.
_SHORTEST = 20
_FEWEST = 8
_SUFFIXES = (".txt", ".md", ".rst", ".py")


def read_texts(paths: Iterable[str | Path], *, whole: bool = False) -> list[str]:
    """Read texts from files and folders.

    Each paragraph is a text; in a file without blank lines, each line; in a ``.py`` file, the first
    paragraph of each docstring. Folders are searched for .txt, .md, .rst and .py files. ``whole``
    takes complete docstrings and keeps line breaks, as a language model needs. Texts of fewer than 20
    characters and repeated ones are left out, and white space is folded. The order is that of the
    files. A path without any text is a DataError.
    """
    texts: list[str] = []
    for path in map(Path, paths):
        before = len(texts)
        for file in files_of(path, "texts", _SUFFIXES):
            texts += _texts_of(file, whole)
        if len(texts) == before:
            raise DataError(
                f"texts must have a paragraph or line of {_SHORTEST} characters, but {path} has "
                "none"
            )
    return list(dict.fromkeys(texts))


# Reading them takes five seconds.
@cache
def standard_library_docstrings(*, whole: bool = False) -> tuple[str, ...]:
    """Return the first paragraphs of the docstrings of Python's standard library.

    Its tests are left out. ``whole`` takes complete docstrings with their line breaks, as a
    language model needs. There are about 6,000 different texts, in the order of the files. They depend
    on the version of Python.
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
    texts: list[str] = []
    for file in sorted(root.rglob("*.py")):
        if not left_out.intersection(file.relative_to(root).parts):
            texts += _texts_of(file, whole)
    return tuple(dict.fromkeys(texts))


def split_texts(
    texts: Sequence[Any], held_out: int, seed: int = 0, noun: str = "texts"
) -> tuple[list[Any], list[Any]]:
    """Shuffle texts (or other samples, named by ``noun``) and set some aside for measuring.

    With fewer than twice ``held_out`` texts, a quarter is set aside. Returns the texts to fit on,
    and those held out.
    """
    if len(texts) < _FEWEST:
        raise DataError(
            f"{noun} must be at least {_FEWEST}, to hold some out (--held-out), got {len(texts)}: "
            "give more"
        )
    if len(texts) < 2 * held_out:
        held_out = len(texts) // 4
    shuffled = random.Random(seed).sample(texts, len(texts))
    return shuffled[held_out:], shuffled[:held_out]


def files_of(path: Path, noun: str, suffixes: Collection[str]) -> list[Path]:
    """Return a file, or the files in a folder with these suffixes."""
    if path.is_dir():
        files = sorted(path.rglob("*"))
        return [file for file in files if file.suffix.lower() in suffixes and file.is_file()]
    if not path.exists():
        raise DataError(f"{noun} must come from files and folders that exist, but {path} does not")
    return [path]


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
    paragraphs: Iterable[str]
    if file.suffix == ".py":
        paragraphs = _docstrings(file, content, whole)
    elif re.search(r"\n\s*\n", content.strip()):
        paragraphs = re.split(r"\n\s*\n", content)
    else:
        paragraphs = content.splitlines()
    for paragraph in paragraphs:
        text = paragraph.strip() if whole else " ".join(paragraph.split())
        if len(text) >= _SHORTEST:
            yield text


def _docstrings(file: Path, content: str, whole: bool) -> Iterator[str]:
    try:
        with warnings.catch_warnings():
            # About invalid escape sequences.
            warnings.simplefilter("ignore")
            tree = ast.parse(content)
    # The last two are of a file that nests too deep.
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise DataError(
            f"a .py file must be Python that can be read, but {file} is not: "
            f"{type(error).__name__}: {error}"
        ) from error
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node) or ""
            yield text if whole else text.split("\n\n")[0]
