"""Section 4: one simulation with its fits, and a study of the same fits over many samples."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dynorm.errors import ArgumentError
from dynorm.functional import dyisru_general, layer_norm
from dynorm.paper.fits import CLOSED, FITTED, Fit, closed_form, fit, fit_many, outputs_of
from dynorm.paper.simulation import STEP, STEPS, Array, Simulation, check_settings, raised, simulate

Setting = tuple[int, float, float]  # C, sigma and mean

# The largest number of float64 values in memory at once.
_CHUNK = 2**22


@dataclass(frozen=True)
class Study:
    """The fits to many samples of one setting; every array has an element for each seed."""

    channels: int
    sigma: float
    mean: float
    seeds: NDArray[np.int64]
    # Samples left out because x_o is not positive after the first step, so that no function
    # through 0 can be fitted.
    skipped: int
    residuals: dict[str, Array]  # mean absolute residuals of DyT, Derf, DyISRU and linear
    closed_residuals: Array  # mean absolute residuals of the closed form

    @property
    def lost(self) -> int:
        """Number of samples in which DyT has a smaller residual than DyISRU."""
        return int((self.residuals["DyT"] < self.residuals["DyISRU"]).sum())

    def middle(self, name: str) -> tuple[float, float, float]:
        """Return the median of a function's residuals, and their 5% and 95% quantiles."""
        low, median, high = np.quantile(self.residuals[name], (0.05, 0.5, 0.95)).tolist()
        return median, low, high

    def to_dict(self) -> dict[str, Any]:
        """Return the setting, the residuals and the wins as plain numbers."""
        middles = {}
        for name in FITTED:
            median, low, high = self.middle(name)
            middles[name] = {"median": median, "p5": low, "p95": high}
        return {
            "channels": self.channels,
            "sigma": self.sigma,
            "mean": self.mean,
            "samples": len(self.seeds),
            "skipped": self.skipped,
            "dyt_wins": self.lost,
            "dyisru_below_0.01": float((self.residuals["DyISRU"] < 0.01).mean()),
            "residuals": middles,
            "largest_closed_form_residual": float(self.closed_residuals.max()),
        }


def study_all(
    channels: int = 100,
    sigma: float = 2.0,
    samples: int = 1000,
    *,
    track: Callable[[list[Setting]], Iterable[Setting]] = iter,
) -> list[Study]:
    """Repeat the simulation and the fits over many samples: a setting, and others around it.

    The first study is of the given setting; in each of the others C, sigma or the mean differs.
    ``track`` wraps the list of settings to show a progress bar.
    """
    settings = [(channels, sigma, 0.0)]
    settings += [(c, sigma, 0.0) for c in (4, 4096)]
    settings += [(channels, factor * sigma, 0.0) for factor in (0.25, 4.0, 16.0)]
    settings += [(channels, sigma, offset * sigma) for offset in (-2.0, 1.0, 2.0, 8.0)]
    distinct = list(dict.fromkeys(settings))
    for setting in distinct:
        check_settings(*setting, seed=0)
    return [study(*setting, samples) for setting in track(distinct)]


def study(
    channels: int = 100,
    sigma: float = 2.0,
    mean: float = 0.0,
    samples: int = 1000,
) -> Study:
    """Repeat the simulation and the fits of section 4 over many samples.

    The seeds are 1, 2, ..., so that any one sample can be reproduced. C must be at least 3, because
    with 2 channels LayerNorm's output is always 1 or -1.
    """
    check_settings(channels, sigma, mean, seed=samples)
    if samples < 1:
        raise ArgumentError(f"samples must be at least 1, got {samples}: give more, say 1000")
    size = max(_CHUNK // (channels * STEPS), 1)
    seeds = np.arange(1, samples + 1)
    parts = []
    for start in range(0, samples, size):
        parts.append(_outliers(channels, sigma, mean, seeds[start : start + size]))
    outliers = _Outliers.joined(parts)
    can_be_fitted = outliers.x[:, 0] > 0
    if not can_be_fitted.any():
        raise ArgumentError(
            f"the outlier must be positive after its first step of {STEP:g} in at least one "
            f"sample, but is in none of {samples} with C={channels}, sigma={sigma} and "
            f"mean={mean}: take a smaller sigma or a larger mean"
        )
    outliers = outliers.where(can_be_fitted)
    x = torch.from_numpy(outliers.x)
    y = outliers.y
    residuals = {}
    for name in FITTED:
        constants = fit_many(name, outliers.x, y, channels)
        outputs = outputs_of(name, x, torch.from_numpy(constants)[:, None], channels)
        residuals[name] = np.abs(outputs.numpy() - y).mean(-1)
    closed = dyisru_general(
        x,
        torch.from_numpy(outliers.betas[:, None]),
        torch.from_numpy(outliers.centers[:, None]),
        scale=math.sqrt(channels - 1),
    )
    return Study(
        channels,
        sigma,
        mean,
        seeds=seeds[can_be_fitted],
        skipped=samples - len(x),
        residuals=residuals,
        closed_residuals=np.abs(closed.numpy() - y).mean(-1),
    )


@dataclass(frozen=True)
class _Outliers:
    """The outliers of many samples: x and y have the shape (samples, STEPS), the rest (samples,)."""

    x: Array
    y: Array  # LayerNorm's outputs at x
    centers: Array  # the mean of the other channels
    betas: Array  # C times the variance of the other channels

    @classmethod
    def joined(cls, parts: Sequence["_Outliers"]) -> "_Outliers":
        return cls(
            np.concatenate([part.x for part in parts]),
            np.concatenate([part.y for part in parts]),
            np.concatenate([part.centers for part in parts]),
            np.concatenate([part.betas for part in parts]),
        )

    def where(self, chosen: NDArray[np.bool_]) -> "_Outliers":
        return _Outliers(
            x=self.x[chosen],
            y=self.y[chosen],
            centers=self.centers[chosen],
            betas=self.betas[chosen],
        )


def _outliers(
    channels: int,
    sigma: float,
    mean: float,
    seeds: NDArray[np.int64],
) -> _Outliers:
    """Draw the samples of some seeds and raise their largest elements."""
    generator = np.random.RandomState()
    samples = np.empty((len(seeds), channels))
    for sample, seed in zip(samples, seeds.tolist(), strict=True):
        generator.seed(seed)
        sample[:] = mean + sigma * generator.randn(channels)
    samples.sort()
    others = samples[:, :-1]
    tokens = raised(samples)[:, 1:]
    outputs = layer_norm(torch.from_numpy(tokens), eps=0.0).numpy()
    return _Outliers(
        x=tokens[..., -1],
        y=outputs[..., -1],
        centers=others.mean(-1),
        betas=channels * others.var(-1),
    )


PAPER_SEED = 1  # the seed of the published figures
PAPER: Mapping[str, tuple[str, str]] = {"DyT": ("0.049", "0.33"), "DyISRU": ("301.1", "< 0.01")}
"""The constants and mean absolute residuals as the paper prints them."""


@dataclass(frozen=True)
class Reproduction:
    """The results that ``dynorm paper`` shows."""

    simulation: Simulation
    fits: Mapping[str, Fit]  # DyT, Derf, DyISRU, linear and the closed form, by name
    studies: Sequence[Study] = ()  # none for one sample only


def reproduce(
    channels: int = 100,
    sigma: float = 2.0,
    seed: int = PAPER_SEED,
    studies: Sequence[Study] = (),
) -> Reproduction:
    """Simulate, fit and compare with the closed form (section 4, eq. 16 to 19).

    ``studies`` are those that are shown with the results.
    """
    simulation = simulate(channels, sigma, seed=seed)
    fits = {}
    for name in FITTED:
        fits[name] = fit(name, simulation.outliers, simulation.outputs, channels)
    fits[CLOSED] = closed_form(simulation)
    return Reproduction(simulation, fits, studies)
