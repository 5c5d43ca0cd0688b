"""Where samples come from: the files and folders that a user names, or a data set of the library ``datasets``."""

import atexit
import hashlib
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterable
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

from dynorm.errors import DataError

# Rows that are taken of a data set, which may have any number: of texts, and of images or audio.
_TEXTS, _FILES = 10_000, 1_000


def files_of(path: Path, noun: str, suffixes: Collection[str]) -> list[Path]:
    """Return a file, those in a folder that end in one of the suffixes, or the rows of a data set as files."""
    if path.is_dir():
        return sorted(
            file for file in path.rglob("*") if file.suffix.lower() in suffixes and file.is_file()
        )
    # A pipe can be read once only, as texts are.
    return (
        [path]
        if path.is_file() or (noun == "texts" and path.exists())
        else _rows_of(str(path), noun)
    )


def _rows_of(name: str, noun: str) -> list[Path]:
    """Return the first rows of the data set ``name`` or ``name:configuration``, in files that end with Python."""
    wanted = f"{noun} must come from files and folders that exist, but {name} does not"
    try:
        datasets: Any = import_module("datasets")
    except ImportError as error:
        raise DataError(
            f"{wanted}: correct it, or install datasets if it is the name of a data set"
        ) from error
    folder = Path(tempfile.mkdtemp(prefix="dynorm-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (title, _, part), offline = name.partition(":"), datasets.config.HF_HUB_OFFLINE
    try:
        rows = datasets.load_dataset(title, part or None, split="train", streaming=not offline)
        rows = rows.to_iterable_dataset() if offline else rows
        # Images and audio stay the bytes of their files, which are read as those of a folder are.
        rows = rows.decode(False) if rows.features else rows
        for k, row in enumerate(islice(rows, _TEXTS if noun == "texts" else _FILES)):
            with (folder / ("texts" if noun == "texts" else f"{k:05}")).open("ab") as file:
                file.write(_content(row, noun))
    # Whatever the data set, the hub or the network make it raise.
    except Exception as error:
        raise DataError(
            f"{wanted}, and as a data set it cannot be read: {type(error).__name__}: "
            f"{error!s:.300}: correct the name, "
            "or set HF_HUB_OFFLINE=0 where there is a network to load it from"
        ) from error
    return sorted(folder.iterdir())


def _content(row: dict[str, Any], noun: str) -> bytes:
    """Return the text of a row, a paragraph, or the bytes of its image or audio file."""
    kind = str if noun == "texts" else dict
    found: Any = next(
        (value for value in (row.get("text"), *row.values()) if isinstance(value, kind)), None
    )
    if found is None:
        raise ValueError(f"a row must have {noun}, but has {', '.join(row)}")
    if noun == "texts":
        return f"{found}\n\n".encode()
    if found["bytes"] is None:
        with import_module("fsspec").open(found["path"]) as file:
            return bytes(file.read())
    return bytes(found["bytes"])


def read_samples(
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
