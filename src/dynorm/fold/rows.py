"""The rows of a fold's report."""

import math
from collections.abc import Sequence

from dynorm.fold.plan import Options
from dynorm.fold.report import FOLDED, NOTHING, OFF, PARTLY, REFUSED, FoldedSite, Rewrite
from dynorm.fold.site import SiteFold
from dynorm.stream.stream import Stream


def row_of(fold: SiteFold, options: Options) -> FoldedSite:
    """Return the row of a site."""
    off = Rewrite(OFF)
    affine = _affine(fold) if options.affine and fold.chosen else off
    mean = _mean(fold) if options.center and fold.chosen else off
    constants = _constants(fold) if fold.is_pointwise and fold.chosen else off
    becomes = ""
    if fold.is_gone:
        becomes = "Identity"
    elif fold.becomes_rms:
        becomes = "RMSNorm"
    return FoldedSite(
        fold.path,
        fold.site.kind or fold.site.class_name,
        math.prod(fold.site.normalized_shape),
        affine,
        mean,
        constants,
        becomes=becomes,
        redundant=_redundant(fold),
        change=fold.change,
    )


def _affine(fold: SiteFold) -> Rewrite:
    if fold.by_rescaling:
        if fold.remaining_weight is None:
            return Rewrite(FOLDED, ("the stream",))
        return _refused(f"a factor per channel stays: {fold.remains_because}")
    is_empty = fold.weight is None and fold.bias is None
    if fold.affine_refused is not None:
        if is_empty and fold.refused is None and not fold.is_pointwise:
            return Rewrite(NOTHING)
        return _refused(fold.affine_refused)
    if is_empty or not fold.is_absorbed:
        return Rewrite(NOTHING)
    return Rewrite(FOLDED, _weights_of_readers(fold))


def _mean(fold: SiteFold) -> Rewrite:
    if fold.site.kind != "layernorm":
        if fold.refused is not None and not fold.site.kind:
            return _refused(fold.refused)
        return Rewrite(NOTHING)
    if fold.partly_mean_free:
        return Rewrite(PARTLY, _names_of_writers(fold.partly_mean_free), fold.mean_refused)
    if not fold.becomes_rms:
        uncalled = "never called while the model was traced"
        return _refused(fold.mean_refused or fold.refused or uncalled)
    return Rewrite(FOLDED, _names_of_writers(fold.streams))


def _constants(fold: SiteFold) -> Rewrite:
    into: tuple[str, ...] = ()
    if fold.scale != 1 and fold.is_absorbed:
        into = _weights_of_readers(fold)
    if fold.learned_center_into is not None and not fold.by_rescaling:
        into = (*into, fold.learned_center_into.slot.name)
    reason = None
    if fold.remains_because and not fold.by_rescaling:
        reason = f"its slope stays: {fold.remains_because}"
    if into:
        return Rewrite(FOLDED, into, reason)
    if fold.is_gone:
        return Rewrite(NOTHING)
    if fold.learned_center is not None and fold.learned_center_into is None:
        reason = fold.bias_before_refused or reason
    if reason is None and fold.scale != 1:
        reason = fold.affine_refused
    if reason is None:
        return Rewrite(NOTHING)
    return _refused(reason)


def _redundant(fold: SiteFold) -> Rewrite:
    if fold.followers:
        return Rewrite(FOLDED, tuple(norm.path for norm in fold.followers))
    if fold.redundant_refused is not None:
        return _refused(fold.redundant_refused)
    return Rewrite(OFF)


def _refused(reason: str) -> Rewrite:
    return Rewrite(REFUSED, reason=reason)


def _names_of_writers(streams: Sequence[Stream]) -> tuple[str, ...]:
    names: dict[str, None] = {}
    for stream in streams:
        names.update(dict.fromkeys(write.slot.name for write in stream.writes))
    return tuple(names)


def _weights_of_readers(fold: SiteFold) -> tuple[str, ...]:
    return tuple(dict.fromkeys(reader.weight.name for reader in fold.readers))
