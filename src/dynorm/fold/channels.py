"""The path of a value's channels: which operators keep them apart, and where they came from.

The *channel axis* of a value is the axis that a norm normalizes.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.fx import Node, map_arg

from dynorm.fold.graph import (
    AVERAGES,
    PERMUTATIONS,
    VIEWS,
    Leaf,
    Operand,
    is_move,
    is_same,
    is_tensor,
    packet,
    producer,
    rank_of,
    shape,
    slot_of,
    users,
)

Step = Callable[[Node, Node, int], int | None]
"""A function that maps the channel axis of an input to that of the output, or to None."""


def carried(node: Node, value: Node, axis: int) -> int | None:
    """Return the channel axis of ``node`` if it keeps the channels of ``value`` apart, else None.

    These are moves, averages over tokens, and a factor that all channels of a token share.
    """
    if factor_of(node, value, axis):
        return axis
    if packet(node) in AVERAGES and node.args[0] is value:
        return _tried(node, value, axis)
    return moved(node, value, axis)


def moved(node: Node, source: Node, axis: int) -> int | None:
    """Return the channel axis of ``node`` if it is a move that keeps ``source``'s channels whole."""
    if not is_move(node, source):
        return None
    if is_same(producer(node)[0]):
        return axis
    return _tried(node, source, axis)


def _tried(node: Node, source: Node, axis: int) -> int | None:
    """Return the channel axis of ``node`` by its operator's effect on channel numbers.

    The operator is tried on a tensor that holds the channel number of each element, so only its
    effect counts: a view may merge or split any axes except the channel axis, and not reorder that.
    """
    op, part = producer(node)
    sizes = shape(source)
    if sizes[axis] < 2:
        return None
    # A size or an index that depends on values cannot be tried.
    for value in (*op.all_input_nodes, node):
        if not is_tensor(value) or -1 in shape(value):
            return None

    def substitute(value: Node) -> Tensor:
        if value is source:
            return _channels(sizes, axis)
        # Other tensors are indices of tokens; any token will do, as channels stay where they are.
        return torch.zeros(shape(value), dtype=torch.long, device="cpu")

    assert callable(op.target)
    results = op.target(*map_arg(op.args, substitute), **map_arg(op.kwargs, substitute))
    result: Tensor = results if part is None else results[part]
    if not result.numel():
        return None
    for to, size in enumerate(result.shape):
        if size != sizes[axis]:
            continue
        # An average rounds.
        numbers = _channels(tuple(result.shape), to)
        if result.double().allclose(numbers, rtol=0, atol=0.1):
            is_view = packet(op) in VIEWS
            return None if is_view and _is_blurred(node, source, axis, to) else to
    return None


def came_from(
    node: Node,
    axis: int,
    step: Step = moved,
) -> tuple[Node, int] | None:
    """Return the value that ``node`` was moved (or carried) from, and its channel axis there.

    None if ``node`` was computed.
    """
    for source in producer(node)[0].args[:2]:
        if is_tensor(source):
            for at, size in enumerate(shape(source)):
                if size == shape(node)[axis] and step(node, source, at) == axis:
                    return source, at
    return None


def made_by(node: Node, axis: int) -> tuple[Node, int] | None:
    """Return the operator that computed the value behind moves, with the channel axis.

    None if others use that value too.
    """
    while len(list(users(node))) == 1:
        source = came_from(node, axis)
        if source is None:
            return producer(node)[0], axis
        node, axis = source
    return None


def operand_at(op: Node, argument: object, axis: int) -> Operand | None:
    """Return the parameter that an argument of an operator is a view of, with the axis there.

    None if the argument is computed, or not a tensor.
    """
    value = argument
    while is_tensor(value):
        slot = slot_of(value)
        if slot is not None:
            assert isinstance(argument, Node)
            return Operand(Leaf(op, argument), slot, axis)
        source = came_from(value, axis)
        if source is None:
            return None
        value, axis = source
    return None


def factor_of(node: Node, value: Node, axis: int) -> bool:
    """Return whether ``node`` multiplies or divides all channels of a token by the same number."""
    if packet(node) not in ("aten.mul", "aten.div") or node.kwargs:
        return False
    if shape(node) != shape(value):
        return False
    first, second = node.args
    is_divisor = packet(node) == "aten.div" and second is value
    if is_divisor or value not in (first, second):
        return False
    other = second if first is value else first
    if not is_tensor(other):
        return isinstance(other, (int, float))
    from_end = rank_of(value) - axis
    return rank_of(other) < from_end or shape(other)[-from_end] == 1


def _is_blurred(node: Node, source: Node, axis: int, to: int) -> bool:
    """Return whether a view would mix tokens and channels if an axis of length 1 were longer.

    It would if such an axis changes sides with the channels, or if a permutation moved it to the
    other side and the view then merges it with another axis. An example: one token (1, C) is
    transposed to (C, 1) and viewed as (C,). With T tokens the view is (C * T,), which mixes both.
    """
    sizes = shape(source)
    views = shape(node)
    before = views[:to].count(1) - sizes[:axis].count(1)
    after = views[to + 1 :].count(1) - sizes[axis + 1 :].count(1)
    if before * after < 0:
        return True
    origin = _before_permutations(source)
    ones = [i for i, size in enumerate(sizes) if size == 1]
    from_behind = any(i < axis and origin[i] > origin[axis] for i in ones)
    from_before = any(i > axis and origin[i] < origin[axis] for i in ones)
    return (before < 0 and from_behind) or (after < 0 and from_before)


def _before_permutations(value: Node) -> list[int]:
    """Return the place of each axis of a value before the permutations that made it."""
    op, part = producer(value)
    axes = list(range(rank_of(value)))
    source = op.args[0] if op.args else None
    if part is not None or not is_tensor(source):
        return axes
    if is_same(op):
        return _before_permutations(source)
    if packet(op) not in PERMUTATIONS:
        return axes
    assert callable(op.target)
    # Axes of different lengths can be recognised afterwards.
    tried = torch.empty([axis + 2 for axis in axes], dtype=torch.float32, device="meta")
    before = _before_permutations(source)
    permuted = op.target(tried, *op.args[1:], **op.kwargs)
    return [before[size - 2] for size in permuted.shape]


def _channels(sizes: tuple[int, ...], axis: int) -> Tensor:
    """Return a tensor that holds the channel of each element."""
    channels = torch.arange(sizes[axis], dtype=torch.float64, device="cpu")
    return laid_along(channels, axis, len(sizes)).expand(sizes).contiguous()


def laid_along(vector: Tensor, axis: int, rank: int) -> Tensor:
    """Return a vector as a tensor of ``rank`` axes that lies along one of them."""
    view = [1] * rank
    view[axis] = -1
    return vector.view(view)
