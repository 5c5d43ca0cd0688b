"""Section 4 on a real model: at every norm, outliers against the functions fitted to them."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from dynorm import functional, theory
from dynorm.batches import arguments, iterate
from dynorm.errors import ModelError
from dynorm.find.probe import find_norms
from dynorm.guard import require_plain_model, undisturbed
from dynorm.replace.original import run_norms
from dynorm.report.records import InspectedSite, InspectionReport
from dynorm.report.sizes import TokenSizes
from dynorm.report.stats import (
    FUNCTIONS,
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

# How many outliers are kept to fit on, and as many to measure on: some hundred kilobytes per site.
_KEPT = 20_000


def inspect_norms(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    sites: Sequence[NormSite] | None = None,
    fit_on: Iterable[Any] | None = None,
    seed: int = 0,
    points: int = 1500,
    meta: Mapping[str, Any] | None = None,
    decode: Callable[[int], str] | None = None,
) -> InspectionReport:
    """Repeat the paper's section 4 at every norm of a model, on its own activations; the model is not changed.

    Of every token the channel farthest from the mean is its outlier. DyT, DyISRU and a straight
    line, with one constant per site, are fitted by least squares on the outliers of some tokens and
    measured on those of others; beside it the same on all channels. The report also says whether
    the model has massive activations: which tokens are the largest, in which channel, and how much
    of the tokens' sizes one, two and four channels tell. Memory is that of one batch plus a fixed
    amount per site. The model runs in eval mode, without gradient; it, its buffers and random
    states are afterwards as they were. The report is that of this process, as :func:`measure`'s
    is.

    Args:
        model: any model with LayerNorms or RMSNorms.
        batches: tensors, tuples or dicts, as for :func:`calibrate_`; read once.
        sites: all or some of those that :func:`find_norms` returned; None finds them with the first
            batch.
        fit_on: as for :func:`measure`.
        seed: of the samples.
        points: how many points to keep for the picture of a site.
        meta: facts to show beside the figures.
        decode: turns a number of ``input_ids`` into text, to name the largest tokens by.

    Returns:
        A report with one row per site.

    Raises:
        ArgumentError: ``points`` is not positive.
        ModelError: the model has no norm that is left (it may be converted already).
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
        sites, remaining = find_norms(model, *args, **kwargs), chain([first], remaining)
    watched = _watched(model, sites, seed, points)
    count = 0
    with undisturbed(model, evaluate=True):
        for batch, share in batches_with_shares(remaining, fit_on):
            count += share < 1
            run_norms(
                model,
                watched,
                batch,
                lambda norm, x, _, b=batch, s=share: watched[norm].see(x, b, s),
            )
    return InspectionReport(
        model=type(model).__name__,
        sites=[site.report(decode) for site in reached_sites(watched.values(), "norm")],
        batches=count,
        refused={site.path: site.refused for site in sites if site.refused is not None},
        unreached=[stats.site.path for stats in watched.values() if not stats.tokens],
        meta=dict(meta or {}),
    )


class _Site(SiteStats):
    """A norm with its outliers."""

    def __init__(self, site: NormSite, seed: int, points: int) -> None:
        super().__init__(site, seed, points)
        self.outliers = Outliers(site, seed)

    def see(self, x: Tensor, batch: Any, share: float) -> Tensor:
        tokens = super().see(x, batch, share)
        self.outliers.add(tokens, int(len(tokens) * share))
        return tokens

    def report(self, decode: Callable[[int], str] | None) -> InspectedSite:
        """Return the row of the report, the largest tokens by their text where ``decode`` knows it."""
        core, figures = self.fit(), self.figures()
        if decode is not None:
            sizes: TokenSizes = figures["sizes"]
            named = (
                replace(t, token=decode(t.token)) if isinstance(t.token, int) else t
                for t in sizes.tokens
            )
            figures["sizes"] = replace(sizes, tokens=tuple(named))
        return InspectedSite(
            **figures, outliers=self.outliers.fit(core.scale, core.center), core=core
        )


def _watched(
    model: nn.Module, sites: Sequence[NormSite], seed: int, points: int
) -> dict[nn.Module, _Site]:
    usable = [
        site for site in sites if site.refused is None and math.prod(site.normalized_shape) > 1
    ]
    if not usable:
        reasons = "; ".join(f"{site.path}: {site.refused}" for site in sites[:3] if site.refused)
        raise ModelError(
            "the model must have a LayerNorm or RMSNorm to inspect, but has none"
            f"{f' ({reasons})' if reasons else ''}: a converted model has lost its norms, inspect "
            "the original"
        )
    modules = dict(model.named_modules(remove_duplicate=False))
    if missing := [site.path for site in usable if site.path not in modules]:
        raise ModelError(f"the sites must be those of this model, but it has no {missing[0]!r}")
    return {modules[site.path]: _Site(site, seed + site.order, points) for site in usable}


class Outliers:
    """Running sample and sums of the outliers of one site: of each token the channel with the largest deviation.

    In section 4.1 with eq. 17 the outlier is ``argmax x``; here it may stand on either side.
    """

    def __init__(self, site: NormSite, seed: int) -> None:
        self.site = site
        self._fitted, self._held_out = (Reservoir(_KEPT, seed + half) for half in (0, 1))
        # How many there are, the sum of their constants' logarithms and of the squares of these.
        self._logs = torch.zeros(3, dtype=torch.float64, device="cpu")
        self._exact = 0.0

    def add(self, x: Tensor, fitted: int = 0) -> None:
        """Add tokens (tokens, C): the functions are fitted on so many of them, and measured on the others."""
        self._add(self._fitted, x[:fitted])
        beta = self._add(self._held_out, x[fitted:])
        log_beta = beta.clamp_min(torch.finfo(beta.dtype).tiny).log()
        self._logs += torch.stack(
            [torch.ones_like(log_beta).sum(), log_beta.sum(), log_beta.square().sum()]
        ).cpu()

    def fit(self, scale: float, center: float) -> OutlierFit:
        """Fit each function by least squares and measure it; where one half has no tokens, on the other.

        The scale is the bound of the functions; the centre the site's mean where the norm centres,
        else 0.
        """
        fitted, held_out = self._fitted or self._held_out, self._held_out or self._fitted
        x, y = torch.tensor(fitted.points(), dtype=torch.float64, device="cpu")
        start = (
            float(((x - center).square() / y.square().clamp_min(1e-12)).median().clamp_min(1e-12))
            * scale**2
        )
        fit = core_fit(fitted, held_out, center, scale, start)
        x, y = torch.tensor(held_out.points(), dtype=torch.float64, device="cpu")
        residuals = {
            name: float(
                (
                    f(
                        x,
                        torch.tensor(fit.betas[name], dtype=torch.float64, device="cpu"),
                        center,
                        scale,
                    )
                    - y
                )
                .abs()
                .mean()
            )
            for name, f in FUNCTIONS.items()
        }
        _, mean, square = (self._logs / self._logs[0].clamp_min(1)).tolist()
        spread = math.sqrt(max(square - mean * mean, 0.0))
        few = slice(None, None, max(1, len(x) // 800))
        points = x[few].tolist(), y[few].tolist()
        return OutlierFit(fit, residuals, math.exp(mean), spread, self._exact, points)

    def _add(self, kept: Reservoir, x: Tensor) -> Tensor:
        """Keep the outliers of tokens, and return the constant that each would need."""
        x, centred = x.double(), self.site.kind == "layernorm"
        sigma, core, _ = normalized(self.site, x)
        place = core.abs().argmax(-1, keepdim=True)
        y = core.gather(-1, place)[:, 0]
        outlier, beta = (
            each.gather(-1, place) for each in (x, own_betas(x, self.site.kind, self.site.eps))
        )
        middle = theory.leave_one_out_mean(x).gather(-1, place) if centred else None
        exact = functional.dyisru_general(
            outlier, beta, middle, scale=math.sqrt(x.shape[-1] - centred)
        )
        gap = (exact[:, 0] - y)[sigma > torch.finfo(x.dtype).tiny]
        self._exact = (
            max([self._exact, *gap.abs().amax(0, keepdim=True).tolist()])
            if len(gap)
            else self._exact
        )
        kept.add(outlier.cpu(), y.cpu(), torch.ones(len(y), dtype=torch.float64, device="cpu"))
        return beta[:, 0]
