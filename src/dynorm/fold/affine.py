"""Rewrite (a): weight and bias of a norm into everything that reads it, W' = W diag(weight), b' = b + W bias."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dynorm.fold.graph import Graph, Leaf, RefusedError, carried, factor_of, is_move, is_norm, shape, users, width
from dynorm.fold.readers import Read, read
from dynorm.fold.site_fold import SiteFold, affine_is_exact
from dynorm.layers import PointwiseNorm

_Uses = dict[Leaf, tuple[SiteFold, Read]]


def fold_affine(graph: Graph, folds: Sequence[SiteFold], affine: bool, constants: bool, add_bias: bool) -> None:
    """Decide for each norm whether its weight and bias can go into everything that reads it.

    They can if every use of its output, through operators that keep the channels, is a product with a parameter, if no
    other value is multiplied by that parameter, and if the products have a bias where one is needed.
    """
    for fold in folds:
        try:
            if fold.refused is not None:
                raise RefusedError(fold.refused)
            _follow(graph, fold, affine, constants)
        except RefusedError as refusal:
            fold.kept = str(refusal)
    uses = {found.leaf: (fold, found) for fold in folds for found in fold.reads}
    for fold in folds:
        try:
            if fold.is_given:
                _require_foldable(graph, fold, uses, add_bias)
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
    if not fold.calls:
        raise RefusedError("never called while the model was traced")
    if affine and fold.chosen:
        fold.factor, fold.shift = fold.weight, fold.bias
    if fold.scale != 1 and (constants or affine) and fold.chosen:
        # A weight without its scale would leave the multiplication where it is.
        ones = torch.ones(fold.site.normalized_shape, dtype=torch.float64)
        fold.factor = fold.scale * (ones if fold.factor is None else fold.factor)
    # The value, its channel axis, whether each token was scaled on the way, and the fewest bytes of a number there.
    todo = [(call, fold.axis(len(shape(call))), False, width(call)) for call in fold.calls]
    whole = min(width(call) for call in fold.calls)
    seen, was_scaled = set(), False
    while todo:
        value, axis, scaled, narrowest = todo.pop()
        if (value, axis) in seen:
            continue
        seen.add((value, axis))
        # Another norm last: of all its readers it says least about why the affine map stays.
        for user in sorted(users(value), key=is_norm):
            if user.op == "output":
                raise RefusedError("the model returns it")
            to = carried(user, value, axis)
            if to is not None:
                todo.append((user, to, scaled or factor_of(user, value, axis), min(narrowest, width(user))))
                continue
            if is_move(user, value):
                raise RefusedError(f"its channels are split or reordered by {graph.where(user)}")
            found = read(graph, user, value, axis)
            if narrowest < min(whole, found.weight.tensor.dtype.itemsize):
                raise RefusedError(f"rounded to fewer digits than the weight has before {graph.where(user)} reads it")
            if found not in fold.reads:
                fold.reads.append(found)
            was_scaled |= scaled
    if not fold.chosen:
        raise RefusedError("not chosen")
    if not fold.reads:
        raise RefusedError("nothing reads it")
    if was_scaled and fold.shift is not None:
        raise RefusedError("scaled token by token before it is read, and its bias with it")


def _require_foldable(graph: Graph, fold: SiteFold, uses: _Uses, add_bias: bool) -> None:
    """Check that the readers' weights and biases, and the norm's own, are used for nothing else."""
    for found in fold.reads:
        slot = found.weight
        if slot.fixed is not None:
            raise RefusedError(slot.fixed)
        if not slot.is_saved:
            raise RefusedError(f"{slot.name}, which reads it, is no parameter of floating point")
        for leaf in slot.leaves:
            if leaf not in uses:
                raise RefusedError(f"{slot.name}, which reads it, is also used by {graph.where(leaf[0])}{slot.hint}")
            other, theirs = uses[leaf]
            same = _equal(fold.factor, other.factor) and _equal(fold.shift, other.shift)
            if not same or (theirs.axis, theirs.groups) != (found.axis, found.groups):
                raise RefusedError(
                    f"{slot.name}, which reads it, also reads {other.path}, whose weight or bias differs"
                )
    if not isinstance(fold.module, PointwiseNorm):
        for tensor, _ in fold.own():
            slots = graph.slots_of(tensor)
            if not slots[0].is_saved:
                raise RefusedError(f"{slots[0].name} is not saved with the model: it would come back when it is loaded")
            if len(slots) > 1 or len(slots[0].owners) > 1 or slots[0].leaves or slots[0].is_shared:
                raise RefusedError(f"{slots[0].name} is used elsewhere too")
    for found in fold.reads if fold.shift is not None else ():
        _require_bias(graph, fold, found, uses, add_bias)
    if not isinstance(fold.module, PointwiseNorm) and not affine_is_exact(fold):
        raise RefusedError("it is no norm times its weight plus its bias to the last digits")


def _require_bias(graph: Graph, fold: SiteFold, found: Read, uses: _Uses, add_bias: bool) -> None:
    """Check that a reader can take a norm's bias into its own, or can be given one."""
    slot = found.weight
    # A bias added to the layer would reach the use that has one of its own too.
    if any((uses[leaf][1].bias is None) != (found.bias is None) for leaf in slot.leaves):
        raise RefusedError(f"{slot.name}, which reads it, has a bias in one use and none in another")
    if found.no_shift is not None:
        raise RefusedError(f"its bias cannot be folded: {found.no_shift}")
    if found.bias is None:
        if not add_bias:
            raise RefusedError(f"{slot.name} has no bias to take its bias: pass add_bias=True")
        owner = slot.owners[0].module
        # Code that takes the weight without calling the layer would not add its bias.
        called = len(slot.owners) == 1 and owner in graph.modules_of(found.node)
        if not called or not _takes_bias(owner):
            raise RefusedError(f"no bias can be added to {slot.name}: it is not the weight of one linear layer")
        return
    bias = found.bias[1]
    if bias.fixed is not None or bias.tensor is slot.tensor:
        raise RefusedError(bias.fixed or f"{bias.name} is a weight too")
    mine = {other.bias[0] for other in fold.reads if other.bias is not None and other.weight is slot}
    for leaf in bias.leaves - mine:
        raise RefusedError(f"{bias.name} is also used by {graph.where(leaf[0])}")


def _takes_bias(module: nn.Module) -> bool:
    """Tell whether a module lacks a bias, and would add one: a convolution of torch's own, or a linear layer."""
    if module._parameters.get("bias", 0) is not None or "forward" in module.__dict__:
        return False
    known = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    if any(isinstance(module, kind) and type(module).forward is kind.forward for kind in known):
        return True
    if not isinstance(module, nn.Linear):
        return False
    # A forward of its own is tried on a copy whose weight is zero.
    weight = torch.zeros_like(module.weight)
    bias = torch.arange(1, len(weight) + 1, dtype=weight.dtype, device=weight.device)
    tried = copy.copy(module)
    tried.__dict__["_parameters"] = {**module._parameters, "weight": weight, "bias": bias}
    try:
        with torch.no_grad():
            result = tried.forward(weight.new_ones(2, weight.shape[1]))
    # Whatever it raises, it does not add the bias to the product with the weight, and nothing else.
    except Exception:
        return False
    return isinstance(result, Tensor) and torch.equal(result, bias.expand(2, -1))


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other if one is None or other is None else torch.equal(one, other)
