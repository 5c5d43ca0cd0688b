"""Everything that reads the outputs of a norm."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch.fx import Node

from dynorm.stream.channels import carried, factor_of
from dynorm.stream.graph import Leaf, is_move, norm_index, rank_of, users, where, width
from dynorm.stream.operators import Reader, RefusedError, reader_of


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

    They must be saved, and have only the ``allowed`` uses, which read along the same axis and
    groups.
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
            if use is None or (use.axis, use.groups) != (reader.axis, reader.groups):
                return f"{name} is also used by {leaf.place}{slot.hint}"
    return None
