"""The analysis of a fold, from a model's graph to all new values: it does not touch the model.

docs/fold.md has the algebra.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dynorm.fold.channels import laid_along
from dynorm.fold.graph import Leaf, Slot, double, rank_of
from dynorm.fold.operators import Reader, RefusedError, refuse_for, require_new_bias
from dynorm.fold.site import SiteFold
from dynorm.fold.stream import Stream, StreamFinder, readers_of, shared_readers
from dynorm.fold.trace import Graph

Uses = dict[Leaf, tuple[SiteFold, Reader]]
"""The readers of all sites, by their use of a weight."""


@dataclass(frozen=True)
class Options:
    """The rewrites that the caller wants, and the changes that the caller allows."""

    affine: bool
    center: bool
    center_partly: bool
    add_bias: bool
    dropout_in_place: bool  # a dropout of the model writes into its input


@dataclass
class Plan:
    """All changes of a fold, as float64 values that are computed before any is written."""

    slots: Sequence[Slot]  # all parameters of the model
    folds: Sequence[SiteFold]
    # The new value of each parameter that changes.
    values: dict[Slot, Tensor] = field(default_factory=dict)
    # The biases to add, by the weight of their layer.
    added: dict[Slot, Tensor] = field(default_factory=dict)

    @property
    def changes_anything(self) -> bool:
        """Return whether there is anything to fold."""
        return any(fold.is_changed for fold in self.folds)

    def value(self, slot: Slot) -> Tensor:
        """Return the value of a parameter so far."""
        return self.values[slot] if slot in self.values else double(slot.tensor)


def planned(graph: Graph, folds: Sequence[SiteFold], options: Options) -> Plan:
    """Decide where every part of every norm goes, or why it stays, and compute the new values."""
    finder = StreamFinder({index: folds[index].site.dim for index in graph.calls})
    for index, calls in graph.calls.items():
        fold = folds[index]
        fold.calls = calls
        fold.readers = readers_of(calls, fold.site.dim)
        streams = [finder.stream_of(call.all_input_nodes[0], fold.site.dim) for call in calls]
        fold.streams = list(dict.fromkeys(streams))
    _decide_affine(folds, options, graph.slots)
    if options.center:
        _decide_means(folds, options.center_partly)
    else:
        for fold in folds:
            fold.mean_refused = "center is off"
    plan = Plan(graph.slots, folds)
    _scale_readers(plan)
    _remove_means(plan)
    return plan


def _decide_affine(folds: Sequence[SiteFold], options: Options, slots: Sequence[Slot]) -> None:
    """Decide for each norm whether its weight and bias can go into everything that reads it."""
    uses: Uses = {}
    for fold in folds:
        for reader in fold.readers.linear:
            uses[reader.leaf] = (fold, reader)
    for fold in folds:
        fold.affine_refused = _obstacle(fold, options)
        if fold.is_absorbed:
            try:
                _require_readers(fold, uses, options.add_bias)
                refuse_for(_tensors_refusal(fold, slots))
            except RefusedError as refusal:
                fold.affine_refused = str(refusal)
    # A norm that shares a reader with a refused one is refused too, until nothing changes.
    changed = True
    while changed:
        changed = False
        for fold in folds:
            neighbour = _neighbour_that_stays(fold, uses) if fold.is_absorbed else None
            if neighbour is not None:
                fold.affine_refused = (
                    f"a reader is shared with {neighbour.path}, which cannot be folded"
                )
                changed = True


def _obstacle(fold: SiteFold, options: Options) -> str | None:
    """Return why the readers cannot take anything, before their weights are looked at."""
    if fold.refused is not None:
        return fold.refused
    if not fold.calls:
        return "never called while the model was traced"
    if fold.readers.refused is not None:
        return fold.readers.refused
    if not (fold.chosen and options.affine):
        return "not chosen"
    if not fold.readers.linear:
        return "nothing reads it"
    if fold.readers.is_scaled and fold.bias is not None:
        return "scaled token by token before it is read, and its bias with it"
    if fold.is_line and options.dropout_in_place:
        return "a dropout of the model works in place, and would write into its input"
    if fold.is_pointwise and _changes_dtype(fold):
        return "it returns another dtype than it is given"
    return None


@torch.no_grad()
def _changes_dtype(layer: SiteFold) -> bool:
    """Return whether a point-wise layer casts its input at one of its calls."""
    for call in layer.calls:
        given = call.all_input_nodes[0]
        sizes = [1] * rank_of(given)
        sizes[layer.site.dim] = layer.site.normalized_shape[0]
        x = torch.zeros(sizes, dtype=given.meta["val"].dtype, device=given.meta["val"].device)
        # forward, so that no hook of the user runs.
        if layer.module.forward(x).dtype != x.dtype:
            return True
    return False


def _require_readers(fold: SiteFold, uses: Uses, add_bias: bool) -> None:
    """Check that the readers' weights and biases can take the norm's, and are used for nothing else."""
    readers = fold.readers.linear
    refuse_for(shared_readers(readers, {leaf: reader for leaf, (_, reader) in uses.items()}))
    for reader in readers:
        for leaf in reader.weight.leaves:
            other, _ = uses[leaf]
            if not (_same(fold.weight, other.weight) and _same(fold.bias, other.bias)):
                raise RefusedError(
                    f"{reader.weight.name}, which reads it, also reads {other.path}, whose weight "
                    "or bias differs"
                )
    if fold.bias is not None:
        for reader in readers:
            _require_bias(readers, reader, uses, add_bias)
    if not fold.is_exact:
        raise RefusedError("it is not a norm times its weight plus its bias to the last digits")


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return torch.equal(a, b)


def _require_bias(readers: Sequence[Reader], reader: Reader, uses: Uses, add_bias: bool) -> None:
    """Check that a reader can take a norm's bias into its own, or can be given one."""
    slot = reader.weight
    for leaf in slot.leaves:
        # A bias that is added to the layer would also reach the use that has a bias already.
        if (uses[leaf][1].bias is None) != (reader.bias is None):
            raise RefusedError(
                f"{slot.name}, which reads it, has a bias in one use and none in another"
            )
    if reader.shift_refused is not None:
        raise RefusedError(f"its bias cannot be folded: {reader.shift_refused}")
    bias = reader.bias
    if bias is None:
        if not add_bias:
            raise RefusedError(f"{slot.name} has no bias to take its bias: pass add_bias=True")
        require_new_bias(slot, reader.node)
        return
    refuse_for(bias.refused)
    ours = {other.bias_leaf for other in readers if other.weight is slot}
    for leaf in bias.leaves - ours:
        raise RefusedError(f"{bias.name} is also used by {leaf.place}")


def _tensors_refusal(fold: SiteFold, slots: Sequence[Slot]) -> str | None:
    """Return why a norm's weight and bias cannot change; None if they are saved, and only the norm uses them."""
    # A point-wise layer drops its own, and other owners keep theirs.
    if fold.is_pointwise:
        return None
    for part in fold.affine_parts:
        held = [slot for slot in slots if slot.tensor is part.tensor]
        slot = held[0]
        if not slot.is_saved:
            return f"{slot.name} is not saved with the model: it would come back when it is loaded"
        if len(held) > 1 or len(slot.owners) > 1 or slot.leaves or slot.overlaps:
            return f"{slot.name} is used elsewhere too"
    return None


def _neighbour_that_stays(fold: SiteFold, uses: Uses) -> SiteFold | None:
    for reader in fold.readers.linear:
        for leaf in reader.weight.leaves:
            neighbour, _ = uses[leaf]
            if not neighbour.is_absorbed:
                return neighbour
    return None


def _decide_means(folds: Sequence[SiteFold], partly: bool) -> None:
    """Decide for each LayerNorm whether the means of all streams it is called on can go.

    A stream without a mean is the same to a LayerNorm and to an RMSNorm of the same eps. With
    ``partly``, means also go out of the linear writers of a stream that has others; its norms then
    stay LayerNorms.
    """
    layernorms = [fold for fold in folds if fold.calls and fold.site.kind == "layernorm"]
    mean_seen_by: dict[Stream, str] = {}
    refusals: dict[Stream, str] = {}
    for fold in layernorms:
        for stream in fold.streams:
            seen_by = _mean_seen_by(folds, stream)
            if seen_by is not None:
                mean_seen_by[stream] = seen_by
            reason = stream.writer_refused or seen_by
            if reason is not None:
                refusals[stream] = reason
    # Another kind of LayerNorm needs the means of its streams: an RMSNorm would not replace it.
    for fold in layernorms:
        if not fold.is_plain_layernorm:
            for stream in fold.streams:
                refusals.setdefault(stream, f"{fold.path} is not a LayerNorm to the last digits")
    for fold in layernorms:
        for stream in fold.streams:
            if fold.mean_refused is None:
                fold.mean_refused = refusals.get(stream)
        if partly and fold.chosen and fold.mean_refused is not None:
            fold.partly_mean_free = [
                stream for stream in fold.streams if stream not in mean_seen_by and stream.writes
            ]


def _mean_seen_by(folds: Sequence[SiteFold], stream: Stream) -> str | None:
    """Return why no writer can lose its mean: something other than LayerNorms sees it."""
    if stream.axes_refused is not None:
        return stream.axes_refused
    for use in stream.norms:
        norm = folds[use.index]
        if norm.site.kind != "layernorm" or not use.over_channels:
            return f"{norm.path} sees its mean"
    if stream.read_by is not None:
        return f"{stream.read_by} sees its mean"
    if stream.is_returned:
        return "the model returns it, with its mean"
    return stream.shared_writer_refused


def _scale_readers(plan: Plan) -> None:
    """Put the weights and biases of norms into their readers."""
    # Norms that share a reader have the same weight and bias, which go in once.
    done = set()
    for fold in plan.folds:
        for reader in fold.readers.linear if fold.is_absorbed else ():
            weight = reader.weight
            bias = reader.bias
            if (weight, bias) in done:
                continue
            done.add((weight, bias))
            # From the old weight, so that one that is read with two biases is scaled once.
            old = double(weight.tensor)
            if fold.weight is not None:
                plan.values[weight] = reader.scaled(old, fold.weight)
            if fold.bias is not None:
                constant = reader.constant(old, fold.bias)
                if bias is None:
                    plan.added[weight] = constant
                else:
                    plan.values[bias] = plan.value(bias) + constant


def _remove_means(plan: Plan) -> None:
    """Take the means out of everything that writes into the streams that lose theirs."""
    streams: dict[Stream, None] = {}
    for fold in plan.folds:
        if fold.becomes_rms:
            streams.update(dict.fromkeys(fold.streams))
        streams.update(dict.fromkeys(fold.partly_mean_free))
    done = set()
    for stream in streams:
        for write in stream.writes:
            slot = write.slot
            if slot in done:
                continue
            done.add(slot)
            value = plan.value(slot)
            bias = plan.added.get(slot)
            if write.gain is not None:
                # The mean to take out is that of the scaled outputs.
                gain = double(write.gain.tensor)
                plan.values[write.gain] = torch.ones_like(gain)
                value = value * laid_along(gain, write.axis, value.ndim)
                if bias is not None:
                    bias = bias * gain
            plan.values[slot] = value - value.mean(write.axis, keepdim=True)
            if bias is not None:
                plan.added[slot] = bias - bias.mean()
