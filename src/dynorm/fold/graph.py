"""What the analysis asks of a traced graph: where tensors come from, who uses them, and which module holds them."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor, nn
from torch.fx import Graph as FxGraph
from torch.fx import Node

_SHAPE_ONLY = {
    f"aten.{name}"
    for name in ("ones_like", "zeros_like", "full_like", "empty_like", "new_ones", "new_zeros", "new_full", "new_empty")
}

Leaf = tuple[Node, Node]
"""A use of a parameter: the operator, and the value, the parameter or a view of it, that it takes."""


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

    def __str__(self) -> str:
        """Return the parameter's name in the model."""
        return f"{self.path}.{self.name}" if self.path else self.name


class Graph:
    """The traced graph of a model.

    Args:
        model: that was traced.
        graph: of torch.fx, functional.
        held: the parameters and buffers among the placeholders, by the placeholder's name.
        calls: the nodes that call each norm.
    """

    def __init__(
        self, model: nn.Module, graph: FxGraph, held: Mapping[str, str], calls: Mapping[int, list[Node]]
    ) -> None:
        self.model = model
        self.calls = {index: list(nodes) for index, nodes in calls.items()}
        self.nodes = list(graph.nodes)
        self._held = {node: held[node.name] for node in self.nodes if node.op == "placeholder" and node.name in held}

    def renumber(self, index: Mapping[int, int]) -> None:
        """Give the norms other numbers: those of the places that they stand for."""
        self.calls = {index[i]: calls for i, calls in self.calls.items()}
        for i, calls in self.calls.items():
            for call in calls:
                call.args = (call.args[0], i)

    def tensor(self, node: Node) -> Tensor | None:
        """Return the parameter or buffer that a placeholder stands for, or None."""
        name = self._held.get(node)
        return None if name is None else self._tensors[name]

    def placeholders(self, tensor: Tensor) -> list[Node]:
        """Return the placeholders of a parameter."""
        return [node for node in self._held if self.tensor(node) is tensor]

    def owners(self, tensor: Tensor) -> list[Owner]:
        """Return every module that holds a parameter or buffer; a module at two paths once."""
        return self._owners.get(id(tensor), [])

    def is_saved(self, tensor: Tensor) -> bool:
        """Whether a parameter or buffer is part of the state dict."""
        return all(owner.name not in owner.module._non_persistent_buffers_set for owner in self.owners(tensor))

    def modules_of(self, node: Node) -> list[nn.Module]:
        """Return the modules whose forward a node belongs to, the innermost last."""
        return [self._modules[path] for path in self.paths_of(node) if path in self._modules]

    def paths_of(self, node: Node) -> list[str]:
        """Return the paths of :meth:`modules_of`."""
        stack = node.meta.get("nn_module_stack") or {}
        paths = [str(path) for path, _ in stack.values()]
        return [path.removeprefix("model").removeprefix(".") for path in paths if path]

    def where(self, node: Node) -> str:
        """Name an operator and its place for a message."""
        if node.op == "output":
            return "the model's output"
        node, _ = producer(node)
        paths = self.paths_of(node)
        name = packet(node) or str(node.target)
        return f"{name} in {paths[-1]}" if paths and paths[-1] else name

    @cached_property
    def called(self) -> set[int]:
        """The ids of all modules that the example calls."""
        return {id(module) for node in self.nodes for module in self.modules_of(node)}

    @cached_property
    def _modules(self) -> dict[str, nn.Module]:
        return dict(self.model.named_modules(remove_duplicate=False))

    @cached_property
    def _tensors(self) -> dict[str, Tensor]:
        named = dict(self.model.named_parameters(remove_duplicate=False))
        return {**named, **dict(self.model.named_buffers(remove_duplicate=False))}

    @cached_property
    def _owners(self) -> dict[int, list[Owner]]:
        found: dict[int, list[Owner]] = {}
        for path, module in self.model.named_modules():
            for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
                if tensor is not None:
                    found.setdefault(id(tensor), []).append(Owner(module, name, path))
        return found


def shape(node: Node) -> tuple[int, ...]:
    """Return the sizes of a node's value; -1 for one that depends on values."""
    return tuple(size if isinstance(size, int) else -1 for size in node.meta["val"].shape)


def is_tensor(node: Any) -> bool:
    """Whether something is a node whose value is one tensor."""
    return isinstance(node, Node) and isinstance(node.meta.get("val"), Tensor)


def packet(node: Node) -> str:
    """Return the operator's name without its overload, as "aten.add"; empty for what is no operator."""
    return str(getattr(node.target, "overloadpacket", "")) if node.op == "call_function" else ""


def users(node: Node) -> Iterator[Node]:
    """Yield who uses a value: tensor-valued nodes (the parts of a split each by itself) and the output.

    What takes only its shape and dtype is no user.
    """
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
