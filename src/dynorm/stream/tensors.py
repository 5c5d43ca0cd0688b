"""The tensors in a model's inputs and outputs, however deep in containers and objects they are."""

import copy
import enum
import functools
import re
import types
import weakref
from collections import deque
from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, Set, ValuesView
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from dynorm.errors import DataError, ModelError

_Value = TypeVar("_Value")
# Objects of these classes hold no tensor that a model computes.
_WITHOUT_TENSORS = (
    *(type(None), bool, int, float, complex, str, bytes, bytearray, type, range, slice),
    *(enum.Enum, re.Pattern, np.generic, np.dtype, nn.Module, types.ModuleType),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
    *(torch.Generator, torch.SymInt, torch.SymFloat, torch.SymBool, torch.Stream, torch.Event),
)
# The kinds of numpy's dtypes.
_NUMBERS = "biufc"
_WORDS_AND_TIMES = "SUmM"
_SEQUENCES = (tuple, list, deque, Set, KeysView, ValuesView, ItemsView)
# The base classes, written in C, whose objects hold nothing but their items and attributes.
_OPEN_BASES = (object, dict, *_SEQUENCES, set, frozenset, types.SimpleNamespace)


def tensors_in(value: object) -> Iterator[Tensor]:
    """Yield the tensors in containers, plain objects, functions and arrays; refuse other objects.

    They come in order, once each.
    """
    for part in _walk(value, {}):
        if isinstance(part, Tensor):
            yield part
        elif isinstance(part, np.ndarray) and part.dtype.kind in _NUMBERS:
            yield torch.from_numpy(part)
        elif isinstance(part, np.ndarray) and part.dtype.kind in _WORDS_AND_TIMES:
            continue
        else:
            raise ModelError(
                "the outputs must be tensors in tuples, lists, dicts, sets or plain objects, but "
                f"hold a {type(part).__qualname__}, in which tensors cannot be seen: return one of "
                "these instead"
            )


def held_tensors(value: object) -> list[Tensor]:
    """Return the tensors that can be seen, once each; other objects are passed over."""
    return [part for part in _walk(value, {}) if isinstance(part, Tensor)]


def mapped(value: _Value, function: Callable[[Tensor], Tensor]) -> _Value:
    """Return a deep copy with a function applied to each tensor; classes and aliases are kept."""
    memo: dict[int, object] = {id(tensor): function(tensor) for tensor in held_tensors(value)}
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


def _walk(value: object, seen: dict[int, object]) -> Iterator[object]:
    """Yield tensors, arrays, and objects that cannot be looked into."""
    if isinstance(value, _WITHOUT_TENSORS) or type(value) is object or id(value) in seen:
        return
    # Holding the value keeps its id from being used again.
    seen[id(value)] = value
    parts = _parts(value)
    if parts is None:
        yield value
        return
    for part in parts:
        yield from _walk(part, seen)


def _parts(value: object) -> list[object] | None:
    """Return the parts of a value; None for a tensor, an array, or an object that hides them."""
    # Looking into an iterator would use it up.
    if isinstance(value, (Tensor, np.ndarray, Iterator, memoryview)):
        return None
    if isinstance(value, types.FunctionType):
        # The globals of a function are left out: they lead to everything.
        cells = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
        return [cells, value.__defaults__, value.__kwdefaults__, vars(value)]
    if isinstance(value, types.MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords, vars(value)]
    if isinstance(value, weakref.ref):
        return [value()]
    parts: list[object] = []
    if isinstance(value, Mapping):
        parts += value.values()
        parts += value.keys()
    elif isinstance(value, _SEQUENCES):
        parts += value
    elif not _is_open(type(value)):
        return None
    return parts + _attributes(value)


def _is_filled(cell: types.CellType) -> bool:
    """Return whether a variable of a closure has a value by now."""
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _is_open(kind: type) -> bool:
    """Return whether all that objects of a class hold is in their attributes."""
    for base in kind.__mro__:
        # A class in C, whose fields are hidden, has a __new__ in C or no __module__ among its
        # attributes; a class statement of Python sets __module__.
        table = vars(base)
        in_c = "__module__" not in table or isinstance(
            table.get("__new__"), types.BuiltinFunctionType
        )
        if in_c and base not in _OPEN_BASES:
            return False
    return True


def _attributes(value: object) -> list[object]:
    """Return the values of an object's attributes, with those in slots."""
    attributes = list(getattr(value, "__dict__", {}).values())
    for base in type(value).__mro__:
        if "__slots__" in vars(base):
            for member in vars(base).values():
                if isinstance(member, types.MemberDescriptorType) and hasattr(
                    value, member.__name__
                ):
                    attributes.append(member.__get__(value))
    return attributes
