"""The values of one norm: a sample of its inputs and outputs, and curves fitted to them."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from dynorm.batches import Batch, arguments, require_finite, site_tokens, token_masks
from dynorm.errors import DataError
from dynorm.find.probe import find_norms
from dynorm.site import NormSite
from dynorm.theory import token_deviation, token_moment

# How many values of a site are kept to fit curves to, and how many of its tokens' largest ones.
_KEPT = 20_000
# How many of each are drawn.
_DRAWN = 1200
_DRAWN_OUTLIERS = 500


FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linear": lambda u, beta: u / beta.sqrt(),
    "dyt": lambda u, beta: (u / beta.sqrt()).tanh(),
    "dyisru": lambda u, beta: u / (beta + u * u).sqrt(),
}
"""The curves of a report: functions of the distance from the centre and of beta.

The slope of each at the centre is ``1 / sqrt(beta)``.
"""


@dataclass(frozen=True)
class CurveFit:
    """Each of :data:`FUNCTIONS` with one constant, fitted to a norm's core by least squares.

    The core is the norm's output without weight and bias.
    """

    scale: float  # the bound of the core: sqrt(C - 1) for a LayerNorm, sqrt(C) for an RMSNorm
    center: float  # the mean of the inputs if the norm centres, else 0
    betas: dict[str, float]  # the constant of each
    errors: dict[str, float]  # the relative error ``|y - f| / |y|`` of each

    def curve(self, name: str, x: Tensor) -> Tensor:
        """Return one of the fitted functions of some inputs."""
        beta = torch.tensor(self.betas[name], dtype=torch.float64, device="cpu")
        return self.scale * FUNCTIONS[name](x - self.center, beta)


@dataclass(frozen=True)
class Picture:
    """The points of a site's picture: inputs and core of some values, and of some outliers."""

    x: list[float]
    y: list[float]
    outlier_x: list[float]
    outlier_y: list[float]
    sigma: float  # the typical sigma of the site, the unit of its axis


class Reservoir:
    """A random sample of fixed size of pairs (x, y), without replacement."""

    def __init__(self, size: int, seed: int) -> None:
        self._size = size
        self._generator = torch.Generator("cpu").manual_seed(seed)
        # The pairs with the largest random keys stay.
        self._keys = torch.empty(0, dtype=torch.float64, device="cpu")
        self.pairs = torch.empty(2, 0, dtype=torch.float64, device="cpu")

    def add(self, x: Tensor, y: Tensor) -> None:
        """Add pairs."""
        keys = torch.rand(x.numel(), generator=self._generator, dtype=torch.float64, device="cpu")
        keys, index = keys.topk(min(self._size, len(keys)))
        index = index.to(x.device)
        pairs = torch.stack([x.flatten()[index], y.flatten()[index]]).double().cpu()
        keys = torch.cat([self._keys, keys])
        self._keys, kept = keys.topk(min(self._size, len(keys)))
        self.pairs = torch.cat([self.pairs, pairs], dim=1)[:, kept]

    def fit(self, center: float, scale: float, sigma: float) -> CurveFit:
        """Fit all curves to the sample; ``sigma`` is the typical size of ``x - center``."""
        betas = {}
        errors = {}
        for name in FUNCTIONS:
            betas[name], errors[name] = self._fit(name, center, scale, sigma)
        return CurveFit(scale, center, betas, errors)

    def _fit(self, name: str, center: float, scale: float, sigma: float) -> tuple[float, float]:
        """Return the beta of least error, and the error: a wide grid, then four finer ones."""
        x, y = self.pairs
        low = 2 * math.log10(scale * sigma) - 4
        high = low + 12
        count = 97
        for _ in range(5):
            grid = torch.linspace(low, high, count, dtype=torch.float64, device="cpu")
            f = scale * FUNCTIONS[name](x - center, 10 ** grid[:, None])
            errors = (f - y).norm(dim=1) / y.norm().clamp_min(1e-300)
            best = int(errors.argmin())
            low = float(grid[max(best - 1, 0)])
            high = float(grid[min(best + 1, count - 1)])
            count = 17
        return float(10 ** grid[best]), float(errors[best])


class SiteStats:
    """A norm of the original model, and how many tokens it saw."""

    def __init__(self, site: NormSite) -> None:
        self.site = site
        self.channels = math.prod(site.normalized_shape)
        self.tokens = 0

    def tokens_of(self, x: Tensor, batch: Batch) -> Tensor:
        """Return the tokens of x, (tokens, C), without padding; DataError if one is not finite."""
        tokens = site_tokens(self.site, x, token_masks(batch))
        require_finite(self.site.path, tokens)
        return tokens


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

    def see(self, x: Tensor, batch: Batch) -> None:
        """Add an input of the norm."""
        tokens = self.tokens_of(x, batch)
        if not len(tokens):
            return
        tiny = torch.finfo(tokens.dtype).tiny
        moment = token_moment(tokens, self.site.kind) + self.site.eps
        sigma = moment.sqrt().clamp_min(tiny)
        self.add(tokens, sigma, token_deviation(tokens, self.site.kind) / sigma[:, None])

    def add(self, x: Tensor, sigma: Tensor, y: Tensor) -> None:
        """Add tokens (tokens, C) with their sigma and the norm's core."""
        place = y.abs().argmax(-1, keepdim=True)
        self._values.add(x, y)
        self._outliers.add(x.gather(-1, place), y.gather(-1, place))
        self._largest = max(self._largest, float(y.abs().max()))
        log_sigma = sigma.double().log()
        self._log_sigma += float(log_sigma.sum())
        self._log_sigma_square += float(log_sigma.square().sum())
        self.tokens += len(x)

    @property
    def typical_sigma(self) -> float:
        """The geometric mean of the tokens' sigma."""
        return math.exp(self._log_sigma / self.tokens)

    def figures(self) -> dict[str, Any]:
        """Return those fields of :class:`dynorm.report.InspectedSite` that describe single values."""
        is_centred = self.site.kind == "layernorm"
        center = float(self._values.pairs[0].mean()) if is_centred else 0.0
        scale = math.sqrt(max(self.channels - is_centred, 1))
        mean = self._log_sigma / self.tokens
        variance = self._log_sigma_square / self.tokens - mean * mean
        sigma = self.typical_sigma
        x, y = self._values.pairs[:, :_DRAWN].tolist()
        outlier_x, outlier_y = self._outliers.pairs[:, :_DRAWN_OUTLIERS].tolist()
        return {
            "path": self.site.path,
            "kind": self.site.kind,
            "channels": self.channels,
            "tokens": self.tokens,
            "outlier": self._largest,
            "sigma_spread": math.sqrt(max(variance, 0.0)),
            "core": self._values.fit(center, scale, sigma),
            "outliers": self._outliers.fit(center, scale, sigma),
            "picture": Picture(x, y, outlier_x, outlier_y, sigma),
        }


Stats = TypeVar("Stats", bound=SiteStats)


def reached_sites(sites: Iterable[Stats], what: str) -> list[Stats]:
    """Return the sites that a batch reached, in call order; DataError if there is none."""
    reached = [site for site in sites if site.tokens]
    if not reached:
        raise DataError(
            f"the batches must reach at least one {what}, but reached none: give batches that use "
            "them"
        )
    return sorted(reached, key=lambda site: site.site.order)


def with_sites(
    model: nn.Module, batches: Iterator[Batch], sites: Sequence[NormSite] | None
) -> tuple[Sequence[NormSite], Iterator[Batch]]:
    """Return the sites, found with the first batch if they are not given, and all batches."""
    if sites is not None:
        return sites, batches
    first = next(batches)
    args, kwargs = arguments(model, first)
    return find_norms(model, *args, **kwargs), chain([first], batches)
