"""Look at the norms of a model before they are replaced: outliers, curves, sizes of tokens."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from dynorm.batches import Batch, iterate
from dynorm.errors import ModelError, listed
from dynorm.fit.witnesses import TokenScales
from dynorm.guard import require_plain_model, undisturbed
from dynorm.replace.original import run_norms
from dynorm.report.records import InspectedSite
from dynorm.report.reports import InspectionReport
from dynorm.report.values import NormStats, reached_sites, with_sites
from dynorm.site import NormSite

# The most channels that are tried to explain the sizes of tokens.
_MOST = 4


def inspect_norms(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    sites: Sequence[NormSite] | None = None,
    seed: int = 0,
    meta: Mapping[str, object] | None = None,
) -> InspectionReport:
    """Look at every norm of a model on its own activations, before anything is replaced.

    A line, DyT and DyISRU, each with one constant per site, are fitted by least squares to a sample
    of the values of each norm, and to the outliers among them as in section 4 of the paper. The
    outlier of a token is its channel farthest from the mean. The report also says whether the model
    has massive activations: how large the largest token is, in which channel, and how much of the
    variation of the tokens' sizes one and four channels explain. It ends with advice on strict
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
        sites=[stats.report() for stats in reached_sites(watched.values(), "norm")],
        batches=measured,
        refused={site.path: site.refused for site in sites if site.refused is not None},
        unreached=[stats.site.path for stats in watched.values() if not stats.tokens],
        meta=dict(meta or {}),
    )


class _InspectedStats(NormStats):
    """The statistics of a norm, with its largest token and the channels that explain the sizes."""

    def __init__(self, site: NormSite, seed: int) -> None:
        super().__init__(site, seed)
        self._scales = TokenScales(site.kind or "layernorm", site.eps, _MOST, least=0.0)
        # Of the largest token: sigma, and the squares of the core.
        self._sigma = 0.0
        self._squares = torch.zeros(1, dtype=torch.float64, device="cpu")

    def add(self, x: Tensor, sigma: Tensor, y: Tensor) -> None:
        super().add(x, sigma, y)
        self._scales.update(x)
        largest, row = sigma.max(0)
        if float(largest) > self._sigma:
            self._sigma = float(largest)
            self._squares = y[row].double().square()

    def report(self) -> InspectedSite:
        """Return the row of the report."""
        shares = self._squares / self._squares.sum().clamp_min(1e-300)
        channel = int(shares.argmax())
        explained = self._scales.choose().explained
        # Fewer channels may be chosen.
        by_count = {count: max(explained[: count + 1][-1], 0.0) for count in (1, _MOST)}
        return InspectedSite(
            **self.figures(),
            largest=self._sigma / self.typical_sigma,
            channel=channel,
            share=float(shares[channel]),
            explained=by_count,
        )


def _watched(
    model: nn.Module, sites: Sequence[NormSite], seed: int
) -> dict[nn.Module, _InspectedStats]:
    """Return the statistics of each norm, by its module."""
    modules = dict(model.named_modules(remove_duplicate=False))
    watched = {}
    for site in sites:
        if site.refused is not None:
            continue
        if site.path not in modules:
            raise ModelError(f"the sites must be those of this model, but it has no {site.path!r}")
        watched[modules[site.path]] = _InspectedStats(site, seed + 2 * site.order)
    if not watched:
        reasons = [f"{site.path} ({site.refused})" for site in sites]
        why = (
            listed(reasons) if reasons else "a converted model has lost them, inspect the original"
        )
        raise ModelError(f"the model must have norms to inspect, but has none: {why}")
    return watched
