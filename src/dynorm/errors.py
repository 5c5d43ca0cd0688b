"""The errors of dynorm: one family, each message saying what must hold, what came, and what to do."""

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
    """A model is not in the state that the call needs: no norms, converted already, compiled, wrapped, on meta."""


class DataError(DynormError):
    """Batches, texts or activations cannot be used: none at all, of the wrong kind, or not finite."""


class CalibrationWarning(UserWarning):
    """The call went on, but left something as it was: constants that no batch reached, or a layer."""


class StorageError(DynormError, OSError):
    """A saved model cannot be written or read: missing, truncated, or of another class."""


def require_library(name: str, purpose: str, extra: str) -> None:
    """Check that an optional library can be imported, before the work that needs it.

    The ArgumentError says for what it is needed (``purpose``), and which ``extra`` of dynorm
    installs it.
    """
    try:
        importlib.import_module(name)
    except ImportError as error:
        raise ArgumentError(
            f"{name} must be installed for {purpose}, but {error}: pip install 'dynorm[{extra}]'"
        ) from error


@contextmanager
def readable(wanted: str) -> Iterator[None]:
    """Raise StorageError, with what is ``wanted``, for whatever the files make transformers raise inside."""
    try:
        yield
    except DynormError:
        raise
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
        raise StorageError(f"{wanted}, but {found:.500}") from error


def listed(names: Collection[str]) -> str:
    """Return the first five names for a message, and how many more there are: "a, b, c, d, e and 2 more"."""
    return ", ".join(sorted(names)[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
