"""The traced graph of a model, with its parameters, and the users of each value.

A *value* is a node whose result is a tensor.
"""

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.fx import Node


def _aten(names: str) -> frozenset[str]:
    return frozenset(f"aten.{name}" for name in names.split())


# These take only the shape and dtype of a value.
_SHAPE_ONLY = _aten(
    "ones_like zeros_like full_like empty_like new_ones new_zeros new_full new_empty"
)
# Operators that return each element unchanged, up to a change of dtype, which `width` shows; and
# operators that move elements.
_SAME = _aten("clone alias detach detach_ contiguous to _to_copy lift_fresh_copy type_as")
_DROPOUT = _aten("dropout feature_dropout alpha_dropout")
VIEWS = _aten("view _unsafe_view view_as reshape reshape_as flatten unflatten")
PERMUTATIONS = _aten("transpose permute t numpy_T mT swapaxes swapdims movedim moveaxis")
_MOVES = VIEWS | PERMUTATIONS
_MOVES |= _aten(
    "slice select narrow split split_with_sizes chunk unbind unsafe_split unsafe_chunk tensor_split "
    "unsqueeze squeeze expand expand_as repeat tile flip roll repeat_interleave unfold index "
    "index_select"
)
# Operators whose tokens are means of old ones, with weights that add up to 1. An example is the
# resizing of learned positions for an image of another size.
AVERAGES = _aten(
    "mean upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d "
    "upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d _upsample_bilinear2d_aa "
    "_upsample_bicubic2d_aa"
)


@dataclass(frozen=True)
class Leaf:
    """One use of a parameter."""

    node: Node  # the operator
    argument: Node  # the parameter or a view of it

    @property
    def place(self) -> str:
        """Name the operator and its place for a message."""
        return where(self.node)


@dataclass(frozen=True)
class Owner:
    """A module that holds a parameter, all paths of the module, and the parameter's name in it."""

    module: nn.Module
    name: str
    paths: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.paths[0]}.{self.name}".lstrip(".")


@dataclass(eq=False)
class Slot:
    """A parameter or buffer, with its uses in the graph."""

    tensor: Tensor
    owners: list[Owner]  # the modules that hold it
    nodes: list[Node]  # its placeholders in the graph
    blocked: str | None  # why nothing may change it
    is_in_norm: bool  # a norm holds it, and does not show how it uses it

    def __post_init__(self) -> None:
        """Find all uses of it, and let its placeholders know it."""
        self.leaves: set[Leaf] = set()
        for node in self.nodes:
            self.leaves |= leaves_of(node)
            node.meta["slot"] = self

    @property
    def name(self) -> str:
        """Return the first name in the model."""
        return str(self.owners[0])

    @property
    def refused(self) -> str | None:
        """Return why it must not change as the parameter of an operator, or None."""
        if self.blocked is None and self.is_in_norm:
            return f"{self.name} is part of a norm"
        return self.blocked


@dataclass(frozen=True)
class Operand:
    """A parameter as an operator uses it."""

    leaf: Leaf  # the use
    slot: Slot
    axis: int  # the axis of the parameter that the channels lie along


def norm_index(node: Node) -> int | None:
    """Return the index of the norm that a node is a call of, or None for any other node."""
    if packet(node) == "dynorm.norm_call":
        assert isinstance(node.args[1], int)
        return node.args[1]
    return None


def slot_of(node: Node) -> Slot | None:
    """Return the parameter that a node is the placeholder of, or None for any other node."""
    slot: Slot | None = node.meta.get("slot")
    return slot


def where(node: Node) -> str:
    """Name an operator and its place for a message."""
    if node.op == "output":
        return "the model's output"
    node, _ = producer(node)
    name = packet(node) or str(node.target)
    path = (paths_of(node) or [""])[-1]
    if not path:
        return name
    return f"{name} in {path}" if norm_index(node) is None else f"the norm {path}"


def paths_of(node: Node) -> list[str]:
    """Return the paths of the modules whose forward a node belongs to, the innermost last."""
    stack = node.meta.get("nn_module_stack") or {}
    paths = [str(path) for path, _ in stack.values() if path]
    return [path.removeprefix("model").removeprefix(".") for path in paths]


def shape(node: Node) -> tuple[int, ...]:
    """Return the sizes of a node's value; -1 for a size that depends on values."""
    sizes = node.meta["val"].shape
    return tuple(size if isinstance(size, int) else -1 for size in sizes)


def rank_of(node: Node) -> int:
    """Return the number of axes of a node's value."""
    return int(node.meta["val"].dim())


def is_tensor(node: object) -> TypeGuard[Node]:
    """Return whether something is a node whose value is one tensor."""
    return isinstance(node, Node) and isinstance(node.meta.get("val"), Tensor)


def width(node: Node) -> int:
    """Return the number of bytes of one element of a node's value."""
    return int(node.meta["val"].dtype.itemsize)


def packet(node: Node) -> str:
    """Return the operator's name without its overload, as "aten.add"; empty for any other node."""
    return str(getattr(node.target, "overloadpacket", "")) if node.op == "call_function" else ""


def argument(node: Node, index: int) -> Any:
    """Return a positional argument of an operator, or None if it was left out."""
    return node.args[index] if index < len(node.args) else None


def users(node: Node) -> Iterator[Node]:
    """Yield the users of a value: nodes with a tensor as value, and the output.

    The parts of a split come one by one; a part that nothing uses is left out.
    """
    for user in node.users:
        if packet(user) in _SHAPE_ONLY or "assert" in packet(user):
            continue
        if user.op != "output" and isinstance(user.meta.get("val"), (tuple, list)):
            yield from user.users
        else:
            yield user


def producer(node: Node) -> tuple[Node, int | None]:
    """Return the operator that computes a value, and which of its results the value is."""
    if node.target is operator.getitem:
        return node.all_input_nodes[0], argument(node, 1)
    return node, None


def is_same(op: Node) -> bool:
    """Return whether an operator returns each floating-point element, perhaps in another dtype."""
    if not is_tensor(op) or not op.meta["val"].is_floating_point():
        return False
    if packet(op) in _DROPOUT:
        return len(op.args) == 3 and op.args[2] is False
    return packet(op) in _SAME


def is_move(node: Node, source: Node) -> bool:
    """Return whether a value consists of elements of another one only."""
    op, _ = producer(node)
    if not op.args or op.args[0] is not source:
        return False
    return is_same(op) or packet(op) in _MOVES


def leaves_of(placeholder: Node) -> set[Leaf]:
    """Return every use of a parameter, through its views."""
    uses: set[Leaf] = set()
    todo = [placeholder]
    while todo:
        value = todo.pop()
        for user in users(value):
            if user.op != "output" and is_move(user, value):
                todo.append(user)
            else:
                uses.add(Leaf(producer(user)[0], value))
    return uses


def double(tensor: Tensor) -> Tensor:
    """Return a tensor in float64, on the CPU, because not all devices have float64."""
    return tensor.detach().to("cpu", torch.float64)
