"""Section 4: one simulation with its fits, and a study of the same fits over many samples."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dynorm.errors import ArgumentError
from dynorm.paper.fits import CLOSED, FITTED, Fit, closed_form, fit, fit_many, outputs_of
from dynorm.paper.simulation import STEP, Array, Simulation, check_settings, simulate

Setting = tuple[int, float, float]  # C, sigma and mean


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
    seeds = []
    outliers = []
    outputs = []
    closed_residuals = []
    for seed in range(1, samples + 1):
        simulation = simulate(channels, sigma, mean, seed)
        if simulation.outliers[0] <= 0:
            continue
        seeds.append(seed)
        outliers.append(simulation.outliers)
        outputs.append(simulation.outputs)
        closed_residuals.append(closed_form(simulation).mean_absolute_residual)
    if not seeds:
        raise ArgumentError(
            f"the outlier must be positive after its first step of {STEP:g} in at least one "
            f"sample, but is in none of {samples} with C={channels}, sigma={sigma} and "
            f"mean={mean}: take a smaller sigma or a larger mean"
        )
    x = np.stack(outliers)
    y = np.stack(outputs)
    residuals = {}
    for name in FITTED:
        constants = fit_many(name, x, y, channels)
        fitted = outputs_of(
            name, torch.from_numpy(x), torch.from_numpy(constants)[:, None], channels
        )
        residuals[name] = np.abs(fitted.numpy() - y).mean(-1)
    return Study(
        channels,
        sigma,
        mean,
        seeds=np.array(seeds),
        skipped=samples - len(seeds),
        residuals=residuals,
        closed_residuals=np.array(closed_residuals),
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
