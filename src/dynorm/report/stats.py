"""The statistics of one site: sums and histograms of fixed size, however many tokens go by."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from dynorm.batches import iterate, require_finite, site_tokens, token_masks
from dynorm.errors import ArgumentError, DataError
from dynorm.family import FAMILY
from dynorm.report.sizes import SizeStats, token_places
from dynorm.site import NormSite
from dynorm.theory import token_deviation, token_moment

# Bins are equally wide in log2(1 + 8 |u|), u = distance from the origin in typical sigmas: 0.003
# sigma wide at the origin, 1.6 % of u far from it. They end at a billion sigmas.
_PER_OCTAVE = 44
_KNEE = 8.0
_HALF = 33 * _PER_OCTAVE
# Bins of log2(sigma), 1.1 % wide, from 2^-128 to 2^128.
_SIGMAS_PER_OCTAVE = 64
_OCTAVES = 128
# Where the axis of the picture goes over from linear to logarithmic, in typical sigmas.
PICTURE_KNEE = 2.0
# The picture's error bars: how many there may be, and how many values each must stand for.
_BARS, _LEAST_VALUES = 25, 8
_CHUNK = 1 << 20
Stats = TypeVar("Stats", bound="SiteStats")


FUNCTIONS = {name: FAMILY[name].layer.curve for name in ("linear", "dyt", "dyisru")}
"""Every site is compared with these: functions of (x, beta, center, scale), all of slope scale / sqrt(beta) at 0."""


@dataclass(frozen=True)
class Bin:
    """The values of one interval of x: their mean, the mean and standard deviation of the norm's core, their number."""

    x: float
    mean: float
    std: float
    count: int


@dataclass(frozen=True)
class Picture:
    """The points and bars of a site's picture, all of held-out tokens."""

    x: list[
        float
    ]  # sampled inputs of the norm, sorted; those far from the centre are drawn more often
    y: list[float]  # the norm's core at each
    bins: list[Bin]  # from all held-out values
    sigma: float  # the typical sigma of the site, the unit of its axis


@dataclass(frozen=True)
class CoreFit:
    """A norm's core as one function of one number, for each of :data:`FUNCTIONS`."""

    scale: float  # the bound: sqrt(C - 1) for LayerNorm, sqrt(C) for RMSNorm
    center: float  # the mean of the activations where the norm centres, else 0
    betas: dict[
        str, float
    ]  # each one's constant of least squares: the inverse square of its slope at 0 over ``scale``
    errors: dict[str, float]  # the relative error of each on the held-out tokens


@dataclass(frozen=True)
class OutlierFit:
    """The functions, each with one constant fitted on outliers, compared with other outliers."""

    fit: CoreFit  # the curves; their errors are relative, ``|y - f| / |y|``
    residuals: dict[str, float]  # mean absolute residual ``|f - y|`` of each, in units of the core
    beta: float  # geometric mean of the constants of which each outlier would need its own
    beta_spread: (
        float  # standard deviation of their natural logarithm: 0 if one constant serves all
    )
    exact: float  # the largest ``|f - y|`` of DyISRU with these own constants
    points: tuple[list[float], list[float]]  # x and y of some of the outliers that were measured on


class Histogram:
    r"""Pairs (x, y) binned by x, from which the distance of y from any smooth function of x follows.

    A bin keeps its count and the sums of u, u^2, y, y^2 and u y, with ``u = (x - origin) / unit``.
    For a function f it stands for two points at one standard deviation from its mean, with y on its
    regression line:

    .. math:: \sum (y - f)^2 = \sum y^2 - 2 \sum_\pm \tfrac n2 (\bar y \pm \tfrac{\mathrm{cov}(u, y)}{s})
        f(\bar u \pm s) + \sum_\pm \tfrac n2 f(\bar u \pm s)^2

    This is exact for a straight line, and right to the third order of a bin's width otherwise. The
    bins are finest at the origin; the unit is the typical size of ``x - origin``.
    """

    def __init__(self, origin: float, unit: float, device: torch.device | str = "cpu") -> None:
        self.origin = origin
        self.unit = unit
        self._sums = torch.zeros(6, 2 * _HALF + 1, dtype=torch.float64, device=device)

    def __len__(self) -> int:
        """Return how many values were added."""
        return int(self._sums[0].sum())

    def add(self, x: Tensor, y: Tensor) -> None:
        """Add values; x and y have the same shape."""
        u = ((x.double() - self.origin) / self.unit).flatten()
        y = y.double().flatten()
        # The choice of the bin may be rough; the sums in it must be exact.
        rough = u.float()
        index = (torch.log2(1 + _KNEE * rough.abs()) * _PER_OCTAVE).round().clamp_max(_HALF)
        place = (index * rough.sign()).long() + _HALF
        for row, value in zip(
            self._sums, (torch.ones_like(u), u, u * u, y, y * y, u * y), strict=True
        ):
            row.scatter_add_(0, place, value)

    def mean(self) -> float:
        """Return the mean of x."""
        return self.origin + self.unit * float(self._sums[1].sum() / self._sums[0].sum())

    def error(self, name: str, betas: Tensor, center: float, scale: float) -> Tensor:
        """Return ``|y - f| / |y|`` for each beta of one of :data:`FUNCTIONS`."""
        n, u, uu, y, yy, uy = self._sums[:, self._sums[0] > 0]
        middle, level = u / n, y / n
        width = (uu / n - middle * middle).clamp_min(0).sqrt()
        tilt = (uy / n - middle * level) / width.clamp_min(1e-12)
        residual = yy.sum()
        for sign in (1, -1):
            x = (self.origin + self.unit * (middle + sign * width)).expand(len(betas), -1)
            f = FUNCTIONS[name](x, betas.to(x)[:, None], center, scale)
            residual = residual + (n / 2 * f * (f - 2 * (level + sign * tilt))).sum(1)
        error: Tensor = (residual.clamp_min(0) / yy.sum().clamp_min(1e-300)).sqrt()
        return error

    def bins(self, most: int, least: int) -> list[Bin]:
        """Return at most ``most`` intervals, equally wide on the picture's axis, that hold ``least`` values or more."""
        n, u, _, y, yy, _ = self._sums[:, self._sums[0] > 0].cpu()
        place = torch.asinh(u / n / PICTURE_KNEE)
        low, high = place.min(), place.max()
        index = ((place - low) / (high - low).clamp_min(1e-12) * most).long().clamp_max(most - 1)
        count, x, mean, square = (
            torch.bincount(index, weights=v, minlength=most) for v in (n, u, y, yy)
        )
        full = count >= least
        count, x, mean, square = (v[full] for v in (count, x, mean, square))
        std = (square / count - (mean / count) ** 2).clamp_min(0).sqrt()
        columns = (self.origin + self.unit * x / count, mean / count, std, count)
        return [
            Bin(a, b, c, int(d)) for a, b, c, d in zip(*(v.tolist() for v in columns), strict=True)
        ]


class Reservoir:
    """A sample without replacement of fixed size, in which x far from the origin is drawn more often.

    Each pair gets the key ``log(random) / weight``; the largest keys stay (Efraimidis and Spirakis,
    2006).
    """

    def __init__(self, size: int, seed: int, device: torch.device | str = "cpu") -> None:
        self.size = size
        self._generator = torch.Generator(device).manual_seed(seed)
        self._kept = torch.empty(3, 0, dtype=torch.float64, device=device)

    def __len__(self) -> int:
        """Return how many pairs are kept now."""
        return self._kept.shape[1]

    def add(self, x: Tensor, y: Tensor, weight: Tensor) -> None:
        """Add values with their weights."""
        random = torch.rand(
            x.numel(), generator=self._generator, device=x.device, dtype=torch.float32
        ).clamp_min(1e-30)
        key, index = (random.log() / weight.flatten()).topk(min(self.size, x.numel()))
        new = torch.stack([part.double() for part in (key, x.flatten()[index], y.flatten()[index])])
        both = torch.cat([self._kept, new], dim=1)
        self._kept = both[:, both[0].topk(min(self.size, both.shape[1])).indices]

    def error(self, name: str, betas: Tensor, center: float, scale: float) -> Tensor:
        """Return ``|y - f| / |y|`` for each beta of one of :data:`FUNCTIONS`."""
        x, y = torch.tensor(self.points(), dtype=torch.float64, device="cpu")
        residual = FUNCTIONS[name](x.expand(len(betas), -1), betas[:, None], center, scale) - y
        error: Tensor = residual.norm(dim=1) / y.norm().clamp_min(1e-300)
        return error

    def points(self) -> tuple[list[float], list[float]]:
        """Return the sample, sorted by x, as two lists."""
        _, x, y = self._kept[:, self._kept[1].argsort()].tolist()
        return x, y


def core_fit(
    fitted: Histogram | Reservoir,
    held_out: Histogram | Reservoir,
    center: float,
    scale: float,
    start: float,
) -> CoreFit:
    """Fit the functions to some values, their betas looked for about ``start``, and measure their errors on others."""
    best = {
        name: _best_beta(partial(fitted.error, name, center=center, scale=scale), start)
        for name in FUNCTIONS
    }
    errors = {name: float(held_out.error(name, beta, center, scale)) for name, beta in best.items()}
    return CoreFit(scale, center, {name: float(beta) for name, beta in best.items()}, errors)


def _best_beta(error: Callable[[Tensor], Tensor], start: float) -> Tensor:
    """Return the beta of least error: a grid of twelve decades about ``start``, then four finer ones."""
    low, high, count = math.log10(start) - 4, math.log10(start) + 8, 97
    for _ in range(5):
        grid = torch.linspace(low, high, count, dtype=torch.float64, device="cpu")
        best = int(error(10**grid).argmin())
        low, high, count = float(grid[max(best - 1, 0)]), float(grid[min(best + 1, count - 1)]), 17
    return 10 ** grid[best, None]


class SiteStats:
    """The running statistics of one norm's inputs in the original model, with a sample of so many points."""

    def __init__(self, site: NormSite, seed: int, points: int) -> None:
        if points < 1:
            raise ArgumentError(f"points must be at least 1, got {points}")
        self.site = site
        self.tokens = 0
        channels = math.prod(site.normalized_shape)
        self.scale = math.sqrt(channels if site.kind == "rmsnorm" else max(channels - 1, 1))
        self._seed, self._points = seed, points
        self._sizes = SizeStats(site)
        self._peak = self._core_peak = 0.0
        self._log_sum = self._log_square_sum = 0.0

    def see(self, x: Tensor, batch: Any, share: float) -> Tensor:
        """Add an input of the norm, and return its tokens (tokens, C) without padding.

        The functions are fitted on so large a share of them, and measured on the others; 1 adds to
        nothing else.
        """
        tokens = self.tokens_of(x, batch)
        if not len(tokens):
            return tokens
        split, size = int(len(tokens) * share), max(1, _CHUNK // tokens.shape[1])
        if not hasattr(self, "sample"):
            self._start(tokens[: split or None])
        places = token_places(self.site, x, batch)
        places = torch.full((len(tokens), 2), -1, device="cpu") if places is None else places
        for kept, part in ((self.fitted, slice(split)), (self.held_out, slice(split, None))):
            for some, known in zip(
                *(torch.split(each[part], size) for each in (tokens, places)), strict=True
            ):
                if len(some):
                    self._add(some, known, kept, share)
        return tokens

    def tokens_of(self, x: Tensor, batch: Any) -> Tensor:
        """Return the tokens of x, (tokens, C), without padding, after a look at them."""
        tokens = site_tokens(self.site, x, token_masks(batch))
        require_finite(self.site.path, tokens)
        return tokens

    def _start(self, x: Tensor) -> None:
        """Lay the bins by the first tokens; these decide no more than how fine they are."""
        origin = float(x.double().mean()) if self.site.kind == "layernorm" else 0.0
        unit = float(normalized(self.site, x)[0].double().log().mean().exp())
        self.fitted, self.held_out = (Histogram(origin, unit, x.device) for _ in range(2))
        self.sample = Reservoir(self._points, self._seed, x.device)
        self._sigmas = torch.zeros(
            2 * _OCTAVES * _SIGMAS_PER_OCTAVE, dtype=torch.long, device=x.device
        )

    def _add(self, x: Tensor, places: Tensor, kept: Histogram, share: float) -> None:
        sigma, y, deviation = normalized(self.site, x)
        kept.add(x, y)
        if share == 1:
            return
        self._sizes.add(x, sigma, y, places)
        self.tokens += len(sigma)
        log_sigma = sigma.double().log()
        self._log_sum += float(log_sigma.sum())
        self._log_square_sum += float(log_sigma.square().sum())
        index = ((log_sigma / math.log(2) + _OCTAVES) * _SIGMAS_PER_OCTAVE).long()
        self._sigmas += torch.bincount(
            index.clamp(0, len(self._sigmas) - 1), minlength=len(self._sigmas)
        )
        self._peak = max(self._peak, float(deviation.abs().max()))
        self._core_peak = max(self._core_peak, float(y.abs().max()))
        if kept is self.held_out:
            self.sample.add(x, y, 1 + (x - kept.origin).abs() / kept.unit)

    def fit(self) -> CoreFit:
        """Fit the functions and measure their errors; where one of the two has no tokens, on those of the other."""
        fitted, held_out = self.fitted or self.held_out, self.held_out or self.fitted
        center = fitted.mean() if self.site.kind == "layernorm" else 0.0
        return core_fit(fitted, held_out, center, self.scale, (self.scale * fitted.unit) ** 2)

    def figures(self) -> dict[str, Any]:
        """Return the fields of :class:`dynorm.report.records.MeasuredSite`."""
        mean = self._log_sum / self.tokens
        typical = math.exp(mean)
        return {
            "path": self.site.path,
            "kind": self.site.kind,
            "channels": math.prod(self.site.normalized_shape),
            "tokens": self.tokens,
            "outlier": self._core_peak,
            "outlier_site": self._peak / typical,
            "sigma_spread": math.sqrt(max(self._log_square_sum / self.tokens - mean * mean, 0.0)),
            "sigma_range": self._quantile(0.99) / self._quantile(0.01),
            "sizes": self._sizes.report(self._quantile(0.5)),
            "picture": Picture(
                *self.sample.points(), self.held_out.bins(_BARS, _LEAST_VALUES), typical
            ),
        }

    def _quantile(self, q: float) -> float:
        """Return the sigma that the part q of the tokens stay below."""
        below = int((self._sigmas.cumsum(0).double() / self.tokens < q).sum())
        return math.pow(2, (below + 0.5) / _SIGMAS_PER_OCTAVE - _OCTAVES)


def batches_with_shares(
    batches: Iterable[Any], fit_on: Iterable[Any] | None
) -> Iterator[tuple[Any, float]]:
    """Yield each batch with the share of its tokens to fit functions on: of ``fit_on`` all, else half of the others."""
    for batch in () if fit_on is None else iterate(fit_on, "fit_on"):
        yield batch, 1.0
    for batch in batches:
        yield batch, 0.5 if fit_on is None else 0.0


def reached_sites(sites: Iterable[Stats], what: str) -> list[Stats]:
    """Return the sites that tokens have reached, in call order; DataError where there is none."""
    found = sorted((site for site in sites if site.tokens), key=lambda site: site.site.order)
    if not found:
        raise DataError(
            f"the batches must reach at least one {what}, but reached none: give batches that use "
            "them"
        )
    return found


def normalized(site: NormSite, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the size that a norm divides each token (tokens, C) by, its core, and the deviations."""
    deviation = token_deviation(x, site.kind)
    sigma = (token_moment(x, site.kind) + site.eps).sqrt().clamp_min(torch.finfo(x.dtype).tiny)
    return sigma, deviation / sigma[:, None], deviation
