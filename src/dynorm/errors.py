"""The errors of dynorm: a message names the requirement, the value that came, and the remedy."""

import importlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager


class DynormError(Exception):
    """Base class of every error that dynorm raises on purpose.

    Example:
        >>> import dynorm
        >>> try:
        ...     dynorm.DyISRU(0)
        ... except dynorm.DynormError as error:
        ...     print(type(error).__name__)
        ArgumentError
    """


class ArgumentError(DynormError, ValueError):
    """An argument is outside its domain: a shape, a dtype, a constant, a name."""


class ModelError(DynormError):
    """A model is in the wrong state for the call: without norms, converted, compiled, on meta."""


class DataError(DynormError):
    """Batches, texts or activations cannot be used: none, of the wrong kind, or not finite."""


class CalibrationWarning(UserWarning):
    """The call left something unchanged: constants that no batch reached, or a layer."""


class StorageError(DynormError, OSError):
    """A saved model cannot be written or read: missing, truncated, or of another class."""


def require_library(name: str, purpose: str, extra: str = "convert") -> None:
    """Check that an optional library can be imported, before the work that needs it.

    The ArgumentError names the ``purpose`` and the ``extra`` of dynorm that installs the library.
    """
    try:
        importlib.import_module(name)
    except ImportError as error:
        raise ArgumentError(
            f"{name} must be installed for {purpose}, but {error}: pip install 'dynorm[{extra}]'"
        ) from error


@contextmanager
def readable(wanted: str) -> Iterator[None]:
    """Raise StorageError, with the text ``wanted``, for any error of transformers inside."""
    try:
        yield
    except DynormError:
        raise
    except Exception as error:
        cause = f"{type(error).__name__}: {error}"
        raise StorageError(
            f"{wanted}, but {cause:.500}: look for a file that is missing, cut or damaged"
        ) from error


def listed(names: Collection[str]) -> str:
    """Return the first five names and the number of the others: "a, b, c, d, e and 2 more"."""
    text = ", ".join(sorted(names)[:5])
    if len(names) > 5:
        text += f" and {len(names) - 5} more"
    return text
