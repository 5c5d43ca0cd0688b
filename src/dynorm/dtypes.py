"""Floating point dtypes."""

from typing import TypeGuard

import torch

HALVES = (torch.float16, torch.bfloat16)
"""The dtypes of half precision."""


def is_floating_dtype(value: object) -> TypeGuard[torch.dtype]:
    """Return whether a value is a real floating point dtype."""
    return isinstance(value, torch.dtype) and value.is_floating_point
