"""The traced graph of a model: the users of each value and parameter, and the way of a value's channels."""

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.fx import Node, map_arg


def _aten(names: str) -> frozenset[str]:
    return frozenset(f"aten.{name}" for name in names.split())


# These take only the shape and dtype of a value.
_SHAPE_ONLY = _aten(
    "ones_like zeros_like full_like empty_like new_ones new_zeros new_full new_empty"
)
# Operators that give each element on, and those that move elements about.
_SAME = _aten("clone alias detach detach_ contiguous to _to_copy lift_fresh_copy type_as")
_DROPOUT = _aten("dropout feature_dropout alpha_dropout")
VIEWS = _aten("view _unsafe_view view_as reshape reshape_as flatten unflatten")
PERMUTATIONS = _aten("transpose permute t numpy_T mT swapaxes swapdims movedim moveaxis")
_PARTS = _aten(
    "slice select narrow split split_with_sizes chunk unbind unsafe_split unsafe_chunk tensor_split"
)
_COPIES = _aten(
    "unsqueeze squeeze expand expand_as repeat tile flip roll repeat_interleave unfold index "
    "index_select"
)
_MOVES = VIEWS | PERMUTATIONS | _PARTS | _COPIES


Leaf = tuple[Node, Node]
"""A use of a parameter: the operator, and the value, the parameter or a view of it, that it takes."""
Step = Callable[[Node, Node, int], int | None]
"""What gives the channel axis of an operator's value, from that of its source."""


@dataclass(frozen=True)
class Owner:
    """A module that holds a parameter, its first path in the model, and the parameter's name there."""

    module: nn.Module
    name: str
    path: str

    @property
    def table(self) -> dict[str, Any]:
        """Return the module's dict of parameters or of buffers that holds it."""
        return (
            self.module._parameters
            if self.name in self.module._parameters
            else self.module._buffers
        )

    def __str__(self) -> str:
        return f"{self.path}.{self.name}" if self.path else self.name


@dataclass(eq=False)
class Slot:
    """A parameter or buffer that can change: for all its owners at once, or, where it may be untied, for one."""

    tensor: Tensor
    owners: list[Owner]  # the modules that hold it: all, or the one
    nodes: list[Node]  # its placeholders in the graph
    is_shared: bool = False  # other tensors lie in its memory
    hint: str = ""  # how the caller could allow more, as the end of a message
    fixed: str | None = None  # why it must not change, whatever it is used for

    def __post_init__(self) -> None:
        """Find all uses of it."""
        self.leaves = {leaf for node in self.nodes for leaf in leaves(node)}

    @property
    def name(self) -> str:
        """Return the first name in the model."""
        return str(self.owners[0])

    @property
    def is_saved(self) -> bool:
        """Tell whether the state dict has it, as floating-point numbers."""
        persistent = all(
            owner.name not in owner.module._non_persistent_buffers_set for owner in self.owners
        )
        return persistent and self.tensor.is_floating_point()

    def double(self) -> Tensor:
        """Return a copy in float64, in which all new values are computed, on the CPU: not all devices know it."""
        return self.tensor.detach().to("cpu", torch.float64, copy=True)


class Graph:
    """The traced graph of a model, with all its parameters and buffers."""

    def __init__(
        self, modules: Mapping[str, nn.Module], nodes: Iterable[Node], slots: Sequence[Slot]
    ) -> None:
        self.modules, self.all_slots = modules, slots
        self.slots = {node: slot for slot in slots for node in slot.nodes}
        # The calls of norms, with the index of each.
        self.norms: dict[Node, Any] = {
            node: node.args[1] for node in nodes if packet(node) == "dynorm.fold_site"
        }

    def where(self, node: Node) -> str:
        """Name an operator and its place for a message."""
        if node.op == "output":
            return "the model's output"
        node, _ = producer(node)
        name, path = packet(node) or str(node.target), (paths_of(node) or [""])[-1]
        if not path:
            return name
        return f"the norm {path}" if node in self.norms else f"{name} in {path}"


def paths_of(node: Node) -> list[str]:
    """Return the paths of the modules whose forward a node belongs to, the innermost last."""
    stack = node.meta.get("nn_module_stack") or {}
    return [str(path).removeprefix("model").removeprefix(".") for path, _ in stack.values() if path]


def shape(node: Node) -> tuple[int, ...]:
    """Return the sizes of a node's value; -1 for one that depends on values."""
    return tuple(size if isinstance(size, int) else -1 for size in node.meta["val"].shape)


def is_tensor(node: Any) -> TypeGuard[Node]:
    """Tell whether something is a node whose value is one tensor."""
    return isinstance(node, Node) and isinstance(node.meta.get("val"), Tensor)


def width(node: Node) -> int:
    """Return the bytes of one number of a node's value."""
    return int(node.meta["val"].dtype.itemsize)


def packet(node: Node) -> str:
    """Return the operator's name without its overload, as "aten.add"; empty for any other node."""
    return str(getattr(node.target, "overloadpacket", "")) if node.op == "call_function" else ""


def argument(node: Node, index: int) -> Any:
    """Return a positional argument of an operator, or None where it was left out."""
    return node.args[index] if index < len(node.args) else None


def users(node: Node) -> Iterator[Node]:
    """Yield the users of a value: tensor-valued nodes (the parts of a split each by itself) and the output."""
    for user in node.users:
        if packet(user) not in _SHAPE_ONLY and "assert" not in packet(user):
            # A part that nobody takes is no use.
            is_split = user.op != "output" and isinstance(user.meta.get("val"), (tuple, list))
            yield from user.users if is_split else [user]


def producer(node: Node) -> tuple[Node, int | None]:
    """Return the operator behind a value, and which of its results the value is."""
    if node.target is operator.getitem:
        return node.all_input_nodes[0], argument(node, 1)
    return node, None


def is_same(op: Node) -> bool:
    """Tell whether an operator gives each floating-point element on."""
    if not is_tensor(op) or not op.meta["val"].is_floating_point():
        return False
    return packet(op) in _SAME or (
        packet(op) in _DROPOUT and len(op.args) == 3 and op.args[2] is False
    )


def is_move(node: Node, source: Node) -> bool:
    """Tell whether a value is made of another one's elements only."""
    op, _ = producer(node)
    return bool(op.args) and op.args[0] is source and (is_same(op) or packet(op) in _MOVES)


def leaves(placeholder: Node) -> set[Leaf]:
    """Return every use of a parameter, through its views."""
    found: set[Leaf] = set()
    todo = [placeholder]
    while todo:
        value = todo.pop()
        for user in users(value):
            if user.op != "output" and is_move(user, value):
                todo.append(user)
            else:
                found.add((producer(user)[0], value))
    return found


def carried(node: Node, value: Node, axis: int) -> int | None:
    """Return the channel axis of ``node`` if it leaves each channel of ``value`` by itself and whole; else None.

    Such are moves, a factor that all channels of a token share, and a mean over tokens.
    """
    if factor_of(node, value, axis):
        return axis
    if packet(node) == "aten.mean" and len(node.args) > 1 and node.args[0] is value:
        given = node.args[1] if isinstance(node.args[1], (list, tuple)) else [node.args[1]]
        dims = {d % len(shape(value)) for d in given if isinstance(d, int)}
        keep = argument(node, 2) or node.kwargs.get("keepdim")
        return (
            None
            if not dims or axis in dims
            else axis
            if keep
            else axis - sum(d < axis for d in dims)
        )
    return moved(node, value, axis)


def moved(node: Node, source: Node, axis: int) -> int | None:
    """Return the channel axis of ``node``, a move of ``source``; None where it is none, or does not keep it whole.

    The operator is tried on a tensor that holds each element's channel, so only its effect counts:
    a view may merge or split any axes but that of the channels, and not reorder it.
    """
    if not is_move(node, source):
        return None
    op, _ = producer(node)
    if is_same(op):
        return axis
    channels = shape(source)[axis]
    # A size or an index that depends on values cannot be tried.
    if channels < 2 or not all(
        is_tensor(value) and -1 not in shape(value) for value in (*op.all_input_nodes, node)
    ):
        return None
    result = moved_like(node, source, _channels(shape(source), axis))
    sizes = tuple(result.shape)
    whole = (
        a for a, n in enumerate(sizes) if n == channels and torch.equal(result, _channels(sizes, a))
    )
    to = next(whole, None) if result.numel() else None
    return (
        None
        if to is not None and packet(op) in VIEWS and _is_blurred(node, source, axis, to)
        else to
    )


def moved_like(node: Node, source: Node, given: Tensor) -> Tensor:
    """Return what a move of ``source`` makes of another tensor of its shape."""
    op, part = producer(node)
    if is_same(op):
        return given

    def tried(value: Node) -> Tensor:
        # Other tensors are indices: whichever token is taken, a channel stays the same.
        return given if value is source else torch.zeros(shape(value), dtype=torch.long)

    assert callable(op.target)
    result = op.target(*map_arg(op.args, tried), **map_arg(op.kwargs, tried))
    moved: Tensor = result if part is None else result[part]
    return moved


def came_from(node: Node, axis: int, step: Step = moved) -> tuple[Node, int] | None:
    """Return the value that ``node`` was moved (or carried) from, and its channel axis there; None if computed."""
    sources = [arg for arg in producer(node)[0].args[:2] if is_tensor(arg)]
    places = [
        (arg, a)
        for arg in sources
        for a, size in enumerate(shape(arg))
        if size == shape(node)[axis]
    ]
    return next(((arg, a) for arg, a in places if step(node, arg, a) == axis), None)


def made_by(node: Node, axis: int) -> tuple[Node, int] | None:
    """Return the operator that computed what ``node`` was moved from, with the axis; None if others use that too."""
    while len(list(users(node))) == 1:
        source = came_from(node, axis)
        if source is None:
            return producer(node)[0], axis
        node, axis = source
    return None


def held_at(graph: Graph, node: Any, axis: int) -> tuple[Slot, int] | None:
    """Return the parameter that a value is a view of, and the axis there; None for any other."""
    while is_tensor(node) and node not in graph.slots:
        node, axis = came_from(node, axis) or (None, 0)
    return (graph.slots[node], axis) if node in graph.slots else None


def factor_of(node: Node, value: Node, axis: int) -> bool:
    """Tell whether ``node`` is ``value`` times, or divided by, one number for all channels of a token."""
    if packet(node) not in ("aten.mul", "aten.div") or len(node.args) != 2 or node.kwargs:
        return False
    first, second = node.args
    if (first is value) is (second is value) or (second is value and packet(node) == "aten.div"):
        return False
    other: Any = second if first is value else first
    if not is_tensor(other):
        return isinstance(other, (int, float)) and shape(node) == shape(value)
    from_end = len(shape(value)) - axis
    uniform = len(shape(other)) < from_end or shape(other)[-from_end] == 1
    return uniform and shape(node) == shape(value)


def _is_blurred(node: Node, source: Node, axis: int, to: int) -> bool:
    """Tell whether a view keeps the channels only because an axis beside them has one index; with more it mixes them.

    It does if such an axis changes sides with the channels, or if it did so by a permutation and is
    then merged away.
    """
    sizes, views = shape(source), shape(node)
    before = views[:to].count(1) - sizes[:axis].count(1)
    after = views[to + 1 :].count(1) - sizes[axis + 1 :].count(1)
    if before * after < 0:
        return True
    at = _before_permutations(source)
    crossed = {
        i < axis for i, size in enumerate(sizes) if size == 1 and (i < axis) != (at[i] < at[axis])
    }
    return (before < 0 and True in crossed) or (after < 0 and False in crossed)


def _before_permutations(value: Node) -> list[int]:
    """Return where each axis of a value was before the permutations that made it."""
    (op, part), axes = producer(value), list(range(len(shape(value))))
    source = op.args[0] if op.args else None
    if part is None and is_tensor(source) and is_same(op):
        return _before_permutations(source)
    if part is None and is_tensor(source) and packet(op) in PERMUTATIONS:
        assert callable(op.target)
        # Of distinct sizes, so that each axis is told from the others.
        tried = op.target(
            torch.empty([i + 2 for i in axes], device="meta"), *op.args[1:], **op.kwargs
        )
        before = _before_permutations(source)
        return [before[size - 2] for size in tried.shape]
    return axes


def _channels(sizes: tuple[int, ...], axis: int) -> Tensor:
    """Return a tensor that holds the channel of each element."""
    return along(torch.arange(sizes[axis]), axis, len(sizes)).expand(sizes).contiguous()


def along(vector: Tensor, axis: int, rank: int) -> Tensor:
    """Return a vector as a tensor of ``rank`` axes that lies along one of them."""
    view = [1] * rank
    view[axis] = -1
    return vector.view(view)
