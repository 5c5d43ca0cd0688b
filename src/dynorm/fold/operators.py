"""The linear operators of a graph: how each reads the channels of a value, and writes others."""

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node

from dynorm.fold.channels import laid_along, made_by, operand_at
from dynorm.fold.graph import (
    Operand,
    argument,
    is_tensor,
    packet,
    paths_of,
    rank_of,
    shape,
    where,
)

SUMS = ("aten.add", "aten.sub", "aten.rsub")
_CONVOLUTIONS = ("aten.conv1d", "aten.conv2d", "aten.conv3d")
_PLAIN_PRODUCTS = ("aten.mm", "aten.matmul", "aten.bmm")
_PRODUCTS = (*_PLAIN_PRODUCTS, "aten._grouped_mm", "transformers.grouped_mm_fallback")


class RefusedError(Exception):
    """The reason why something cannot be edited, as a report says it."""


def refuse_for(reason: str | None) -> None:
    """Raise RefusedError if there is a reason."""
    if reason is not None:
        raise RefusedError(reason)


@dataclass(frozen=True)
class Reader:
    """An operator that reads all channels of a value linearly."""

    weight: Operand
    out: int | None  # the weight's axis of outputs; None if they have no single axis
    bias: Operand | None = None
    shift_refused: str | None = None  # why a constant in the value cannot become a bias

    def scaled(self, weight: Tensor, factor: Tensor) -> Tensor:
        """Return the weight that reads ``v`` as this one reads ``factor * v``."""
        return weight * laid_along(factor, self.weight.axis, weight.ndim)

    def constant(self, weight: Tensor, shift: Tensor) -> Tensor:
        """Return the outputs of this weight for a constant ``shift`` in every token, (outputs,)."""
        product = self.scaled(weight, shift)
        return product.sum([axis for axis in range(product.ndim) if axis != self.out])


@dataclass(frozen=True)
class Write:
    """A parameter that writes into a stream."""

    operand: Operand
    gain: Operand | None = None  # it scales each channel on the way (LayerScale)


@dataclass(frozen=True)
class _Product:
    """A linear operator: the sum of a weight times an input over one axis, plus a bias."""

    value: Any  # the input; None for a table of embeddings, which reads no channels
    weight: Any
    contracted: int  # the weight's axis that is summed over
    out: int  # the weight's axis of outputs
    bias: Any = None
    from_end: int = 1  # the axis of the channels of input and output, counted from the last
    pads: bool = False  # zeros around the input

    def reads(self, value: Node, axis: int) -> bool:
        """Return whether it is linear in a value with the channels along an axis."""
        is_input = self.value is value and self.bias is not value
        return is_input and rank_of(value) - self.from_end == axis


def product_of(op: Node, value: Node | None = None) -> _Product | None:
    """Return an operator as a product with a weight, None if it is not one.

    If both operands may be the weight, it is the one that is not ``value``.
    """
    name = packet(op)
    first, second = argument(op, 0), argument(op, 1)
    product = None
    if name in _PRODUCTS and is_tensor(first) and is_tensor(second):
        rank = rank_of(second)
        product = _Product(first, second, contracted=rank - 2, out=rank - 1)
        if name in _PLAIN_PRODUCTS and second is value:
            # A weight on the left, as of experts.
            rank = rank_of(first)
            product = _Product(second, first, contracted=rank - 1, out=rank - 2, from_end=2)
    # The operators below are read by position, so one with keywords is not known.
    elif op.kwargs:
        return None
    elif name == "aten.linear":
        bias = argument(op, 2)
        product = _Product(first, second, contracted=1, out=0, bias=bias)
    elif name == "aten.addmm":
        product = _Product(second, argument(op, 2), contracted=0, out=1, bias=first)
    elif name == "aten.embedding":
        product = _Product(None, first, contracted=0, out=1)
    elif name in _CONVOLUTIONS:
        # Padding is "same", "valid" or the width at each side.
        padding = argument(op, 4) or ()
        groups = argument(op, 6) or 1
        if groups != 1 or rank_of(second) != rank_of(op):
            return None
        product = _Product(
            first,
            second,
            contracted=1,
            out=0,
            bias=argument(op, 2),
            from_end=rank_of(op) - 1,
            pads=padding != "valid" and any(padding),
        )
    if product is None or product.weight in (product.value, product.bias):
        return None
    is_matrix = is_tensor(product.weight) and rank_of(product.weight) >= 2
    return product if is_matrix else None


def reader_of(node: Node, value: Node, axis: int) -> Reader:
    """Find how an operator reads the channels of a value along an axis.

    Raises:
        RefusedError: it is not linear in the channels.
    """
    product = product_of(node, value)
    if product is None or not product.reads(value, axis):
        reason = "which is not linear in the channels"
        if packet(node) in SUMS:
            reason = "a sum, which has no weight to take over the norm's"
        raise RefusedError(f"read by {where(node)}, {reason}")
    weight = operand_at(node, product.weight, product.contracted)
    if weight is None:
        raise RefusedError(f"read by {where(node)}, whose weight is computed, not a parameter")
    out = operand_at(node, product.weight, product.out)
    bias, shift_refused = None, None
    if product.bias is not None:
        bias = operand_at(node, product.bias, 0)
        size = (shape(product.weight)[product.out],)
        is_vector = bias is not None and bias.slot.tensor.shape == shape(product.bias) == size
        if not is_vector:
            shift_refused = (
                f"the bias of {where(node)} is not a parameter with one number per output"
            )
    rank = rank_of(value) if packet(node) in _CONVOLUTIONS else 2
    if out is None or not weight.slot.tensor.ndim == rank_of(product.weight) == rank:
        shift_refused = f"{where(node)} has several weights in one, or none for a bias to belong to"
    if product.pads:
        shift_refused = f"{where(node)} pads with zeros: a bias would differ at its borders"
    return Reader(weight, None if out is None else out.axis, bias, shift_refused)


def writes(op: Node, axis: int) -> list[Write]:
    """Return the weight and bias, or the table, of a linear operator; [] for other operators."""
    if packet(op) == "aten.mul":
        return _gained(op, axis)
    product = product_of(op)
    if product is None or rank_of(op) - product.from_end != axis:
        return []
    written = []
    for part, at in ((product.weight, product.out), (product.bias, 0)):
        if part is None:
            continue
        operand = operand_at(op, part, at)
        if operand is None or shape(part)[at] != shape(op)[axis]:
            return []
        written.append(Write(operand))
    return written


def _gained(op: Node, axis: int) -> list[Write]:
    """Return the writes of a linear operator times a parameter (LayerScale).

    The gain can go into the operator's weight and bias.
    """
    inputs = [operand for operand in op.args if is_tensor(operand)]
    if len(inputs) != 2:
        return []
    from_end = rank_of(op) - axis
    for part, value in (inputs, inputs[::-1]):
        at = rank_of(part) - from_end
        gain = operand_at(op, part, at) if at >= 0 else None
        if gain is None or gain.slot.tensor.ndim != 1 or shape(value) != shape(op):
            continue
        made = made_by(value, axis)
        if made is None or packet(made[0]) == "aten.mul":
            return []
        return [replace(write, gain=gain) for write in writes(*made)]
    return []


def require_new_bias(weight: Operand) -> None:
    """Check that a weight belongs to one linear layer, which can be given a bias."""
    slot = weight.slot
    owner = slot.owners[0]
    # Code that uses the weight without calling the layer would not add the bias.
    is_called = not set(owner.paths).isdisjoint(paths_of(weight.leaf.node))
    if not is_called or not _takes_bias(owner.module):
        raise RefusedError(
            f"no bias can be added to {slot.name}: it is not the weight of one linear layer"
        )


def _takes_bias(module: nn.Module) -> bool:
    """Return whether a linear layer has no bias, and would add one.

    It is tried on a copy whose weight is zero: a subclass may have another forward.
    """
    if not isinstance(module, nn.Linear) or module.bias is not None:
        return False
    weight = module.weight.new_zeros(1).expand_as(module.weight)
    bias = torch.arange(1, len(weight) + 1, dtype=weight.dtype, device=weight.device)
    trial = copy.copy(module)
    trial.__dict__["_parameters"] = {**module._parameters, "weight": weight, "bias": bias}
    try:
        with torch.no_grad():
            result = trial.forward(weight.new_ones(2, weight.shape[1]))
    # A forward that raises does not just add the bias to the product.
    except Exception:
        return False
    return isinstance(result, Tensor) and torch.equal(result, bias.expand(2, -1))
