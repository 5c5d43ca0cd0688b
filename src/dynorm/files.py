"""Files and directories that appear whole or not at all."""

import ctypes
import errno
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path

from safetensors import SafetensorError

from dynorm.errors import DynormError, StorageError

# One of these makes a directory a saved model, which may be replaced.
_MARKERS = ("dynorm.json", "config.json")
# The files of a saved model; everything else in an old directory is kept.
_MODEL_FILES = (
    *_MARKERS,
    "generation_config.json",
    "model*.safetensors",
    "model*.safetensors.index.json",
)
# Of Linux's renameat2.
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a text file in UTF-8, as `write_bytes` does."""
    write_bytes(path, text.encode())


def write_bytes(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a file in a folder that exists, whole or not at all: after a StorageError an old one stands untouched."""
    target = Path(path)
    temporary = target.parent / f".{target.name}.{secrets.token_hex(4)}.part"
    try:
        if target.is_dir():
            raise IsADirectoryError(f"{target} is a directory")
        temporary.write_bytes(data)
        os.replace(temporary, target)
    # A path with a null byte gives ValueError.
    except (OSError, ValueError) as error:
        raise StorageError(
            f"{str(target)!r} cannot be written: {error}; give a path that can be"
        ) from error
    finally:
        # Not its own exists(), which raises where the name is too long.
        if os.path.exists(temporary):
            temporary.unlink()


def require_writable(path: str | os.PathLike[str]) -> None:
    """Make the folder of a file that is to be written, or refuse the path now, before hours of work are lost for it."""
    target = Path(path)
    try:
        if "\0" in str(target):
            raise ValueError("embedded null byte")
        if target.is_dir():
            raise IsADirectoryError(f"{target} is a directory")
        if target.parent.exists() and not target.parent.is_dir():
            raise NotADirectoryError(f"{target.parent} is a file, but a folder is needed there")
        target.parent.mkdir(parents=True, exist_ok=True)
        # Tried, not asked: to root every folder looks writable, also on a read-only file system.
        with tempfile.TemporaryFile(dir=target.parent):
            pass
    except (OSError, ValueError) as error:
        raise StorageError(
            f"the output must be a file that can be written, but {str(target)!r} cannot be "
            f"written: {error}"
        ) from error


@contextmanager
def replaced_directory(
    directory: str | os.PathLike[str], *, overwrite: bool = False, keep_others: bool = True
) -> Iterator[Path]:
    """Fill a new directory, then put it in its place in one step; after an error the old one stands untouched.

    The new directory is made next to the target, flushed to disk, and renamed, or exchanged with
    the old one. (Linux exchanges in one step. Elsewhere it takes two renames, between which a power
    cut leaves the old one under another name.) Nothing else is left behind, whatever happens in the
    block. Only a process that is killed leaves a hidden ``.dynorm-*.tmp`` beside the target, safe
    to delete.

    The target's parent must exist; ``overwrite`` allows a target that is a saved model or empty.
    ``keep_others`` keeps those of its files that no save writes (a tokenizer's, a report), unless
    the block writes them. It is False where the block writes all files of the model: another
    model's must not stay among them. What cannot be done is a StorageError.
    """
    # A link stays a link: its target is replaced.
    target = Path(os.path.realpath(directory))
    require_replaceable(target, overwrite)
    new = target.parent / f".dynorm-{secrets.token_hex(4)}.tmp"
    try:
        new.mkdir()
        yield new
        _flush(new)
        if target.is_dir():
            if keep_others:
                _keep_other_files(target, new)
            shutil.copymode(target, new)
            _exchange(new, target)
        else:
            new.rename(target)
        _sync(target.parent)
    except DynormError:
        raise
    except (OSError, SafetensorError) as error:
        raise StorageError(
            f"{target} must be writable, but {error}; nothing was changed"
        ) from error
    finally:
        # After an exchange this is the old directory.
        shutil.rmtree(new, ignore_errors=True)


def require_replaceable(target: Path, overwrite: bool) -> None:
    """Refuse a target that :func:`replaced_directory` would not replace."""
    if not target.parent.is_dir():
        raise StorageError(f"the parent of {target} must be a directory: make it first")
    if not target.exists():
        return
    if not target.is_dir():
        raise StorageError(f"{target} must be a directory, but is a file: choose another")
    if not overwrite:
        raise StorageError(f"{target} must not exist yet: choose another, or pass overwrite=True")
    if any(target.iterdir()) and not any((target / name).is_file() for name in _MARKERS):
        raise StorageError(
            f"{target} must be a saved model or empty to be overwritten, but holds neither "
            f"{' nor '.join(_MARKERS)}"
        )


def _keep_other_files(old: Path, new: Path) -> None:
    written = {path.name for path in new.iterdir()}

    def skip(folder: str, names: list[str]) -> list[str]:
        if Path(folder) != old:
            return []
        return [
            n
            for n in names
            if n in written or any(fnmatchcase(n, pattern) for pattern in _MODEL_FILES)
        ]

    def link(source: str, target: str) -> None:
        try:
            os.link(source, target)
        # A file system without hard links.
        except OSError:
            shutil.copy2(source, target)

    try:
        shutil.copytree(
            old, new, symlinks=True, ignore=skip, copy_function=link, dirs_exist_ok=True
        )
    except shutil.Error as error:
        raise StorageError(
            f"the other files of {old} must be kept, but {error}; nothing was changed"
        ) from error


def _exchange(new: Path, target: Path) -> None:
    """Swap two directories: in one step where the system and the file system can, else by renames."""
    rename = (
        getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
        if sys.platform == "linux"
        else None
    )
    if rename is not None:
        if (
            rename(_AT_FDCWD, os.fsencode(new), _AT_FDCWD, os.fsencode(target), _RENAME_EXCHANGE)
            == 0
        ):
            return
        code = ctypes.get_errno()
        if code not in (errno.ENOSYS, errno.EINVAL):
            raise OSError(code, os.strerror(code), str(target))
    old = new.with_suffix(".old")
    target.rename(old)
    try:
        new.rename(target)
    except BaseException:
        old.rename(target)
        raise
    old.rename(new)


def _flush(folder: Path) -> None:
    # safetensors makes its files readable by their owner only; the umask, which the folder's mode
    # shows, decides.
    mode = folder.stat().st_mode & 0o666
    for root, _, files in os.walk(folder):
        for name in files:
            path = Path(root) / name
            path.chmod(path.stat().st_mode | mode)
            _sync(path)
        _sync(Path(root))


def _sync(path: Path) -> None:
    # Elsewhere a directory cannot be opened.
    if os.name != "posix":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
