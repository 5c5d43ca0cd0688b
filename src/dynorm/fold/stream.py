"""Rewrites (b) and (c): means out of the residual stream, learned centres of layers into the bias before them.

With P = I - 11^T / C, LayerNorm(P x) = LayerNorm(x), and for an x without a mean it is RMSNorm. So if the mean is taken
out of everything that writes into the stream, W' = P W and b' = P b, and nothing but LayerNorms looks at it, no output
changes. The centre c of a point-wise layer goes into the one operator that feeds it, b' = b - c.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch.fx import Node

from dynorm.fold.graph import Graph, argument, came_from, carried, is_tensor, made_by, packet, producer, shape, users
from dynorm.fold.operators import CONVOLUTIONS, writes
from dynorm.fold.refusals import RefusedError, is_exact, require_new_bias, require_writers
from dynorm.fold.site_fold import SiteFold, Stream, Write
from dynorm.layers import PointwiseNorm

_ZEROS = {"aten.zeros", "aten.zeros_like", "aten.new_zeros"}
_SUMS = {"aten.add", "aten.sub", "aten.rsub"}


def fold_means(graph: Graph, folds: Sequence[SiteFold]) -> None:
    """Find the streams that each LayerNorm is called on, and whether their means can be taken out."""
    found: list[Walk] = []
    layernorms = [fold for fold in folds if fold.calls and fold.site.kind == "layernorm"]
    for fold in layernorms:
        for source in (call.all_input_nodes[0] for call in fold.calls):
            if not any(source in stream.values for stream in found):
                found.append(Walk(graph=graph, folds=folds))
                found[-1].walk(source, fold.axis(len(shape(source))))
            stream: Stream = next(stream for stream in found if source in stream.values)
            fold.streams += [stream] * (stream not in fold.streams)
    for fold in layernorms:
        if any(stream.refused is None for stream in fold.streams) and not is_exact(fold, as_rms=True):
            for stream in fold.streams:
                stream.refused = stream.refused or f"{fold.path} is no LayerNorm to the last digits"


@dataclass(eq=False, kw_only=True)
class Walk(Stream):
    """A stream that is found from one of its values; a subclass says what else may write or read it."""

    graph: Graph
    folds: Sequence[SiteFold]
    todo: list[tuple[Node, int]] = field(default_factory=list)
    not_linear: ClassVar = "cannot be centred"
    returned: ClassVar = ", with its mean"

    def walk(self, start: Node, axis: int) -> None:
        """Find all values of the stream, and whether it is refused."""
        self.todo.append((start, axis))
        try:
            while self.todo:
                value, axis = self.todo.pop()
                if value not in self.values:
                    self.values[value] = axis
                    self._source(value, axis)
                    for user in users(value):
                        self._use(user, value, axis)
                elif self.values[value] != axis:
                    raise RefusedError(f"{self.graph.where(value)} has the channels on two axes")
            self._require()
        except RefusedError as refusal:
            self.refused = str(refusal)

    def _source(self, value: Node, axis: int) -> None:
        """Follow a value to the values that it is made of."""
        graph, (op, _) = self.graph, producer(value)
        name = packet(op)
        if name in _ZEROS:
            return
        if value in graph.slots:
            slot = graph.slots[value]
            self.writes.append(Write((value, value), slot, axis))
            # Other owners of the same parameter: their uses are values of the stream too.
            self.todo += [(node, axis) for node in slot.nodes]
            return
        if name in _SUMS or name == "aten.cat":
            parts: Any = op.args[:2] if name in _SUMS else op.args[0]
            for part in parts:
                if not is_tensor(part):
                    raise RefusedError(f"written by {graph.where(op)}, which adds a number to all channels")
                at = len(shape(part)) - len(shape(value)) + axis
                if at < 0 or shape(part)[at] != shape(value)[axis]:
                    raise RefusedError(f"written by {graph.where(op)}, in parts or one number for all channels")
                self.todo.append((part, at))
            return
        source = came_from(value, axis, carried)
        if source is not None:
            self.todo.append(source)
            return
        written = writes(graph, op, axis)
        if not written and op.op == "placeholder":
            raise RefusedError(f"written by {op.name}, which the model is given")
        if not written and op in graph.norms:
            norm = self.folds[graph.norms[op]]
            self._norm_writes(norm, norm.axis(len(shape(value))) == axis)
        elif not written:
            raise RefusedError(f"written by {graph.where(op)}, which {self.not_linear}")
        self.writes += written

    def _use(self, user: Node, value: Node, axis: int) -> None:
        """Follow a value to one of its uses."""
        if user.op == "output":
            raise RefusedError(f"the model returns it{self.returned}")
        op, _ = producer(user)
        name = packet(op)
        if op in self.graph.norms:
            norm = self.folds[self.graph.norms[op]]
            self._norm_reads(norm, norm.axis(len(shape(value))) == axis)
            return
        to = carried(user, value, axis)
        if to is None and name in _SUMS:
            to = axis - len(shape(value)) + len(shape(user))
        if to is None and name == "aten.cat":
            to = axis if (argument(op, 1) or 0) % len(shape(user)) != axis else None
        if to is None:
            self._reads(user, value, axis)
        else:
            self.todo.append((user, to))

    def _require(self) -> None:
        """Check that what writes and reads the stream does nothing else."""
        require_writers(self.graph, self)

    def _norm_writes(self, norm: SiteFold, along: bool) -> None:
        """Refuse a norm that writes into the stream, or take note of it; ``along`` tells whether over its channels."""
        raise RefusedError(f"written by the norm {norm.path}, whose weight and bias give it a mean again (post-norm)")

    def _norm_reads(self, norm: SiteFold, along: bool) -> None:
        """Refuse a norm that reads the stream, or take note of it."""
        if norm.site.kind != "layernorm" or not along:
            raise RefusedError(f"{norm.path} sees its mean")

    def _reads(self, user: Node, value: Node, axis: int) -> None:
        """Refuse any other operator that reads the stream, or take note of it."""
        raise RefusedError(f"{self.graph.where(user)} sees its mean")


def fold_centers(graph: Graph, folds: Sequence[SiteFold], add_bias: bool) -> None:
    """Decide for each point-wise layer with a learned centre whether the bias before it can take it."""
    for fold in folds:
        center = fold.module.center if isinstance(fold.module, PointwiseNorm) and not fold.goes else None
        if center is None or not fold.chosen or not fold.calls:
            continue
        fold.center = center.detach().to("cpu", torch.float64).expand(fold.site.normalized_shape)
        try:
            fold.center_into = bias_before(graph, fold, add_bias)
        except RefusedError as refusal:
            fold.center_kept = str(refusal)


def bias_before(graph: Graph, fold: SiteFold, add_bias: bool) -> Write:
    """Return the bias, or the table, that adds to all of a site's input and to nothing else; RefusedError if none."""
    if len(fold.calls) != 1:
        raise RefusedError("the layer is called several times")
    value = fold.calls[0].all_input_nodes[0]
    todo, refusals = [(value, fold.axis(len(shape(value))))], list[str]()
    while todo:
        value, axis = todo.pop()
        made = made_by(value, axis)
        if made is None:
            refusals.append(f"its input is also read by others than {fold.path}")
            continue
        (op, _), axis = producer(made[0]), made[1]
        if packet(op) == "aten.add" and not op.kwargs and op.args[0] is not op.args[1]:
            ranks = [(part, len(shape(part))) for part in op.args[:2] if is_tensor(part)]
            # One number for all channels has no room for a centre.
            places = [(part, axis - len(shape(op)) + rank) for part, rank in ranks]
            todo += [(part, at) for part, at in places if at >= 0 and shape(part)[at] == shape(op)[axis]]
            continue
        biased = packet(op) in ("aten.linear", "aten.addmm", "aten.embedding", *CONVOLUTIONS)
        bias = argument(op, 0 if packet(op) in ("aten.addmm", "aten.embedding") else 2) if biased else None
        written = writes(graph, op, axis) if biased else []
        if op in graph.slots:
            bias, written = op, [Write(leaf, graph.slots[op], axis) for leaf in graph.slots[op].leaves]
        found = next((write for write in written if op in graph.slots or bias in (None, write.leaf[1])), None)
        if found is None or (bias is None and not add_bias):
            hint = "" if found is None else ": pass add_bias=True"
            refusals.append(f"fed by {graph.where(op)}, which has no bias to take its centre{hint}")
        elif found.slot.fixed is not None or found.slot.leaves != {found.leaf} or not found.slot.is_saved:
            refusals.append(found.slot.fixed or f"{found.slot.name} is used elsewhere too")
        elif bias is not None:
            return found
        else:
            require_new_bias(graph, found.slot, op)
            return replace(found, is_new=True)
    raise RefusedError(refusals[0])
