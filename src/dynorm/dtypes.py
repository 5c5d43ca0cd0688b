"""The rule by which a norm chooses the dtype of its output, and the search for it."""

from collections.abc import Mapping
from typing import TypeGuard

import torch

from dynorm.errors import ArgumentError

HALVES = (torch.float16, torch.bfloat16)
"""The dtypes of half precision."""
INPUT, WEIGHT = "input", "weight"
# The simplest first. A norm may cast to float32 inside and never back.
_RULES = (
    INPUT,
    WEIGHT,
    "input+weight",
    "weight+float32",
    "input+float32",
    "input+weight+float32",
)

Returned = Mapping[tuple[torch.dtype, torch.dtype], torch.dtype]
"""The dtype that a norm returns for an input and parameters of two dtypes."""


def is_floating_dtype(value: object) -> TypeGuard[torch.dtype]:
    """Return whether a value is a real floating point dtype."""
    return isinstance(value, torch.dtype) and value.is_floating_point


class DtypeRule:
    """A dtype that is promoted from those of the input and the weight, and from fixed ones.

    Args:
        text: the parts, joined by "+": "input", "weight", or names of torch's floating dtypes.

    Raises:
        ArgumentError: a part is none of these.

    Example:
        >>> rule = DtypeRule("input+weight")
        >>> rule(torch.bfloat16, torch.float32), rule(torch.bfloat16, torch.bfloat16)
        (torch.float32, torch.bfloat16)
        >>> DtypeRule("float32")(torch.bfloat16, torch.bfloat16)
        torch.float32
    """

    def __init__(self, text: str) -> None:
        self._text = str(text)
        self._parts: list[str | torch.dtype] = []
        for part in self._text.split("+"):
            known = part if part in (INPUT, WEIGHT) else getattr(torch, part, None)
            if not (isinstance(known, str) or is_floating_dtype(known)):
                raise ArgumentError(
                    "output_dtype must be a real floating point dtype, 'input' or 'weight', or "
                    f"several of them joined by '+', got {text}"
                )
            self._parts.append(known)
        #: Whether the output has the dtype of input and weight if these are the same.
        self.follows_model = all(isinstance(part, str) for part in self._parts)

    def __call__(self, given: torch.dtype, weight: torch.dtype) -> torch.dtype:
        """Return the dtype for an input and a weight of these dtypes."""
        if self.follows_model and given == weight:
            return given
        promoted = None
        for part in self._parts:
            if isinstance(part, str):
                dtype = given if part == INPUT else weight
            else:
                dtype = part
            promoted = dtype if promoted is None else torch.promote_types(promoted, dtype)
        assert promoted is not None
        return promoted

    def __str__(self) -> str:
        """Return the parts, joined by "+"."""
        return self._text

    __repr__ = __str__

    def __eq__(self, other: object) -> bool:
        """Return whether another rule has the same parts, in the same order."""
        return isinstance(other, DtypeRule) and self._text == other._text

    def __hash__(self) -> int:
        """Return the hash of the parts."""
        return hash(self._text)


def fitting_rule(returned: Returned) -> str | None:
    """Return the simplest rule that gives each dtype a norm returned; None if none does.

    Example:
        >>> half, full = torch.bfloat16, torch.float32
        >>> fitting_rule({(half, half): half, (half, full): full, (full, half): half})
        'weight'
    """
    fixed = {str(dtype).removeprefix("torch.") for dtype in returned.values()}
    for text in (*_RULES, *sorted(fixed)):
        rule = DtypeRule(text)
        if all(rule(*pair) == dtype for pair, dtype in returned.items()):
            return text
    return None
