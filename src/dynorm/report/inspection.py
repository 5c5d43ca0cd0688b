"""Section 4 on a real model: at every norm, outliers against the functions fitted to them."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from dynorm import functional, theory, watch
from dynorm.errors import ArgumentError, DataError, ModelError
from dynorm.find.probe import find_norms
from dynorm.fit.site_fit import own_betas
from dynorm.report.records import InspectedSite, InspectionReport
from dynorm.report.sizes import TokenSizes, token_places
from dynorm.report.stats import FUNCTIONS, CoreFit, OutlierFit, Reservoir, SiteStats, best_beta, normalized
from dynorm.site import NormSite

Curve = Callable[[Tensor, Tensor, float, float], Tensor]
Watched = dict[nn.Module, tuple[SiteStats, "Outliers"]]
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

    Of every token the channel farthest from the mean is its outlier. DyT, DyISRU and a straight line, with one constant
    per site, are fitted by least squares on the outliers of some tokens and measured on those of others; beside it the
    same on all channels. The report also says whether the model has massive activations: which tokens are the largest,
    in which channel, and how much of the tokens' sizes one, two and four channels tell. Memory is that of one batch
    plus a fixed amount per site. The model runs in eval mode, without gradient; it, its buffers and random states are
    afterwards as they were.

    Args:
        model: any model with LayerNorms or RMSNorms.
        batches: tensors, tuples or dicts, as for :func:`calibrate_`; read once.
        sites: all or some of those that :func:`find_norms` returned; None finds them with the first batch.
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
        DataError: there is no batch, one is of the wrong kind, the model cannot run it, it reaches no norm, or an
            activation is not finite.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
        >>> report = dynorm.inspect_norms(model, [torch.randn(64, 8) for _ in range(4)])
        >>> report.sites[0].tokens, report.summary()["exact"] < 1e-12
        (256, True)

    Reference:
        Section 4, eq. 17 to 19.
    """
    if points < 1:
        raise ArgumentError(f"points must be at least 1, got {points}")
    watch.require_plain_model(model)
    remaining = watch.iterate(batches)
    if sites is None:
        first = next(remaining)
        args, kwargs = watch.arguments(model, first)
        sites, remaining = find_norms(model, *args, **kwargs), chain([first], remaining)
    watched = _watched(model, sites, seed, points)
    count = 0
    with watch.undisturbed(model, evaluate=True):
        for batch in () if fit_on is None else watch.iterate(fit_on, "fit_on"):
            _run(model, watched, batch, fitted=1.0)
        for batch in remaining:
            count += 1
            _run(model, watched, batch, fitted=0.0 if fit_on is not None else 0.5)
    reached = [entry for entry in watched.values() if entry[0].tokens]
    if not reached:
        raise DataError("the batches must reach at least one norm, but reached none: give batches that use them")
    return InspectionReport(
        model=type(model).__name__,
        sites=[_row(*entry, decode) for entry in sorted(reached, key=lambda entry: entry[0].site.order)],
        batches=count,
        refused={site.path: site.refused for site in sites if site.refused is not None},
        unreached=[stats.site.path for stats, _ in watched.values() if not stats.tokens],
        meta=dict(meta or {}),
    )


def _row(stats: SiteStats, outliers: "Outliers", decode: Callable[[int], str] | None) -> InspectedSite:
    """Return the row of the report, the largest tokens by their text where ``decode`` knows it."""
    core, figures = stats.fit(), stats.figures()
    if decode is not None:
        sizes: TokenSizes = figures["sizes"]
        named = (replace(t, token=decode(t.token)) if isinstance(t.token, int) else t for t in sizes.tokens)
        figures["sizes"] = replace(sizes, tokens=tuple(named))
    return InspectedSite(**figures, outliers=outliers.fit(core.scale, core.center), core=core)


def _watched(model: nn.Module, sites: Sequence[NormSite], seed: int, points: int) -> Watched:
    usable = [site for site in sites if site.refused is None and math.prod(site.normalized_shape) > 1]
    if not usable:
        reasons = "; ".join(f"{site.path}: {site.refused}" for site in sites[:3] if site.refused)
        raise ModelError(
            "the model must have a LayerNorm or RMSNorm to inspect, but has none"
            f"{f' ({reasons})' if reasons else ''}: a converted model has lost its norms, inspect the original"
        )
    modules = dict(model.named_modules(remove_duplicate=False))
    if missing := [site.path for site in usable if site.path not in modules]:
        raise ModelError(f"the sites must be those of this model, but it has no {missing[0]!r}")
    seeds = [(site, seed + site.order) for site in usable]
    return {modules[site.path]: (SiteStats(site, own, points), Outliers(site, own)) for site, own in seeds}


def _run(model: nn.Module, watched: Watched, batch: Any, fitted: float) -> None:
    """Add the tokens of a batch to the sums of each norm, a share of which is fitted on, and the rest measured on."""
    masks = watch.token_masks(batch)

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        stats, outliers = watched[module]
        given = args[0] if args else next(iter(kwargs.values()))
        x = watch.site_tokens(stats.site, given, masks)
        watch.require_finite(stats.site.path, x)
        split = int(len(x) * fitted)
        outliers.add(x, split)
        if fitted == 1.0:
            stats.add_fitted(x)
        else:
            stats.add(x, split, token_places(stats.site, given, batch))

    with watch.undisturbed(model, batch), watch.hooked(watched, hook, with_kwargs=True):
        watch.call(model, batch)


class Outliers:
    """Running sample and sums of the outliers of one site: of each token the channel with the largest deviation.

    In section 4.1 with eq. 17 the outlier is ``argmax x``; here it may stand on either side.
    """

    def __init__(self, site: NormSite, seed: int) -> None:
        self.site = site
        self._fitted, self._held_out = (Reservoir(_KEPT, seed + half) for half in (0, 1))
        # How many there are, the sum of their constants' logarithms and of the squares of these.
        self._logs = torch.zeros(3, dtype=torch.float64)
        self._exact = 0.0

    def add(self, x: Tensor, fitted: int = 0) -> None:
        """Add tokens (tokens, C): the functions are fitted on so many of them, and measured on the others."""
        self._add(self._fitted, x[:fitted])
        beta = self._add(self._held_out, x[fitted:])
        log_beta = beta.clamp_min(torch.finfo(beta.dtype).tiny).log()
        self._logs += torch.stack([torch.ones_like(log_beta).sum(), log_beta.sum(), log_beta.square().sum()]).cpu()

    def fit(self, scale: float, center: float) -> OutlierFit:
        """Fit each function by least squares and measure it; where one half has no tokens, on the other.

        The scale is the bound of the functions; the centre the site's mean where the norm centres, else 0.
        """
        held_out = self._held_out if len(self._held_out) else self._fitted
        fitted = self._fitted if len(self._fitted) else held_out
        (x, y), (other_x, other_y) = (torch.tensor(kept.points(), dtype=torch.float64) for kept in (fitted, held_out))
        start = float(((x - center).square() / y.square().clamp_min(1e-12)).median().clamp_min(1e-12)) * scale**2

        def squares(function: Curve, beta: Tensor) -> Tensor:
            error: Tensor = function(x.expand(len(beta), -1), beta[:, None], center, scale) - y
            return error.square().sum(-1)

        betas, errors, residuals = {}, {}, {}
        for name, function in FUNCTIONS.items():
            betas[name] = best_beta(partial(squares, function), start)
            residual = function(other_x, torch.tensor(betas[name], dtype=torch.float64), center, scale) - other_y
            errors[name] = float(residual.norm() / other_y.norm().clamp_min(1e-300))
            residuals[name] = float(residual.abs().mean())
        _, mean, square = (self._logs / self._logs[0].clamp_min(1)).tolist()
        spread = math.sqrt(max(square - mean * mean, 0.0))
        few = slice(None, None, max(1, len(other_x) // 800))
        points = other_x[few].tolist(), other_y[few].tolist()
        fit = CoreFit(scale, center, betas, errors)
        return OutlierFit(fit, residuals, math.exp(mean), spread, self._exact, points)

    def _add(self, kept: Reservoir, x: Tensor) -> Tensor:
        """Keep the outliers of tokens, and return the constant that each would need."""
        x, centred = x.double(), self.site.kind == "layernorm"
        sigma, core, _ = normalized(self.site, x)
        place = core.abs().argmax(-1, keepdim=True)
        y = core.gather(-1, place)[:, 0]
        outlier, beta = (each.gather(-1, place) for each in (x, own_betas(x, self.site.kind, self.site.eps)))
        middle = theory.leave_one_out_mean(x).gather(-1, place) if centred else None
        exact = functional.dyisru_general(outlier, beta, middle, scale=math.sqrt(x.shape[-1] - centred))
        gap = (exact[:, 0] - y)[sigma > torch.finfo(x.dtype).tiny]
        self._exact = max([self._exact, *gap.abs().amax(0, keepdim=True).tolist()]) if len(gap) else self._exact
        kept.add(outlier.cpu(), y.cpu(), torch.ones(len(y), dtype=torch.float64))
        return beta[:, 0]
