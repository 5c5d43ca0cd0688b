"""Sources of samples: files and folders of the user, or a data set of the library ``datasets``."""

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

# The most rows that are taken of a data set of texts, and of images or audio.
_TEXTS = 10_000
_FILES = 1_000


def files_of(path: Path, noun: str, suffixes: Collection[str]) -> list[Path]:
    """Return a file, the files in a folder with these suffixes, or a data set's rows as files."""
    if path.is_dir():
        files = sorted(path.rglob("*"))
        return [file for file in files if file.suffix.lower() in suffixes and file.is_file()]
    # Texts are read only once, so they may come from a pipe.
    if path.is_file() or (noun == "texts" and path.exists()):
        return [path]
    return _rows_of(str(path), noun)


def _rows_of(name: str, noun: str) -> list[Path]:
    """Write the first rows of the data set ``name`` or ``name:configuration`` to temporary files.

    They are deleted when Python ends.
    """
    problem = f"{noun} must come from files and folders that exist, but {name} does not"
    try:
        datasets: Any = import_module("datasets")
    except ImportError as error:
        raise DataError(
            f"{problem}: correct it, or install datasets if it is the name of a data set"
        ) from error
    folder = Path(tempfile.mkdtemp(prefix="dynorm-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    title, _, configuration = name.partition(":")
    offline = datasets.config.HF_HUB_OFFLINE
    try:
        rows = datasets.load_dataset(
            title, configuration or None, split="train", streaming=not offline
        )
        if offline:
            rows = rows.to_iterable_dataset()
        if rows.features:
            # Keep images and audio as the bytes of their files, to read them like the user's files.
            rows = rows.decode(False)
        if noun == "texts":
            with (folder / "texts").open("ab") as file:
                for row in islice(rows, _TEXTS):
                    file.write(_content(row, noun))
        else:
            for number, row in enumerate(islice(rows, _FILES)):
                (folder / f"{number:05}").write_bytes(_content(row, noun))
    # The data set, the hub or the network may raise anything.
    except Exception as error:
        raise DataError(
            f"{problem}, and as a data set it cannot be read: {type(error).__name__}: "
            f"{error!s:.300}: correct the name, or set HF_HUB_OFFLINE=0 to load it from the network"
        ) from error
    return sorted(folder.iterdir())


def _content(row: dict[str, Any], noun: str) -> bytes:
    """Return the text of a row as a paragraph, or the bytes of its image or audio file."""
    kind = str if noun == "texts" else dict
    columns: list[object] = [row.get("text"), *row.values()]
    fitting = [value for value in columns if isinstance(value, kind)]
    if not fitting:
        raise ValueError(f"a row must have {noun}, but has {', '.join(row)}")
    value: Any = fitting[0]
    if noun == "texts":
        return f"{value}\n\n".encode()
    if value["bytes"] is None:
        with import_module("fsspec").open(value["path"]) as file:
            return bytes(file.read())
    return bytes(value["bytes"])


def read_samples(
    paths: Iterable[str | Path],
    noun: str,
    reader: str,
    suffixes: tuple[str, ...],
    look: Callable[[Path], object],
    damage: type[Exception],
) -> tuple[list[Any], list[str]]:
    """Call ``look`` on each file; return its results, and the names of the files it cannot read.

    Of files with the same bytes only the first one counts.
    """
    samples: dict[bytes, object] = {}
    damaged: list[str] = []
    for path in map(Path, paths):
        files = files_of(path, noun, suffixes)
        unreadable: list[str] = []
        for file in files:
            try:
                sample = look(file)
                samples.setdefault(hashlib.sha256(file.read_bytes()).digest(), sample)
            # Readers raise different errors for different formats.
            except (OSError, EOFError, SyntaxError, ValueError, RuntimeError, damage):
                unreadable.append(str(file))
        if len(unreadable) == len(files):
            raise DataError(
                f"{noun} must be files that {reader} can read, but {path} has none, of {len(files)}"
            )
        damaged += unreadable
    return list(samples.values()), damaged
