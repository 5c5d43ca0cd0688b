"""The biases and tables that add to all of a norm's input."""

from dataclasses import dataclass

from torch.fx import Node

from dynorm.stream.graph import argument, is_tensor, made_by, packet, shape, slot_of, where
from dynorm.stream.operators import CONVOLUTIONS, RefusedError, Write, require_new_bias, writes

# Operators with a bias or a table, and the argument that holds it.
_BIAS = {"aten.linear": 2, "aten.addmm": 0, "aten.embedding": 0, **dict.fromkeys(CONVOLUTIONS, 2)}


@dataclass(frozen=True)
class Feed:
    """One term of a norm's input."""

    write: Write | None = None  # its bias or table; its weight, if it could be given a bias
    refused: str = ""  # why that cannot take a constant


def feeds_of(call: Node, dim: int) -> list[Feed]:
    """Return the terms of a norm's input, with the parameter that could take a constant."""
    value = call.all_input_nodes[0]
    todo = [(value, dim % len(shape(value)))]
    feeds = []
    while todo:
        made = made_by(*todo.pop())
        if made is None:
            feeds.append(Feed(refused="its input is also read by others"))
            continue
        op, axis = made
        if packet(op) == "aten.add" and not op.kwargs and op.args[0] is not op.args[1]:
            for part in op.args[:2]:
                if is_tensor(part):
                    at = axis - len(shape(op)) + len(shape(part))
                    # One number for all channels cannot hold a centre.
                    if at >= 0 and shape(part)[at] == shape(op)[axis]:
                        todo.append((part, at))
        else:
            feeds.append(_feed(op, axis))
    return feeds


def _feed(op: Node, axis: int) -> Feed:
    """Return the bias or table of an operator; its weight, if it could be given a bias."""
    write = _bias_or_weight(op, axis)
    if write is None:
        return Feed(refused=f"fed by {where(op)}, which has no bias to take its centre")
    slot = write.slot
    if slot.fixed is not None:
        return Feed(refused=slot.fixed)
    if slot.leaves != {write.leaf} or not slot.is_saved:
        return Feed(refused=f"{slot.name} is used elsewhere too")
    try:
        if write.is_new:
            require_new_bias(slot, op)
    except RefusedError as refusal:
        return Feed(refused=str(refusal))
    return Feed(write)


def _bias_or_weight(op: Node, axis: int) -> Write | None:
    slot = slot_of(op)
    if slot is not None:
        # A parameter that is added itself, as learned positions are.
        for leaf in slot.leaves:
            return Write(leaf, slot, axis)
    if packet(op) not in _BIAS:
        return None
    bias = argument(op, _BIAS[packet(op)])
    for write in writes(op, axis):
        if bias is None:
            return Write(write.leaf, write.slot, write.axis, write.gain, is_new=True)
        if bias is write.leaf.argument:
            return write
    return None
