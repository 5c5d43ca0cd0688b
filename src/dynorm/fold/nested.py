"""The tensors inside nested containers and objects: what a call takes and returns, whatever its classes."""

from __future__ import annotations

import copy
import enum
import functools
import re
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Set, ValuesView
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from dynorm.errors import DataError, ModelError

_Value = TypeVar("_Value")

# What holds no tensor that a model computes.
_EMPTY = (
    *(type(None), bool, int, float, complex, str, bytes, bytearray, type, range, slice, enum.Enum, re.Pattern),
    *(np.generic, np.dtype, nn.Module, types.ModuleType, torch.dtype, torch.device, torch.layout, torch.memory_format),
    *(torch.Generator, torch.SymInt, torch.SymFloat, torch.SymBool, torch.Stream, torch.Event),
)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in containers, plain objects, functions and arrays, each object's once, in order.

    Raises:
        ModelError: something may hold tensors that cannot be seen, such as a generator.

    Example:
        >>> [t.item() for t in tensors_in({"a": torch.tensor(1), "b": [torch.tensor(2), "c"]})]
        [1, 2]
    """
    for part in _walk(value, {}):
        if isinstance(part, Tensor):
            yield part
        elif isinstance(part, np.ndarray) and part.dtype.kind in "biufc":
            yield torch.from_numpy(part)
        elif not isinstance(part, np.ndarray) or part.dtype.kind not in "SUmM":
            raise ModelError(
                "the outputs must be tensors in tuples, lists, dicts, sets or plain objects, but hold a "
                f"{type(part).__qualname__}, in which tensors cannot be seen: return one of these instead"
            )


def held_tensors(value: Any) -> list[Tensor]:
    """Return the tensors that can be seen, each once, whatever else there is.

    Example:
        >>> x = torch.tensor(1)
        >>> held_tensors(([x, x], iter([x])))
        [tensor(1)]
    """
    return list({id(part): part for part in _walk(value, {}) if isinstance(part, Tensor)}.values())


def mapped(value: _Value, function: Callable[[Tensor], Tensor]) -> _Value:
    """Return a deep copy in which each tensor is what a function makes of it; classes and aliases are kept.

    Raises:
        DataError: it cannot be copied.

    Example:
        >>> mapped({"a": [torch.tensor(1)]}, lambda tensor: tensor + 1)
        {'a': [tensor(2)]}
    """
    memo: dict[int, Any] = {id(tensor): function(tensor) for tensor in held_tensors(value)}
    try:
        return copy.deepcopy(value, memo)
    # Classes raise what they like when they are copied.
    except Exception as error:
        raise DataError(
            "the example must be what copy.deepcopy can copy, as the model is run several times, but that raised "
            f"{type(error).__name__}: {error}"
        ) from error


def copied(value: _Value) -> _Value:
    """Return a deep copy, its tensors detached, so that a run cannot write into what the caller holds.

    Example:
        >>> x = torch.zeros(1)
        >>> copied([x])[0].add_(1), x
        (tensor([1.]), tensor([0.]))
    """
    return mapped(value, lambda tensor: tensor.detach().clone())


def _walk(value: Any, seen: dict[int, Any]) -> Iterator[Any]:
    """Yield tensors, arrays, and what cannot be looked into."""
    if isinstance(value, (Tensor, np.ndarray)):
        yield value
        return
    if isinstance(value, _EMPTY) or type(value) is object or id(value) in seen:
        return
    # Kept, so that no temporary's id is used twice.
    seen[id(value)] = value
    parts = _parts(value)
    if parts is None:
        yield value
        return
    for part in parts:
        yield from _walk(part, seen)


def _parts(value: Any) -> list[Any] | None:
    """What an object holds, or None if that cannot be known."""
    inside: list[Any] | None = None
    if isinstance(value, Mapping):
        inside = list(value.values())
    elif isinstance(value, (tuple, list, deque, Set, ValuesView)):
        inside = list(value)
    elif isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
        inside = [*cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    elif isinstance(value, (types.MethodType, types.BuiltinFunctionType)):
        inside = [value.__self__, getattr(value, "__func__", None)]
    elif isinstance(value, functools.partial):
        inside = [value.func, *value.args, *value.keywords.values()]
    elif isinstance(value, weakref.ref):
        inside = [value()]
    elif isinstance(value, Iterator):
        # Looking would use it up.
        return None
    held = _attributes(value)
    if inside is None:
        return held
    known = {id(part) for part in inside}
    return [*inside, *(part for part in held or [] if id(part) not in known)]


def _attributes(value: Any) -> list[Any] | None:
    """The values of an object's attributes, of slots too; None if its class keeps its state where Python has none."""
    found = list(vars(value).values()) if hasattr(value, "__dict__") else None
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__")
        if slots is None:
            continue
        found = [] if found is None else found
        for slot in (slots,) if isinstance(slots, str) else tuple(slots):
            name = f"_{kind.__name__.lstrip('_')}{slot}" if slot.startswith("__") and slot[-2:] != "__" else slot
            if slot not in ("__dict__", "__weakref__") and hasattr(value, name):
                found.append(getattr(value, name))
    return found


def _is_filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True
