"""The bias or table that adds to all of a norm's input."""

from collections.abc import Sequence
from dataclasses import replace

from torch.fx import Node

from dynorm.stream.channels import made_by
from dynorm.stream.graph import argument, is_tensor, packet, rank_of, shape, slot_of, where
from dynorm.stream.operators import (
    CONVOLUTIONS,
    RefusedError,
    Write,
    refuse_for,
    require_new_bias,
    writes,
)

# Operators with a bias or a table, and the argument that holds it.
_BIAS = {"aten.linear": 2, "aten.addmm": 0, "aten.embedding": 0, **dict.fromkeys(CONVOLUTIONS, 2)}


def bias_before(calls: Sequence[Node], dim: int, add_bias: bool) -> Write:
    """Return the bias, or the table, that adds to all of a norm's input and to nothing else.

    With ``add_bias`` it may be the weight of a layer that can be given a bias.

    Raises:
        RefusedError: there is none; the message has the first reason.
    """
    if len(calls) != 1:
        raise RefusedError("the layer is called several times")
    value = calls[0].all_input_nodes[0]
    todo = [(value, dim % rank_of(value))]
    refusals = []
    while todo:
        made = made_by(*todo.pop())
        if made is None:
            refusals.append("its input is also read by others")
            continue
        op, axis = made
        if packet(op) == "aten.add" and not op.kwargs and op.args[0] is not op.args[1]:
            for part in op.args[:2]:
                if is_tensor(part):
                    at = axis - rank_of(op) + rank_of(part)
                    # One number for all channels cannot hold a centre.
                    if at >= 0 and shape(part)[at] == shape(op)[axis]:
                        todo.append((part, at))
            continue
        try:
            return _bias_of(op, axis, add_bias)
        except RefusedError as refusal:
            refusals.append(str(refusal))
    raise RefusedError(refusals[0] if refusals else "its input is one number for all channels")


def _bias_of(op: Node, axis: int, add_bias: bool) -> Write:
    """Return the bias or table of an operator; its weight, if it can be given a bias."""
    write = _bias_or_weight(op, axis)
    if write is None or (write.is_new and not add_bias):
        hint = "" if write is None else ": pass add_bias=True"
        raise RefusedError(f"fed by {where(op)}, which has no bias to take its centre{hint}")
    slot = write.slot
    refuse_for(slot.refused)
    if slot.leaves != {write.leaf} or not slot.is_saved:
        raise RefusedError(f"{slot.name} is used elsewhere too")
    if write.is_new:
        require_new_bias(slot, op)
    return write


def _bias_or_weight(op: Node, axis: int) -> Write | None:
    slot = slot_of(op)
    if slot is not None and slot.leaves:
        # A parameter that is added itself, as learned positions are.
        return Write(next(iter(slot.leaves)), slot, axis)
    if packet(op) not in _BIAS:
        return None
    bias = argument(op, _BIAS[packet(op)])
    written = writes(op, axis)
    if bias is None and written:
        return replace(written[0], is_new=True)
    for write in written:
        if write.leaf.argument is bias:
            return write
    return None
