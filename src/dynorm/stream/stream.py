"""The residual stream: values that are sums of one another, and everything that touches them.

A stream is found once, and no edit is in mind: it records its facts. An edit of its channels, such
as taking their mean out, then asks whether the facts allow it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.fx import Node

from dynorm.stream.graph import (
    Graph,
    argument,
    came_from,
    carried,
    is_tensor,
    packet,
    producer,
    shape,
    users,
    width,
)
from dynorm.stream.operators import RefusedError, Write, writes

SUMS = ("aten.add", "aten.sub", "aten.rsub")
_ZEROS = ("aten.zeros", "aten.zeros_like", "aten.new_zeros")


@dataclass(frozen=True)
class NormUse:
    """A norm that reads or writes a stream."""

    index: int  # the norm
    over_channels: bool  # it normalizes over the channels of the stream


@dataclass(frozen=True)
class OtherUse:
    """Any other operator that reads a stream."""

    node: Node
    value: Node  # the value that it reads
    axis: int  # the channel axis of that value


@dataclass(eq=False)
class Stream:
    """All values that are sums of one another, up to operators that keep the channels separate."""

    values: dict[Node, int] = field(default_factory=dict)  # with the channel axis
    writes: list[Write] = field(default_factory=list)
    norms_before: list[NormUse] = field(default_factory=list)  # these write into it (post-norm)
    norms_after: list[NormUse] = field(default_factory=list)  # these read it
    other_uses: list[OtherUse] = field(default_factory=list)
    is_returned: bool = False  # the model returns it
    obstacle: str | None = None  # why no edit of its channels is exact

    def refuse(self, reason: str) -> None:
        """Note why the stream cannot be edited; the first reason stays."""
        if self.obstacle is None:
            self.obstacle = reason

    def require_followed(self) -> None:
        """Check that all writers of the stream are known."""
        if self.obstacle is not None:
            raise RefusedError(self.obstacle)

    def require_writers(self, graph: Graph) -> None:
        """Check that the parameters that write into it do nothing else."""
        by_leaf = {write.leaf: write for write in self.writes}
        narrowest = min(map(width, self.values))
        for write in self.writes:
            slot = write.slot
            if narrowest < slot.tensor.dtype.itemsize:
                raise RefusedError(
                    f"{slot.name} writes into it, and it is rounded to fewer digits than that has"
                )
            if slot.fixed is not None:
                raise RefusedError(f"{slot.name} writes into it: {slot.fixed}")
            if not slot.is_saved:
                raise RefusedError(f"{slot.name} writes into it, and is not saved with the model")
            # The uses of a parameter that is a value of the stream were followed.
            if not write.is_value:
                _require_same_writes(graph, write, by_leaf)
            if write.gain is not None:
                self._require_gain(write)

    def _require_gain(self, write: Write) -> None:
        """Check that the gain (LayerScale) of a write scales nothing outside of the stream."""
        assert write.gain is not None
        gain = write.gain[1]
        uses = {other.gain[0] for other in self.writes if other.gain is not None}
        if gain.fixed is not None or len(gain.leaves) != 1 or not gain.leaves <= uses:
            raise RefusedError(f"{gain.name} scales writes into it, and is used elsewhere too")
        if not gain.is_saved:
            raise RefusedError(
                f"{gain.name} scales writes into it, and is not saved with the model"
            )


def _require_same_writes(graph: Graph, write: Write, by_leaf: Mapping[Any, Write]) -> None:
    """Check that all uses of a parameter write into the stream in the same way."""
    slot = write.slot
    for leaf in slot.leaves:
        other = by_leaf.get(leaf)
        if other is None or other.axis != write.axis:
            where = graph.where(leaf[0])
            raise RefusedError(
                f"{slot.name} writes into it, and is also used by {where}{slot.hint}"
            )
        gains = [use.gain and use.gain[1] for use in (other, write)]
        if gains[0] is not gains[1]:
            raise RefusedError(
                f"{slot.name} writes into it several times, not always scaled by the same gain"
                f"{slot.hint}"
            )


class StreamFinder:
    """Finds the streams of a graph, each once.

    ``dims`` has the channel axis of each norm of the graph, as the norm's own ``dim``.
    """

    def __init__(self, graph: Graph, dims: Mapping[int, int]) -> None:
        self.graph = graph
        self.dims = dims
        self.streams: list[Stream] = []
        self._todo: list[tuple[Node, int]] = []

    def before(self, call: Node) -> Stream:
        """Return the stream that a norm's call reads."""
        return self._stream_of(call.all_input_nodes[0], self.graph.norms[call])

    def after(self, call: Node) -> Stream:
        """Return the stream that a norm's call writes into."""
        return self._stream_of(call, self.graph.norms[call])

    def _stream_of(self, start: Node, norm: int) -> Stream:
        for known in self.streams:
            if start in known.values:
                return known
        stream = Stream()
        self.streams.append(stream)
        self._todo = [(start, self.dims[norm] % len(shape(start)))]
        while self._todo:
            value, axis = self._todo.pop()
            if value not in stream.values:
                stream.values[value] = axis
                self._follow_back(stream, value, axis)
                for user in users(value):
                    self._follow_on(stream, user, value, axis)
            elif stream.values[value] != axis:
                stream.refuse(f"{self.graph.where(value)} has the channels on two axes")
        return stream

    def _follow_back(self, stream: Stream, value: Node, axis: int) -> None:
        """Follow a value of a stream to the values that it is made of."""
        graph = self.graph
        op, _ = producer(value)
        if value in graph.slots:
            slot = graph.slots[value]
            stream.writes.append(Write((value, value), slot, axis))
            # The uses by other owners of the same parameter are values of the stream too.
            self._todo += [(node, axis) for node in slot.nodes]
            return
        if packet(op) in SUMS:
            self._follow_parts(stream, value, axis, op.args[:2])
            return
        if packet(op) == "aten.cat":
            self._follow_parts(stream, value, axis, op.args[0])
            return
        source = came_from(value, axis, carried)
        if source is not None:
            self._todo.append(source)
            return
        written = writes(graph, op, axis)
        if written:
            stream.writes += written
        elif op.op == "placeholder":
            stream.refuse(f"written by {op.name}, which the model is given")
        elif op in graph.norms:
            stream.norms_before.append(self._norm_use(op, value, axis))
        elif packet(op) not in _ZEROS:
            stream.refuse(f"written by {graph.where(op)}, which is not linear")

    def _follow_parts(self, stream: Stream, value: Node, axis: int, parts: Any) -> None:
        """Follow a sum to its terms, or a concatenation of tokens to its parts."""
        where = self.graph.where(producer(value)[0])
        for part in parts:
            if not is_tensor(part):
                stream.refuse(f"written by {where}, which adds a number to all channels")
                continue
            at = len(shape(part)) - len(shape(value)) + axis
            if at < 0 or shape(part)[at] != shape(value)[axis]:
                stream.refuse(f"written by {where}, in parts or one number for all channels")
                continue
            self._todo.append((part, at))

    def _follow_on(self, stream: Stream, user: Node, value: Node, axis: int) -> None:
        """Follow a value of a stream to one of its uses."""
        if user.op == "output":
            stream.is_returned = True
            return
        op, _ = producer(user)
        if op in self.graph.norms:
            stream.norms_after.append(self._norm_use(op, value, axis))
            return
        to = carried(user, value, axis)
        if to is not None:
            self._todo.append((user, to))
        elif packet(op) in SUMS:
            self._todo.append((user, axis - len(shape(value)) + len(shape(user))))
        elif packet(op) == "aten.cat" and (argument(op, 1) or 0) % len(shape(user)) != axis:
            self._todo.append((user, axis))
        else:
            stream.other_uses.append(OtherUse(user, value, axis))

    def _norm_use(self, call: Node, value: Node, axis: int) -> NormUse:
        index = self.graph.norms[call]
        return NormUse(index, self.dims[index] % len(shape(value)) == axis)
