"""The values around the norms: their readers, and the residual streams that they are called on."""

from collections.abc import Iterable, Sequence

from torch.fx import Node

from dynorm.fold.channels import came_from, carried, factor_of
from dynorm.fold.graph import (
    Leaf,
    Operand,
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
from dynorm.fold.operators import SUMS, Reader, RefusedError, Write, reader_of, writes
from dynorm.fold.site import SiteFold

_ZEROS = ("aten.zeros", "aten.zeros_like", "aten.new_zeros")


def readers_of(calls: Sequence[Node], fold: SiteFold) -> list[Reader]:
    """Follow the outputs of a norm's calls to the linear operators that read them.

    Raises:
        RefusedError: something else reads them, or a bias cannot get there as it is.
    """
    readers: list[Reader] = []
    widest = min(map(width, calls))
    # Each value with its channel axis and the fewest bytes per number on the way to it.
    todo = [(call, fold.site.dim % rank_of(call), width(call)) for call in calls]
    seen = set()
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
                if fold.bias is not None and factor_of(user, value, axis):
                    raise RefusedError(f"its bias is scaled token by token by {where(user)}")
                todo.append((user, to, min(narrowest, width(user))))
                continue
            if is_move(user, value):
                raise RefusedError(f"its channels are split or reordered by {where(user)}")
            reader = reader_of(user, value, axis)
            if narrowest < min(widest, reader.weight.slot.tensor.dtype.itemsize):
                raise RefusedError(
                    f"rounded to fewer digits than the weight has before {where(user)} reads it"
                )
            if reader not in readers:
                readers.append(reader)
    return readers


class Stream:
    """All values that are sums of one another, up to operators that keep the channels separate.

    The stream of a value, with its channel axis, is found in the graph whose norms are ``folds``.
    """

    def __init__(self, start: Node, axis: int, folds: Sequence[SiteFold]) -> None:
        self.values: dict[Node, int] = {}  # with the channel axis
        self.writes: list[Write] = []
        # Why its mean must stay, as words of a message.
        self.refused: str | None = None
        self._folds = folds
        self._todo = [(start, axis)]
        while self._todo:
            value, axis = self._todo.pop()
            if value not in self.values:
                self.values[value] = axis
                self._follow_back(value, axis)
                for user in users(value):
                    self._follow_on(user, value, axis)
            elif self.values[value] != axis:
                self._refuse(f"{where(value)} has the channels on two axes")
        if not self.writes:
            self._refuse("nothing writes into it")
        narrowest = min(map(width, self.values))
        for write in self.writes:
            reason = self._shared(write, narrowest)
            if reason is not None:
                self._refuse(reason)

    def _refuse(self, reason: str) -> None:
        if self.refused is None:
            self.refused = reason

    def _follow_back(self, value: Node, axis: int) -> None:
        """Follow a value to the values that it is made of."""
        op, _ = producer(value)
        slot = slot_of(value)
        if slot is not None:
            self.writes.append(Write(Operand(Leaf(value, value), slot, axis)))
            # Another path of its module has another placeholder.
            self._todo += [(node, axis) for node in slot.nodes]
            return
        if packet(op) in SUMS:
            self._follow_parts(value, axis, op.args[:2])
            return
        if packet(op) == "aten.cat":
            self._follow_parts(value, axis, op.args[0])
            return
        source = came_from(value, axis, carried)
        if source is not None:
            self._todo.append(source)
            return
        written = writes(op, axis)
        if written:
            self.writes += written
        elif op.op == "placeholder":
            self._refuse(f"written by {op.name}, which the model is given")
        elif norm_index(op) is not None:
            self._refuse(
                f"written by {where(op)}, whose weight and bias give it a mean again (post-norm)"
            )
        elif packet(op) not in _ZEROS:
            self._refuse(f"written by {where(op)}, which is not linear")

    def _follow_parts(self, value: Node, axis: int, parts: object) -> None:
        """Follow a sum to its terms, or a concatenation of tokens to its parts."""
        place = where(value)
        assert isinstance(parts, Iterable)
        for part in parts:
            at = -1
            if is_tensor(part):
                at = rank_of(part) - rank_of(value) + axis
            if at >= 0 and shape(part)[at] == shape(value)[axis]:
                self._todo.append((part, at))
            else:
                self._refuse(f"written by {place}, in parts or one number for all channels")

    def _follow_on(self, user: Node, value: Node, axis: int) -> None:
        """Follow a value to one of its uses."""
        if user.op == "output":
            self._refuse("the model returns it, with its mean")
            return
        op, _ = producer(user)
        index = norm_index(op)
        if index is not None:
            norm = self._folds[index]
            if norm.site.kind != "layernorm" or norm.site.dim % rank_of(value) != axis:
                self._refuse(f"{norm.path} sees its mean")
            elif not norm.is_plain_layernorm:
                self._refuse(f"{norm.path} is not a LayerNorm to the last digits")
            return
        to = carried(user, value, axis)
        if to is not None:
            self._todo.append((user, to))
        elif packet(op) in SUMS:
            # The axes of a sum's terms are counted from the last one.
            self._todo.append((user, axis - rank_of(value) + rank_of(user)))
        elif packet(op) == "aten.cat" and (argument(op, 1) or 0) % rank_of(user) != axis:
            self._todo.append((user, axis))
        else:
            self._refuse(f"{where(user)} sees its mean")

    def _shared(self, write: Write, narrowest: int) -> str | None:
        """Return why a parameter that writes into the stream cannot change, or None."""
        slot = write.operand.slot
        gain = write.gain
        refused = slot.refused
        if refused is None and narrowest < slot.tensor.dtype.itemsize:
            refused = "the stream is rounded to fewer digits than that has"
        if refused is None and gain is not None:
            refused = gain.slot.refused
        if refused is not None:
            return f"{slot.name} writes into it: {refused}"
        # The uses of a parameter that is itself a value of the stream were followed.
        if write.operand.leaf.node is not write.operand.leaf.argument:
            allowed = {other.operand.leaf: other for other in self.writes if other.gain == gain}
            for leaf in slot.leaves:
                other = allowed.get(leaf)
                if other is None or other.operand.axis != write.operand.axis:
                    return f"{slot.name} writes into it, and is also used by {leaf.place}"
        # The bias of a product with a gain has the same gain.
        if gain is not None and gain.slot.leaves != {gain.leaf}:
            return f"{gain.slot.name} scales writes into it, and is used elsewhere too"
        return None
