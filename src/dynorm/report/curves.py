"""Curves fitted to a sample of a norm's inputs and outputs."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

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
