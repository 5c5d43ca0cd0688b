"""The tensors in a model's inputs and outputs, however deep in containers and objects they are."""

import copy
import enum
import gc
import re
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from dynorm.errors import DataError, ModelError

Inputs = tuple[tuple[Any, ...], dict[str, Any]]

_Value = TypeVar("_Value")
# These hold no tensor that a model computes.
_EMPTY = (
    *(
        type(None),
        bool,
        int,
        float,
        complex,
        str,
        bytes,
        bytearray,
        type,
        range,
        slice,
        enum.Enum,
        re.Pattern,
    ),
    *(
        np.generic,
        np.dtype,
        nn.Module,
        types.ModuleType,
        torch.dtype,
        torch.device,
        torch.layout,
        torch.memory_format,
    ),
    *(torch.Generator, torch.SymInt, torch.SymFloat, torch.SymBool, torch.Stream, torch.Event),
)
# The flag of a class whose objects show the garbage collector all that they refer to.
_SHOWS_ITS_PARTS = 1 << 14


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in containers, plain objects, functions and arrays, once each, in order; refuse others."""
    for part in _walk(value, {}):
        if isinstance(part, Tensor):
            yield part
        elif isinstance(part, np.ndarray) and part.dtype.kind in "biufc":
            yield torch.from_numpy(part)
        elif not isinstance(part, np.ndarray) or part.dtype.kind not in "SUmM":
            raise ModelError(
                "the outputs must be tensors in tuples, lists, dicts, sets or plain objects, but "
                "hold a "
                f"{type(part).__qualname__}, in which tensors cannot be seen: return one of these "
                "instead"
            )


def held_tensors(value: Any) -> list[Tensor]:
    """Return the tensors that can be seen, each once, whatever else there is."""
    return [part for part in _walk(value, {}) if isinstance(part, Tensor)]


def mapped(value: _Value, function: Callable[[Tensor], Tensor]) -> _Value:
    """Return a deep copy in which a function has replaced each tensor; classes and aliases are kept."""
    memo: dict[int, Any] = {id(tensor): function(tensor) for tensor in held_tensors(value)}
    try:
        return copy.deepcopy(value, memo)
    # Classes raise what they like when they are copied.
    except Exception as error:
        raise DataError(
            "the example must be what copy.deepcopy can copy, as the model is run several times, "
            "but that raised "
            f"{type(error).__name__}: {error}"
        ) from error


def copied(value: _Value) -> _Value:
    """Return a deep copy, its tensors detached, so that a run cannot write into what the caller holds."""
    return mapped(value, lambda tensor: tensor.detach().clone())


def _walk(value: Any, seen: dict[int, Any]) -> Iterator[Any]:
    """Yield tensors, arrays, and objects that cannot be looked into."""
    if isinstance(value, _EMPTY) or type(value) is object or id(value) in seen:
        return
    # Kept, so that no temporary's id is used twice.
    seen[id(value)] = value
    parts: list[Any] = []
    if isinstance(value, types.FunctionType):
        # Not its globals, which lead to everything.
        parts = [value.__closure__, value.__defaults__, value.__kwdefaults__]
    elif isinstance(value, weakref.ref):
        parts = [value()]
    # Looking into an iterator would use it up.
    elif (
        isinstance(value, (Tensor, np.ndarray, Iterator, memoryview))
        or not type(value).__flags__ & _SHOWS_ITS_PARTS
    ):
        yield value
    else:
        # In their own order first: the collector goes through lists and tuples from the end.
        if isinstance(value, Mapping):
            parts = list(value.values())
        elif isinstance(value, (tuple, list, deque)):
            parts = list(value)
        parts += gc.get_referents(value)
    for part in parts:
        yield from _walk(part, seen)
