"""Decide where weight and bias, mean, and learned centre of each norm go, site by site.

docs/fold.md has the algebra. ``through.py`` and ``redundant.py`` decide about whole layers.
"""

from collections.abc import Sequence

import torch

from dynorm.fold.refusals import Uses, require_readers
from dynorm.fold.site import SiteFold
from dynorm.stream.operators import RefusedError
from dynorm.stream.stream import Stream


def decide_affine(
    folds: Sequence[SiteFold],
    affine: bool,
    add_bias: bool,
) -> None:
    """Decide for each norm whether its weight and bias can go into everything that reads it."""
    for fold in folds:
        _choose_parts(fold, affine)
        fold.affine_refused = _obstacle(fold)
    uses: Uses = {}
    for fold in folds:
        for reader in fold.readers:
            uses[reader.leaf] = (fold, reader)
    for fold in folds:
        if fold.is_absorbed:
            try:
                require_readers(fold, uses, add_bias)
            except RefusedError as refusal:
                fold.affine_refused = str(refusal)
    _propagate_refusals(folds, uses)


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
    if not fold.readers:
        return "nothing reads it"
    if fold.around.readers.is_scaled and fold.shift is not None:
        return "scaled token by token before it is read, and its bias with it"
    return None


def _propagate_refusals(folds: Sequence[SiteFold], uses: Uses) -> None:
    """Refuse each norm that shares a reader with a refused one, until nothing changes."""
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


def _neighbour_that_stays(fold: SiteFold, uses: Uses) -> SiteFold | None:
    for reader in fold.readers:
        for leaf in reader.weight.leaves:
            neighbour, _ = uses[leaf]
            if not neighbour.is_absorbed:
                return neighbour
    return None


def decide_means(folds: Sequence[SiteFold], partly: bool) -> None:
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
            seen_by = _other_reader(folds, stream)
            if seen_by is not None:
                mean_seen_by[stream] = seen_by
            reason = _other_writer(folds, stream) or seen_by
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


def _other_writer(folds: Sequence[SiteFold], stream: Stream) -> str | None:
    """Return why some of the means stay: a writer is not linear."""
    if stream.writer_refused is not None:
        return stream.writer_refused
    if stream.norms_before:
        norm = folds[stream.norms_before[0].index]
        return (
            f"written by the norm {norm.path}, whose weight and bias give it a mean again "
            "(post-norm)"
        )
    return None


def _other_reader(folds: Sequence[SiteFold], stream: Stream) -> str | None:
    """Return why no writer can lose its mean: something other than LayerNorms sees it."""
    if stream.axes_refused is not None:
        return stream.axes_refused
    for use in stream.norms_after:
        norm = folds[use.index]
        if norm.site.kind != "layernorm" or not use.over_channels:
            return f"{norm.path} sees its mean"
    if stream.read_by is not None:
        return f"{stream.read_by} sees its mean"
    if stream.is_returned:
        return "the model returns it, with its mean"
    return stream.shared_writer_refused


def decide_learned_centers(folds: Sequence[SiteFold]) -> None:
    """Decide for each learned centre of a point-wise layer whether a bias before can take it."""
    for fold in folds:
        if fold.learned_center is None or fold.is_line or not fold.chosen or not fold.calls:
            continue
        fold.learned_center_into = fold.bias_before
