"""Section 4: one simulation with its fits, and a study of the same fits over many samples."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
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
    betas: Array  # DyISRU's fitted beta
    centers: Array  # m_o, the mean of the other channels
    closed_betas: Array  # C v_o, the beta of the closed form
    closed_residuals: Array  # mean absolute residuals of the closed form

    @property
    def offset(self) -> float:
        """The mean in units of sigma."""
        return self.mean / self.sigma

    @property
    def lost(self) -> int:
        """Number of samples in which DyT has a smaller residual than DyISRU."""
        return int((self._ratio < 1).sum())

    @property
    def dyt_wins(self) -> float:
        """Share of the samples in which DyT has a smaller residual than DyISRU."""
        return float((self._ratio < 1).mean())

    @property
    def below_paper(self) -> float:
        """Share of the samples in which DyISRU's residual is below 0.01, as in the paper."""
        return float((self.residuals["DyISRU"] < 0.01).mean())

    @cached_property
    def best(self) -> dict[str, float]:
        """Share of the samples in which each function has the smallest residual of the four."""
        winner = np.argmin([self.residuals[name] for name in FITTED], axis=0)
        shares = {}
        for place, name in enumerate(FITTED):
            shares[name] = float((winner == place).mean())
        return shares

    @property
    def closest(self) -> tuple[int, float]:
        """The seed with the smallest ratio of DyT's residual to DyISRU's, and that ratio."""
        place = int(self._ratio.argmin())
        return int(self.seeds[place]), float(self._ratio[place])

    @property
    def _ratio(self) -> Array:
        # A residual may round to 0, if every function reaches the bound.
        return (self.residuals["DyT"] + 1e-300) / (self.residuals["DyISRU"] + 1e-300)

    def middle(self, name: str) -> tuple[float, float, float]:
        """Return the median of a function's residuals, and their 5% and 95% quantiles."""
        low, median, high = np.quantile(self.residuals[name], (0.05, 0.5, 0.95)).tolist()
        return median, low, high

    def to_dict(self) -> dict[str, Any]:
        """Return the setting and the distributions as plain numbers."""
        seed, ratio = self.closest
        return {
            "channels": self.channels,
            "sigma": self.sigma,
            "mean": self.mean,
            "samples": len(self.seeds),
            "skipped": self.skipped,
            "dyt_wins": self.dyt_wins,
            "best": self.best,
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
    """A base setting, and studies in which one quantity differs from it."""

    base: Study
    # By the quantity that varies: channels, sigma and mean.
    axes: Mapping[str, tuple[Study, ...]]

    def to_dict(self) -> dict[str, Any]:
        """Return every study as plain numbers."""
        numbers: dict[str, object] = {"base": self.base.to_dict()}
        for axis, studies in self.axes.items():
            numbers[f"over_{axis}"] = [study.to_dict() for study in studies]
        return numbers


def study_all(
    channels: int = 100,
    sigma: float = 2.0,
    samples: int = 1000,
    *,
    track: Callable[[list[Setting]], Iterable[Setting]] = iter,
) -> Generality:
    """Repeat the simulation and the fits over many samples, over C, over sigma and over the mean.

    Each study varies one quantity; the others are those of the base setting. ``track`` wraps the
    list of settings to show a progress bar.
    """
    settings = settings_of(channels, sigma)
    # The base setting is on every axis and is studied once.
    distinct = list(dict.fromkeys(chain(*settings.values())))
    for setting in distinct:
        check_settings(*setting, seed=0)
    studies = {}
    for setting in track(distinct):
        studies[setting] = study(*setting, samples)
    axes = {}
    for axis, along in settings.items():
        axes[axis] = tuple(studies[setting] for setting in along)
    (base,) = axes.pop("base")
    return Generality(base, axes)


def settings_of(channels: int, sigma: float) -> dict[str, list[Setting]]:
    """Return the settings (C, sigma, mean) of each axis; the base setting is on all of them."""
    return {
        "base": [(channels, sigma, 0.0)],
        "channels": [(c, sigma, 0.0) for c in sorted({*CHANNELS, channels})],
        "sigma": [(channels, s, 0.0) for s in sorted({*SIGMAS, sigma})],
        "mean": [(channels, sigma, m * sigma) for m in MEANS],
    }


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
    constants = {}
    for name in FITTED:
        constants[name] = fit_many(name, outliers.x, y, channels)
        outputs = outputs_of(name, x, torch.from_numpy(constants[name])[:, None], channels)
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
        betas=constants["DyISRU"],
        centers=outliers.centers,
        closed_betas=outliers.betas,
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


def _distribution(values: Array) -> dict[str, float]:
    distribution = {}
    for name, share in QUANTILES.items():
        distribution[name] = float(np.quantile(values, share))
    return distribution


PAPER_SEED = 1  # the seed of the published figures
PAPER: Mapping[str, tuple[str, str]] = {"DyT": ("0.049", "0.33"), "DyISRU": ("301.1", "< 0.01")}
"""The constants and mean absolute residuals as the paper prints them."""


@dataclass(frozen=True)
class Reproduction:
    """The results that ``dynorm paper`` shows."""

    simulation: Simulation
    fits: Mapping[str, Fit]  # DyT, Derf, DyISRU, linear and the closed form, by name
    generality: Generality | None = None  # None for one sample only


def reproduce(
    channels: int = 100,
    sigma: float = 2.0,
    seed: int = PAPER_SEED,
    generality: Generality | None = None,
) -> Reproduction:
    """Simulate, fit and compare with the closed form (section 4, eq. 16 to 19).

    ``generality`` is the study that is shown with the results.
    """
    simulation = simulate(channels, sigma, seed=seed)
    fits = {}
    for name in FITTED:
        fits[name] = fit(name, simulation.outliers, simulation.outputs, channels)
    fits[CLOSED] = closed_form(simulation)
    return Reproduction(simulation, fits, generality)
