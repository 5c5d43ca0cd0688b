"""The base of reports: they convert themselves to plain values, and are not taken for the model."""

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NoReturn, cast

JsonObject = dict[str, Any]
"""An object of JSON: plain values by name."""

_NOT_THE_MODEL = (
    ": this is a report and not the model, which was changed in place; write "
    "`report = dynorm.convert_model(model, batches)`, and go on with `model`"
)


class NotTheModel:
    """A result that explains itself if it is used as the model that was changed in place."""

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            message = f"{type(self).__name__!r} object has no attribute {name!r}"
            if not name.startswith("_"):
                message += _NOT_THE_MODEL
            raise AttributeError(message)

        def __call__(self, *args: object, **kwargs: object) -> NoReturn:
            """Say that a report cannot be called as the model."""
            raise TypeError(f"{type(self).__name__!r} object is not callable{_NOT_THE_MODEL}")


class PlainRecord:
    """A dataclass that converts itself to plain values."""

    def to_dict(self) -> JsonObject:
        """Return the fields as plain values for JSON."""
        values: dict[str, object] = plain(asdict(cast("Any", self)))
        return values


class Plain(NotTheModel, PlainRecord):
    """A report that converts itself to plain values."""


def plain(value: object) -> Any:
    """Return a value for JSON: numbers that are not finite become None, other types their text."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return None
    if value is None or isinstance(value, (bool, int, str)):
        return value
    return str(value)
