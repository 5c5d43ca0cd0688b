"""The outliers of one norm, a channel a token, and how well one constant describes what the norm makes of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from dynorm import functional, theory
from dynorm.fit.site_fit import own_betas
from dynorm.report.stats import FUNCTIONS, CoreFit, Reservoir, best_beta
from dynorm.site import NormSite

# How many outliers are kept to fit on, and as many to measure on: some hundred kilobytes a site.
_KEPT = 20_000


@dataclass(frozen=True)
class OutlierFit:
    """What the functions, each with one constant fitted on outliers, make of other outliers.

    Args:
        fit: the curves; their errors are relative, ``|y - f| / |y|``.
        residuals: mean absolute residual ``|f - y|`` of each, in units of the core.
        beta: geometric mean of the constants of which each outlier would need its own.
        beta_spread: standard deviation of their natural logarithm: 0 if one constant serves all.
        exact: the largest ``|f - y|`` of DyISRU with these own constants.
        points: x and y of some of the outliers that were measured on.
    """

    fit: CoreFit
    residuals: dict[str, float]
    beta: float
    beta_spread: float
    exact: float
    points: tuple[list[float], list[float]]


class Outliers:
    """Running sample and sums of the outliers of one site: of each token the channel with the largest deviation.

    Args:
        site: the norm.
        seed: of the sample.

    Reference:
        Section 4.1 with eq. 17, where the outlier is ``argmax x``; here it may stand on either side.
    """

    def __init__(self, site: NormSite, seed: int) -> None:
        self.site = site
        self._fitted, self._held_out = (Reservoir(_KEPT, seed + half) for half in (0, 1))
        self._count = 0
        self._log_sum = self._log_square_sum = self._exact = 0.0

    def add_fitted(self, x: Tensor) -> None:
        """Add tokens (tokens, C) to those that the functions are fitted on."""
        self._add(self._fitted, x)

    def add(self, x: Tensor) -> None:
        """Add tokens (tokens, C) to those that are measured on."""
        beta = self._add(self._held_out, x)
        self._count += len(beta)
        log_beta = beta.clamp_min(torch.finfo(beta.dtype).tiny).log()
        self._log_sum += float(log_beta.sum())
        self._log_square_sum += float(log_beta.square().sum())

    def fit(self, scale: float, center: float) -> OutlierFit:
        """Fit each function by least squares and measure it; where one half has no tokens, on the other.

        Args:
            scale: the bound of the functions.
            center: the mean of the site where the norm centres, else 0.
        """
        held_out = self._held_out if self._count else self._fitted
        x, y = _columns(self._fitted if len(self._fitted) else held_out)
        other_x, other_y = _columns(held_out)
        start = float(((x - center).square() / y.square().clamp_min(1e-12)).median().clamp_min(1e-12)) * scale**2
        betas, errors, residuals = {}, {}, {}
        for name in FUNCTIONS:
            betas[name] = best_beta(partial(_errors, name, x, y, center=center, scale=scale), start)
            residual = _residual(
                name, other_x, other_y, torch.tensor([betas[name]], dtype=torch.float64), center, scale
            )
            errors[name] = float(residual.norm() / other_y.norm().clamp_min(1e-300))
            residuals[name] = float(residual.abs().mean())
        mean = self._log_sum / max(self._count, 1)
        spread = math.sqrt(max(self._log_square_sum / max(self._count, 1) - mean * mean, 0.0))
        few = slice(None, None, max(1, len(other_x) // 800))
        points = other_x[few].tolist(), other_y[few].tolist()
        fit = CoreFit(scale, center, betas, errors)
        return OutlierFit(fit, residuals, math.exp(mean), spread, self._exact, points)

    def _add(self, kept: Reservoir, x: Tensor) -> Tensor:
        """Keep the outliers of tokens, and return the constant that each would need."""
        x = x.double()
        centred = self.site.kind == "layernorm"
        deviation = x - x.mean(-1, keepdim=True) if centred else x
        place = deviation.abs().argmax(-1, keepdim=True)
        size = (deviation.square().mean(-1, keepdim=True) + self.site.eps).sqrt()
        y = (deviation.gather(-1, place) / size.clamp_min(torch.finfo(x.dtype).tiny))[:, 0]
        outlier, beta = (each.gather(-1, place) for each in (x, own_betas(x, self.site.kind, self.site.eps)))
        middle = theory.leave_one_out_mean(x).gather(-1, place) if centred else None
        exact = functional.dyisru_general(outlier, beta, middle, scale=math.sqrt(x.shape[-1] - centred))
        known = size[:, 0] > 0
        gap = (exact[:, 0] - y)[known]
        self._exact = max([self._exact, *gap.abs().amax(0, keepdim=True).tolist()]) if len(gap) else self._exact
        kept.add(outlier.cpu(), y.cpu(), torch.ones(len(y), dtype=torch.float64))
        return beta[:, 0]


def _columns(kept: Reservoir) -> tuple[Tensor, Tensor]:
    x, y = (torch.tensor(column, dtype=torch.float64) for column in kept.points())
    return x, y


def _residual(name: str, x: Tensor, y: Tensor, betas: Tensor, center: float, scale: float) -> Tensor:
    return FUNCTIONS[name](x.expand(len(betas), -1), betas[:, None], center, scale) - y


def _errors(name: str, x: Tensor, y: Tensor, betas: Tensor, *, center: float, scale: float) -> Tensor:
    return _residual(name, x, y, betas, center, scale).square().sum(-1)
