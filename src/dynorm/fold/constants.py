"""Rewrite (c): the learned centre of a point-wise layer into the bias of the one operator that feeds it, b' = b - c.

The scale goes into the readers with the weight, in :mod:`affine`. The constant of the slope stays: a layer computes
alpha * x, or beta + x^2, in the pass over x that it makes anyway, so moving it into a weight would save nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Node

from dynorm.fold.graph import Graph, packet, producer, shape, users
from dynorm.fold.moves import came_from
from dynorm.fold.places import Place
from dynorm.fold.slots import Slot, Slots
from dynorm.fold.stream import writes_of
from dynorm.layers import PointwiseNorm

_BIASED = {"aten.linear", "aten.addmm", "aten.conv1d", "aten.conv2d", "aten.conv3d"}


@dataclass(eq=False)
class CenterFold:
    """What happens to the learned centre of a point-wise layer.

    Args:
        place: the layer.
        center: its centre in float64.
        bias: the bias that takes it, or None.
        problem: why it stays, or None.
    """

    place: Place
    center: Tensor
    bias: Slot | None = None
    problem: str | None = None


def plan_constants(graph: Graph, slots: Slots, places: list[Place]) -> dict[int, CenterFold]:
    """Decide for each point-wise layer with a centre whether a bias can take it."""
    found = {}
    for index, place in enumerate(places):
        center = place.module.center if isinstance(place.module, PointwiseNorm) else None
        if center is None or place.problem is not None or not place.chosen or index not in graph.calls:
            continue
        fold = CenterFold(place, center.detach().to("cpu", torch.float64))
        bias = _bias_before(graph, slots, graph.calls[index], place)
        if isinstance(bias, str):
            fold.problem = bias
        else:
            fold.bias = bias
        found[index] = fold
    return found


def _bias_before(graph: Graph, slots: Slots, calls: list[Node], place: Place) -> Slot | str:
    if len(calls) != 1:
        return "the layer is called several times"
    value = calls[0].args[0]
    assert isinstance(value, Node)
    axis = place.axis(len(shape(value)))
    while True:
        if len(list(users(value))) != 1:
            return f"what it reads is also read by others than {place.path}"
        source = came_from(value, axis)
        if source is None:
            break
        value, axis = source
    op, _ = producer(value)
    written = writes_of(graph, op, axis) if packet(op) in _BIASED else []
    at = 0 if packet(op) == "aten.addmm" else 2
    mine = [w for w in written if len(op.args) > at and w.leaf[1] is op.args[at]]
    if not mine:
        return f"fed by {graph.where(op)}, which has no bias to take its centre"
    slot = slots.of(mine[0].leaf, mine[0].placeholder)
    if slot.tied is not None or slot.leaves != {mine[0].leaf}:
        return slot.tied or f"{slot.name} is used elsewhere too"
    return slot
