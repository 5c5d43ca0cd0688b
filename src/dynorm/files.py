"""Write files and directories completely, or not at all."""

import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from pathlib import Path

from safetensors import SafetensorError

from dynorm.arguments import check_path
from dynorm.errors import StorageError
from dynorm.plain import JsonObject

# A directory with one of these is a saved model, which may be replaced.
_MARKERS = ("dynorm.json", "config.json")
# The files of a saved model. All others in an old directory are kept.
_MODEL_FILES = (*_MARKERS, "generation_config.json", "model*.safetensors*", "*dynorm*.py")


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a text file in UTF-8, as `write_bytes` does."""
    write_bytes(path, text.encode())


def write_bytes(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a file in an existing folder. After a StorageError an old file is unchanged."""
    target = check_path("the file", path)
    temporary = target.parent / f".{target.name}.{secrets.token_hex(4)}.part"
    try:
        temporary.write_bytes(data)
        os.replace(temporary, target)
    # A path with a null byte gives ValueError.
    except (OSError, ValueError) as error:
        with suppress(OSError, ValueError):
            temporary.unlink()
        raise StorageError(
            f"{str(target)!r} cannot be written: {error}; give a path that can be"
        ) from error


def read_json(path: Path) -> JsonObject:
    """Read a JSON object, or raise StorageError if the file does not hold one."""
    try:
        values = json.loads(path.read_text("utf-8"))
    # Text that is not UTF-8, or not JSON, is a ValueError, and too deep nesting a RecursionError.
    except (OSError, ValueError, RecursionError) as error:
        raise StorageError(f"{path} must be readable JSON, but {error}") from error
    if not isinstance(values, dict):
        raise StorageError(f"{path} must hold a JSON object, got {values!r:.60}")
    return values


def require_writable(path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
    """Create the folder of a later output file; refuse now a path that cannot be written.

    ``overwrite`` allows a file that exists.
    """
    target = Path(path)
    if target.is_file() and not overwrite:
        raise StorageError(
            f"the output must be a new file, but {str(target)!r} exists: choose another path, or "
            "pass --overwrite"
        )
    try:
        if target.is_dir():
            raise IsADirectoryError(f"{target} is a directory")
        target.parent.mkdir(parents=True, exist_ok=True)
        # Create a file to find out: to root, os.access calls every folder writable.
        with tempfile.NamedTemporaryFile(prefix=f"{target.name}.", dir=target.parent):
            pass
    except (OSError, ValueError) as error:
        raise StorageError(
            f"the output must be a file that can be written, but {str(target)!r} cannot be "
            f"written: {error}"
        ) from error


@contextmanager
def replaced_directory(
    directory: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    keep_others: bool = True,
    markers: Sequence[str] = _MARKERS,
) -> Iterator[Path]:
    """Fill a new directory, and put it in the target's place when the block ends.

    After an error the old directory is unchanged. The new one is made next to the target, whose
    parent must exist, and renamed. ``overwrite`` allows a target that is empty or has one of the
    ``markers``, those of a saved model. ``keep_others`` keeps its files that are not written by any
    save, such as a tokenizer or a report, unless the block writes them. Failures are a
    StorageError.
    """
    # Replace the target of a link, not the link.
    target = Path(os.path.realpath(directory))
    require_replaceable(target, overwrite, markers)
    try:
        with tempfile.TemporaryDirectory(prefix=".dynorm-", dir=target.parent) as scratch:
            new = Path(scratch) / "new"
            # Unlike the directory around it, it gets the usual permissions.
            new.mkdir()
            yield new
            if keep_others and target.exists():
                _copy_other_files(target, new)
            _put_in_place(new, target, Path(scratch) / "old")
    except (OSError, SafetensorError) as error:
        raise StorageError(
            f"{target} must be writable, but {error}; nothing was changed"
        ) from error


def require_replaceable(target: Path, overwrite: bool, markers: Sequence[str] = _MARKERS) -> None:
    """Refuse a target that :func:`replaced_directory` would not replace."""
    if not target.parent.is_dir():
        raise StorageError(f"the parent of {target} must be a directory: make it first")
    if not target.exists():
        return
    if not target.is_dir():
        raise StorageError(f"{target} must be a directory, but is a file: choose another")
    if not overwrite:
        raise StorageError(
            f"{target} must not exist yet: choose another, or replace it "
            "(overwrite=True, --overwrite)"
        )
    if any(target.iterdir()) and not any((target / name).is_file() for name in markers):
        raise StorageError(
            f"{target} must be written by dynorm or empty to be overwritten, but does not hold "
            f"{' or '.join(markers)}"
        )


def _copy_other_files(old: Path, new: Path) -> None:
    for path in old.iterdir():
        copy = new / path.name
        if copy.exists() or any(fnmatchcase(path.name, pattern) for pattern in _MODEL_FILES):
            continue
        if path.is_dir():
            shutil.copytree(path, copy, symlinks=True)
        else:
            shutil.copy2(path, copy, follow_symlinks=False)


def _put_in_place(new: Path, target: Path, old: Path) -> None:
    try:
        if target.exists():
            os.replace(target, old)
        os.replace(new, target)
    # Ctrl-C too must not lose the old directory.
    except BaseException:
        if old.exists() and not target.exists():
            os.replace(old, target)
        raise
