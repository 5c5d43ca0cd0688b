"""The linear operators of a graph: how one reads the channels of a value, and what it writes its own with."""

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.fx import Node

from dynorm.stream.graph import (
    Graph,
    Leaf,
    Slot,
    along,
    argument,
    held_at,
    is_tensor,
    made_by,
    packet,
    shape,
    users,
)

CONVOLUTIONS = ("aten.conv1d", "aten.conv2d", "aten.conv3d")
_TRANSPOSED = ("aten.conv_transpose1d", "aten.conv_transpose2d", "aten.conv_transpose3d")
_PRODUCTS = (
    "aten.mm",
    "aten.matmul",
    "aten.bmm",
    "aten._grouped_mm",
    "transformers.grouped_mm_fallback",
)


class RefusedError(Exception):
    """Why something cannot be folded; the report says it."""


@dataclass(frozen=True)
class Read:
    """One operator that reads all channels of a value linearly."""

    node: Node
    leaf: Leaf  # its use of the weight
    weight: Slot
    axis: int  # of the weight that the value's channels go along
    out: int | None  # the weight's axis of outputs; None where they have no one axis
    groups: int = 1  # of a convolution; the channels of each group go along ``axis`` then
    bias: tuple[Leaf, Slot] | None = (
        None  # what is added to the outputs: its use, and the parameter
    )
    no_shift: str | None = None  # why a constant in the value cannot become a bias

    def scaled(self, weight: Tensor, factor: Tensor) -> Tensor:
        """Return the weight that reads ``v`` as this one reads ``factor * v``."""
        if self.groups == 1:
            return weight * along(factor, self.axis, weight.ndim)
        # Output o belongs to group o // (outputs / groups), and reads that group's channels only.
        rows = factor.view(self.groups, -1).repeat_interleave(weight.shape[0] // self.groups, 0)
        return weight * rows.view(*rows.shape, *[1] * (weight.ndim - 2))

    def constant(self, weight: Tensor, shift: Tensor) -> Tensor:
        """Return the outputs of this weight for a constant ``shift`` in every token: one number per output."""
        assert self.out is not None
        product = self.scaled(weight, shift)
        return product.sum([axis for axis in range(product.ndim) if axis != self.out])


@dataclass(frozen=True)
class Write:
    """A parameter that writes into a stream."""

    leaf: Leaf  # its use
    slot: Slot
    axis: int  # of the parameter that the stream's channels go along
    gain: tuple[Leaf, Slot] | None = (
        None  # the parameter that scales each channel on the way (LayerScale), and its use
    )
    is_new: bool = False  # it is a weight, whose layer is given a bias in its place


@dataclass(frozen=True)
class _Product:
    """An operator's weight, and how it is used."""

    weight: Node
    contracted: int  # the axis that is summed over
    out: int | None  # that of the outputs
    bias: Any = None
    rank: int = 2  # of one weight alone
    groups: int = 1
    no_shift: str | None = None  # why a constant in the input cannot become a bias
    added: bool = False  # a sum after it may be its bias


def read(graph: Graph, node: Node, value: Node, axis: int) -> Read:
    """Find how an operator reads the channels of a value, which lie along an axis; RefusedError if not linearly."""
    name = packet(node)
    parts = [p for arg in node.args for p in (arg if isinstance(arg, (list, tuple)) else [arg])]
    if sum(part is value for part in parts) != 1:
        raise RefusedError(f"read by {graph.where(node)}, which is not linear")
    if name in CONVOLUTIONS + _TRANSPOSED and node.args[0] is value:
        product = _convolution(graph, node, len(shape(value)), axis)
    else:
        product = (_einsum if name == "aten.einsum" else _matrices)(graph, node, value, axis)
    weight, no_shift = product.weight, product.no_shift
    held = held_at(graph, weight, product.contracted)
    if held is None:
        raise RefusedError(
            f"read by {graph.where(node)}, whose weight is computed and no parameter"
        )
    slot, at = held
    out = None if product.out is None else held_at(graph, weight, product.out)
    part = weight not in graph.slots and out is not None and _is_stacked(slot, at, out[1])
    if out is None or len(shape(weight)) != product.rank or part:
        no_shift = (
            no_shift
            or f"{graph.where(node)} has several weights in one, or none for a bias to belong to"
        )
    bias = None
    try:
        outputs = None if product.out is None else shape(weight)[product.out]
        bias = _bias(graph, node, product.bias, outputs, product.added)
    except RefusedError as refusal:
        no_shift = no_shift or str(refusal)
    return Read(
        node,
        (node, weight),
        slot,
        at,
        None if out is None else out[1],
        product.groups,
        bias,
        no_shift,
    )


def _matrices(graph: Graph, node: Node, value: Node, axis: int) -> _Product:
    name, rank = packet(node), len(shape(value))
    bias = None
    # The weight, the bias, and the weight's contracted axis, from the end.
    if name == "aten.linear" and node.args[0] is value and axis == rank - 1:
        weight, bias, from_end = argument(node, 1), argument(node, 2), -1
    elif name == "aten.addmm" and node.args[1] is value and axis == 1 and not node.kwargs:
        weight, bias, from_end = argument(node, 2), argument(node, 0), -2
    elif name in _PRODUCTS and node.args[0] is value and axis == rank - 1:
        weight, from_end = argument(node, 1), -2
    elif (
        name in _PRODUCTS
        and node.args[1] is value
        and axis == max(rank - 2, 0)
        and "grouped" not in name
    ):
        weight, from_end = argument(node, 0), -1
    else:
        raise RefusedError(f"read by {graph.where(node)}, which is not linear in the channels")
    if not is_tensor(weight) or sum(arg is weight for arg in node.args) != 1:
        raise RefusedError(
            f"read by {graph.where(node)}, whose weight is no tensor, or its bias too"
        )
    size = len(shape(weight))
    contracted, out = (
        (0, None) if size == 1 else (size + from_end, size - 2 if from_end == -1 else size - 1)
    )
    # The outputs of a weight on the left do not come last: a vector added to them is no bias.
    return _Product(weight, contracted, out, bias, added=weight is not node.args[0])


def _convolution(graph: Graph, node: Node, rank: int, axis: int) -> _Product:
    weight, transposed = argument(node, 1), packet(node) in _TRANSPOSED
    if not is_tensor(weight) or len(shape(weight)) != rank or axis != 1:
        raise RefusedError(
            f"read by {graph.where(node)}, which does not take the channels at axis 1"
        )
    groups: Any = argument(node, 6) or node.kwargs.get("groups", 1)
    padding = argument(node, 4) or 0
    no_shift = None
    if transposed:
        if groups != 1:
            raise RefusedError(f"read by {graph.where(node)}, a transposed convolution in groups")
        no_shift = f"{graph.where(node)} is transposed: at its borders a constant does not stay one"
    elif padding != "valid" and (any(padding) if isinstance(padding, (list, tuple)) else padding):
        no_shift = f"{graph.where(node)} pads with zeros: at its borders a bias would be another"
    contracted, out = (0, 1) if transposed else (1, 0)
    if groups != 1 and weight not in graph.slots:
        raise RefusedError(
            f"read by {graph.where(node)}, whose weight is computed and no parameter"
        )
    return _Product(weight, contracted, out, argument(node, 2), rank, groups, no_shift)


def _einsum(graph: Graph, node: Node, value: Node, axis: int) -> _Product:
    (inputs, arrow, output), operands = (
        str(node.args[0]).replace(" ", "").partition("->"),
        argument(node, 1),
    )
    refusal = RefusedError(f"read by {graph.where(node)}, which is not linear in the channels")
    if "." in inputs or not arrow or len(operands) != 2 or not all(map(is_tensor, operands)):
        raise refusal
    letters, mine = inputs.split(","), 0 if operands[0] is value else 1
    weight, channel, names = operands[1 - mine], letters[mine][axis], letters[1 - mine]
    if channel in output or names.count(channel) != 1 or letters[mine].count(channel) != 1:
        raise refusal
    if shape(weight)[names.index(channel)] != shape(value)[axis]:
        raise RefusedError(
            f"read by {graph.where(node)}, which repeats one weight over the channels"
        )
    outs = [i for i, letter in enumerate(names) if letter != channel]
    is_last = (
        len(outs) == 1 and names[outs[0]] not in letters[mine] and output.endswith(names[outs[0]])
    )
    # A sum over tokens would add a constant up as well.
    is_whole = all(letter in output for letter in letters[mine] if letter != channel)
    return _Product(
        weight, names.index(channel), outs[0] if is_last and is_whole else None, added=True
    )


def _bias(
    graph: Graph, node: Node, bias: Any, outputs: int | None, added: bool
) -> tuple[Leaf, Slot] | None:
    """Find the bias of an operator: its argument, or, where its outputs come last, a parameter added to them."""
    user = node
    if not is_tensor(bias):
        takers = list(users(node)) if added else []
        if (
            len(takers) != 1
            or packet(takers[0]) != "aten.add"
            or takers[0].kwargs
            or len(takers[0].args) != 2
        ):
            return None
        user = takers[0]
        bias = next((a for a in user.args if a is not node), None)
        if not is_tensor(bias) or shape(bias) != (outputs,) or held_at(graph, bias, 0) is None:
            return None
    if shape(bias) != (outputs,):
        raise RefusedError(f"the bias of {graph.where(node)} is no vector of one number per output")
    held = held_at(graph, bias, 0)
    if held is None:
        raise RefusedError(f"the bias of {graph.where(node)} is computed and no parameter")
    slot, axis = held
    if axis != slot.tensor.ndim - 1 or _is_stacked(slot, axis):
        raise RefusedError(f"the bias of {graph.where(node)} is a part of a larger parameter")
    return (user, bias), slot


def _is_stacked(slot: Slot, *axes: int) -> bool:
    """Tell whether a parameter has more in it than a reader takes: axes beside these, of more than one index."""
    return any(size != 1 for axis, size in enumerate(slot.tensor.shape) if axis not in axes)


def writes(graph: Graph, op: Node, axis: int) -> list[Write]:
    """Return the weight and bias, or the table, that a linear operator writes with; [] for any other operator."""
    if not is_tensor(op):
        return []
    name, rank = packet(op), len(shape(op))
    if name == "aten.mul":
        return _gained(graph, op, axis)
    parts: list[tuple[Any, int]] = []
    if name == "aten.linear" and axis == rank - 1:
        parts = [(op.args[1], 0), (argument(op, 2), 0)]
    elif name == "aten.addmm" and axis == rank - 1 and not op.kwargs:
        parts = [(op.args[2], 1), (op.args[0], 0)]
    elif name in _PRODUCTS[:3] and axis == rank - 1 and is_tensor(op.args[1]):
        parts = [(op.args[1], len(shape(op.args[1])) - 1)]
    elif name == "aten.embedding" and axis == rank - 1:
        parts = [(op.args[0], 1)]
    elif name in CONVOLUTIONS and axis == 1 and (argument(op, 6) or 1) == 1 and not op.kwargs:
        parts = [(op.args[1], 0), (argument(op, 2), 0)]
    found = []
    for part, at in (pair for pair in parts if pair[0] is not None):
        held = held_at(graph, part, at)
        if (
            held is None
            or shape(part)[at] != shape(op)[axis]
            or sum(arg is part for arg in op.args) != 1
        ):
            return []
        found.append(Write((op, part), *held))
    return found


def _gained(graph: Graph, op: Node, axis: int) -> list[Write]:
    """Return the writes of a linear operator times a parameter (LayerScale), which can go into its weight and bias."""
    inputs, from_end = [arg for arg in op.args if is_tensor(arg)], len(shape(op)) - axis
    if len(op.args) != 2 or op.kwargs or len(inputs) != 2:
        return []
    for gain, value in (inputs, inputs[::-1]):
        held = (
            held_at(graph, gain, len(shape(gain)) - from_end)
            if len(shape(gain)) >= from_end
            else None
        )
        if held is None or held[0].tensor.ndim != 1 or shape(value) != shape(op):
            continue
        made = made_by(value, axis)
        if made is None or packet(made[0]) == "aten.mul":
            return []
        return [replace(write, gain=((op, gain), held[0])) for write in writes(graph, *made)]
    return []
