"""Linear readers: operators that multiply the channels of a value by a parameter and add up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from dynorm.fold.graph import Graph, Leaf, is_tensor, packet, shape, users
from dynorm.fold.moves import held_at

_CONVOLUTIONS = {"aten.conv1d": 1, "aten.conv2d": 2, "aten.conv3d": 3}
_TRANSPOSED = {"aten.conv_transpose1d", "aten.conv_transpose2d", "aten.conv_transpose3d"}
_PRODUCTS = {"aten.mm", "aten.matmul", "aten.bmm", "aten._grouped_mm", "transformers.grouped_mm_fallback"}


@dataclass(frozen=True)
class Read:
    """One operator that reads all channels of a value linearly.

    Args:
        node: the operator.
        leaf: its use of the weight.
        weight: the placeholder of the weight.
        axis: of the weight that the value's channels go along.
        out: the axis of its outputs; None where they have no one axis.
        groups: of a convolution; the channels of each group go along ``axis`` then.
        bias: the use of a bias that is added to the outputs, with its placeholder; None where there is none.
        shift: why a constant in the value cannot become a bias, or None.
    """

    node: Node
    leaf: Leaf
    weight: Node
    axis: int
    out: int | None
    groups: int = 1
    bias: tuple[Leaf, Node] | None = None
    shift: str | None = None

    def scaled(self, weight: Tensor, factor: Tensor) -> Tensor:
        """Return the weight that reads ``v`` as this one reads ``factor * v``."""
        if self.groups == 1:
            view = [1] * weight.ndim
            view[self.axis] = -1
            return weight * factor.view(view)
        rows = factor.view(self.groups, -1).repeat_interleave(weight.shape[0] // self.groups, 0)
        return weight * rows.view(*rows.shape, *[1] * (weight.ndim - 2))

    def constant(self, weight: Tensor, shift: Tensor) -> Tensor:
        """Return what this weight makes of a constant ``shift`` in every token: one number an output."""
        assert self.out is not None
        product = self.scaled(weight, shift)
        return product.sum([axis for axis in range(product.ndim) if axis != self.out])


def read(graph: Graph, node: Node, value: Node, axis: int) -> Read | str:
    """Say how an operator reads the channels of a value: linearly, or why it does not.

    Args:
        graph: the graph.
        node: the operator.
        value: that it takes.
        axis: of the channels in the value.
    """
    name = packet(node)
    if sum(source is value for source in _flat(node.args)) != 1:
        return f"read by {graph.where(node)}, which is not linear"
    rank = len(shape(value))
    place: tuple[int, int | None, int] | None = (
        None  # argument of the weight, of the bias, contracted axis from the end
    )
    if name == "aten.linear" and node.args[0] is value and axis == rank - 1:
        place = (1, 2, -1)
    elif name == "aten.addmm" and node.args[1] is value and axis == 1 and not node.kwargs:
        place = (2, 0, -2)
    elif name in _PRODUCTS and node.args[0] is value and axis == rank - 1:
        place = (1, None, -2)
    elif name in _PRODUCTS and node.args[1] is value and axis == max(rank - 2, 0) and "grouped" not in name:
        place = (0, None, -1)
    elif (name in _CONVOLUTIONS or name in _TRANSPOSED) and node.args[0] is value:
        return _convolution(graph, node, value, axis)
    elif name == "aten.einsum":
        return _einsum(graph, node, value, axis)
    if place is None:
        return f"read by {graph.where(node)}, which is not linear in the channels"
    weight_at, bias_at, from_end = place
    weight = _argument(node, weight_at)
    if not is_tensor(weight) or sum(arg is weight for arg in node.args) != 1:
        return f"read by {graph.where(node)}, whose weight is no tensor, or its bias too"
    size = len(shape(weight))
    if size == 1:
        contracted, out = 0, None
    else:
        contracted = size + from_end
        out = size - 2 if from_end == -1 else size - 1
    return _assembled(graph, node, weight, contracted, out, _argument(node, bias_at), from_end != -1 or bias_at == 2)


def _assembled(
    graph: Graph, node: Node, weight: Node, contracted: int, out: int | None, bias: Any, added: bool
) -> Read | str:
    held = held_at(graph, weight, contracted)
    if held is None:
        return f"read by {graph.where(node)}, whose weight is computed and no parameter"
    placeholder, axis = held
    shift = None
    held_out = None if out is None else held_at(graph, weight, out)
    if out is None or held_out is None or len(shape(weight)) != 2 or _stacked(placeholder, (axis, held_out[1])):
        shift = f"{graph.where(node)} has several weights in one, or none for a bias to belong to"
    found, problem = _bias(graph, node, bias, None if out is None else shape(weight)[out], added)
    return Read(
        node,
        (node, weight),
        placeholder,
        axis,
        None if held_out is None else held_out[1],
        bias=found,
        shift=shift or problem,
    )


def _stacked(placeholder: Node, axes: tuple[int, ...]) -> bool:
    """Whether a parameter has more in it than what a reader takes: axes beside these, of more than one index."""
    return any(size != 1 for axis, size in enumerate(shape(placeholder)) if axis not in axes)


def _bias(
    graph: Graph, node: Node, bias: Any, outputs: int | None, added: bool = False
) -> tuple[tuple[Leaf, Node] | None, str | None]:
    """The bias of an operator: its argument, or, where its outputs come last, a parameter that is added to them."""
    user = node
    if not is_tensor(bias):
        if not added:
            return None, None
        takers = list(users(node))
        if len(takers) != 1 or packet(takers[0]) != "aten.add" or takers[0].kwargs or len(takers[0].args) != 2:
            return None, None
        user = takers[0]
        bias = next((a for a in user.args if a is not node), None)
        if not is_tensor(bias) or shape(bias) != (outputs,) or held_at(graph, bias, 0) is None:
            return None, None
    if shape(bias) != (outputs,):
        return None, f"the bias of {graph.where(node)} is no vector of a number an output"
    held = held_at(graph, bias, 0)
    if held is None:
        return None, f"the bias of {graph.where(node)} is computed and no parameter"
    if held[1] != len(shape(held[0])) - 1 or _stacked(held[0], (held[1],)):
        return None, f"the bias of {graph.where(node)} is a part of a larger parameter"
    return ((user, bias), held[0]), None


def _convolution(graph: Graph, node: Node, value: Node, axis: int) -> Read | str:
    name, rank = packet(node), len(shape(value))
    weight, transposed = _argument(node, 1), packet(node) in _TRANSPOSED
    if not is_tensor(weight) or len(shape(weight)) != rank or axis != 1:
        return f"read by {graph.where(node)}, which does not take the channels at axis 1"
    groups = node.args[6] if len(node.args) > 6 else 1
    if name in _CONVOLUTIONS:
        groups = node.args[6] if len(node.args) > 6 else node.kwargs.get("groups", 1)
    padding = node.args[4] if len(node.args) > 4 else 0
    assert isinstance(groups, int)
    if transposed and groups != 1:
        return f"read by {graph.where(node)}, a transposed convolution in groups"
    padded = padding != "valid" and (isinstance(padding, str) or any(_integers(padding)))
    shift = None
    if transposed:
        shift = f"{graph.where(node)} is transposed: at its borders a constant does not stay one"
    elif padded:
        shift = f"{graph.where(node)} pads with zeros: at its borders a bias would be another"
    if groups == 1:
        return _assembled_convolution(graph, node, weight, 0 if transposed else 1, 1 if transposed else 0, shift)
    if graph.tensor(weight) is None:
        return f"read by {graph.where(node)}, whose weight is computed and no parameter"
    bias, problem = _bias(graph, node, _argument(node, 2), shape(weight)[0])
    return Read(node, (node, weight), weight, 1, 0, groups, bias, shift or problem)


def _assembled_convolution(
    graph: Graph, node: Node, weight: Node, contracted: int, out: int, shift: str | None
) -> Read | str:
    held, held_out = held_at(graph, weight, contracted), held_at(graph, weight, out)
    if held is None or held_out is None:
        return f"read by {graph.where(node)}, whose weight is computed and no parameter"
    if graph.tensor(weight) is None and _stacked(held[0], (held[1], held_out[1])):
        shift = shift or f"the weight of {graph.where(node)} is a part of a larger parameter"
    bias, problem = _bias(graph, node, _argument(node, 2), shape(weight)[out])
    return Read(node, (node, weight), held[0], held[1], held_out[1], bias=bias, shift=shift or problem)


def _einsum(graph: Graph, node: Node, value: Node, axis: int) -> Read | str:
    equation, operands = node.args[0], node.args[1]
    problem = f"read by {graph.where(node)}, which is not linear in the channels"
    if not isinstance(equation, str) or "." in equation or "->" not in equation:
        return problem
    assert isinstance(operands, (list, tuple))
    inputs, output = equation.replace(" ", "").split("->")
    letters = inputs.split(",")
    if len(operands) != 2 or not all(is_tensor(operand) for operand in operands):
        return problem
    mine = 0 if operands[0] is value else 1
    weight = operands[1 - mine]
    assert isinstance(weight, Node)
    channel = letters[mine][axis]
    names = letters[1 - mine]
    if channel in output or names.count(channel) != 1 or letters[mine].count(channel) != 1:
        return problem
    if shape(weight)[names.index(channel)] != shape(value)[axis]:
        return f"read by {graph.where(node)}, which repeats one weight over the channels"
    outs = [i for i, letter in enumerate(names) if letter != channel]
    out = None
    # A sum over tokens would add a constant up as well.
    if len(outs) == 1 and all(letter in output for letter in letters[mine] if letter != channel):
        out = outs[0] if names[outs[0]] not in letters[mine] and output.endswith(names[outs[0]]) else None
    return _assembled(graph, node, weight, names.index(channel), out, None, True)


def _argument(node: Node, index: int | None) -> Any:
    return node.args[index] if index is not None and index < len(node.args) else None


def _flat(args: Any) -> list[Any]:
    return [part for arg in args for part in (_flat(arg) if isinstance(arg, (list, tuple)) else [arg])]


def _integers(padding: Any) -> list[int]:
    return list(padding) if isinstance(padding, (list, tuple)) else [int(padding)]


def as_double(tensor: Tensor) -> Tensor:
    """Return a copy in float64, in which all new weights are computed."""
    return tensor.detach().to(torch.float64, copy=True)
