"""Rewrites (a) and (d): weight and bias of a norm into everything that reads it, or through the stream that it writes.

(a) W' = W diag(weight), b' = b + W bias, in each linear reader. (d) is for linear layers on a residual stream,
y = a x + b with a number a per channel, by rescaling the stream.

Where a layer's output is the stream too (post-norm), its readers cannot take a and b alone. But if every value v of the
stream is kept as v / d, the readers multiply by d, the writers divide by it, and the layer is the identity where
d after it is a times d before it. b - a c goes into a bias before the layer, as b / a - c. Each d follows from the
last one. Where the model is given the stream and returns it too, the product of all a stays at one layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor
from torch.fx import Node

from dynorm.fold.graph import Graph, carried, factor_of, is_move, shape, users, width
from dynorm.fold.operators import read
from dynorm.fold.refusals import RefusedError, is_exact, require_free, require_own, require_readers
from dynorm.fold.site_fold import Read, SiteFold
from dynorm.fold.stream import Walk, bias_before
from dynorm.layers import PointwiseNorm


def fold_affine(graph: Graph, folds: Sequence[SiteFold], affine: bool, constants: bool, add_bias: bool) -> None:
    """Decide for each norm whether its weight and bias can go into everything that reads it, each a product."""
    for fold in folds:
        try:
            _follow(graph, fold, affine, constants)
        except RefusedError as refusal:
            fold.kept = str(refusal)
    uses = {found.leaf: (fold, found) for fold in folds for found in fold.reads}
    for fold in folds:
        try:
            if fold.is_given:
                require_readers(graph, fold, uses, add_bias)
        except RefusedError as refusal:
            fold.kept = str(refusal)
    # A weight that several norms share changes for all of them or for none.
    changed = True
    while changed:
        changed = False
        for fold in (fold for fold in folds if fold.is_given):
            partners = (uses[leaf][0] for found in fold.reads for leaf in found.weight.leaves)
            stays = next((other for other in partners if not other.is_given), None)
            if stays is not None:
                fold.kept, changed = f"a reader is shared with {stays.path}, which cannot be folded", True


def _follow(graph: Graph, fold: SiteFold, affine: bool, constants: bool) -> None:
    """Find the factor and the shift of a norm, and everything that reads its outputs."""
    if fold.refused is not None or not fold.calls:
        raise RefusedError(fold.refused or "never called while the model was traced")
    if affine and fold.chosen:
        fold.factor, fold.shift = fold.weight, fold.bias
    if fold.scale != 1 and (constants or affine) and fold.chosen:
        # A weight without its scale would leave the multiplication where it is.
        ones = torch.ones(fold.site.normalized_shape, dtype=torch.float64)
        fold.factor = fold.scale * (ones if fold.factor is None else fold.factor)
    # The value, its channel axis, and the fewest bytes of a number on the way.
    todo = [(call, fold.axis(len(shape(call))), width(call)) for call in fold.calls]
    whole = min(width(call) for call in fold.calls)
    seen, is_scaled = set(), False
    while todo:
        value, axis, narrowest = todo.pop()
        if (value, axis) in seen:
            continue
        seen.add((value, axis))
        # Other norms come last: they are the least telling reason why an affine map stays.
        for user in sorted(users(value), key=graph.norms.__contains__):
            if user.op == "output":
                raise RefusedError("the model returns it")
            to = carried(user, value, axis)
            if to is not None:
                todo.append((user, to, min(narrowest, width(user))))
                is_scaled |= factor_of(user, value, axis)
                continue
            if is_move(user, value):
                raise RefusedError(f"its channels are split or reordered by {graph.where(user)}")
            found = read(graph, user, value, axis)
            if narrowest < min(whole, found.weight.tensor.dtype.itemsize):
                raise RefusedError(f"rounded to fewer digits than the weight has before {graph.where(user)} reads it")
            fold.reads += [found] * (found not in fold.reads)
    if not fold.chosen:
        raise RefusedError("not chosen")
    if not fold.reads:
        raise RefusedError("nothing reads it")
    if is_scaled and fold.shift is not None:
        raise RefusedError("scaled token by token before it is read, and its bias with it")


@dataclass(eq=False, kw_only=True)
class Part(Walk):
    """A stream between two linear layers: its values are ``factor`` times those of the folded model."""

    reads: list[Read] = field(default_factory=list)
    norms: list[SiteFold] = field(default_factory=list)  # those that write into it with a weight and a bias
    takers: list[SiteFold] = field(default_factory=list)  # linear layers that give all they are to their readers
    factor: Tensor = field(default_factory=lambda: torch.ones(1, dtype=torch.float64))
    not_linear: ClassVar = "is not linear"
    returned: ClassVar = ""

    def _norm_writes(self, norm: SiteFold, along: bool) -> None:
        is_plain = isinstance(norm.module, PointwiseNorm) or is_exact(norm)
        if not along or norm.weight is None or norm.is_given or not norm.chosen or not is_plain:
            raise RefusedError(f"written by the norm {norm.path}, which has no weight of its own to take a factor")
        if not norm.through:
            require_own(self.graph, norm)
            self.norms += [norm] * (norm not in self.norms)

    def _norm_reads(self, norm: SiteFold, along: bool) -> None:
        if not along or not norm.goes:
            raise RefusedError(f"read by {norm.path}, which stays")
        self.takers += [norm] * (not norm.through and norm not in self.takers)

    def _reads(self, user: Node, value: Node, axis: int) -> None:
        found = read(self.graph, user, value, axis)
        self.reads += [found] * (found not in self.reads)

    def _require(self) -> None:
        super()._require()
        require_free(self.graph, self.reads, {found.leaf: found for found in self.reads})
        for norm in (*self.norms, *self.takers):
            if any((call if norm in self.norms else call.args[0]) not in self.values for call in norm.calls):
                raise RefusedError(f"{norm.path} is called on other values too")
            if any(found.weight.leaves - {other.leaf for other in norm.reads} for found in norm.reads):
                raise RefusedError(f"a reader of {norm.path} reads another norm too")


def fold_through(graph: Graph, folds: Sequence[SiteFold], add_bias: bool) -> list[Part]:
    """Let the linear layers go that cannot give all they are to their readers, and return the parts to rescale."""
    for fold in folds:
        if fold.goes and not fold.is_given and fold.calls:
            assert fold.weight is not None
            try:
                if zeros := (fold.weight == 0).nonzero().flatten().tolist():
                    raise RefusedError(f"its weight is 0 in channel {zeros[0]}, which no factor before it undoes")
                if len(fold.calls) != 1:
                    raise RefusedError("the layer is called several times")
                # With the sign of a centre.
                fold.center = None if fold.bias is None else -fold.bias / fold.weight
                fold.center_into = None if fold.center is None else bias_before(graph, fold, add_bias)
                fold.through = True
            except RefusedError as refusal:
                fold.kept = f"{fold.kept}; {refusal}"
    parts: list[Part] = []
    groups: dict[Part, list[Part]] = {}

    def part_of(value: Node, fold: SiteFold) -> Part:
        if not any(value in part.values for part in parts):
            parts.append(Part(graph=graph, folds=folds))
            parts[-1].walk(value, fold.axis(len(shape(value))))
            groups[parts[-1]] = parts[-1:]
        return next(part for part in parts if value in part.values)

    for fold in (fold for fold in folds if fold.through):
        assert fold.weight is not None
        source = fold.calls[0].all_input_nodes[0]
        before, after = part_of(source, fold), part_of(fold.calls[0], fold)
        ratio = fold.weight * before.factor / after.factor
        pins = [next((part.refused for part in groups[end] if part.refused), None) for end in (before, after)]
        if groups[before] is groups[after] or None not in pins:
            fold.left, fold.left_because = ratio, "; ".join(dict.fromkeys(filter(None, pins))) or "it comes round"
            continue
        for part in groups[after] if pins[1] is None else groups[before]:
            part.factor = part.factor * ratio if pins[1] is None else part.factor / ratio
        groups[before] += groups[after]
        groups |= dict.fromkeys(groups[after], groups[before])
    for part in parts:
        for taker in part.takers:
            assert taker.factor is not None
            taker.factor = part.factor * taker.factor
    return [part for part in parts if not bool((part.factor == 1).all())]
