"""Look at the norms of a model before they are replaced: outliers, curves, sizes of tokens."""

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from dynorm.arguments import check_kind, check_seed
from dynorm.batches import Batch, iterate
from dynorm.errors import ModelError, listed
from dynorm.fit.witnesses import TokenScales
from dynorm.functional import rms
from dynorm.guard import require_plain_model, undisturbed
from dynorm.replace.original import run_norms
from dynorm.report.curves import Picture, Reservoir
from dynorm.report.inspection_report import InspectedSite, InspectionReport
from dynorm.report.sites import SiteStats, reached_sites, with_sites
from dynorm.site import NormSite
from dynorm.theory import norm_numerator

# How many values of a site are kept to fit curves to, and how many of its tokens' largest ones.
_KEPT = 20_000
# How many of each are drawn.
_DRAWN = 1200
_DRAWN_OUTLIERS = 500
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
    check_seed(seed)
    check_kind("meta", meta, Mapping | None, "a dict, or None")
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


class NormStats(SiteStats):
    """The sample and the running sums of one norm's inputs."""

    def __init__(self, site: NormSite, seed: int) -> None:
        super().__init__(site)
        self._values = Reservoir(_KEPT, seed)
        # The largest value of each token.
        self._outliers = Reservoir(_KEPT, seed + 1)
        self._largest = 0.0
        # The sums of the logarithms of the tokens' sigma, and of their squares.
        self._log_sigma = 0.0
        self._log_sigma_square = 0.0
        self._scales = TokenScales(site.kind or "layernorm", site.eps, _MOST, least=0.0)
        # Of the largest token: sigma, and the squares of the core.
        self._largest_sigma = 0.0
        self._squares = torch.zeros(1, dtype=torch.float64, device="cpu")

    def see(self, inputs: Tensor, batch: Batch) -> None:
        """Add an input of the norm."""
        x = self.tokens_of(inputs, batch)
        if not len(x):
            return
        tiny = torch.finfo(x.dtype).tiny
        numerator = norm_numerator(x, self.site.kind)
        sigma = rms(numerator, eps=self.site.eps).clamp_min(tiny)
        y = numerator / sigma[:, None]
        place = y.abs().argmax(-1, keepdim=True)
        self._values.add(x, y)
        self._outliers.add(x.gather(-1, place), y.gather(-1, place))
        self._largest = max(self._largest, float(y.abs().max()))
        log_sigma = sigma.double().log()
        self._log_sigma += float(log_sigma.sum())
        self._log_sigma_square += float(log_sigma.square().sum())
        self.tokens += len(x)
        self._scales.update(x)
        largest_sigma, row = sigma.max(0)
        if float(largest_sigma) > self._largest_sigma:
            self._largest_sigma = float(largest_sigma)
            self._squares = y[row].double().square()

    def report(self) -> InspectedSite:
        """Return the row of the report."""
        is_centred = self.site.kind == "layernorm"
        center = float(self._values.pairs[0].mean()) if is_centred else 0.0
        scale = math.sqrt(max(self.channels - is_centred, 1))
        mean = self._log_sigma / self.tokens
        variance = self._log_sigma_square / self.tokens - mean * mean
        typical = math.exp(mean)
        x, y = self._values.pairs[:, :_DRAWN].tolist()
        outlier_x, outlier_y = self._outliers.pairs[:, :_DRAWN_OUTLIERS].tolist()
        shares = self._squares / self._squares.sum().clamp_min(1e-300)
        channel = int(shares.argmax())
        explained = self._scales.choose().explained
        # Fewer channels may be chosen.
        by_count = {count: max(explained[: count + 1][-1], 0.0) for count in (1, _MOST)}
        return InspectedSite(
            path=self.site.path,
            kind=self.site.kind,
            channels=self.channels,
            tokens=self.tokens,
            outlier=self._largest,
            sigma_spread=math.sqrt(max(variance, 0.0)),
            core=self._values.fit(center, scale, typical),
            outliers=self._outliers.fit(center, scale, typical),
            picture=Picture(x, y, outlier_x, outlier_y, typical),
            largest=self._largest_sigma / typical,
            channel=channel,
            share=float(shares[channel]),
            explained=by_count,
        )


def _watched(model: nn.Module, sites: Sequence[NormSite], seed: int) -> dict[nn.Module, NormStats]:
    """Return the statistics of each norm, by its module."""
    modules = dict(model.named_modules(remove_duplicate=False))
    watched = {}
    for site in sites:
        if site.refused is not None:
            continue
        if site.path not in modules:
            raise ModelError(f"the sites must be those of this model, but it has no {site.path!r}")
        watched[modules[site.path]] = NormStats(site, seed + 2 * site.order)
    if not watched:
        reasons = [f"{site.path} ({site.refused})" for site in sites]
        why = (
            listed(reasons) if reasons else "a converted model has lost them, inspect the original"
        )
        raise ModelError(f"the model must have norms to inspect, but has none: {why}")
    return watched
