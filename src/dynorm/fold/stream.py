"""The values around the norms: their readers, and the residual streams that they are called on.

A residual stream is all values that are sums of one another. It is found once, and no edit is in
mind: it records its facts. An edit, such as taking its mean out, then asks whether these allow it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.fx import Node

from dynorm.fold.channels import came_from, carried, factor_of
from dynorm.fold.graph import (
    Leaf,
    argument,
    is_move,
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
from dynorm.fold.operators import Reader, RefusedError, Write, reader_of, writes

_SUMS = ("aten.add", "aten.sub", "aten.rsub")
_ZEROS = ("aten.zeros", "aten.zeros_like", "aten.new_zeros")


@dataclass(eq=False)
class Readers:
    """The linear operators that read all that a norm returns."""

    linear: list[Reader] = field(default_factory=list)
    refused: str | None = None  # why some reader is not one of these
    is_scaled: bool = False  # a factor for each token is between the norm and a reader


def readers_of(calls: Sequence[Node], dim: int) -> Readers:
    """Follow the outputs of a norm's calls, with channel axis ``dim``, to their readers."""
    readers = Readers()
    widest = min(map(width, calls))
    # Each value with its channel axis and the fewest bytes per number on the way to it.
    todo = [(call, dim % rank_of(call), width(call)) for call in calls]
    seen = set()
    try:
        while todo:
            value, axis, narrowest = todo.pop()
            if (value, axis) in seen:
                continue
            seen.add((value, axis))
            # Another norm is the least helpful reason for a refusal, so norms come last.
            for user in sorted(users(value), key=lambda user: norm_index(user) is not None):
                if user.op == "output":
                    raise RefusedError("the model returns it")
                to = carried(user, value, axis)
                if to is not None:
                    todo.append((user, to, min(narrowest, width(user))))
                    readers.is_scaled |= factor_of(user, value, axis)
                    continue
                if is_move(user, value):
                    raise RefusedError(f"its channels are split or reordered by {where(user)}")
                reader = reader_of(user, value, axis)
                if narrowest < min(widest, reader.weight.tensor.dtype.itemsize):
                    raise RefusedError(
                        f"rounded to fewer digits than the weight has before {where(user)} reads it"
                    )
                if reader not in readers.linear:
                    readers.linear.append(reader)
    except RefusedError as refusal:
        readers.refused = str(refusal)
    return readers


def shared_readers(readers: Iterable[Reader], allowed: Mapping[Leaf, Reader]) -> str | None:
    """Return why the weights of some readers cannot change, or None.

    They must be saved, and have only the ``allowed`` uses, which read along the same axis.
    """
    for reader in readers:
        slot = reader.weight
        name = f"{slot.name}, which reads it,"
        if slot.refused is not None:
            return slot.refused
        if not slot.is_saved:
            return f"{name} is not a saved floating-point parameter"
        for leaf in slot.leaves:
            use = allowed.get(leaf)
            if use is None or use.axis != reader.axis:
                return f"{name} is also used by {leaf.place}{slot.hint}"
    return None


@dataclass(frozen=True)
class NormUse:
    """A norm that reads a stream."""

    index: int  # the norm
    over_channels: bool  # it normalizes over the channels of the stream


@dataclass(eq=False)
class Stream:
    """All values that are sums of one another, up to operators that keep the channels separate."""

    values: dict[Node, int] = field(default_factory=dict)  # with the channel axis
    writes: list[Write] = field(default_factory=list)
    norms: list[NormUse] = field(default_factory=list)  # these read it
    read_by: str | None = None  # the first operator that is not a norm and reads it
    is_returned: bool = False  # the model returns it
    # Each is the reason why edits of the channels are not exact, as words of a message: a writer is
    # not linear, the channels have no single axis, or a writer's parameters are used elsewhere.
    writer_refused: str | None = None
    axes_refused: str | None = None
    shared_writer_refused: str | None = None


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
            _refuse_writer(
                stream,
                f"written by {where(op)}, whose weight and bias give it a mean again (post-norm)",
            )
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
        index = norm_index(op)
        if index is not None:
            over_channels = self.dims[index] % rank_of(value) == axis
            stream.norms.append(NormUse(index, over_channels))
            return
        to = carried(user, value, axis)
        if to is not None:
            self._todo.append((user, to))
        elif packet(op) in _SUMS:
            # The axes of a sum's terms are counted from the last one.
            self._todo.append((user, axis - rank_of(value) + rank_of(user)))
        elif packet(op) == "aten.cat" and (argument(op, 1) or 0) % rank_of(user) != axis:
            self._todo.append((user, axis))
        elif stream.read_by is None:
            stream.read_by = where(user)


def _refuse_writer(stream: Stream, reason: str) -> None:
    if stream.writer_refused is None:
        stream.writer_refused = reason


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
