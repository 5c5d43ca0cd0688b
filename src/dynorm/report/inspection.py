"""The paper's section 4 on a real model: the outliers of each norm, and curves fitted to them."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain

import torch
from torch import Tensor, nn

from dynorm import functional, theory
from dynorm.batches import Batch, arguments, iterate
from dynorm.errors import ModelError
from dynorm.find.probe import find_norms
from dynorm.guard import require_plain_model, undisturbed
from dynorm.replace.original import run_norms
from dynorm.report.records import InspectedSite, InspectionReport
from dynorm.report.sizes import LargeToken
from dynorm.report.stats import (
    FUNCTIONS,
    LogSums,
    OutlierFit,
    Reservoir,
    SiteStats,
    batches_with_shares,
    core_fit,
    normalized,
    reached_sites,
)
from dynorm.site import NormSite
from dynorm.theory import own_betas

# The most outliers that are kept to fit on, and again to measure on: some hundred kilobytes per
# site.
_KEPT = 20_000
# About the number of outliers in a picture.
_DRAWN = 800


def inspect_norms(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    sites: Sequence[NormSite] | None = None,
    fit_on: Iterable[Batch] | None = None,
    seed: int = 0,
    meta: Mapping[str, object] | None = None,
    decode: Callable[[int], str] | None = None,
) -> InspectionReport:
    """Repeat the paper's section 4 at every norm of a model, on the model's own activations.

    The outlier of a token is its channel farthest from the mean. DyT, DyISRU and a straight line,
    with one constant per site, are fitted by least squares on the outliers of some tokens and
    measured on those of others; the same is done on all channels. The report also says whether the
    model has massive activations: which tokens are the largest, in which channel, and how much of
    the variation of the tokens' sizes one, two and four channels explain. Memory is that of one
    batch plus a fixed amount per site. The model runs in eval mode, without gradient; it, its
    buffers and random states are afterwards as they were. As for :func:`measure`, the report covers
    this process only.

    Args:
        model: any model with LayerNorms or RMSNorms.
        batches: tensors, tuples or dicts, as for :func:`calibrate_`; read once.
        sites: all or some of the sites that :func:`find_norms` returned; None finds them with the
            first batch.
        fit_on: as for :func:`measure`.
        seed: seed of the samples.
        meta: facts to show with the figures.
        decode: a function from a number of ``input_ids`` to its text, to name the largest tokens.

    Returns:
        A report with one row per site.

    Raises:
        ModelError: the model has no norm (it may be converted already).
        DataError: there is no batch, one is of the wrong kind, the model cannot run it, it reaches
            no norm, or an activation is not finite.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
        >>> report = dynorm.inspect_norms(model, [torch.randn(64, 8) for _ in range(4)])
        >>> report.sites[0].tokens, report.summary()["exact"] < 1e-12
        (256, True)

    Reference:
        Section 4, eq. 17 to 19.
    """
    require_plain_model(model)
    remaining = iterate(batches)
    if sites is None:
        first = next(remaining)
        args, kwargs = arguments(model, first)
        sites = find_norms(model, *args, **kwargs)
        remaining = chain([first], remaining)
    watched = _watched(model, sites, seed)
    measured = 0
    with undisturbed(model, evaluate=True):
        for batch, share in batches_with_shares(remaining, fit_on):

            def see(
                norm: nn.Module,
                x: Tensor,
                _: Tensor,
                batch: Batch = batch,
                share: float = share,
            ) -> None:
                watched[norm].see(x, batch, share)

            run_norms(model, watched, batch, see)
            if share < 1:
                measured += 1
    return InspectionReport(
        model=type(model).__name__,
        sites=[site.report(decode) for site in reached_sites(watched.values(), "norm")],
        batches=measured,
        refused={site.path: site.refused for site in sites if site.refused is not None},
        unreached=[stats.site.path for stats in watched.values() if not stats.tokens],
        meta=dict(meta or {}),
    )


class _NormStats(SiteStats):
    """The statistics of a norm and of its outliers."""

    def __init__(self, site: NormSite, seed: int) -> None:
        super().__init__(site, seed)
        self.outliers = Outliers(site, seed)

    def see(self, x: Tensor, batch: Batch, share: float) -> Tensor:
        tokens = super().see(x, batch, share)
        self.outliers.add(tokens, int(len(tokens) * share))
        return tokens

    def report(self, decode: Callable[[int], str] | None) -> InspectedSite:
        """Return the row of the report, with the texts of the largest tokens from ``decode``."""
        core = self.fit()
        outliers = self.outliers.fit(core.scale, core.center)
        figures = self.figures()
        if decode is not None:
            tokens: list[LargeToken] = []
            for token in figures["sizes"].tokens:
                if isinstance(token.token, int):
                    token = replace(token, token=decode(token.token))
                tokens.append(token)
            figures["sizes"] = replace(figures["sizes"], tokens=tuple(tokens))
        return InspectedSite(**figures, outliers=outliers, core=core)


def _watched(model: nn.Module, sites: Sequence[NormSite], seed: int) -> dict[nn.Module, _NormStats]:
    """Return the statistics of each norm of more than one channel, by its module."""
    usable = []
    for site in sites:
        if site.refused is None and math.prod(site.normalized_shape) > 1:
            usable.append(site)
    if not usable:
        reasons = "; ".join(f"{site.path}: {site.refused}" for site in sites[:3] if site.refused)
        details = f" ({reasons})" if reasons else ""
        raise ModelError(
            f"the model must have a LayerNorm or RMSNorm to inspect, but has none{details}: "
            "a converted model has lost its norms, inspect the original"
        )
    modules = dict(model.named_modules(remove_duplicate=False))
    watched = {}
    for site in usable:
        if site.path not in modules:
            raise ModelError(f"the sites must be those of this model, but it has no {site.path!r}")
        watched[modules[site.path]] = _NormStats(site, seed + site.order)
    return watched


class Outliers:
    """Running sample and sums of the outliers of one site: each token's largest deviation.

    In section 4.1 with eq. 17 the outlier is ``argmax x``; here it may also lie below the mean.
    """

    def __init__(self, site: NormSite, seed: int) -> None:
        self.site = site
        self._fitted = Reservoir(_KEPT, seed)
        self._held_out = Reservoir(_KEPT, seed + 1)
        # Of the constant that each held-out outlier would need.
        self._log_betas = LogSums()
        # The largest distance of DyISRU with these constants from the norm.
        self._exact = 0.0

    def add(self, x: Tensor, fitted: int = 0) -> None:
        """Add tokens (tokens, C); the functions are fitted on the first ``fitted`` of them."""
        self._add(self._fitted, x[:fitted])
        beta = self._add(self._held_out, x[fitted:])
        self._log_betas.add(beta.clamp_min(torch.finfo(beta.dtype).tiny).log())

    def fit(self, scale: float, center: float) -> OutlierFit:
        """Fit each function by least squares and measure it; both on all if one half has none.

        The scale is the bound of the functions; the centre is the site's mean if the norm centres,
        else 0.
        """
        # An empty sample is False.
        fitted = self._fitted or self._held_out
        held_out = self._held_out or self._fitted
        x, y = fitted.tensors()
        # A line through the centre, with slope scale / sqrt(beta), through the typical outlier.
        inverse_slopes = (x - center).square() / y.square().clamp_min(1e-12)
        start = float(inverse_slopes.median().clamp_min(1e-12)) * scale**2
        fit = core_fit(fitted, held_out, center, scale, start)
        x, y = held_out.tensors()
        residuals = {name: float((fit.curve(name, x) - y).abs().mean()) for name in FUNCTIONS}
        step = max(1, len(x) // _DRAWN)
        return OutlierFit(
            fit=fit,
            residuals=residuals,
            beta=math.exp(self._log_betas.mean()),
            beta_spread=self._log_betas.deviation(),
            exact=self._exact,
            points=(x[::step].tolist(), y[::step].tolist()),
        )

    def _add(self, sample: Reservoir, x: Tensor) -> Tensor:
        """Add the outliers of tokens to a sample, and return the constant that each would need."""
        x = x.double()
        sigma, core, _ = normalized(self.site, x)
        place = core.abs().argmax(-1, keepdim=True)
        y = core.gather(-1, place)[:, 0]
        outlier = x.gather(-1, place)
        beta = own_betas(x, self.site.kind, self.site.eps).gather(-1, place)
        # With this constant, and for a LayerNorm the mean of the other channels as its centre,
        # DyISRU is the norm: the distance is only rounding.
        if self.site.kind == "layernorm":
            center = theory.leave_one_out_mean(x).gather(-1, place)
            scale = math.sqrt(x.shape[-1] - 1)
        else:
            center = None
            scale = math.sqrt(x.shape[-1])
        exact = functional.dyisru_general(outlier, beta, center, scale=scale)[:, 0]
        distances = (exact - y)[sigma > torch.finfo(x.dtype).tiny].abs()
        if len(distances):
            self._exact = max(self._exact, float(distances.max()))
        sample.add(outlier.cpu(), y.cpu(), torch.ones(len(y), dtype=torch.float64, device="cpu"))
        return beta[:, 0]
