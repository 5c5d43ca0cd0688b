"""The search for tensors: which objects are looked into, and which are refused because they hide theirs."""

from __future__ import annotations

import array
import functools
from collections import UserDict
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import pytest
import torch
from torch import Tensor

from dynorm.errors import ModelError
from dynorm.stream.tensors import held_tensors, tensors_in

Item = TypeVar("Item")


class Box(Generic[Item]):
    """A generic class, whose base is written in C."""

    def __init__(self, item: Item) -> None:
        self.item = item


class Child(Box[Item]):
    """A class with its attributes in a slot and in the base's table."""

    __slots__ = ("other",)

    def __init__(self, item: Item) -> None:
        super().__init__(item)
        self.other = item


OPEN: dict[str, Callable[[Tensor], Any]] = {
    "generic": Box,
    "slots": Child,
    "user dict": lambda t: UserDict({"a": t}),
    "partial": lambda t: functools.partial(print, t),
    "keyword of a partial": lambda t: functools.partial(print, end=t),
    "key": lambda t: {t: 1},
    "attribute of a function": lambda t: functools.wraps(print, updated=())(
        functools.partial(lambda x: x, t)
    ),
    "twice": lambda t: [t, {"a": (t, t)}],
}


@pytest.mark.parametrize("name", OPEN)
def test_a_tensor_in_an_open_object_is_found_once(name: str) -> None:
    tensor = torch.ones(2)
    found = list(tensors_in(OPEN[name](tensor)))
    assert len(found) == 1
    assert found[0] is tensor


def cached(tensor: Tensor) -> Any:
    function = functools.lru_cache(lambda: tensor)
    function()
    return function


CLOSED: dict[str, Callable[[Tensor], Any]] = {
    "array": lambda t: array.array("f", [1.0]),
    "cache": cached,
    "future": lambda t: torch.futures.Future(),  # type: ignore[var-annotated]
    "exception": RuntimeError,
    "iterator": lambda t: iter([t]),
}


@pytest.mark.parametrize("name", CLOSED)
def test_an_object_that_hides_its_tensors_is_refused(name: str) -> None:
    value = CLOSED[name](torch.ones(2))
    with pytest.raises(ModelError, match="cannot be seen"):
        list(tensors_in([value]))
    assert held_tensors([value]) == []
