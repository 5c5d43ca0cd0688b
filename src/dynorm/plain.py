"""The base of reports and records, which convert themselves to plain values."""

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, cast

JsonObject = dict[str, Any]
"""An object of JSON: plain values by name."""


class Plain:
    """A dataclass that converts itself to plain values."""

    def to_dict(self) -> JsonObject:
        """Return the fields as plain values for JSON."""
        values: dict[str, object] = plain(asdict(cast("Any", self)))
        return values


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
