"""Write files and directories completely, or not at all."""

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

# A directory with one of these is a saved model, which may be replaced.
_MARKERS = ("dynorm.json", "config.json", "dynorm_delta.json")
# The files of a saved model. All others in an old directory are kept.
_MODEL_FILES = (
    *_MARKERS,
    "generation_config.json",
    "model*.safetensors",
    "model*.safetensors.index.json",
    "modeling_dynorm.py",
    "dynorm_delta.safetensors",
)
# Constants of Linux for renameat2.
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a text file in UTF-8, as `write_bytes` does."""
    write_bytes(path, text.encode())


def write_bytes(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a file in an existing folder. After a StorageError an old file is unchanged."""
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
        # Path.exists would raise if the name is too long.
        if os.path.exists(temporary):
            temporary.unlink()


def require_writable(path: str | os.PathLike[str]) -> None:
    """Create the folder of a later output file; refuse now a path that cannot be written."""
    target = Path(path)
    try:
        if "\0" in str(target):
            raise ValueError("embedded null byte")
        if target.is_dir():
            raise IsADirectoryError(f"{target} is a directory")
        if target.parent.exists() and not target.parent.is_dir():
            raise NotADirectoryError(f"{target.parent} is a file, but a folder is needed there")
        target.parent.mkdir(parents=True, exist_ok=True)
        # Create a file to find out: to root, os.access calls every folder writable.
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
    """Fill a new directory, and put it in the target's place in one step when the block ends.

    After an error the old directory is unchanged. The new one is made next to the target, flushed
    to disk, and renamed, or exchanged with the old one. (Linux exchanges in one step. Other systems
    need two renames; a power cut between them leaves the old directory under another name.)
    Temporary directories are removed, except if the process is killed: then a hidden
    ``.dynorm-*.tmp`` remains next to the target and may be deleted.

    The target's parent must exist; ``overwrite`` allows a target that is a saved model or empty.
    ``keep_others`` keeps its files that are not written by any save, such as a tokenizer or a
    report, unless the block writes them. It is False if the block writes all files of the model,
    so that no files of another model remain. Failures are a StorageError.
    """
    # Replace the target of a link, not the link.
    target = Path(os.path.realpath(directory))
    require_replaceable(target, overwrite)
    new = target.parent / f".dynorm-{secrets.token_hex(4)}.tmp"
    try:
        new.mkdir()
        yield new
        _flush(new)
        if target.is_dir():
            if keep_others:
                _link_other_files(target, new)
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


def _link_other_files(old: Path, new: Path) -> None:
    written = {path.name for path in new.iterdir()}

    def skip(folder: str, names: list[str]) -> list[str]:
        if Path(folder) != old:
            return []
        skipped = []
        for name in names:
            is_of_model = any(fnmatchcase(name, pattern) for pattern in _MODEL_FILES)
            if is_of_model or name in written:
                skipped.append(name)
        return skipped

    def link(source: str, target: str) -> None:
        try:
            os.link(source, target)
        # The file system may not have hard links.
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
    """Swap two directories, in one step if the system and the file system can."""
    if sys.platform == "linux":
        renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
        if renameat2 is not None:
            names = (_AT_FDCWD, os.fsencode(new), _AT_FDCWD, os.fsencode(target))
            if renameat2(*names, _RENAME_EXCHANGE) == 0:
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
    # safetensors makes files that only their owner can read. Apply the umask instead, which the
    # mode of the new folder shows.
    mode = folder.stat().st_mode & 0o666
    for root, _, files in os.walk(folder):
        for name in files:
            path = Path(root) / name
            path.chmod(path.stat().st_mode | mode)
            _sync(path)
        _sync(Path(root))


def _sync(path: Path) -> None:
    # Other systems cannot open a directory.
    if os.name != "posix":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
