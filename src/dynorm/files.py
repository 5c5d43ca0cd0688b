"""Files that appear whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from dynorm.errors import StorageError

__all__ = ["write_bytes", "write_text"]


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


def _umask() -> int:
    """The mask of new files; it cannot be read without being set."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
