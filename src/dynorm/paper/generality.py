"""Section 4, reproduced: one simulation with its fits, and the study of how general they are over many samples."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dynorm.errors import ArgumentError
from dynorm.functional import dyisru_general, layer_norm
from dynorm.paper.fits import CLOSED, FITTED, Fit, closed_form, fit, fit_many, outputs_of
from dynorm.paper.simulation import STEP, STEPS, Array, Simulation, check_settings, raised, simulate

CHANNELS = (4, 16, 64, 100, 256, 768, 4096)
SIGMAS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
MEANS = (-2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0, 4.0, 8.0)  # in units of sigma
QUANTILES = {"min": 0.0, "p5": 0.05, "median": 0.5, "p95": 0.95, "max": 1.0}
# Values that are held in memory at once, eight bytes each.
_CHUNK = 2**22


@dataclass(frozen=True)
class Study:
    """The fits to many samples of one setting; every array has an element for each seed."""

    channels: int
    sigma: float
    mean: float
    seeds: NDArray[np.int64]
    # Samples left out because x_o is not positive after the first step: no function through 0 can
    # be fitted.
    skipped: int
    residuals: dict[str, Array]  # mean absolute residuals of DyT, Derf, DyISRU and linear
    betas: Array  # DyISRU's fitted beta
    centers: Array  # m_o, the mean of the other channels
    closed_betas: Array  # C v_o, which the closed form has for beta
    closed_residuals: Array  # mean absolute residuals of the closed form

    @property
    def offset(self) -> float:
        """The mean in units of sigma."""
        return self.mean / self.sigma

    @property
    def lost(self) -> int:
        """In how many of the samples DyT has a smaller residual than DyISRU."""
        return int((self._ratio < 1).sum())

    @property
    def dyt_wins(self) -> float:
        """Share of the samples in which DyT has a smaller residual than DyISRU."""
        return float((self._ratio < 1).mean())

    @property
    def below_paper(self) -> float:
        """Share of the samples in which DyISRU's residual is below 0.01, as the paper's is."""
        return float((self.residuals["DyISRU"] < 0.01).mean())

    @cached_property
    def best(self) -> dict[str, float]:
        """Share of the samples in which each function has the smallest residual of the four."""
        winner = np.argmin([self.residuals[name] for name in FITTED], axis=0)
        return {name: float((winner == i).mean()) for i, name in enumerate(FITTED)}

    @property
    def closest(self) -> tuple[int, float]:
        """Return the seed in which DyT comes closest to DyISRU, or beats it most, and the ratio of residuals there."""
        i = int(self._ratio.argmin())
        return int(self.seeds[i]), float(self._ratio[i])

    @property
    def _ratio(self) -> Array:
        # A residual may be 0 to rounding, where every function reaches the bound.
        return (self.residuals["DyT"] + 1e-300) / (self.residuals["DyISRU"] + 1e-300)

    def middle(self, name: str) -> tuple[float, float, float]:
        """Return the median of a function's residuals, and where their middle nine tenths begin and end."""
        low, median, high = np.quantile(self.residuals[name], (0.05, 0.5, 0.95)).tolist()
        return median, low, high

    def to_dict(self) -> dict[str, Any]:
        """Return the setting and the distributions as plain numbers."""
        seed, ratio = self.closest
        return {
            **{name: getattr(self, name) for name in ("channels", "sigma", "mean")},
            "samples": len(self.seeds),
            **{name: getattr(self, name) for name in ("skipped", "dyt_wins", "best")},
            "dyisru_below_0.01": self.below_paper,
            "closest": {"seed": seed, "dyt_over_dyisru": ratio},
            "residuals": {name: _distribution(values) for name, values in self.residuals.items()},
            "closed_form_residual": _distribution(self.closed_residuals),
            "beta": _distribution(self.betas),
            "closed_form_beta": _distribution(self.closed_betas),
            "beta_over_closed_form": _distribution(self.betas / self.closed_betas),
        }


@dataclass(frozen=True)
class Generality:
    """A setting, and what changes when C, sigma or the mean does, the rest being held."""

    base: Study
    axes: Mapping[
        str, tuple[Study, ...]
    ]  # by the quantity that varies in them: channels, sigma and mean

    def to_dict(self) -> dict[str, Any]:
        """Return every study as plain numbers."""
        over = {
            f"over_{axis}": [study.to_dict() for study in studies]
            for axis, studies in self.axes.items()
        }
        return {"base": self.base.to_dict(), **over}


def study_all(
    channels: int = 100,
    sigma: float = 2.0,
    samples: int = 1000,
    *,
    track: Callable[[list[tuple[int, float, float]]], Iterable[tuple[int, float, float]]] = iter,
) -> Generality:
    """Repeat the simulation and the fits over many samples, over C, over sigma and over the mean.

    What a study does not vary is that of the base setting. ``track`` wraps the list of settings,
    for a progress bar.
    """
    settings = settings_of(channels, sigma)
    wanted = list(dict.fromkeys(setting for axis in settings.values() for setting in axis))
    for setting in wanted:
        check_settings(*setting, seed=0)
    done = {setting: study(*setting, samples) for setting in track(wanted)}
    axes = {axis: tuple(done[setting] for setting in chosen) for axis, chosen in settings.items()}
    return Generality(axes.pop("base")[0], axes)


def settings_of(channels: int, sigma: float) -> dict[str, list[tuple[int, float, float]]]:
    """Return the settings (C, sigma, mean) of each axis; the base setting is on all of them."""
    return {
        "base": [(channels, sigma, 0.0)],
        "channels": [(c, sigma, 0.0) for c in sorted({*CHANNELS, channels})],
        "sigma": [(channels, s, 0.0) for s in sorted({*SIGMAS, sigma})],
        "mean": [(channels, sigma, m * sigma) for m in MEANS],
    }


def study(channels: int = 100, sigma: float = 2.0, mean: float = 0.0, samples: int = 1000) -> Study:
    """Repeat the simulation and the fits of section 4 over many samples.

    The seeds are 1, 2, ..., so that each sample can be looked at alone. C is at least 3: with 2,
    LayerNorm's output is 1 or -1 whatever x is.
    """
    check_settings(channels, sigma, mean, seed=samples)
    if samples < 1:
        raise ArgumentError(f"samples must be at least 1, got {samples}: give more, say 1000")
    size = max(_CHUNK // (channels * STEPS), 1)
    seeds = np.arange(1, samples + 1)
    parts = [_outliers(channels, sigma, mean, seeds[i : i + size]) for i in range(0, samples, size)]
    x, y, centers, betas = (np.concatenate(column) for column in zip(*parts, strict=True))
    fitted = x[:, 0] > 0
    if not fitted.any():
        raise ArgumentError(
            f"the outlier must be positive after its first step of {STEP:g} in one sample at "
            "least, but is in none of "
            f"{samples} with C={channels}, sigma={sigma} and mean={mean}: take a smaller sigma or "
            "a larger mean"
        )
    x, y, centers, betas = x[fitted], y[fitted], centers[fitted], betas[fitted]
    inputs, center, beta = (
        torch.from_numpy(values) for values in (x, centers[:, None], betas[:, None])
    )
    constants = {name: fit_many(name, x, y, channels) for name in FITTED}
    residuals = {
        name: np.abs(
            outputs_of(name, inputs, torch.from_numpy(found)[:, None], channels).numpy() - y
        ).mean(-1)
        for name, found in constants.items()
    }
    closed = dyisru_general(inputs, beta, center, scale=math.sqrt(channels - 1)).numpy() - y
    found = (residuals, constants["DyISRU"], centers, betas, np.abs(closed).mean(-1))
    return Study(channels, sigma, mean, seeds[fitted], samples - len(x), *found)


def _outliers(
    channels: int, sigma: float, mean: float, seeds: NDArray[np.int64]
) -> tuple[Array, Array, Array, Array]:
    """Return the raised outliers, LayerNorm's outputs at them, and the mean and C times the variance of the others."""
    generator, x = np.random.RandomState(), np.empty((len(seeds), channels))
    for row, seed in zip(x, seeds.tolist(), strict=True):
        generator.seed(seed)
        row[:] = mean + sigma * generator.randn(channels)
    x.sort()
    others, tokens = x[:, :-1], raised(x)[:, 1:]
    outputs = layer_norm(torch.from_numpy(tokens), eps=0.0).numpy()[..., -1]
    return tokens[..., -1], outputs, others.mean(-1), channels * others.var(-1)


def _distribution(values: Array) -> dict[str, float]:
    return {name: float(np.quantile(values, share)) for name, share in QUANTILES.items()}


PAPER_SEED = 1  # the seed of the published figures
PAPER: Mapping[str, tuple[str, str]] = {"DyT": ("0.049", "0.33"), "DyISRU": ("301.1", "< 0.01")}
"""The constants and mean absolute residuals as the paper prints them."""


@dataclass(frozen=True)
class Reproduction:
    """What ``dynorm paper`` shows."""

    simulation: Simulation
    fits: Mapping[str, Fit]  # DyT, Derf, DyISRU, linear and the closed form, by name
    generality: Generality | None = None  # None for one sample alone


def reproduce(
    channels: int = 100,
    sigma: float = 2.0,
    seed: int = PAPER_SEED,
    generality: Generality | None = None,
) -> Reproduction:
    """Simulate, fit and compare with the closed form (section 4, eq. 16 to 19); ``generality`` is to be shown along."""
    simulation = simulate(channels, sigma, seed=seed)
    fits = {name: fit(name, simulation.outliers, simulation.outputs, channels) for name in FITTED}
    return Reproduction(simulation, fits | {CLOSED: closed_form(simulation)}, generality)
