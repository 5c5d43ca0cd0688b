"""Rewrite (b): the mean out of everything that writes into a residual stream, so that its LayerNorms become RMSNorms.

With P = I - 11^T / C, LayerNorm(P x) = LayerNorm(x), and for a centred x it is RMSNorm. So if all that writes into the
stream is centred, W' = P W and b' = P b, and nothing but LayerNorms looks at it, no output changes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch.fx import Node

from dynorm.fold.graph import Graph, Leaf, is_tensor, packet, producer, shape, site_of, users
from dynorm.fold.moves import averaged, came_from, factor_of, held_at, is_move, moved
from dynorm.fold.places import Place
from dynorm.fold.slots import Slot, Slots

_ZEROS = {"aten.zeros", "aten.zeros_like", "aten.new_zeros"}
_SUMS = {"aten.add", "aten.sub", "aten.rsub"}
_CONVOLUTIONS = {"aten.conv1d", "aten.conv2d", "aten.conv3d"}
_PRODUCTS = {"aten.mm", "aten.matmul", "aten.bmm"}


@dataclass(frozen=True)
class Write:
    """A parameter that writes into a stream.

    Args:
        leaf: its use.
        placeholder: of the parameter.
        axis: of the parameter that the stream's channels go along.
        gain: the use and placeholder of what multiplies each channel of it on the way (LayerScale), or None.
    """

    leaf: Leaf
    placeholder: Node
    axis: int
    gain: tuple[Leaf, Node] | None = None


@dataclass(eq=False)
class Stream:
    """All values that are sums of one another, up to what leaves each channel alone.

    Args:
        values: the nodes, with the axis of the channels.
        writes: everything that writes into it.
        norms: the indices of the LayerNorms that look at it.
        problem: why it cannot be centred, or None.
    """

    values: dict[Node, int] = field(default_factory=dict)
    writes: list[Write] = field(default_factory=list)
    norms: set[int] = field(default_factory=set)
    problem: str | None = None


def plan_center(graph: Graph, slots: Slots, places: list[Place]) -> dict[int, list[Stream]]:
    """Return the streams that each LayerNorm is called on, by its index; one stream is one object.

    Args:
        graph: the traced model.
        slots: its parameters.
        places: its norms, numbered as in the graph.
    """
    wanted = [i for i, p in enumerate(places) if i in graph.calls and p.problem is None and p.site.kind == "layernorm"]
    found: list[Stream] = []
    for index in wanted:
        for call in graph.calls[index]:
            source = call.args[0]
            assert isinstance(source, Node)
            if not any(source in stream.values for stream in found):
                found.append(_Walk(graph, places).stream(source, places[index].axis(len(shape(source)))))
    for stream in found:
        stream.problem = stream.problem or _shared(graph, slots, stream)
    return {index: [s for s in found if any(c.args[0] in s.values for c in graph.calls[index])] for index in wanted}


class _Walk:
    """The way from one value to all of its stream."""

    def __init__(self, graph: Graph, places: list[Place]) -> None:
        self.graph, self.places = graph, places
        self.found = Stream()
        self.todo: list[tuple[Node, int]] = []

    def stream(self, start: Node, axis: int) -> Stream:
        self.todo.append((start, axis))
        while self.todo and self.found.problem is None:
            value, axis = self.todo.pop()
            known = self.found.values.get(value)
            if known is None:
                self.found.values[value] = axis
                self.found.problem = self._source(value, axis) or self._uses(value, axis)
            elif known != axis:
                self.found.problem = f"{self.graph.where(value)} has the channels on two axes"
        return self.found

    def _source(self, value: Node, axis: int) -> str | None:
        """Follow a value to where it comes from."""
        graph, (op, _) = self.graph, producer(value)
        name = packet(op)
        if name in _ZEROS:
            return None
        if graph.tensor(value) is not None:
            self.found.writes.append(Write((value, value), value, axis))
            return None
        if name in _SUMS:
            return self._sum(op, value, axis)
        if name == "aten.cat":
            return self._all(list(op.args[0]), value, axis, op)  # type: ignore[arg-type]
        for source in (a for a in op.args[:2] if is_tensor(a)):
            assert isinstance(source, Node)
            if factor_of(op, source, axis - len(shape(value)) + len(shape(source))):
                self.todo.append((source, axis))
                return None
            back = _before_mean(op, source, axis)
            if back is not None:
                self.todo.append((source, back))
                return None
        moved_from = came_from(value, axis)
        if moved_from is not None:
            self.todo.append(moved_from)
            return None
        written = writes_of(graph, op, axis)
        if written:
            self.found.writes += written
            return None
        if op.op == "placeholder":
            return f"written by {op.name}, which the model is given"
        if name == "dynorm.fold_site":
            norm = self.places[site_of(op)].path
            return f"written by the norm {norm}, whose weight and bias give it a mean again (post-norm)"
        return f"written by {graph.where(op)}, which cannot be centred"

    def _sum(self, op: Node, value: Node, axis: int) -> str | None:
        return self._all(list(op.args[:2]), value, axis, op)

    def _all(self, parts: list[object], value: Node, axis: int, op: Node) -> str | None:
        from_end = len(shape(value)) - axis
        for part in parts:
            if not is_tensor(part):
                return f"written by {self.graph.where(op)}, which adds a number to all channels"
            assert isinstance(part, Node)
            rank = len(shape(part))
            if rank < from_end or shape(part)[rank - from_end] != shape(value)[axis]:
                return f"written by {self.graph.where(op)}, in parts or one number for all channels"
            self.todo.append((part, rank - from_end))
        return None

    def _uses(self, value: Node, axis: int) -> str | None:
        """Follow a value to where it is used."""
        for user in users(value):
            problem = self._use(user, value, axis)
            if problem is not None:
                return problem
        return None

    def _use(self, user: Node, value: Node, axis: int) -> str | None:
        graph = self.graph
        if user.op == "output":
            return "the model returns it, with its mean"
        op, _ = producer(user)
        name = packet(op)
        if name == "dynorm.fold_site":
            return self._read_by(site_of(op), axis, len(shape(value)))
        to = axis if factor_of(op, value, axis) else averaged(op, value, axis)
        if to is None and is_move(user, value):
            to = moved(user, value, axis)
        if to is None and name in _SUMS:
            to = axis - len(shape(value)) + len(shape(user))
        if to is None and name == "aten.cat":
            dim = op.args[1] if len(op.args) > 1 else 0
            assert isinstance(dim, int)
            to = axis if dim % len(shape(user)) != axis else None
        if to is None:
            return f"{graph.where(op)} sees its mean"
        self.todo.append((user, to))
        return None

    def _read_by(self, index: int, axis: int, rank: int) -> str | None:
        place = self.places[index]
        if place.problem is None and place.site.kind == "layernorm" and place.axis(rank) == axis:
            self.found.norms.add(index)
            return None
        return f"{place.path} sees its mean"


def _before_mean(op: Node, source: Node, axis: int) -> int | None:
    fitting = (a for a in range(len(shape(source))) if averaged(op, source, a) == axis)
    return next(fitting, None)


def writes_of(graph: Graph, op: Node, axis: int) -> list[Write]:
    """What a linear operator writes with: weight and bias, or a table; nothing where it is no such operator."""
    name, rank = packet(op), len(shape(op))
    if name == "aten.mul":
        return _gained(graph, op, axis)
    parts: list[tuple[object, int]] = []
    if name == "aten.linear" and axis == rank - 1:
        parts = [(op.args[1], 0), (op.args[2] if len(op.args) > 2 else None, 0)]
    elif name == "aten.addmm" and axis == rank - 1 and not op.kwargs:
        parts = [(op.args[2], 1), (op.args[0], 0)]
    elif name in _PRODUCTS and axis == rank - 1 and is_tensor(op.args[1]):
        parts = [(op.args[1], len(shape(op.args[1])) - 1)]  # type: ignore[arg-type]
    elif name == "aten.embedding" and axis == rank - 1:
        parts = [(op.args[0], 1)]
    elif name in _CONVOLUTIONS and axis == 1 and (op.args[6] if len(op.args) > 6 else 1) == 1 and not op.kwargs:
        parts = [(op.args[1], 0), (op.args[2] if len(op.args) > 2 else None, 0)]
    found = []
    for part, along in parts:
        if part is None:
            continue
        held = held_at(graph, part, along) if isinstance(part, Node) and is_tensor(part) else None
        if held is None or shape(part)[along] != shape(op)[axis]:  # type: ignore[arg-type]
            return []
        if sum(arg is part for arg in op.args) != 1:
            return []
        assert isinstance(part, Node)
        found.append(Write((op, part), *held))
    return found


def _gained(graph: Graph, op: Node, axis: int) -> list[Write]:
    """LayerScale: a parameter times what a linear operator writes; folded into that operator it can be centred."""
    if len(op.args) != 2 or op.kwargs or not all(is_tensor(arg) for arg in op.args):
        return []
    from_end = len(shape(op)) - axis
    for gain, value in (op.args, op.args[::-1]):
        assert isinstance(gain, Node)
        assert isinstance(value, Node)
        held = held_at(graph, gain, len(shape(gain)) - from_end) if len(shape(gain)) >= from_end else None
        if held is None or len(shape(held[0])) != 1 or shape(value) != shape(op):
            continue
        along = axis
        while True:
            if len(list(users(value))) != 1:
                return []
            source = came_from(value, along)
            if source is None:
                break
            value, along = source
        written = writes_of(graph, producer(value)[0], along) if packet(value) != "aten.mul" else []
        return [Write(w.leaf, w.placeholder, w.axis, ((op, gain), held[0])) for w in written]
    return []


def _shared(graph: Graph, slots: Slots, stream: Stream) -> str | None:
    """Why a parameter that writes into the stream must not change: it does something else too."""
    axes = {write.leaf: write.axis for write in stream.writes}
    scaled = {write.leaf: None if write.gain is None else write.gain[1] for write in stream.writes}
    gains = {write.gain[0] for write in stream.writes if write.gain is not None}
    narrowest = min(value.meta["val"].dtype.itemsize for value in stream.values)
    for write in stream.writes:
        for slot in slots_of(slots, write):
            if narrowest < slot.tensor.dtype.itemsize:
                return f"{slot.name} writes into it, and it is rounded to fewer digits than that has"
            if slot.tied is not None:
                return f"{slot.name} writes into it: {slot.tied}"
            if not graph.is_saved(slot.tensor) or not slot.tensor.is_floating_point():
                return f"{slot.name} writes into it, and is not saved with the model"
            # The uses of a parameter that is itself a value of the stream were followed as such.
            for leaf in () if is_value(write) else slot.leaves:
                hint = ": pass untie=True" if len(slot.owners) > 1 and not slots.untie else ""
                if axes.get(leaf) != write.axis:
                    return f"{slot.name} writes into it, and is also used by {graph.where(leaf[0])}{hint}"
                if scaled[leaf] is not scaled[write.leaf]:
                    return f"{slot.name} writes into it several times, not always scaled by the same gain{hint}"
        if write.gain is not None:
            gain = slots.of(*write.gain)
            if gain.tied is not None or len(gain.leaves) != 1 or not gain.leaves <= gains:
                return f"{gain.name} scales what is written into it, and is used elsewhere too"
            if not graph.is_saved(gain.tensor) or not gain.tensor.is_floating_point():
                return f"{gain.name} scales what is written into it, and is not saved with the model"
    return None


def slots_of(slots: Slots, write: Write) -> list[Slot]:
    """Return the slots of the parameter that writes: one, unless it is itself a value of the stream."""
    return slots.all_of(write.placeholder) if is_value(write) else [slots.of(write.leaf, write.placeholder)]


def is_value(write: Write) -> bool:
    """Whether a parameter is itself a value of the stream, as learned positions are."""
    return write.leaf[0] is write.leaf[1]
