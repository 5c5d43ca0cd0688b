"""The mean of a LayerNorm, out of everything that writes into the residual stream.

A stream without a mean is the same to a LayerNorm and to an RMSNorm of the same eps. Writers are
centred, W' = P W and b' = P b, with P = I - 11^T / C.
"""

from collections.abc import Sequence

from dynorm.fold.site import SiteFold
from dynorm.stream.graph import Graph
from dynorm.stream.operators import RefusedError
from dynorm.stream.stream import Stream, StreamFinder


def fold_means(graph: Graph, folds: Sequence[SiteFold], finder: StreamFinder) -> None:
    """Decide for each LayerNorm whether the means of all streams it is called on can go."""
    layernorms = [fold for fold in folds if fold.calls and fold.site.kind == "layernorm"]
    refusals: dict[Stream, str] = {}
    for fold in layernorms:
        fold.streams = list(dict.fromkeys(map(finder.before, fold.calls)))
        for stream in fold.streams:
            try:
                _require_no_mean(graph, folds, stream)
            except RefusedError as refusal:
                refusals[stream] = str(refusal)
    # A norm that is not exactly an RMSNorm needs the means of its streams.
    for fold in layernorms:
        if not fold.is_exact_rms:
            for stream in fold.streams:
                refusals.setdefault(stream, f"{fold.path} is not a LayerNorm to the last digits")
    for fold in layernorms:
        for stream in fold.streams:
            if fold.mean_kept is None:
                fold.mean_kept = refusals.get(stream)


def _require_no_mean(graph: Graph, folds: Sequence[SiteFold], stream: Stream) -> None:
    """Check that the mean of a stream can be taken out: only LayerNorms see it."""
    stream.require_followed()
    for use in stream.norms_before:
        raise RefusedError(
            f"written by the norm {folds[use.index].path}, whose weight and bias give it a mean "
            "again (post-norm)"
        )
    for use in stream.norms_after:
        norm = folds[use.index]
        if norm.site.kind != "layernorm" or not use.over_channels:
            raise RefusedError(f"{norm.path} sees its mean")
    for other in stream.other_uses:
        raise RefusedError(f"{graph.where(other.node)} sees its mean")
    if stream.is_returned:
        raise RefusedError("the model returns it, with its mean")
    stream.require_writers(graph)
