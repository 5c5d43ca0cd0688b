"""The learned centre of a point-wise layer, into the bias or the table before it."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch.fx import Node

from dynorm.fold.refusals import require_new_bias
from dynorm.fold.site import SiteFold
from dynorm.layers import PointwiseNorm
from dynorm.stream.graph import Graph, argument, is_tensor, made_by, packet, shape
from dynorm.stream.operators import CONVOLUTIONS, RefusedError, Write, writes

# Operators with a bias or a table, and the argument that holds it.
_BIAS = {"aten.linear": 2, "aten.addmm": 0, "aten.embedding": 0, **dict.fromkeys(CONVOLUTIONS, 2)}


def fold_centers(graph: Graph, folds: Sequence[SiteFold], add_bias: bool) -> None:
    """Decide for each point-wise layer with a learned centre whether the bias before can take it."""
    for fold in folds:
        layer = fold.module
        if not isinstance(layer, PointwiseNorm) or layer.center is None or fold.goes:
            continue
        if not fold.chosen or not fold.calls:
            continue
        center = layer.center.detach().to("cpu", torch.float64)
        fold.center = center.expand(fold.site.normalized_shape)
        try:
            fold.center_into = bias_before(graph, fold, add_bias)
        except RefusedError as refusal:
            fold.center_kept = str(refusal)


def bias_before(graph: Graph, fold: SiteFold, add_bias: bool) -> Write:
    """Return the bias, or the table, that adds to all of a site's input and to nothing else.

    Raises:
        RefusedError: there is none, for the first of the reasons that were met.
    """
    if len(fold.calls) != 1:
        raise RefusedError("the layer is called several times")
    value = fold.calls[0].all_input_nodes[0]
    todo = [(value, fold.dim % len(shape(value)))]
    refusals: list[str] = []
    while todo:
        made = made_by(*todo.pop())
        if made is None:
            refusals.append(f"its input is also read by others than {fold.path}")
            continue
        op, axis = made
        if packet(op) == "aten.add" and not op.kwargs and op.args[0] is not op.args[1]:
            todo += _terms(op, axis)
            continue
        try:
            return _bias_of(graph, op, axis, add_bias)
        except RefusedError as refusal:
            refusals.append(str(refusal))
    raise RefusedError(refusals[0] if refusals else "its input is one number for all channels")


def _terms(op: Node, axis: int) -> list[tuple[Node, int]]:
    """Return the terms of a sum that have all channels, with their channel axes."""
    terms = []
    for part in op.args[:2]:
        if is_tensor(part):
            at = axis - len(shape(op)) + len(shape(part))
            # One number for all channels cannot hold a centre.
            if at >= 0 and shape(part)[at] == shape(op)[axis]:
                terms.append((part, at))
    return terms


def _bias_of(graph: Graph, op: Node, axis: int, add_bias: bool) -> Write:
    """Return the write of an operator's bias or table; of its weight, if it will be given a bias."""
    write: Write | None = None
    is_new = False
    if op in graph.slots:
        # A parameter that is added itself, as learned positions are.
        slot = graph.slots[op]
        for leaf in slot.leaves:
            write = Write(leaf, slot, axis)
    elif packet(op) in _BIAS:
        bias = argument(op, _BIAS[packet(op)])
        is_new = bias is None
        for candidate in writes(graph, op, axis):
            if write is None and bias in (None, candidate.leaf[1]):
                write = candidate
    if write is None or (is_new and not add_bias):
        hint = "" if write is None else ": pass add_bias=True"
        raise RefusedError(f"fed by {graph.where(op)}, which has no bias to take its centre{hint}")
    slot = write.slot
    if slot.fixed is not None:
        raise RefusedError(slot.fixed)
    if slot.leaves != {write.leaf} or not slot.is_saved:
        raise RefusedError(f"{slot.name} is used elsewhere too")
    if is_new:
        require_new_bias(graph, slot, op)
        return replace(write, is_new=True)
    return write
