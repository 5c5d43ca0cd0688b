"""Section 4 on a real model: at every norm, outliers against the functions fitted to them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

from torch import Tensor, nn

from dynorm.errors import ArgumentError, DataError, ModelError
from dynorm.find.probe import find_norms
from dynorm.guard import require_plain_model
from dynorm.report.outliers import OutlierFit, Outliers
from dynorm.report.stats import CoreFit, Picture, SiteStats
from dynorm.site import NormSite
from dynorm.watch import arguments, call, iterate, require_finite, site_tokens, token_masks, undisturbed


@dataclass(frozen=True)
class InspectedSite:
    """One norm and its outliers; an outlier is the channel of a token that is farthest from the mean (an RMSNorm's: 0).

    The core is the norm without weight and bias. Functions are named "linear", "dyt" (scaled) and "dyisru"; each has
    one constant a site, fitted on some tokens and measured on others.

    Args:
        path: where it stands.
        kind: "layernorm" or "rmsnorm".
        channels: C.
        tokens: how many tokens it saw, padding not counted.
        outlier: the largest value of the core, in sigmas of its own token: sqrt(C - 1) at most (RMSNorm: sqrt(C)).
        outlier_site: the largest deviation in typical sigmas of the site, their geometric mean; no bound.
        sigma_spread: standard deviation over tokens of the natural logarithm of sigma.
        outliers: how well the functions, fitted on outliers alone, describe outliers, as section 4.2 asks.
        core: how well they describe all channels when fitted on all.
        picture: what its picture is drawn from.
    """

    path: str
    kind: str
    channels: int
    tokens: int
    outlier: float
    outlier_site: float
    sigma_spread: float
    outliers: OutlierFit = field(repr=False)
    core: CoreFit = field(repr=False)
    picture: Picture = field(repr=False)

    @property
    def alpha(self) -> float:
        """DyT's constant, fitted on the outliers: ``1 / sqrt(beta)`` of the same slope."""
        return 1 / math.sqrt(self.outliers.fit.betas["dyt"])

    @property
    def beta(self) -> float:
        """DyISRU's constant, fitted on the outliers."""
        return self.outliers.fit.betas["dyisru"]

    @property
    def ratio(self) -> float:
        """DyT's mean absolute residual on outliers over DyISRU's: above 1 where the paper's claim holds."""
        return self.outliers.residuals["dyt"] / max(self.outliers.residuals["dyisru"], 1e-300)

    @property
    def holds(self) -> bool:
        """Whether DyISRU describes the outliers with a smaller mean absolute residual than DyT, as the paper claims."""
        return self.outliers.residuals["dyisru"] < self.outliers.residuals["dyt"]

    def to_dict(self) -> dict[str, Any]:
        """The row as plain values, without the sampled points."""
        row = {name: value for name, value in asdict(self).items() if name != "picture"}
        row["outliers"] = {name: value for name, value in row["outliers"].items() if name != "points"}
        return row | {"alpha": self.alpha, "beta": self.beta, "holds": self.holds}


@dataclass(frozen=True)
class InspectionReport:
    """What :func:`inspect_norms` found.

    Args:
        model: the class of the model.
        sites: the norms, in call order.
        batches: how many batches were measured.
        refused: paths of what looked like a norm but is none of ours, with the reason.
        unreached: paths of the norms that no batch reached.
        meta: whatever should stand beside the figures.
    """

    model: str
    sites: list[InspectedSite]
    batches: int
    refused: dict[str, str] = field(default_factory=dict)
    unreached: list[str] = field(default_factory=list)
    meta: dict[str, Any] = field(default_factory=dict)

    def summary(self) -> dict[str, Any]:
        """Return in how many sites the paper's claim holds, and by how much."""
        ratios = [site.ratio for site in self.sites]
        core = [site.core.errors for site in self.sites]
        residuals = [site.outliers.residuals for site in self.sites]
        return {
            "sites": len(self.sites),
            "holds": sum(site.holds for site in self.sites),
            "outliers_best": _wins(residuals),
            "core_best": _wins(core),
            "core_holds": sum(e["dyisru"] < e["dyt"] for e in core),
            "ratio_median": median(ratios),
            "ratio_min": min(ratios),
            "ratio_max": max(ratios),
            "exact": max(site.outliers.exact for site in self.sites),
        }

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values that JSON knows, without the sampled points."""
        from dynorm.report.text import plain

        values = {name: getattr(self, name) for name in ("model", "batches", "refused", "unreached", "meta")}
        whole = values | {"summary": self.summary(), "sites": [site.to_dict() for site in self.sites]}
        return {name: plain(value) for name, value in whole.items()}

    def to_html(self, path: str | Path) -> None:
        """Write the report as one HTML page that needs no other file, with a picture a site.

        Raises:
            ArgumentError: matplotlib is not installed.
            StorageError: the file cannot be written.
        """
        from dynorm.files import write_text
        from dynorm.report.inspection_html import render

        write_text(path, render(self))

    def __str__(self) -> str:
        """Return the report as a table, at most 120 columns wide."""
        from dynorm.report.inspection_text import table

        return table(self)


def _wins(rows: Sequence[Mapping[str, float]]) -> dict[str, int]:
    """In how many rows each function has the smallest value."""
    return {name: sum(min(row, key=row.__getitem__) == name for row in rows) for name in rows[0]}


def inspect_norms(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    sites: Sequence[NormSite] | None = None,
    fit_on: Iterable[Any] | None = None,
    seed: int = 0,
    points: int = 1500,
    meta: Mapping[str, Any] | None = None,
) -> InspectionReport:
    """Repeat the paper's section 4 at every norm of a model, on its own activations; the model is not changed.

    Of every token the channel farthest from the mean is its outlier. DyT, DyISRU and a straight line, with one constant
    a site, are fitted by least squares on the outliers of some tokens and measured on those of others; beside it the
    same on all channels. Memory is that of one batch plus a fixed amount a site. The model runs in eval mode, without
    gradient; it, its buffers and random states are afterwards as they were.

    Args:
        model: any model with LayerNorms or RMSNorms.
        batches: tensors, tuples or dicts, as for :func:`calibrate_`; read once.
        sites: what :func:`find_norms` returned, or some of it; None finds them with the first batch.
        fit_on: batches to fit on, all of ``batches`` then being measured on. None fits on the first half of each
            batch's tokens and measures on the second.
        seed: of the samples.
        points: how many points to keep a site, for its picture.
        meta: what should stand beside the figures.

    Returns:
        A report with a row a site.

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
    require_plain_model(model)
    remaining = iterate(batches)
    if sites is None:
        first = next(remaining)
        args, kwargs = arguments(model, first)
        sites, remaining = find_norms(model, *args, **kwargs), chain([first], remaining)
    watched = _watched(model, sites, seed, points)
    count = 0
    with undisturbed(model, evaluate=True):
        for batch in () if fit_on is None else iterate(fit_on, "fit_on"):
            _run(model, watched, batch, fitted=1.0)
        for batch in remaining:
            _run(model, watched, batch, fitted=0.0 if fit_on is not None else 0.5)
            count += 1
    return _report(type(model).__name__, sites, list(watched.values()), count, meta)


class _Watched:
    """A norm with the statistics of what it sees."""

    def __init__(self, site: NormSite, seed: int, points: int) -> None:
        self.site = site
        self.stats = SiteStats(site, seed + site.order, points)
        self.outliers = Outliers(site, seed + site.order)

    def see(self, x: Tensor, fitted: float) -> None:
        """Add tokens (tokens, C), a share of which is fitted on, and the rest measured on."""
        require_finite(self.site.path, x)
        if fitted == 1.0:
            self.stats.add_fitted(x)
        split = int(len(x) * fitted)
        self.outliers.add_fitted(x[:split])
        if fitted < 1.0:
            self.stats.add(x, split)
            self.outliers.add(x[split:])

    def row(self) -> InspectedSite:
        """Return the row of the report."""
        core = self.stats.fit()
        outlier, outlier_site = self.stats.outliers()
        return InspectedSite(
            path=self.site.path,
            kind=self.site.kind,
            channels=math.prod(self.site.normalized_shape),
            tokens=self.stats.tokens,
            outlier=outlier,
            outlier_site=outlier_site,
            sigma_spread=self.stats.spread()[0],
            outliers=self.outliers.fit(core.scale, core.center),
            core=core,
            picture=self.stats.picture(),
        )


def _watched(model: nn.Module, sites: Sequence[NormSite], seed: int, points: int) -> dict[nn.Module, _Watched]:
    usable = [site for site in sites if site.refused is None and math.prod(site.normalized_shape) > 1]
    if not usable:
        reasons = "; ".join(f"{site.path}: {site.refused}" for site in sites[:3] if site.refused)
        raise ModelError(
            "the model must have a LayerNorm or RMSNorm to inspect, but has none"
            f"{f' ({reasons})' if reasons else ''}: a converted model has lost its norms, inspect the original"
        )
    return {_module(model, site): _Watched(site, seed, points) for site in usable}


def _module(model: nn.Module, site: NormSite) -> nn.Module:
    try:
        return model.get_submodule(site.path)
    except AttributeError as error:
        raise ModelError(f"the sites must be those of this model, but it has no {site.path!r}") from error


@contextmanager
def _seen(watched: Mapping[nn.Module, _Watched], masks: list[Tensor], fitted: float) -> Iterator[None]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        entry = watched[module]
        x = args[0] if args else next(iter(kwargs.values()))
        entry.see(site_tokens(entry.site, x, masks), fitted)

    handles = [module.register_forward_hook(hook, with_kwargs=True, prepend=True) for module in watched]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _run(model: nn.Module, watched: Mapping[nn.Module, _Watched], batch: Any, fitted: float) -> None:
    with undisturbed(model, batch), _seen(watched, token_masks(batch), fitted):
        call(model, batch)


def _report(
    name: str, sites: Sequence[NormSite], watched: list[_Watched], count: int, meta: Mapping[str, Any] | None
) -> InspectionReport:
    rows = [entry.row() for entry in sorted(watched, key=lambda entry: entry.site.order) if entry.stats.tokens]
    if not rows:
        raise DataError("the batches must reach at least one norm, but reached none: give batches that use them")
    refused = {site.path: site.refused for site in sites if site.refused is not None}
    unreached = [entry.site.path for entry in watched if not entry.stats.tokens]
    return InspectionReport(name, rows, count, refused, unreached, dict(meta or {}))
