"""Linear layers whose output is the residual stream: they are removed by rescaling the stream.

Every value v of the stream is kept as v / d, with one factor d per channel. Readers multiply by d,
and writers divide by it. A linear layer, y = a x + b, is the identity if d_after = a * d_before,
so each d follows from the last one. Its constant goes into a bias before it, as b / a.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dynorm.fold.site import SiteFold
from dynorm.stream.operators import RefusedError, refuse_for
from dynorm.stream.stream import Stream


@dataclass(eq=False)
class RescaledStream:
    """A stream between linear layers: its values are ``factor`` times those of the folded model."""

    stream: Stream
    writers: list[SiteFold] = field(default_factory=list)  # norms whose weights take 1 / d
    givers: list[SiteFold] = field(default_factory=list)  # linear layers that give d to readers
    refused: str | None = None  # why its factor must stay 1
    factor: Tensor = field(default_factory=lambda: torch.ones(1, dtype=torch.float64, device="cpu"))
    group: "ScaleGroup" = field(init=False)

    def __post_init__(self) -> None:
        """Start in a group without others."""
        self.group = ScaleGroup([self])


@dataclass(eq=False)
class ScaleGroup:
    """Streams whose factors change together, because linear layers between them are gone."""

    members: list[RescaledStream]

    @property
    def refused(self) -> str | None:
        """Return why the factor of one of them, and so of all, must stay."""
        for member in self.members:
            if member.refused is not None:
                return member.refused
        return None

    def scale(self, by: Tensor) -> None:
        """Multiply all factors."""
        for member in self.members:
            member.factor = member.factor * by

    def merge(self, other: "ScaleGroup") -> None:
        """Take over the members of another group."""
        self.members += other.members
        for member in other.members:
            member.group = self


def decide_rescaling(folds: Sequence[SiteFold]) -> list[RescaledStream]:
    """Choose the linear layers to remove by rescaling; return the rescaled streams."""
    for fold in folds:
        if fold.is_line and not fold.is_absorbed and fold.calls:
            _choose_rescaling(fold)
    records: dict[Stream, RescaledStream] = {}
    for fold in folds:
        if fold.by_rescaling:
            before = fold.around.before[0]
            after = fold.around.after[0]
            for stream in (before, after):
                if stream not in records:
                    records[stream] = _rescaled_stream(folds, stream)
            _join(fold, records[before], records[after])
    for record in records.values():
        for giver in record.givers:
            assert giver.factor is not None
            giver.factor = record.factor * giver.factor
    return [record for record in records.values() if bool((record.factor != 1).any())]


def _choose_rescaling(fold: SiteFold) -> None:
    """Choose to remove a linear layer by rescaling, and the bias that takes its constant.

    If that is impossible, note the reason.
    """
    assert fold.weight is not None
    zeros = (fold.weight == 0).nonzero().flatten().tolist()
    obstacle = None
    if zeros:
        obstacle = f"its weight is 0 in channel {zeros[0]}, which no factor before it undoes"
    elif len(fold.calls) != 1:
        obstacle = "the layer is called several times"
    elif fold.bias is not None and fold.bias_before is None:
        obstacle = fold.bias_before_refused
    if obstacle is not None:
        fold.affine_refused = f"{fold.affine_refused}; {obstacle}"
        return
    fold.by_rescaling = True
    fold.learned_center = None
    if fold.bias is not None:
        # a x + b = a (x - c) with this centre.
        fold.learned_center = -fold.bias / fold.weight
        fold.learned_center_into = fold.bias_before


def _join(fold: SiteFold, before: RescaledStream, after: RescaledStream) -> None:
    """Make a linear layer the identity by the factors of the streams on both sides of it."""
    assert fold.weight is not None
    # The layer is the identity if this is 1.
    mismatch = fold.weight * before.factor / after.factor
    one_group = before.group is after.group
    if one_group or (before.group.refused and after.group.refused):
        fold.remaining_weight = mismatch
        reasons = dict.fromkeys([before.group.refused, after.group.refused])
        words = [reason for reason in reasons if reason is not None]
        fold.remains_because = "; ".join(words) or "its two ends belong to the same rescaled stream"
        return
    if after.group.refused:
        before.group.scale(1 / mismatch)
    else:
        after.group.scale(mismatch)
    before.group.merge(after.group)


def _rescaled_stream(folds: Sequence[SiteFold], stream: Stream) -> RescaledStream:
    """Return a stream with its norms, or with the reason why its factor must stay 1."""
    rescaled = RescaledStream(stream)
    try:
        refuse_for(stream.writer_refused)
        for use in stream.norms_before:
            _add_writer(rescaled, folds[use.index], use.over_channels)
        for use in stream.norms_after:
            _add_giver(rescaled, folds[use.index], use.over_channels)
        refuse_for(stream.reader_refused)
        if stream.is_returned:
            raise RefusedError("the model returns it")
        refuse_for(stream.shared_writer_refused)
        refuse_for(stream.shared_reader_refused)
        for writer in rescaled.writers:
            _require_only_here(writer, writer.around.after, stream)
        for giver in rescaled.givers:
            _require_only_here(giver, giver.around.before, stream)
    except RefusedError as refusal:
        rescaled.refused = str(refusal)
    return rescaled


def _add_writer(rescaled: RescaledStream, norm: SiteFold, over_channels: bool) -> None:
    """Add a norm that writes into the stream, whose weight can take a factor."""
    is_affine = norm.is_pointwise or norm.is_exact
    stays_affine = norm.weight is not None and not norm.is_absorbed
    if not (over_channels and norm.chosen and is_affine and stays_affine):
        raise RefusedError(
            f"written by the norm {norm.path}, which has no weight that could take a factor"
        )
    # A layer that goes needs no factor: those on both sides make it the identity.
    if not norm.by_rescaling and norm not in rescaled.writers:
        refuse_for(norm.tensors_refused)
        rescaled.writers.append(norm)


def _add_giver(rescaled: RescaledStream, layer: SiteFold, over_channels: bool) -> None:
    """Add a linear layer that reads the stream, and whose readers take the factor."""
    if not over_channels or not layer.is_line:
        raise RefusedError(f"read by {layer.path}, which stays")
    if not layer.by_rescaling and layer not in rescaled.givers:
        rescaled.givers.append(layer)


def _require_only_here(layer: SiteFold, streams: Sequence[Stream], stream: Stream) -> None:
    """Check that a layer is called on one stream only, and its readers read no other."""
    if any(other is not stream for other in streams):
        raise RefusedError(f"{layer.path} is called on other values too")
    ours = {reader.leaf for reader in layer.readers}
    for reader in layer.readers:
        if reader.weight.leaves - ours:
            raise RefusedError(f"a reader of {layer.path} reads another norm too")
