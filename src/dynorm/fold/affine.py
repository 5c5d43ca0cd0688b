"""Weight and bias of a norm, into everything that reads it."""

from collections.abc import Sequence

import torch

from dynorm.fold.refusals import Uses, require_readers
from dynorm.fold.site import SiteFold
from dynorm.stream.graph import Graph
from dynorm.stream.operators import RefusedError


def fold_affine(
    graph: Graph, folds: Sequence[SiteFold], affine: bool, constants: bool, add_bias: bool
) -> None:
    """Decide for each norm whether its weight and bias can go into everything that reads it."""
    for fold in folds:
        _choose_parts(fold, affine, constants)
        fold.kept = _obstacle(fold)
    uses: Uses = {}
    for fold in folds:
        for reader in fold.reads:
            uses[reader.leaf] = (fold, reader)
    for fold in folds:
        if fold.is_absorbed:
            try:
                require_readers(graph, fold, uses, add_bias)
            except RefusedError as refusal:
                fold.kept = str(refusal)
    propagate_refusals(folds, uses)


def _choose_parts(fold: SiteFold, affine: bool, constants: bool) -> None:
    """Set the factor and the shift that the readers are to take."""
    fold.with_affine = affine and fold.chosen
    if fold.with_affine:
        fold.factor = fold.weight
        fold.shift = fold.bias
    if fold.scale != 1 and (constants or affine) and fold.chosen:
        # A weight without its scale would leave the multiplication in the layer.
        scale = torch.full(fold.site.normalized_shape, fold.scale, dtype=torch.float64)
        fold.factor = scale if fold.factor is None else scale * fold.factor


def _obstacle(fold: SiteFold) -> str | None:
    """Return why the readers cannot take anything, before their weights are looked at."""
    reason = fold.refused or fold.readers.refused
    if reason is not None:
        return reason
    if not fold.chosen:
        return "not chosen"
    if not fold.reads:
        return "nothing reads it"
    if fold.readers.is_scaled and fold.shift is not None:
        return "scaled token by token before it is read, and its bias with it"
    return None


def propagate_refusals(folds: Sequence[SiteFold], uses: Uses) -> None:
    """Let a norm stay if one that shares a reader with it stays, until nothing changes."""
    changed = True
    while changed:
        changed = False
        for fold in folds:
            neighbour = _neighbour_that_stays(fold, uses) if fold.is_absorbed else None
            if neighbour is not None:
                fold.kept = f"a reader is shared with {neighbour.path}, which cannot be folded"
                changed = True


def _neighbour_that_stays(fold: SiteFold, uses: Uses) -> SiteFold | None:
    for reader in fold.reads:
        for leaf in reader.weight.leaves:
            neighbour, _ = uses[leaf]
            if not neighbour.is_absorbed:
                return neighbour
    return None
