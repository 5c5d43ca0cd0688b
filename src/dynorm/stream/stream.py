"""The residual stream: values that are sums of one another, and everything that touches them.

A stream is found once, and no edit is in mind: it records its facts. An edit of its channels, such
as taking their mean out, then asks whether the facts allow it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.fx import Node

from dynorm.stream.channels import came_from, carried
from dynorm.stream.graph import (
    Leaf,
    argument,
    is_tensor,
    norm_index,
    packet,
    producer,
    rank_of,
    shape,
    slot_of,
    users,
    where,
    width,
)
from dynorm.stream.operators import Reader, RefusedError, Write, reader_of, writes
from dynorm.stream.readers import shared_readers

_SUMS = ("aten.add", "aten.sub", "aten.rsub")
_ZEROS = ("aten.zeros", "aten.zeros_like", "aten.new_zeros")


@dataclass(frozen=True)
class NormUse:
    """A norm that reads or writes a stream."""

    index: int  # the norm
    over_channels: bool  # it normalizes over the channels of the stream


@dataclass(eq=False)
class Stream:
    """All values that are sums of one another, up to operators that keep the channels separate."""

    values: dict[Node, int] = field(default_factory=dict)  # with the channel axis
    writes: list[Write] = field(default_factory=list)
    norms_before: list[NormUse] = field(default_factory=list)  # these write into it (post-norm)
    norms_after: list[NormUse] = field(default_factory=list)  # these read it
    readers: list[Reader] = field(default_factory=list)  # linear operators that read it directly
    read_by: str | None = None  # the first operator that is not a norm and reads it
    is_returned: bool = False  # the model returns it
    # Each is the reason why edits of the channels are not exact, as words of a message: a writer or
    # a reader is not linear, or the parameters of one are used elsewhere.
    writer_refused: str | None = None
    axes_refused: str | None = None
    shared_writer_refused: str | None = None
    reader_refused: str | None = None
    shared_reader_refused: str | None = None


class StreamFinder:
    """Finds the streams of a graph, each once.

    ``dims`` has the channel axis of each norm of the graph, as the norm's own ``dim``.
    """

    def __init__(self, dims: Mapping[int, int]) -> None:
        self.dims = dims
        self.streams: list[Stream] = []
        self._todo: list[tuple[Node, int]] = []

    def stream_of(self, start: Node, dim: int) -> Stream:
        """Return the stream that a value belongs to."""
        for known in self.streams:
            if start in known.values:
                return known
        stream = Stream()
        self.streams.append(stream)
        self._todo = [(start, dim % rank_of(start))]
        while self._todo:
            value, axis = self._todo.pop()
            if value not in stream.values:
                stream.values[value] = axis
                self._follow_back(stream, value, axis)
                for user in users(value):
                    self._follow_on(stream, user, value, axis)
            elif stream.values[value] != axis:
                stream.axes_refused = f"{where(value)} has the channels on two axes"
                _refuse_writer(stream, stream.axes_refused)
        stream.shared_writer_refused = _shared_writers(stream)
        stream.shared_reader_refused = shared_readers(
            stream.readers, {r.leaf: r for r in stream.readers}
        )
        return stream

    def _follow_back(self, stream: Stream, value: Node, axis: int) -> None:
        """Follow a value of a stream to the values that it is made of."""
        op, _ = producer(value)
        slot = slot_of(value)
        if slot is not None:
            stream.writes.append(Write(Leaf(value, value), slot, axis))
            # The uses by other owners of the same parameter are values of the stream too.
            self._todo += [(node, axis) for node in slot.nodes]
            return
        if packet(op) in _SUMS:
            self._follow_parts(stream, value, axis, op.args[:2])
            return
        if packet(op) == "aten.cat":
            self._follow_parts(stream, value, axis, op.args[0])
            return
        source = came_from(value, axis, carried)
        if source is not None:
            self._todo.append(source)
            return
        written = writes(op, axis)
        if written:
            stream.writes += written
        elif op.op == "placeholder":
            _refuse_writer(stream, f"written by {op.name}, which the model is given")
        elif norm_index(op) is not None:
            stream.norms_before.append(self._norm_use(op, value, axis))
        elif packet(op) not in _ZEROS:
            _refuse_writer(stream, f"written by {where(op)}, which is not linear")

    def _follow_parts(self, stream: Stream, value: Node, axis: int, parts: Any) -> None:
        """Follow a sum to its terms, or a concatenation of tokens to its parts."""
        place = where(value)
        for part in parts:
            if not is_tensor(part):
                _refuse_writer(stream, f"written by {place}, which adds a number to all channels")
                continue
            at = rank_of(part) - rank_of(value) + axis
            if at < 0 or shape(part)[at] != shape(value)[axis]:
                _refuse_writer(
                    stream, f"written by {place}, in parts or one number for all channels"
                )
                continue
            self._todo.append((part, at))

    def _follow_on(self, stream: Stream, user: Node, value: Node, axis: int) -> None:
        """Follow a value of a stream to one of its uses."""
        if user.op == "output":
            stream.is_returned = True
            return
        op, _ = producer(user)
        if norm_index(op) is not None:
            stream.norms_after.append(self._norm_use(op, value, axis))
            return
        to = carried(user, value, axis)
        if to is not None:
            self._todo.append((user, to))
        elif packet(op) in _SUMS:
            # The axes of a sum's terms are counted from the last one.
            self._todo.append((user, axis - rank_of(value) + rank_of(user)))
        elif packet(op) == "aten.cat" and (argument(op, 1) or 0) % rank_of(user) != axis:
            self._todo.append((user, axis))
        else:
            _add_reader(stream, user, value, axis)

    def _norm_use(self, call: Node, value: Node, axis: int) -> NormUse:
        index = norm_index(call)
        assert index is not None
        return NormUse(index, self.dims[index] % rank_of(value) == axis)


def _refuse_writer(stream: Stream, reason: str) -> None:
    if stream.writer_refused is None:
        stream.writer_refused = reason


def _add_reader(stream: Stream, user: Node, value: Node, axis: int) -> None:
    if stream.read_by is None:
        stream.read_by = where(user)
    try:
        reader = reader_of(user, value, axis)
    except RefusedError as refusal:
        if stream.reader_refused is None:
            stream.reader_refused = str(refusal)
        return
    if reader not in stream.readers:
        stream.readers.append(reader)


def _shared_writers(stream: Stream) -> str | None:
    """Return why a parameter that writes into a stream cannot change, or None."""
    by_leaf = {write.leaf: write for write in stream.writes}
    gain_uses = {write.gain_leaf for write in stream.writes}
    narrowest = min(map(width, stream.values))
    for write in stream.writes:
        slot = write.slot
        name = slot.name
        if narrowest < slot.tensor.dtype.itemsize:
            return f"{name} writes into it, and it is rounded to fewer digits than that has"
        if slot.refused is not None:
            return f"{name} writes into it: {slot.refused}"
        if not slot.is_saved:
            return f"{name} writes into it, and is not saved with the model"
        gain = write.gain
        # The uses of a parameter that is a value of the stream were followed.
        uses_to_check = set() if write.is_value else slot.leaves
        for leaf in uses_to_check:
            other = by_leaf.get(leaf)
            if other is None or other.axis != write.axis:
                return f"{name} writes into it, and is also used by {leaf.place}{slot.hint}"
            if gain is not other.gain:
                how = "several times, not always scaled by the same gain"
                return f"{name} writes into it {how}{slot.hint}"
        if gain is not None:
            if gain.refused is not None or len(gain.leaves) != 1 or not gain.leaves <= gain_uses:
                return f"{gain.name} scales writes into it, and is used elsewhere too"
            if not gain.is_saved:
                return f"{gain.name} scales writes into it, and is not saved with the model"
    return None
