"""Look at the norms of a model before they are replaced: outliers, curves, sizes of tokens."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from dynorm.batches import Batch, iterate
from dynorm.errors import ModelError
from dynorm.guard import require_plain_model, undisturbed
from dynorm.replace.original import run_norms
from dynorm.report.records import InspectedSite, InspectionReport
from dynorm.report.sizes import SizeStats, token_places
from dynorm.report.values import NormStats, normalized, reached_sites, with_sites
from dynorm.site import NormSite


def inspect_norms(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    sites: Sequence[NormSite] | None = None,
    seed: int = 0,
    meta: Mapping[str, object] | None = None,
    decode: Callable[[int], str] | None = None,
) -> InspectionReport:
    """Look at every norm of a model on its own activations, before anything is replaced.

    A line, DyT and DyISRU, each with one constant per site, are fitted by least squares to a sample
    of the values of each norm, and to the outliers among them as in section 4 of the paper. The
    outlier of a token is its channel farthest from the mean. The report also says whether the model
    has massive activations: which tokens are the largest, in which channel, and how much of the
    variation of the tokens' sizes one, two and four channels explain. It ends with advice on strict
    layers, of which each value depends on its own channel.

    Memory is that of one batch plus a fixed amount per site. The model runs in eval mode, without
    gradient; it, its buffers and random states are afterwards as they were.

    Args:
        model: any model with LayerNorms or RMSNorms.
        batches: tensors, tuples or dicts, as for :func:`calibrate_`; read once.
        sites: all or some of the sites that :func:`find_norms` returned; None finds them with the
            first batch.
        seed: seed of the samples.
        meta: facts to show with the figures.
        decode: a function from a number of ``input_ids`` to its text, to name the largest tokens.

    Returns:
        A report with one row per site.

    Raises:
        ModelError: the model has no norm (it may be converted already).
        DataError: ``batches`` is empty, one is of the wrong kind, the model cannot run it, it reaches
            no norm, or an activation is not finite.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
        >>> report = dynorm.inspect_norms(model, [torch.randn(64, 8) for _ in range(4)])
        >>> report.sites[0].tokens, report.sites[0].kind
        (256, 'layernorm')

    Reference:
        Section 4, eq. 17 to 19.
    """
    require_plain_model(model)
    sites, remaining = with_sites(model, iterate(batches), sites)
    watched = _watched(model, sites, seed)
    measured = 0
    with undisturbed(model, evaluate=True):
        for batch in remaining:

            def see(norm: nn.Module, x: Tensor, _: Tensor, batch: Batch = batch) -> None:
                watched[norm].see(x, batch)

            run_norms(model, watched, batch, see)
            measured += 1
    return InspectionReport(
        model=type(model).__name__,
        sites=[stats.report(decode) for stats in reached_sites(watched.values(), "norm")],
        batches=measured,
        refused={site.path: site.refused for site in sites if site.refused is not None},
        unreached=[stats.site.path for stats in watched.values() if not stats.tokens],
        meta=dict(meta or {}),
    )


class _InspectedStats(NormStats):
    """The statistics of a norm, with the sizes of its tokens."""

    def __init__(self, site: NormSite, seed: int) -> None:
        super().__init__(site, seed)
        self._sizes = SizeStats(site)

    def see(self, x: Tensor, batch: Batch) -> None:
        super().see(x, batch)
        tokens = self.tokens_of(x, batch)
        if not len(tokens):
            return
        sigma, y = normalized(self.site, tokens)
        places = token_places(self.site, x, batch)
        if places is None:
            places = torch.full((len(tokens), 2), -1, device="cpu")
        self._sizes.add(tokens, sigma, y, places)

    def report(self, decode: Callable[[int], str] | None) -> InspectedSite:
        """Return the row of the report, with the texts of the largest tokens from ``decode``."""
        sizes = self._sizes.report(self.typical_sigma)
        tokens = []
        for token in sizes.tokens:
            if decode is not None and isinstance(token.token, int):
                token = replace(token, token=decode(token.token))
            tokens.append(token)
        return InspectedSite(**self.figures(), sizes=replace(sizes, tokens=tuple(tokens)))


def _watched(
    model: nn.Module, sites: Sequence[NormSite], seed: int
) -> dict[nn.Module, _InspectedStats]:
    """Return the statistics of each norm of more than one channel, by its module."""
    modules = dict(model.named_modules(remove_duplicate=False))
    watched = {}
    for site in sites:
        if site.refused is not None or math.prod(site.normalized_shape) == 1:
            continue
        if site.path not in modules:
            raise ModelError(f"the sites must be those of this model, but it has no {site.path!r}")
        watched[modules[site.path]] = _InspectedStats(site, seed + 2 * site.order)
    if not watched:
        reasons = "; ".join(f"{site.path}: {site.refused}" for site in sites[:3] if site.refused)
        details = f" ({reasons})" if reasons else ""
        raise ModelError(
            f"the model must have a LayerNorm or RMSNorm to inspect, but has none{details}: "
            "a converted model has lost its norms, inspect the original"
        )
    return watched
