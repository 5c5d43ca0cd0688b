"""The analysis of a fold, from a model's graph to all new values: it does not touch the model.

docs/fold.md has the algebra.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.fx import Node

from dynorm.fold.channels import laid_along
from dynorm.fold.graph import Slot, double, rank_of
from dynorm.fold.operators import Reader, RefusedError, refuse_for, require_new_bias
from dynorm.fold.report import FOLDED, NOTHING, REFUSED, Rewrite
from dynorm.fold.site import SiteFold
from dynorm.fold.stream import Stream, readers_of
from dynorm.fold.trace import Graph
from dynorm.layers import PointwiseNorm


@dataclass(frozen=True)
class Options:
    """The rewrites that the caller wants, and the changes that the caller allows."""

    affine: bool = False
    center: bool = False
    add_bias: bool = False
    untie: bool = False


@dataclass
class Plan:
    """All changes of a fold, as float64 values that are computed before any is written."""

    folds: Sequence[SiteFold]
    ties: Sequence[Sequence[Slot]]  # parameters that were tied and may differ now
    # The new value of each parameter that changes.
    values: dict[Slot, Tensor] = field(default_factory=dict)
    # The biases to add, by the weight of their layer.
    added: dict[Slot, Tensor] = field(default_factory=dict)

    def value(self, slot: Slot) -> Tensor:
        """Return the value of a parameter so far."""
        return self.values[slot] if slot in self.values else double(slot.tensor)


def planned(graph: Graph, folds: Sequence[SiteFold], options: Options) -> Plan:
    """Decide where every part of every norm goes, or why it stays, and compute the new values."""
    plan = Plan(folds, graph.ties)
    decide_affine(graph, folds, options)
    for fold in folds:
        if fold.is_absorbed:
            _fold_affine(plan, fold, graph)
    if options.center:
        _fold_means(plan, graph)
    return plan


def decide_affine(graph: Graph, folds: Sequence[SiteFold], options: Options) -> None:
    """Decide which weights take over the weight and bias of each norm, or why they stay."""
    for index, fold in enumerate(folds):
        if fold.refused is None and index not in graph.calls:
            fold.refused = "never called while the model was traced"
        if fold.chosen and options.affine:
            fold.affine = _affine(fold, index, graph, options)


def _affine(fold: SiteFold, index: int, graph: Graph, options: Options) -> Rewrite:
    """Find everything that reads a norm, if all of that is linear."""
    if fold.refused is not None:
        return Rewrite(REFUSED, reason=fold.refused)
    if fold.weight is None and fold.bias is None:
        return Rewrite(NOTHING)
    try:
        readers = readers_of(graph.calls[index], fold)
        _require_readers(fold, readers, options.add_bias)
        _require_free(fold, graph, graph.calls[index])
    except RefusedError as refusal:
        return Rewrite(REFUSED, reason=str(refusal))
    # A weight that is read several times is scaled once.
    fold.readers = {reader.weight.slot: reader for reader in readers}
    return Rewrite(FOLDED, tuple(slot.name for slot in fold.readers))


def _fold_affine(plan: Plan, fold: SiteFold, graph: Graph) -> None:
    """Put a norm's weight and bias into its readers."""
    # A layer drops its own tensors, and other owners keep theirs.
    if not fold.is_pointwise:
        for part in fold.affine_parts.values():
            own = graph.slots[part.tensor]
            plan.values[own] = torch.full_like(double(own.tensor), part.neutral)
    for slot, reader in fold.readers.items():
        old = double(slot.tensor)
        if fold.weight is not None:
            plan.values[slot] = reader.scaled(old, fold.weight)
        if fold.bias is not None:
            constant = reader.constant(old, fold.bias)
            if reader.bias is None:
                plan.added[slot] = constant
            else:
                bias = reader.bias.slot
                plan.values[bias] = plan.value(bias) + constant


def _require_readers(fold: SiteFold, readers: Sequence[Reader], add_bias: bool) -> None:
    """Check that the readers' weights and biases can take the norm's, and are used for nothing else."""
    if not readers:
        raise RefusedError("nothing reads it")
    uses = {reader.weight.leaf: reader for reader in readers}
    for reader in readers:
        slot = reader.weight.slot
        refuse_for(slot.refused)
        for leaf in slot.leaves:
            other = uses.get(leaf)
            if other is None or other.weight.axis != reader.weight.axis:
                raise RefusedError(f"{slot.name}, which reads it, is also used by {leaf.place}")
        if fold.bias is not None:
            same_weight = [uses[leaf] for leaf in slot.leaves]
            _require_bias(reader, same_weight, add_bias)


def _require_bias(reader: Reader, same_weight: Sequence[Reader], add_bias: bool) -> None:
    """Check that a reader can take a norm's bias into its own, or can be given one."""
    slot = reader.weight.slot
    bias = reader.bias
    if reader.shift_refused is not None:
        raise RefusedError(f"its bias cannot be folded: {reader.shift_refused}")
    for other in same_weight:
        # A bias that is added to the layer would also reach a use that has none.
        if (other.bias and other.bias.slot) is not (bias and bias.slot):
            raise RefusedError(f"{slot.name}, which reads it, has not the same bias in all uses")
    if bias is None:
        if not add_bias:
            raise RefusedError(
                f"{slot.name} has no bias to take its bias: pass add_bias=True (--add-bias)"
            )
        require_new_bias(reader.weight)
        return
    refuse_for(bias.slot.refused)
    ours = {other.bias.leaf for other in same_weight if other.bias is not None}
    for leaf in bias.slot.leaves - ours:
        raise RefusedError(f"{bias.slot.name} is also used by {leaf.place}")


def _require_free(fold: SiteFold, graph: Graph, calls: Sequence[Node]) -> None:
    """Check that a norm or layer can lose its weight and bias, and does nothing else with them."""
    if not fold.is_exact:
        raise RefusedError("it is not a norm times its weight plus its bias to the last digits")
    if fold.is_line and graph.drops_in_place:
        raise RefusedError("a dropout of the model works in place, and would write into its input")
    for call in calls:
        dtype = call.all_input_nodes[0].meta["val"].dtype
        if isinstance(fold.module, PointwiseNorm) and fold.module.returned_dtype(dtype) != dtype:
            raise RefusedError("it returns another dtype than it is given")
    for part in fold.affine_parts.values():
        slot = graph.slots[part.tensor]
        if not fold.is_pointwise:
            refuse_for(slot.blocked)
            if slot.leaves:
                raise RefusedError(f"{slot.name} is used elsewhere too")


def _fold_means(plan: Plan, graph: Graph) -> None:
    """Take the means out of the streams that LayerNorms are called on, where all else allows it.

    A stream without a mean is the same to a LayerNorm and to an RMSNorm of the same eps.
    """
    streams: list[Stream] = []
    freed: dict[Stream, None] = {}
    for index, fold in enumerate(plan.folds):
        if not fold.chosen:
            continue
        if fold.site.kind not in ("layernorm", ""):
            fold.center = Rewrite(NOTHING)
            continue
        if fold.refused is not None:
            fold.center = Rewrite(REFUSED, reason=fold.refused)
            continue
        called_on: dict[Stream, None] = {}
        for call in graph.calls[index]:
            value = call.all_input_nodes[0]
            axis = fold.site.dim % rank_of(value)
            called_on[_stream_of(value, axis, plan.folds, streams)] = None
        reasons = [stream.refused for stream in called_on if stream.refused is not None]
        if reasons:
            fold.center = Rewrite(REFUSED, reason=reasons[0])
        else:
            fold.center = Rewrite(FOLDED, _names_of_writers(called_on))
            freed |= called_on
    _remove_means(plan, freed)


def _stream_of(value: Node, axis: int, folds: Sequence[SiteFold], known: list[Stream]) -> Stream:
    """Return the stream that a value belongs to; each is found once."""
    for stream in known:
        if value in stream.values:
            return stream
    known.append(Stream(value, axis, folds))
    return known[-1]


def _names_of_writers(streams: Collection[Stream]) -> tuple[str, ...]:
    names: dict[str, None] = {}
    for stream in streams:
        names.update(dict.fromkeys(write.operand.slot.name for write in stream.writes))
    return tuple(names)


def _remove_means(plan: Plan, streams: Collection[Stream]) -> None:
    """Take the means out of everything that writes into some streams."""
    done = set()
    for stream in streams:
        for write in stream.writes:
            slot = write.operand.slot
            axis = write.operand.axis
            if slot in done:
                continue
            done.add(slot)
            value = plan.value(slot)
            bias = plan.added.get(slot)
            if write.gain is not None:
                # The mean to take out is that of the scaled outputs.
                gain = double(write.gain.slot.tensor)
                plan.values[write.gain.slot] = torch.ones_like(gain)
                value = value * laid_along(gain, axis, value.ndim)
                if bias is not None:
                    bias = bias * gain
            plan.values[slot] = value - value.mean(axis, keepdim=True)
            if bias is not None:
                plan.added[slot] = bias - bias.mean()
