"""The tensors in a model's inputs and outputs."""

import copy
import enum
from collections.abc import Callable
from types import SimpleNamespace
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dynorm.errors import DataError, ModelError

_Value = TypeVar("_Value")
# Objects of these classes hold no tensor that a model computes.
_WITHOUT_TENSORS = (
    *(type(None), bool, int, float, complex, str, bytes, type, range, slice, enum.Enum, nn.Module),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Generator),
    *(torch.SymInt, torch.SymFloat, torch.SymBool),
)


def tensors_in(value: object) -> list[Tensor]:
    """Return the tensors in torch's pytrees and in the attributes of plain objects, once each.

    Raises:
        ModelError: an object may hide tensors, as an iterator, a closure or a set does.
    """
    tensors: list[Tensor] = []
    seen: dict[int, object] = {}
    todo = [value]
    while todo:
        for leaf in tree_leaves(todo.pop(0)):
            if isinstance(leaf, _WITHOUT_TENSORS) or id(leaf) in seen:
                continue
            # Holding the leaf keeps its id from being used again.
            seen[id(leaf)] = leaf
            if isinstance(leaf, Tensor):
                tensors.append(leaf)
            elif _is_plain_object(leaf):
                todo.append(vars(leaf))
            else:
                raise ModelError(
                    "inputs and outputs must be tensors in tuples, lists, dicts or plain objects, "
                    f"but hold a {type(leaf).__qualname__}, in which tensors cannot be seen: use "
                    "one of these instead"
                )
    return tensors


def _is_plain_object(value: object) -> bool:
    """Return whether all that an object holds is in its ``__dict__``."""
    kind = type(value)
    if kind is SimpleNamespace:
        return True
    if any(vars(base).get("__slots__") for base in kind.__mro__):
        return False
    try:
        # Python refuses this for a class whose objects have hidden fields of C.
        object.__new__(kind)
    except TypeError:
        return False
    return hasattr(value, "__dict__")


def mapped(value: _Value, function: Callable[[Tensor], Tensor]) -> _Value:
    """Return a deep copy with a function applied to each tensor; classes and aliases are kept."""
    memo: dict[int, object] = {id(tensor): function(tensor) for tensor in tensors_in(value)}
    try:
        return copy.deepcopy(value, memo)
    # Any exception may come from the __deepcopy__ of a foreign class.
    except Exception as error:
        raise DataError(
            "the example must be something that copy.deepcopy can copy, because the model is run "
            f"several times, but that raised {type(error).__name__}: {error}"
        ) from error


def detached_copy(value: _Value) -> _Value:
    """Return a deep copy with detached tensors, so that a run cannot write into the caller's."""
    return mapped(value, lambda tensor: tensor.detach().clone())
