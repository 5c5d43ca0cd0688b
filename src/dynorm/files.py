"""Files that appear whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from dynorm.errors import StorageError

__all__ = ["require_writable", "write_bytes", "write_text"]


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a text file in UTF-8, whole or not at all; one that exists is replaced.

    Args:
        path: the file; its folder must exist.
        text: what it holds afterwards.

    Raises:
        StorageError: the file cannot be written; an old one stands untouched.

    Example:
        >>> write_text(getfixture("tmp_path") / "a.txt", "sigma")
    """
    write_bytes(path, text.encode())


def write_bytes(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a file, whole or not at all; one that exists is replaced.

    Args:
        path: the file; its folder must exist.
        data: what it holds afterwards.

    Raises:
        StorageError: the file cannot be written; an old one stands untouched.

    Example:
        >>> write_bytes(getfixture("tmp_path") / "a.png", b"...")
    """
    target = Path(path)
    temporary: str | None = None
    try:
        if target.is_dir():
            raise IsADirectoryError(f"{target} is a directory")
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".part")
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        # mkstemp makes files that only their owner can read.
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, target)
    # ValueError is what a path with a null byte gives.
    except (OSError, ValueError) as error:
        raise StorageError(f"{str(target)!r} cannot be written: {error}; give a path that can be") from error
    finally:
        if temporary is not None and os.path.exists(temporary):
            os.unlink(temporary)


def require_writable(path: str | os.PathLike[str]) -> None:
    """Make the folder of a file, and refuse before the work what could not be written after it.

    Args:
        path: the file; neither it nor its folder need exist.

    Raises:
        StorageError: it is a folder, or its folder cannot be made or written to.

    Example:
        >>> require_writable(getfixture("tmp_path") / "new" / "a.txt")
    """
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
            f"the output must be a file that can be written, but {str(target)!r} cannot be written: {error}"
        ) from error


def _umask() -> int:
    """The mask of new files; it cannot be read without being set."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
