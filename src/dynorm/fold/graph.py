"""The traced graph of a model: where tensors come from, who uses them, and which module holds them."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node

# These take only the shape and dtype of a value.
_SHAPE_ONLY = {
    f"aten.{name}"
    for name in ("ones_like", "zeros_like", "full_like", "empty_like", "new_ones", "new_zeros", "new_full", "new_empty")
}

Leaf = tuple[Node, Node]
"""A use of a parameter: the operator, and the value, the parameter or a view of it, that it takes."""


class RefusedError(Exception):
    """Why something cannot be folded; the report says it."""


@dataclass(frozen=True)
class Owner:
    """A module that holds a parameter, and the name it has there.

    Args:
        module: the module.
        name: the attribute.
        path: of the module in the model, the first one.
    """

    module: nn.Module
    name: str
    path: str

    @property
    def table(self) -> dict[str, Any]:
        """The module's dict of parameters or of buffers that holds it."""
        return self.module._parameters if self.name in self.module._parameters else self.module._buffers

    def __str__(self) -> str:
        """Return the parameter's name in the model."""
        return f"{self.path}.{self.name}" if self.path else self.name


@dataclass(eq=False)
class Slot:
    """A parameter or buffer that can change: for all its owners at once, or, where it may be untied, for one.

    Args:
        tensor: the parameter or buffer.
        owners: the modules that hold it: all, or the one.
        leaves: their uses of it.
        fixed: why it must not change, whatever it is used for; or None.
        is_shared: whether other tensors lie in its memory.
        hint: how the caller could allow more, as the end of a message.
        nodes: its placeholders in the graph.
    """

    tensor: Tensor
    owners: list[Owner]
    leaves: set[Leaf] = field(default_factory=set)
    fixed: str | None = None
    is_shared: bool = False
    hint: str = ""
    nodes: list[Node] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The name in the model, the first one."""
        return str(self.owners[0])

    @property
    def is_saved(self) -> bool:
        """Whether the state dict has it, as floating-point numbers."""
        persistent = all(owner.name not in owner.module._non_persistent_buffers_set for owner in self.owners)
        return persistent and self.tensor.is_floating_point()

    def double(self) -> Tensor:
        """Return a copy in float64, in which all new values are computed."""
        return self.tensor.detach().to(torch.float64, copy=True)


class Graph:
    """The traced graph of a model.

    Args:
        model: that was traced.
        nodes: of torch.fx, functional.
        slots: all parameters and buffers.
    """

    def __init__(self, model: nn.Module, nodes: Sequence[Node], slots: Sequence[Slot]) -> None:
        self.slots = {node: slot for slot in slots for node in slot.nodes}
        self.calls: dict[int, list[Node]] = {}
        for node in nodes:
            if packet(node) == "dynorm.fold_site":
                self.calls.setdefault(site_of(node), []).append(node)
        self._slots = slots
        self._modules: Mapping[str, nn.Module] = dict(model.named_modules(remove_duplicate=False))

    def slots_of(self, tensor: Tensor) -> list[Slot]:
        """Return the slots of a parameter: several if it may be untied."""
        return [slot for slot in self._slots if slot.tensor is tensor]

    def modules_of(self, node: Node) -> list[nn.Module]:
        """Return the modules whose forward a node belongs to, the innermost last."""
        return [self._modules[path] for path in _paths_of(node) if path in self._modules]

    def where(self, node: Node) -> str:
        """Name an operator and its place for a message."""
        if node.op == "output":
            return "the model's output"
        node, _ = producer(node)
        paths = _paths_of(node)
        name = packet(node) or str(node.target)
        return f"{name} in {paths[-1]}" if paths and paths[-1] else name


def _paths_of(node: Node) -> list[str]:
    stack = node.meta.get("nn_module_stack") or {}
    paths = [str(path) for path, _ in stack.values()]
    return [path.removeprefix("model").removeprefix(".") for path in paths if path]


def shape(node: Node) -> tuple[int, ...]:
    """Return the sizes of a node's value; -1 for one that depends on values."""
    return tuple(size if isinstance(size, int) else -1 for size in node.meta["val"].shape)


def is_tensor(node: Any) -> bool:
    """Whether something is a node whose value is one tensor."""
    return isinstance(node, Node) and isinstance(node.meta.get("val"), Tensor)


def width(node: Node) -> int:
    """Return the bytes of one number of a node's value."""
    size: int = node.meta["val"].dtype.itemsize
    return size


def packet(node: Node) -> str:
    """Return the operator's name without its overload, as "aten.add"; empty for what is no operator."""
    return str(getattr(node.target, "overloadpacket", "")) if node.op == "call_function" else ""


def argument(node: Node, index: int | None) -> Any:
    """Return the positional argument of an operator, or None where it was left out."""
    return node.args[index] if index is not None and index < len(node.args) else None


def users(node: Node) -> Iterator[Node]:
    """Yield who uses a value: tensor-valued nodes (the parts of a split each by itself) and the output."""
    for user in node.users:
        if packet(user) in _SHAPE_ONLY:
            continue
        if user.op == "output" or is_tensor(user):
            yield user
        elif isinstance(user.meta.get("val"), (tuple, list)):
            # A part that nobody takes is no use.
            yield from user.users
        elif "assert" not in packet(user):
            yield user


def producer(node: Node) -> tuple[Node, int | None]:
    """Return the operator behind a value, and which of its results the value is."""
    if node.target is operator.getitem:
        source, index = node.args
        assert isinstance(source, Node)
        assert isinstance(index, int)
        return source, index
    return node, None


def site_of(node: Node) -> int:
    """Return the index of the norm that a ``fold_site`` node stands for."""
    index = node.args[1]
    assert isinstance(index, int)
    return index
