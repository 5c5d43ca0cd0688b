"""Files that appear whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from dynorm.errors import StorageError


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a text file in UTF-8, as `write_bytes` does."""
    write_bytes(path, text.encode())


def write_bytes(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a file, whole or not at all; one that exists is replaced.

    Args:
        path: the file; its folder must exist.
        data: its contents.

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
        # mkstemp makes files that only their owner can read; the mask of others cannot be read without being set.
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)
        os.replace(temporary, target)
    # A path with a null byte gives ValueError.
    except (OSError, ValueError) as error:
        raise StorageError(f"{str(target)!r} cannot be written: {error}; give a path that can be") from error
    finally:
        if temporary is not None and os.path.exists(temporary):
            os.unlink(temporary)


def require_writable(path: str | os.PathLike[str]) -> None:
    """Make the folder of a file, or refuse the path now, before hours of work are lost for it.

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
