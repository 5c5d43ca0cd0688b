"""The linear operators of a graph: how each reads the channels of a value, and writes others."""

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node

from dynorm.fold.channels import held_at, laid_along, made_by
from dynorm.fold.graph import (
    Leaf,
    Slot,
    argument,
    as_list,
    is_tensor,
    packet,
    paths_of,
    rank_of,
    shape,
    slot_of,
    where,
)

_CONVOLUTIONS = ("aten.conv1d", "aten.conv2d", "aten.conv3d")
_CONVOLUTION_FORWARDS = (nn.Conv1d.forward, nn.Conv2d.forward, nn.Conv3d.forward)
_PLAIN_PRODUCTS = ("aten.mm", "aten.matmul", "aten.bmm")
_PRODUCTS = (*_PLAIN_PRODUCTS, "aten._grouped_mm", "transformers.grouped_mm_fallback")


class RefusedError(Exception):
    """The reason why something cannot be edited, for a report."""


def refuse_for(reason: str | None) -> None:
    """Raise RefusedError if there is a reason."""
    if reason is not None:
        raise RefusedError(reason)


@dataclass(frozen=True)
class Reader:
    """One operator that reads all channels of a value linearly."""

    node: Node
    leaf: Leaf  # its use of the weight
    weight: Slot
    axis: int  # the axis of the weight that the value's channels lie along
    out: int | None  # the weight's axis of outputs; None if they have no single axis
    bias: Slot | None = None
    bias_leaf: Leaf | None = None  # the use of the bias
    shift_refused: str | None = None  # why a constant in the value cannot become a bias

    def scaled(self, weight: Tensor, factor: Tensor) -> Tensor:
        """Return the weight that reads ``v`` as this one reads ``factor * v``."""
        return weight * laid_along(factor, self.axis, weight.ndim)

    def constant(self, weight: Tensor, shift: Tensor) -> Tensor:
        """Return the outputs of this weight for a constant ``shift`` in every token, (outputs,)."""
        product = self.scaled(weight, shift)
        return product.sum([axis for axis in range(product.ndim) if axis != self.out])


@dataclass(frozen=True)
class Write:
    """A parameter that writes into a stream."""

    leaf: Leaf  # its use
    slot: Slot
    axis: int  # the axis of the parameter that the stream's channels lie along
    gain: Slot | None = None  # a parameter that scales each channel on the way (LayerScale)
    gain_leaf: Leaf | None = None  # its use

    @property
    def is_value(self) -> bool:
        """Return whether the parameter itself is added to the stream, as learned positions are."""
        return self.leaf.node is self.leaf.argument


@dataclass(frozen=True)
class _Product:
    """An operator's weight, and how it is used."""

    weight: Node
    contracted: int  # the axis that is summed over
    out: int | None  # the axis of the outputs
    bias: Any = None
    rank: int = 2  # of a single weight
    shift_refused: str | None = None  # why a constant in the input cannot become a bias


def reader_of(node: Node, value: Node, axis: int) -> Reader:
    """Find how an operator reads the channels of a value along an axis.

    Raises:
        RefusedError: it is not linear in the channels.
    """
    times = 0
    for part in node.args:
        times += sum(operand is value for operand in as_list(part))
    if times != 1:
        raise RefusedError(f"read by {where(node)}, which is not linear")
    if packet(node) in _CONVOLUTIONS and node.args[0] is value:
        product = _convolution(node, rank_of(value), axis)
    else:
        product = _matrices(node, value, axis)
    weight = product.weight
    held = held_at(weight, product.contracted)
    if held is None:
        raise RefusedError(f"read by {where(node)}, whose weight is computed, not a parameter")
    slot, contracted = held
    out = None
    if product.out is not None:
        held_out = held_at(weight, product.out)
        if held_out is not None:
            out = held_out[1]
    shift_refused = product.shift_refused
    is_matrix = out is not None and rank_of(weight) == product.rank
    is_part = slot_of(weight) is None and _is_stacked(slot, contracted, out)
    if is_part or not is_matrix:
        shift_refused = shift_refused or (
            f"{where(node)} has several weights in one, or none for a bias to belong to"
        )
    bias = bias_leaf = None
    if product.bias is not None:
        outputs = None if product.out is None else shape(weight)[product.out]
        try:
            bias, bias_leaf = _bias(node, product.bias, outputs)
        except RefusedError as refusal:
            shift_refused = shift_refused or str(refusal)
    leaf = Leaf(node, weight)
    return Reader(node, leaf, slot, contracted, out, bias, bias_leaf, shift_refused)


def _matrices(node: Node, value: Node, axis: int) -> _Product:
    name = packet(node)
    is_last = axis == rank_of(value) - 1
    weight: Any = None
    bias = None
    # The contracted axis of the weight is its last one, or the last but one.
    from_end = 2
    if name == "aten.linear" and node.args[0] is value and is_last:
        weight, bias, from_end = argument(node, 1), argument(node, 2), 1
    elif name == "aten.addmm" and node.args[1] is value and is_last and not node.kwargs:
        weight, bias = argument(node, 2), argument(node, 0)
    elif name in _PRODUCTS and node.args[0] is value and is_last:
        weight = argument(node, 1)
    elif name in _PLAIN_PRODUCTS and node.args[1] is value and axis == max(rank_of(value) - 2, 0):
        # A weight on the left, as of experts.
        weight, from_end = argument(node, 0), 1
    if not is_tensor(weight):
        raise RefusedError(f"read by {where(node)}, which is not linear in the channels")
    if sum(operand is weight for operand in node.args) != 1:
        raise RefusedError(f"read by {where(node)}, whose weight is its bias too")
    size = rank_of(weight)
    if size == 1:
        return _Product(weight, 0, None, bias)
    out = size - 2 if from_end == 1 else size - 1
    return _Product(weight, size - from_end, out, bias)


def _convolution(node: Node, rank: int, axis: int) -> _Product:
    place = where(node)
    weight = argument(node, 1)
    if not is_tensor(weight) or rank_of(weight) != rank or axis != 1:
        raise RefusedError(f"read by {place}, which does not take the channels at axis 1")
    if (argument(node, 6) or 1) != 1 or node.kwargs:
        raise RefusedError(f"read by {place}, a convolution in groups, or with arguments by name")
    padding = argument(node, 4) or 0
    pads = None
    if padding != "valid" and any(as_list(padding)):
        pads = f"{place} pads with zeros: a bias would differ at its borders"
    return _Product(weight, 1, 0, argument(node, 2), rank, pads)


def _bias(node: Node, bias: object, outputs: int | None) -> tuple[Slot, Leaf]:
    """Return the parameter that is the bias of an operator, and its use."""
    place = where(node)
    if not is_tensor(bias) or shape(bias) != (outputs,):
        raise RefusedError(f"the bias of {place} is not a vector of one number per output")
    held = held_at(bias, 0)
    if held is None:
        raise RefusedError(f"the bias of {place} is computed, not a parameter")
    slot, axis = held
    if axis != slot.tensor.ndim - 1 or _is_stacked(slot, axis):
        raise RefusedError(f"the bias of {place} is a part of a larger parameter")
    return slot, Leaf(node, bias)


def _is_stacked(slot: Slot, *axes: int | None) -> bool:
    """Return whether a parameter has further axes, with more than one index."""
    return any(size != 1 for axis, size in enumerate(slot.tensor.shape) if axis not in axes)


def writes(op: Node, axis: int) -> list[Write]:
    """Return the weight and bias, or the table, of a linear operator; [] for other operators."""
    if not is_tensor(op):
        return []
    name = packet(op)
    if name == "aten.mul":
        return _gained(op, axis)
    is_last = axis == rank_of(op) - 1
    # Operands, with the axis of their outputs.
    parts: list[tuple[Any, int]] = []
    weight_and_bias = [(argument(op, 1), 0), (argument(op, 2), 0)]
    if name == "aten.linear" and is_last:
        parts = weight_and_bias
    elif name == "aten.addmm" and is_last and not op.kwargs:
        parts = [(op.args[2], 1), (op.args[0], 0)]
    elif name in _PLAIN_PRODUCTS and is_last and is_tensor(op.args[1]):
        parts = [(op.args[1], len(shape(op.args[1])) - 1)]
    elif name == "aten.embedding" and is_last:
        parts = [(op.args[0], 1)]
    elif name in _CONVOLUTIONS and axis == 1 and (argument(op, 6) or 1) == 1 and not op.kwargs:
        parts = weight_and_bias
    written = []
    for part, at in parts:
        if part is None:
            continue
        held = held_at(part, at)
        is_whole = held is not None and shape(part)[at] == shape(op)[axis]
        if held is None or not is_whole or sum(operand is part for operand in op.args) != 1:
            return []
        written.append(Write(Leaf(op, part), *held))
    return written


def _gained(op: Node, axis: int) -> list[Write]:
    """Return the writes of a linear operator times a parameter (LayerScale).

    The gain can go into the operator's weight and bias.
    """
    inputs = [operand for operand in op.args if is_tensor(operand)]
    if len(op.args) != 2 or op.kwargs or len(inputs) != 2:
        return []
    from_end = rank_of(op) - axis
    for gain, value in (inputs, inputs[::-1]):
        at = rank_of(gain) - from_end
        held = held_at(gain, at) if at >= 0 else None
        if held is None or held[0].tensor.ndim != 1 or shape(value) != shape(op):
            continue
        made = made_by(value, axis)
        if made is None or packet(made[0]) == "aten.mul":
            return []
        leaf = Leaf(op, gain)
        return [replace(write, gain=held[0], gain_leaf=leaf) for write in writes(*made)]
    return []


def require_new_bias(slot: Slot, node: Node) -> None:
    """Check that a weight belongs to one linear layer, which can be given a bias."""
    owner = slot.owners[0]
    # Code that uses the weight without calling the layer would not add the bias.
    is_called = not set(owner.paths).isdisjoint(paths_of(node))
    if len(slot.owners) > 1 or not is_called or not _takes_bias(owner.module):
        raise RefusedError(
            f"no bias can be added to {slot.name}: it is not the weight of one linear layer"
        )


def _takes_bias(module: nn.Module) -> bool:
    """Return whether a linear layer or convolution has no bias, and would add one."""
    table = module._parameters
    has_empty_bias = "bias" in table and table["bias"] is None
    if not has_empty_bias or "forward" in module.__dict__:
        return False
    forward = type(module).forward
    if forward is nn.Linear.forward or forward in _CONVOLUTION_FORWARDS:
        return True
    if not isinstance(module, nn.Linear):
        return False
    # A subclass with another forward is tried on a copy whose weight is zero.
    weight = torch.zeros_like(module.weight)
    bias = torch.arange(1, len(weight) + 1, dtype=weight.dtype, device=weight.device)
    trial = copy.copy(module)
    trial.__dict__["_parameters"] = {**table, "weight": weight, "bias": bias}
    try:
        with torch.no_grad():
            result = trial.forward(weight.new_ones(2, weight.shape[1]))
    # A forward that raises does not just add the bias to the product.
    except Exception:
        return False
    return isinstance(result, Tensor) and torch.equal(result, bias.expand(2, -1))
