"""Where weight and bias, mean, and centre of each norm go: decided site by site.

docs/fold.md has the algebra. ``through.py`` and ``redundant.py`` decide about whole layers.
"""

from collections.abc import Sequence

import torch

from dynorm.fold.refusals import Uses, require_readers
from dynorm.fold.site import SiteFold
from dynorm.stream.operators import RefusedError
from dynorm.stream.stream import Stream


def fold_affine(
    folds: Sequence[SiteFold],
    affine: bool,
    add_bias: bool,
) -> None:
    """Decide for each norm whether its weight and bias can go into everything that reads it."""
    for fold in folds:
        _choose_parts(fold, affine)
        fold.kept = _obstacle(fold)
    uses: Uses = {}
    for fold in folds:
        for reader in fold.reads:
            uses[reader.leaf] = (fold, reader)
    for fold in folds:
        if fold.is_absorbed:
            try:
                require_readers(fold, uses, add_bias)
            except RefusedError as refusal:
                fold.kept = str(refusal)
    propagate_refusals(folds, uses)


def _choose_parts(fold: SiteFold, affine: bool) -> None:
    """Set the factor and the shift that the readers are to take."""
    fold.with_affine = affine and fold.chosen
    if fold.with_affine:
        fold.factor = fold.weight
        fold.shift = fold.bias
    # A bias that stays in the layer would be scaled too.
    scale_can_go = fold.with_affine or fold.bias is None
    if fold.scale != 1 and fold.chosen and scale_can_go:
        # Move the scale too, or the layer still multiplies.
        scale = torch.full(
            fold.site.normalized_shape, fold.scale, dtype=torch.float64, device="cpu"
        )
        fold.factor = scale if fold.factor is None else scale * fold.factor


def _obstacle(fold: SiteFold) -> str | None:
    """Return why the readers cannot take anything, before their weights are looked at."""
    if fold.refused is not None:
        return fold.refused
    if not fold.calls:
        return "never called while the model was traced"
    if fold.around.readers.refused is not None:
        return fold.around.readers.refused
    if not fold.chosen:
        return "not chosen"
    if not fold.reads:
        return "nothing reads it"
    if fold.around.readers.is_scaled and fold.shift is not None:
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


def fold_means(folds: Sequence[SiteFold], partly: bool) -> None:
    """Decide for each LayerNorm whether the means of all streams it is called on can go.

    A stream without a mean is the same to a LayerNorm and to an RMSNorm of the same eps. With
    ``partly``, means also go out of the linear writers of a stream that has others; its norms then
    stay LayerNorms.
    """
    layernorms = [fold for fold in folds if fold.calls and fold.site.kind == "layernorm"]
    mean_seen_by: dict[Stream, str] = {}
    refusals: dict[Stream, str] = {}
    for fold in layernorms:
        fold.streams = list(dict.fromkeys(fold.around.before))
        for stream in fold.streams:
            try:
                _require_only_layernorms(folds, stream)
            except RefusedError as refusal:
                mean_seen_by[stream] = str(refusal)
            reason = _other_writer(folds, stream) or mean_seen_by.get(stream)
            if reason is not None:
                refusals[stream] = reason
    # A norm that is not exactly an RMSNorm needs the means of its streams.
    for fold in layernorms:
        if not fold.is_exact_rms:
            for stream in fold.streams:
                refusals.setdefault(stream, f"{fold.path} is not a LayerNorm to the last digits")
    for fold in layernorms:
        for stream in fold.streams:
            if fold.mean_kept is None:
                fold.mean_kept = refusals.get(stream)
        if partly and fold.chosen and fold.mean_kept is not None:
            fold.partly_centred = [
                stream for stream in fold.streams if stream not in mean_seen_by and stream.writes
            ]


def _other_writer(folds: Sequence[SiteFold], stream: Stream) -> str | None:
    """Return why some of the means stay: a writer is not linear."""
    if stream.writers_unknown is not None:
        return stream.writers_unknown
    if stream.norms_before:
        norm = folds[stream.norms_before[0].index]
        return (
            f"written by the norm {norm.path}, whose weight and bias give it a mean again "
            "(post-norm)"
        )
    return None


def _require_only_layernorms(folds: Sequence[SiteFold], stream: Stream) -> None:
    """Check that means can be taken out of what writes into a stream: only LayerNorms see them."""
    if stream.two_axes is not None:
        raise RefusedError(stream.two_axes)
    for use in stream.norms_after:
        norm = folds[use.index]
        if norm.site.kind != "layernorm" or not use.over_channels:
            raise RefusedError(f"{norm.path} sees its mean")
    if stream.read_by is not None:
        raise RefusedError(f"{stream.read_by} sees its mean")
    if stream.is_returned:
        raise RefusedError("the model returns it, with its mean")
    if stream.writers_shared is not None:
        raise RefusedError(stream.writers_shared)


def fold_centers(folds: Sequence[SiteFold]) -> None:
    """Decide for each learned centre of a point-wise layer whether a bias before can take it."""
    for fold in folds:
        if fold.center is None or fold.goes or not fold.chosen or not fold.calls:
            continue
        fold.center_into = fold.bias_before
        if fold.center_into is None:
            fold.center_kept = fold.no_bias_before
