"""Where the channels go: operators that move elements about, and those that work on each channel alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node, map_arg

from dynorm.fold.graph import Graph, Leaf, is_tensor, packet, producer, shape, users

_SAME = {"clone", "alias", "detach", "contiguous", "to", "_to_copy", "lift_fresh_copy", "type_as"}
_MOVES = (
    {"view", "_unsafe_view", "reshape", "flatten", "unflatten", "unsqueeze", "squeeze", "expand", "repeat", "tile"}
    | {"transpose", "permute", "t", "numpy_T", "mT", "swapaxes", "swapdims", "movedim", "moveaxis", "flip", "roll"}
    | {"slice", "select", "narrow", "split", "split_with_sizes", "chunk", "unbind", "unsafe_split", "unsafe_chunk"}
    | {"tensor_split", "index", "index_select", "unfold", "repeat_interleave"}
)
_VIEWS = {"view", "_unsafe_view", "reshape", "flatten", "unflatten"}
_PERMUTATIONS = {"transpose", "permute", "t", "numpy_T", "mT", "swapaxes", "swapdims", "movedim", "moveaxis"}
_DROPOUT = {"dropout", "feature_dropout", "alpha_dropout"}


def moved(node: Node, source: Node, axis: int) -> int | None:
    """Return where the channel axis of ``source`` is in ``node``, which takes it; None where it is not kept whole.

    The operator is tried on a tensor that holds each element's channel, so what counts is what it does: a view may
    merge or split any axes but that of the channels, and not reorder it.

    Args:
        node: a value.
        source: the value that its operator takes.
        axis: of the channels in ``source``.
    """
    op, part = producer(node)
    name = packet(op).removeprefix("aten.")
    if op.args and op.args[0] is source and _is_same(op, name):
        return axis
    if name not in _MOVES or not op.args or op.args[0] is not source:
        return None
    if any(-1 in shape(value) for value in (*inputs_of(op), node) if is_tensor(value)):
        return None
    channels = shape(source)[axis]
    result = _on_indices(op, source, axis)
    result = result if part is None else result[part]
    to = _axis_of(result, channels)
    return None if to is not None and name in _VIEWS and _blurred(node, source, axis, to) else to


def came_from(node: Node, axis: int) -> tuple[Node, int] | None:
    """Return the value that ``node`` was moved from, and its channel axis there; None where it was computed."""
    op, _ = producer(node)
    source = op.args[0] if op.args else None
    if not isinstance(source, Node) or not is_tensor(source):
        return None
    candidates = [a for a, size in enumerate(shape(source)) if size == shape(node)[axis]]
    return next(((source, a) for a in candidates if moved(node, source, a) == axis), None)


def is_move(node: Node, source: Node) -> bool:
    """Whether a value is made of another one's elements only."""
    op, _ = producer(node)
    name = packet(op).removeprefix("aten.")
    return bool(op.args) and op.args[0] is source and (_is_same(op, name) or name in _MOVES)


def held_at(graph: Graph, node: Node, axis: int) -> tuple[Node, int] | None:
    """Return the placeholder of the parameter that a value is a view of, and the axis there; None for any other."""
    while graph.tensor(node) is None:
        source = came_from(node, axis)
        if source is None:
            return None
        node, axis = source
    return node, axis


def leaves(graph: Graph, placeholder: Node) -> set[Leaf]:
    """Return every use of a parameter, through its views."""
    found: set[Leaf] = set()
    todo = [placeholder]
    while todo:
        value = todo.pop()
        for user in users(value):
            if user.op != "output" and is_move(user, value):
                todo.append(user)
            else:
                found.add((producer(user)[0] if user.op != "output" else user, value))
    return found


def factor_of(node: Node, value: Node, axis: int) -> bool:
    """Whether ``node`` is ``value`` times, or divided by, what is one number for all channels of a token."""
    if packet(node) not in ("aten.mul", "aten.div") or len(node.args) != 2 or node.kwargs:
        return False
    first, second = node.args
    if first is value and second is not value:
        other = second
    elif second is value and first is not value and packet(node) == "aten.mul":
        other = first
    else:
        return False
    return shape(node) == shape(value) and is_uniform(other, len(shape(value)) - axis)


def is_uniform(other: Any, from_end: int) -> bool:
    """Whether a number or tensor is the same at all indices of an axis, counted from the end, by its shape."""
    if not is_tensor(other):
        return isinstance(other, (int, float))
    sizes = shape(other)
    return len(sizes) < from_end or sizes[-from_end] == 1


def averaged(node: Node, value: Node, axis: int) -> int | None:
    """Return the channel axis after a mean over other axes; None where ``node`` is none."""
    if packet(node) != "aten.mean" or len(node.args) < 2 or node.args[0] is not value:
        return None
    rank = len(shape(value))
    given = node.args[1]
    dims = {int(d) % rank for d in (given if isinstance(given, (list, tuple)) else [given])}  # type: ignore[arg-type]
    keep = bool(node.args[2]) if len(node.args) > 2 else bool(node.kwargs.get("keepdim", False))
    if not dims or axis in dims:
        return None
    return axis if keep else axis - sum(d < axis for d in dims)


def inputs_of(node: Node) -> Iterator[Node]:
    """Yield the tensors that a node takes."""
    yield from (source for source in node.all_input_nodes if is_tensor(source))


def _is_same(op: Node, name: str) -> bool:
    if not (packet(op).startswith("aten.") and is_tensor(op) and op.meta["val"].is_floating_point()):
        return False
    if name in _DROPOUT:
        return len(op.args) == 3 and op.args[2] is False
    return name in _SAME


def _on_indices(op: Node, source: Node, axis: int) -> Any:
    """What an operator does to a tensor that holds the channel of each element."""

    def value_of(node: Node) -> Any:
        if node is source:
            return _channels(shape(source), axis)
        # Other tensors are indices: whichever token is taken, a channel stays what it is.
        return torch.zeros(shape(node), dtype=torch.long)

    args, kwargs = map_arg(op.args, value_of), map_arg(op.kwargs, value_of)
    assert callable(op.target)
    return op.target(*args, **kwargs)


def _blurred(node: Node, source: Node, axis: int, to: int) -> bool:
    """Whether a view keeps the channels only because an axis beside them has one index, and with more would mix them.

    It does if such an axis changes sides with the channels, or if it did so by a permutation and is then merged away.
    """
    sizes, views = shape(source), shape(node)
    before, after = sizes[:axis].count(1), sizes[axis + 1 :].count(1)
    less = views[:to].count(1) < before, views[to + 1 :].count(1) < after
    more = views[:to].count(1) > before, views[to + 1 :].count(1) > after
    if (less[0] and more[1]) or (less[1] and more[0]):
        return True
    if not any(less):
        return False
    crossed = _crossed(source, axis)
    return (less[0] and "before" in crossed) or (less[1] and "after" in crossed)


def _crossed(value: Node, axis: int) -> set[str]:
    """On which side of the channels the permutations before a value put axes of one index that were on the other."""
    at = list(range(len(shape(value))))
    single = {i for i, size in enumerate(shape(value)) if size == 1}
    # at[i]: where axis i of the last value is in the one that is looked at.
    node = value
    while True:
        op, part = producer(node)
        source, name = op.args[0] if op.args else None, packet(op).removeprefix("aten.")
        if part is not None or not isinstance(source, Node) or not is_tensor(source):
            break
        if name in _PERMUTATIONS:
            assert callable(op.target)
            # Of distinct sizes, so that each axis is told from the others.
            tried = op.target(torch.empty([i + 2 for i in range(len(at))], device="meta"), *op.args[1:], **op.kwargs)
            order = [size - 2 for size in tried.shape]
            at = [order[i] for i in at]
        elif not _is_same(op, name):
            break
        node = source
    return {"before" if i < axis else "after" for i in single if (i < axis) != (at[i] < at[axis])}


def _channels(sizes: tuple[int, ...], axis: int) -> Tensor:
    view = [1] * len(sizes)
    view[axis] = -1
    return torch.arange(sizes[axis]).view(view).expand(sizes).contiguous()


def _axis_of(result: Tensor, channels: int) -> int | None:
    sizes = tuple(result.shape)
    if not result.numel() or channels < 2:
        return None
    fitting = (axis for axis, size in enumerate(sizes) if size == channels)
    return next((axis for axis in fitting if torch.equal(result, _channels(sizes, axis))), None)
