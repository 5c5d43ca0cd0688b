"""Linear readers: operators that multiply the channels of a value by a parameter and add up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.fx import Node

from dynorm.fold.graph import Graph, Leaf, RefusedError, Slot, argument, held_at, is_tensor, packet, shape, users

CONVOLUTIONS = {"aten.conv1d", "aten.conv2d", "aten.conv3d"}
_TRANSPOSED = {"aten.conv_transpose1d", "aten.conv_transpose2d", "aten.conv_transpose3d"}
_PRODUCTS = {"aten.mm", "aten.matmul", "aten.bmm", "aten._grouped_mm", "transformers.grouped_mm_fallback"}


@dataclass(frozen=True)
class Read:
    """One operator that reads all channels of a value linearly.

    Args:
        node: the operator.
        leaf: its use of the weight.
        weight: the weight.
        axis: of the weight that the value's channels go along.
        out: the axis of its outputs; None where they have no one axis.
        groups: of a convolution; the channels of each group go along ``axis`` then.
        bias: the use of a bias that is added to the outputs, and the bias; None where there is none.
        no_shift: why a constant in the value cannot become a bias, or None.
    """

    node: Node
    leaf: Leaf
    weight: Slot
    axis: int
    out: int | None
    groups: int = 1
    bias: tuple[Leaf, Slot] | None = None
    no_shift: str | None = None

    def scaled(self, weight: Tensor, factor: Tensor) -> Tensor:
        """Return the weight that reads ``v`` as this one reads ``factor * v``."""
        factor = factor.to(weight.device)
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


def along(vector: Tensor, axis: int, rank: int) -> Tensor:
    """Return a vector as a tensor of ``rank`` axes that lies along one of them."""
    view = [1] * rank
    view[axis] = -1
    return vector.view(view)


def read(graph: Graph, node: Node, value: Node, axis: int) -> Read:
    """Find how an operator reads the channels of a value, which lie along an axis.

    Raises:
        RefusedError: it is not linear in them, or its weight is no parameter.
    """
    name, rank = packet(node), len(shape(value))
    parts = [p for arg in node.args for p in (arg if isinstance(arg, (list, tuple)) else [arg])]
    if sum(part is value for part in parts) != 1:
        raise RefusedError(f"read by {graph.where(node)}, which is not linear")
    if name in CONVOLUTIONS | _TRANSPOSED and node.args[0] is value:
        return _convolution(graph, node, rank, axis)
    if name == "aten.einsum":
        return _einsum(graph, node, value, axis)
    # The weight, the bias, and the weight's contracted axis, from the end.
    weight: Any
    bias: Any = None
    if name == "aten.linear" and node.args[0] is value and axis == rank - 1:
        weight, bias, from_end = argument(node, 1), argument(node, 2), -1
    elif name == "aten.addmm" and node.args[1] is value and axis == 1 and not node.kwargs:
        weight, bias, from_end = node.args[2], node.args[0], -2
    elif name in _PRODUCTS and node.args[0] is value and axis == rank - 1:
        weight, from_end = node.args[1], -2
    elif name in _PRODUCTS and node.args[1] is value and axis == max(rank - 2, 0) and "grouped" not in name:
        weight, from_end = node.args[0], -1
    else:
        raise RefusedError(f"read by {graph.where(node)}, which is not linear in the channels")
    if not is_tensor(weight) or sum(arg is weight for arg in node.args) != 1:
        raise RefusedError(f"read by {graph.where(node)}, whose weight is no tensor, or its bias too")
    size = len(shape(weight))
    contracted, out = (0, None) if size == 1 else (size + from_end, size - 2 if from_end == -1 else size - 1)
    # The outputs of a weight on the left do not come last: a vector added to them is no bias.
    added = weight is not node.args[0]
    return _assembled(graph, node, weight, contracted, out, bias, added=added)


def _convolution(graph: Graph, node: Node, rank: int, axis: int) -> Read:
    weight, transposed = argument(node, 1), packet(node) in _TRANSPOSED
    if not is_tensor(weight) or len(shape(weight)) != rank or axis != 1:
        raise RefusedError(f"read by {graph.where(node)}, which does not take the channels at axis 1")
    groups = node.args[6] if len(node.args) > 6 else node.kwargs.get("groups", 1)
    padding: Any = argument(node, 4) or 0
    assert isinstance(groups, int)
    no_shift = None
    if transposed:
        if groups != 1:
            raise RefusedError(f"read by {graph.where(node)}, a transposed convolution in groups")
        no_shift = f"{graph.where(node)} is transposed: at its borders a constant does not stay one"
    elif padding != "valid" and (any(padding) if isinstance(padding, (list, tuple)) else padding):
        no_shift = f"{graph.where(node)} pads with zeros: at its borders a bias would be another"
    contracted, out = (0, 1) if transposed else (1, 0)
    if groups != 1 and weight not in graph.slots:
        raise RefusedError(f"read by {graph.where(node)}, whose weight is computed and no parameter")
    return _assembled(graph, node, weight, contracted, out, argument(node, 2), rank, groups, no_shift)


def _einsum(graph: Graph, node: Node, value: Node, axis: int) -> Read:
    equation, operands = node.args[0], node.args[1]
    refusal = RefusedError(f"read by {graph.where(node)}, which is not linear in the channels")
    if not isinstance(equation, str) or "." in equation or "->" not in equation:
        raise refusal
    assert isinstance(operands, (list, tuple))
    inputs, output = equation.replace(" ", "").split("->")
    letters = inputs.split(",")
    if len(operands) != 2 or not all(is_tensor(operand) for operand in operands):
        raise refusal
    mine = 0 if operands[0] is value else 1
    weight = operands[1 - mine]
    assert isinstance(weight, Node)
    channel, names = letters[mine][axis], letters[1 - mine]
    if channel in output or names.count(channel) != 1 or letters[mine].count(channel) != 1:
        raise refusal
    if shape(weight)[names.index(channel)] != shape(value)[axis]:
        raise RefusedError(f"read by {graph.where(node)}, which repeats one weight over the channels")
    outs = [i for i, letter in enumerate(names) if letter != channel]
    out = None
    # A sum over tokens would add a constant up as well.
    if len(outs) == 1 and all(letter in output for letter in letters[mine] if letter != channel):
        out = outs[0] if names[outs[0]] not in letters[mine] and output.endswith(names[outs[0]]) else None
    return _assembled(graph, node, weight, names.index(channel), out, None, added=True)


def _assembled(
    graph: Graph,
    node: Node,
    weight: Node,
    contracted: int,
    out: int | None,
    bias: Any,
    rank: int = 2,
    groups: int = 1,
    no_shift: str | None = None,
    added: bool = False,
) -> Read:
    held = held_at(graph, weight, contracted)
    if held is None:
        raise RefusedError(f"read by {graph.where(node)}, whose weight is computed and no parameter")
    slot, axis = held
    held_out = None if out is None else held_at(graph, weight, out)
    part = weight not in graph.slots and held_out is not None and _is_stacked(slot, axis, held_out[1])
    if held_out is None or len(shape(weight)) != rank or part:
        no_shift = no_shift or f"{graph.where(node)} has several weights in one, or none for a bias to belong to"
    found = None
    try:
        found = _bias(graph, node, bias, None if out is None else shape(weight)[out], added)
    except RefusedError as refusal:
        no_shift = no_shift or str(refusal)
    return Read(node, (node, weight), slot, axis, None if held_out is None else held_out[1], groups, found, no_shift)


def _bias(graph: Graph, node: Node, bias: Any, outputs: int | None, added: bool) -> tuple[Leaf, Slot] | None:
    """Find the bias of an operator: its argument, or, where its outputs come last, a parameter added to them."""
    user = node
    if not is_tensor(bias):
        takers = list(users(node)) if added else []
        if len(takers) != 1 or packet(takers[0]) != "aten.add" or takers[0].kwargs or len(takers[0].args) != 2:
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
