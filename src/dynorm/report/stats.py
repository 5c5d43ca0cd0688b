"""The statistics of one site: sums and histograms whose size does not grow with the tokens."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from dynorm.batches import Batch, iterate, require_finite, site_tokens, token_masks
from dynorm.errors import DataError
from dynorm.functional import dyisru_general, dyt, linear
from dynorm.report.sizes import SizeStats, token_places
from dynorm.site import NormSite
from dynorm.theory import token_deviation, token_moment

# Bins are equally wide in log2(1 + 8 |u|), u = distance from the origin in typical sigmas: 0.003
# sigma wide at the origin, 1.6% of u far from it. They end at a billion sigmas.
_PER_OCTAVE = 44
_KNEE = 8.0
_HALF = 33 * _PER_OCTAVE
# Bins of log2(sigma), 1.1% wide, from 2^-128 to 2^128.
_SIGMAS_PER_OCTAVE = 64
_OCTAVES = 128
# The axis of the picture is linear up to here and logarithmic beyond, in typical sigmas.
PICTURE_KNEE = 2.0
# The number of points that are sampled for a picture.
_POINTS = 1500
# A picture has at most this many error bars; bins with fewer values are left out.
_BARS = 25
_LEAST_VALUES = 8
# The number of values that are added at once.
_CHUNK = 1 << 20
Stats = TypeVar("Stats", bound="SiteStats")


FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "linear": lambda x, beta, center, scale: linear(x, beta**-0.5, center=center, scale=scale),
    "dyt": lambda x, beta, center, scale: dyt(x, beta**-0.5, center=center, scale=scale),
    "dyisru": lambda x, beta, center, scale: dyisru_general(x, beta, center, scale=scale),
}
"""The curves that sites are compared with: functions of (x, beta, center, scale).

The slope of each at the centre is scale / sqrt(beta).
"""


@dataclass(frozen=True)
class Bin:
    """The values of one interval of x: mean x, mean and deviation of the norm's core, number."""

    x: float
    mean: float
    std: float
    count: int


@dataclass(frozen=True)
class Picture:
    """The points and bars of a site's picture, all of held-out tokens."""

    # Sampled inputs of the norm, sorted; those far from the centre are drawn more often.
    x: list[float]
    y: list[float]  # the norm's core at each
    bins: list[Bin]  # of all held-out values
    sigma: float  # the typical sigma of the site, the unit of its axis


@dataclass(frozen=True)
class CoreFit:
    """Each of :data:`FUNCTIONS`, fitted to a norm's core as a function of one number."""

    scale: float  # the bound: sqrt(C - 1) for LayerNorm, sqrt(C) for RMSNorm
    center: float  # the mean of the activations if the norm centres, else 0
    betas: dict[str, float]  # the constant of each by least squares
    errors: dict[str, float]  # the relative error of each on the held-out tokens

    def curve(self, name: str, x: Tensor) -> Tensor:
        """Return one of the fitted functions of some inputs."""
        beta = torch.tensor(self.betas[name], dtype=torch.float64, device="cpu")
        y: Tensor = FUNCTIONS[name](x, beta, self.center, self.scale)
        return y


@dataclass(frozen=True)
class OutlierFit:
    """The functions, each with one constant fitted on outliers, compared with other outliers."""

    fit: CoreFit  # the curves; their errors are relative, ``|y - f| / |y|``
    residuals: dict[str, float]  # mean absolute residual ``|f - y|`` of each, in units of the core
    beta: float  # geometric mean of the constants that each outlier would need
    # Standard deviation of their natural logarithm: 0 if one constant serves all.
    beta_spread: float
    exact: float  # the largest ``|f - y|`` of DyISRU with each outlier's constant
    points: tuple[list[float], list[float]]  # x and y of some held-out outliers


class Histogram:
    r"""Pairs (x, y) binned by x, to find the distance of y from any smooth function of x.

    A bin keeps its count and the sums of u, u^2, y, y^2 and u y, with ``u = (x - origin) / unit``.
    To compare with a function f, it is replaced by two points at one standard deviation from its
    mean, with y on its regression line:

    .. math:: \sum (y - f)^2 = \sum y^2
        - 2 \sum_\pm \tfrac n2 (\bar y \pm \tfrac{\mathrm{cov}(u, y)}{s}) f(\bar u \pm s)
        + \sum_\pm \tfrac n2 f(\bar u \pm s)^2

    This is exact for a straight line, and right to the third order of a bin's width otherwise. The
    bins are finest at the origin; the unit is the typical size of ``x - origin``.
    """

    def __init__(
        self,
        origin: float,
        unit: float,
        device: torch.device | str = "cpu",
    ) -> None:
        self.origin = origin
        self.unit = unit
        self._count = torch.zeros(2 * _HALF + 1, dtype=torch.float64, device=device)
        self._u = self._count.clone()
        self._uu = self._count.clone()
        self._y = self._count.clone()
        self._yy = self._count.clone()
        self._uy = self._count.clone()

    def __len__(self) -> int:
        """Return how many values were added."""
        return int(self._count.sum())

    def add(self, x: Tensor, y: Tensor) -> None:
        """Add values; x and y have the same shape."""
        u = ((x.double() - self.origin) / self.unit).flatten()
        y = y.double().flatten()
        # The choice of the bin may be rough; the sums in it must be exact.
        rough = u.float()
        octaves = torch.log2(1 + _KNEE * rough.abs())
        distance = (octaves * _PER_OCTAVE).round().clamp_max(_HALF)
        place = (distance * rough.sign()).long() + _HALF
        self._count.scatter_add_(0, place, torch.ones_like(u))
        self._u.scatter_add_(0, place, u)
        self._uu.scatter_add_(0, place, u * u)
        self._y.scatter_add_(0, place, y)
        self._yy.scatter_add_(0, place, y * y)
        self._uy.scatter_add_(0, place, u * y)

    def mean(self) -> float:
        """Return the mean of x."""
        return self.origin + self.unit * float(self._u.sum() / self._count.sum())

    def error(self, name: str, betas: Tensor, center: float, scale: float) -> Tensor:
        """Return ``|y - f| / |y|`` for each beta of one of :data:`FUNCTIONS`."""
        filled = self._count > 0
        count = self._count[filled]
        u_mean = self._u[filled] / count
        y_mean = self._y[filled] / count
        u_std = (self._uu[filled] / count - u_mean * u_mean).clamp_min(0).sqrt()
        covariance = self._uy[filled] / count - u_mean * y_mean
        # How far the regression line rises over one standard deviation.
        rise = covariance / u_std.clamp_min(1e-12)
        square = self._yy[filled].sum()
        residual = square
        for side in (1, -1):
            x = self.origin + self.unit * (u_mean + side * u_std)
            x = x.expand(len(betas), -1)
            f = FUNCTIONS[name](x, betas.to(x)[:, None], center, scale)
            y = y_mean + side * rise
            # (y - f)^2 less the y^2 that is in the residual already.
            residual = residual + (count / 2 * f * (f - 2 * y)).sum(1)
        error: Tensor = (residual.clamp_min(0) / square.clamp_min(1e-300)).sqrt()
        return error

    def bins(self, most: int, least: int) -> list[Bin]:
        """Return at most ``most`` intervals, equally wide on the picture's axis.

        Those of fewer than ``least`` values are left out.
        """
        filled = self._count > 0
        count = self._count[filled].cpu()
        u_sum = self._u[filled].cpu()
        place = torch.asinh(u_sum / count / PICTURE_KNEE)
        low = place.min()
        width = (place.max() - low).clamp_min(1e-12)
        index = ((place - low) / width * most).long().clamp_max(most - 1)

        def totals(values: Tensor) -> Tensor:
            return torch.bincount(index, weights=values, minlength=most)

        # An interval without values has a count of 0 and is left out below.
        counts = totals(count)
        x = self.origin + self.unit * totals(u_sum) / counts
        mean = totals(self._y[filled].cpu()) / counts
        mean_square = totals(self._yy[filled].cpu()) / counts
        std = (mean_square - mean**2).clamp_min(0).sqrt()
        bins = []
        for i in (counts >= least).nonzero().flatten().tolist():
            interval = Bin(
                x=float(x[i]),
                mean=float(mean[i]),
                std=float(std[i]),
                count=int(counts[i]),
            )
            bins.append(interval)
        return bins


class Reservoir:
    """A sample of fixed size without replacement, in which values of larger weight are more likely.

    Each pair gets the key ``log(random) / weight``; the largest keys stay (Efraimidis and Spirakis,
    2006).
    """

    def __init__(
        self,
        size: int,
        seed: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self.size = size
        self._generator = torch.Generator(device).manual_seed(seed)
        self._key = torch.empty(0, dtype=torch.float64, device=device)
        self._x = self._key
        self._y = self._key

    def __len__(self) -> int:
        """Return how many pairs the sample holds now."""
        return len(self._key)

    def add(self, x: Tensor, y: Tensor, weight: Tensor) -> None:
        """Add values with their weights."""
        random = torch.rand(
            x.numel(), generator=self._generator, device=x.device, dtype=torch.float32
        ).clamp_min(1e-30)
        keys = random.log() / weight.flatten()
        key, index = keys.topk(min(self.size, x.numel()))
        key = torch.cat([self._key, key.double()])
        x = torch.cat([self._x, x.flatten()[index].double()])
        y = torch.cat([self._y, y.flatten()[index].double()])
        self._key, largest = key.topk(min(self.size, len(key)))
        self._x = x[largest]
        self._y = y[largest]

    def error(self, name: str, betas: Tensor, center: float, scale: float) -> Tensor:
        """Return ``|y - f| / |y|`` for each beta of one of :data:`FUNCTIONS`."""
        x, y = self.tensors()
        x = x.expand(len(betas), -1)
        residual = FUNCTIONS[name](x, betas[:, None], center, scale) - y
        error: Tensor = residual.norm(dim=1) / y.norm().clamp_min(1e-300)
        return error

    def tensors(self) -> tuple[Tensor, Tensor]:
        """Return the sample, sorted by x, as two tensors on the CPU."""
        order = self._x.argsort()
        return self._x[order].cpu(), self._y[order].cpu()

    def points(self) -> tuple[list[float], list[float]]:
        """Return the sample, sorted by x, as two lists."""
        x, y = self.tensors()
        return x.tolist(), y.tolist()


class LogSums:
    """The mean and the deviation of the natural logarithms of some numbers."""

    def __init__(self) -> None:
        self.count = 0
        self._sum = 0.0
        self._square_sum = 0.0

    def add(self, logarithms: Tensor) -> None:
        """Add logarithms in float64."""
        self.count += len(logarithms)
        self._sum += float(logarithms.sum())
        self._square_sum += float(logarithms.square().sum())

    def mean(self) -> float:
        """Return the mean; 0 if there are none."""
        return self._sum / max(self.count, 1)

    def deviation(self) -> float:
        """Return the standard deviation."""
        mean = self.mean()
        return math.sqrt(max(self._square_sum / max(self.count, 1) - mean * mean, 0.0))


def core_fit(
    fitted: Histogram | Reservoir,
    held_out: Histogram | Reservoir,
    center: float,
    scale: float,
    start: float,
) -> CoreFit:
    """Fit the functions to some values, and measure their errors on others.

    Their betas are searched around ``start``.
    """
    betas = {}
    errors = {}
    for name in FUNCTIONS:
        error_of = partial(fitted.error, name, center=center, scale=scale)
        beta = _best_beta(error_of, start)
        betas[name] = float(beta)
        errors[name] = float(held_out.error(name, beta, center, scale))
    return CoreFit(scale, center, betas, errors)


def _best_beta(error: Callable[[Tensor], Tensor], start: float) -> Tensor:
    """Return the beta of least error, (1,): a grid around ``start``, then four finer ones.

    The first grid reaches four decades below the start and eight above.
    """
    low = math.log10(start) - 4
    high = math.log10(start) + 8
    count = 97
    for _ in range(5):
        grid = torch.linspace(low, high, count, dtype=torch.float64, device="cpu")
        best = int(error(10**grid).argmin())
        low = float(grid[max(best - 1, 0)])
        high = float(grid[min(best + 1, count - 1)])
        count = 17
    return 10 ** grid[best, None]


class SiteStats:
    """The running statistics of one norm's inputs in the original model, with sampled points."""

    def __init__(self, site: NormSite, seed: int) -> None:
        self.site = site
        channels = math.prod(site.normalized_shape)
        self.scale = math.sqrt(channels if site.kind == "rmsnorm" else max(channels - 1, 1))
        self._seed = seed
        self._sizes = SizeStats(site)
        self._peak = 0.0
        self._core_peak = 0.0
        self._log_sigmas = LogSums()
        # The first tokens make the histograms and the sample.
        self._has_started = False

    @property
    def tokens(self) -> int:
        """The number of tokens so far, without those that only the functions were fitted to."""
        return self._log_sigmas.count

    def see(self, x: Tensor, batch: Batch, share: float) -> Tensor:
        """Add an input of the norm, and return its tokens (tokens, C) without padding.

        The functions are fitted on the first ``share`` of them, and measured on the others. With a
        share of 1 the tokens are used for nothing else.
        """
        tokens = self.tokens_of(x, batch)
        if not len(tokens):
            return tokens
        split = int(len(tokens) * share)
        if not self._has_started:
            self._start(tokens[:split] if split else tokens)
        places = token_places(self.site, x, batch)
        if places is None:
            places = torch.full((len(tokens), 2), -1, device="cpu")
        fit_only = share == 1
        self._add_part(tokens[:split], places[:split], self.fitted, fit_only)
        self._add_part(tokens[split:], places[split:], self.held_out, fit_only)
        return tokens

    def tokens_of(self, x: Tensor, batch: Batch) -> Tensor:
        """Return the tokens of x, (tokens, C), without padding; DataError if one is not finite."""
        tokens = site_tokens(self.site, x, token_masks(batch))
        require_finite(self.site.path, tokens)
        return tokens

    def _start(self, x: Tensor) -> None:
        """Place the bins by the first tokens, which only decide how fine they are."""
        self._has_started = True
        origin = float(x.double().mean()) if self.site.kind == "layernorm" else 0.0
        sigma, _, _ = normalized(self.site, x)
        unit = float(sigma.double().log().mean().exp())
        self.fitted = Histogram(origin, unit, x.device)
        self.held_out = Histogram(origin, unit, x.device)
        self.sample = Reservoir(_POINTS, self._seed, x.device)
        self._sigmas = torch.zeros(
            2 * _OCTAVES * _SIGMAS_PER_OCTAVE, dtype=torch.long, device=x.device
        )

    def _add_part(
        self, tokens: Tensor, places: Tensor, histogram: Histogram, fit_only: bool
    ) -> None:
        """Add the tokens of one of the two histograms, in chunks that bound the memory."""
        if not len(tokens):
            return
        size = max(1, _CHUNK // tokens.shape[1])
        chunks = zip(torch.split(tokens, size), torch.split(places, size), strict=True)
        for x, x_places in chunks:
            sigma, y, deviation = normalized(self.site, x)
            histogram.add(x, y)
            if fit_only:
                continue
            self._add_figures(x, sigma, y, deviation, x_places)
            if histogram is self.held_out:
                distance = (x - histogram.origin).abs() / histogram.unit
                self.sample.add(x, y, 1 + distance)

    def _add_figures(
        self, x: Tensor, sigma: Tensor, y: Tensor, deviation: Tensor, places: Tensor
    ) -> None:
        self._sizes.add(x, sigma, y, places)
        log_sigma = sigma.double().log()
        self._log_sigmas.add(log_sigma)
        index = ((log_sigma / math.log(2) + _OCTAVES) * _SIGMAS_PER_OCTAVE).long()
        self._sigmas += torch.bincount(
            index.clamp(0, len(self._sigmas) - 1), minlength=len(self._sigmas)
        )
        self._peak = max(self._peak, float(deviation.abs().max()))
        self._core_peak = max(self._core_peak, float(y.abs().max()))

    def fit(self) -> CoreFit:
        """Fit the functions and measure their errors; both on all tokens if one half has none."""
        # An empty histogram is False.
        fitted = self.fitted or self.held_out
        held_out = self.held_out or self.fitted
        center = fitted.mean() if self.site.kind == "layernorm" else 0.0
        return core_fit(fitted, held_out, center, self.scale, (self.scale * fitted.unit) ** 2)

    def figures(self) -> dict[str, Any]:
        """Return the fields of :class:`dynorm.report.records.MeasuredSite`."""
        typical = math.exp(self._log_sigmas.mean())
        x, y = self.sample.points()
        return {
            "path": self.site.path,
            "kind": self.site.kind,
            "channels": math.prod(self.site.normalized_shape),
            "tokens": self.tokens,
            "outlier": self._core_peak,
            "outlier_site": self._peak / typical,
            "sigma_spread": self._log_sigmas.deviation(),
            "sigma_range": self._quantile(0.99) / self._quantile(0.01),
            "sizes": self._sizes.report(self._quantile(0.5)),
            "picture": Picture(x, y, self.held_out.bins(_BARS, _LEAST_VALUES), typical),
        }

    def _quantile(self, q: float) -> float:
        """Return a quantile of the tokens' sigma."""
        shares = self._sigmas.cumsum(0).double() / self.tokens
        below = int((shares < q).sum())
        return math.pow(2, (below + 0.5) / _SIGMAS_PER_OCTAVE - _OCTAVES)


def batches_with_shares(
    batches: Iterable[Batch], fit_on: Iterable[Batch] | None
) -> Iterator[tuple[Batch, float]]:
    """Yield each batch with the share of its tokens to fit functions on.

    It is 1 for the batches of ``fit_on`` and 0 for the others; without ``fit_on`` it is a half.
    """
    if fit_on is not None:
        for batch in iterate(fit_on, "fit_on"):
            yield batch, 1.0
    for batch in batches:
        yield batch, 0.5 if fit_on is None else 0.0


def reached_sites(sites: Iterable[Stats], what: str) -> list[Stats]:
    """Return the sites that a batch reached, in call order; DataError if there is none."""
    reached = [site for site in sites if site.tokens]
    if not reached:
        raise DataError(
            f"the batches must reach at least one {what}, but reached none: give batches that use "
            "them"
        )
    return sorted(reached, key=lambda site: site.site.order)


def normalized(site: NormSite, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the size by which a norm divides each token (tokens, C), its core, and deviations."""
    deviation = token_deviation(x, site.kind)
    tiny = torch.finfo(x.dtype).tiny
    sigma = (token_moment(x, site.kind) + site.eps).sqrt().clamp_min(tiny)
    return sigma, deviation / sigma[:, None], deviation
