"""Section 4: one simulation with its fits, and a study of the same fits over many samples."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dynorm.paper.fits import CLOSED, FITTED, Fit, closed_form, fit, fit_many, outputs_of
from dynorm.paper.simulation import Array, Simulation, simulate
from dynorm.plain import JsonObject

Setting = tuple[int, float, float]  # C, sigma and mean

# The paper's setting, and others around it: other C, other sigma, and means that are a centre.
SETTINGS: Sequence[Setting] = (
    (100, 2.0, 0.0),
    (4, 2.0, 0.0),
    (4096, 2.0, 0.0),
    (100, 0.5, 0.0),
    (100, 8.0, 0.0),
    (100, 32.0, 0.0),
    (100, 2.0, -4.0),
    (100, 2.0, 2.0),
    (100, 2.0, 4.0),
    (100, 2.0, 16.0),
)


@dataclass(frozen=True)
class Study:
    """The fits to many samples of one setting, with the seeds 1, 2, ... in this order."""

    channels: int
    sigma: float
    mean: float
    samples: int
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

    def to_dict(self) -> JsonObject:
        """Return the setting, the residuals and the wins as plain numbers."""
        middles = {}
        for name in FITTED:
            median, low, high = self.middle(name)
            middles[name] = {"median": median, "p5": low, "p95": high}
        return {
            "channels": self.channels,
            "sigma": self.sigma,
            "mean": self.mean,
            "samples": self.samples,
            "dyt_wins": self.lost,
            "dyisru_below_0.01": float((self.residuals["DyISRU"] < 0.01).mean()),
            "residuals": middles,
            "largest_closed_form_residual": float(self.closed_residuals.max()),
        }


def study(channels: int, sigma: float, mean: float, samples: int) -> Study:
    """Repeat the simulation and the fits of section 4 over many samples."""
    outliers = []
    outputs = []
    closed_residuals = []
    for seed in range(1, samples + 1):
        simulation = simulate(channels, sigma, mean, seed)
        outliers.append(simulation.outliers)
        outputs.append(simulation.outputs)
        closed_residuals.append(closed_form(simulation).mean_absolute_residual)
    x = np.stack(outliers)
    y = np.stack(outputs)
    residuals = {}
    for name in FITTED:
        constants = fit_many(name, x, y, channels)
        fitted = outputs_of(
            name, torch.from_numpy(x), torch.from_numpy(constants)[:, None], channels
        )
        residuals[name] = np.abs(fitted.numpy() - y).mean(-1)
    return Study(channels, sigma, mean, samples, residuals, np.array(closed_residuals))


PAPER: Mapping[str, tuple[str, str]] = {"DyT": ("0.049", "0.33"), "DyISRU": ("301.1", "< 0.01")}
"""The constants and mean absolute residuals as the paper prints them."""


@dataclass(frozen=True)
class Reproduction:
    """The results that ``dynorm paper`` shows."""

    simulation: Simulation
    fits: Mapping[str, Fit]  # DyT, Derf, DyISRU, linear and the closed form, by name
    studies: Sequence[Study]


def reproduce(
    samples: int, track: Callable[[Sequence[Setting]], Iterable[Setting]] = iter
) -> Reproduction:
    """Simulate, fit and compare with the closed form (section 4, eq. 16 to 19).

    The paper's one sample is followed by a study of each of :data:`SETTINGS` with this many
    samples. ``track`` wraps the settings to show a progress bar.
    """
    simulation = simulate()
    fits = {}
    for name in FITTED:
        fits[name] = fit(name, simulation.outliers, simulation.outputs, simulation.channels)
    fits[CLOSED] = closed_form(simulation)
    studies = [study(*setting, samples) for setting in track(SETTINGS)]
    return Reproduction(simulation, fits, studies)
