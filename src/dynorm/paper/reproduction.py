"""Section 4, reproduced: one simulation with its fits and its closed form, and the study of how general they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dynorm.paper.fits import Fit, fit
from dynorm.paper.generality import FUNCTIONS, Generality
from dynorm.paper.simulation import ClosedForm, Simulation, closed_form, simulate

__all__ = ["PAPER", "PAPER_SEED", "Reproduction", "reproduce"]

PAPER_SEED = 1
"""The seed of the published figures."""
PAPER: Mapping[str, tuple[str, str]] = {"DyT": ("0.049", "0.33"), "DyISRU": ("301.1", "< 0.01")}
"""The constants and mean absolute residuals as the paper prints them."""


@dataclass(frozen=True)
class Reproduction:
    """What ``dynorm paper`` shows."""

    simulation: Simulation
    fits: Mapping[str, Fit]
    """DyT, Derf, DyISRU and linear, by name."""
    closed: ClosedForm
    generality: Generality | None = None
    """None for one sample alone."""


def reproduce(
    channels: int = 100, sigma: float = 2.0, seed: int = PAPER_SEED, generality: Generality | None = None
) -> Reproduction:
    """Simulate, fit and compare with the closed form.

    Args:
        channels: C, at least 3; with 2 there is nothing to fit.
        sigma: Standard deviation of the sample, positive.
        seed: Seed of the sample.
        generality: What :func:`dynorm.paper.generality.study_all` returns, to be shown along.

    Returns:
        The simulation, the fits by name, and the closed form.

    Raises:
        ArgumentError: If an argument is outside its domain, or scipy is not installed.

    Example:
        >>> fits = reproduce().fits
        >>> round(fits["DyT"].value, 3), round(fits["DyISRU"].value, 1)
        (0.049, 301.1)

    Reference:
        Section 4, eq. 16 to 19.
    """
    simulation = simulate(channels, sigma, seed=seed)
    fits = {name: fit(name, simulation.outliers, simulation.outputs, channels) for name in FUNCTIONS}
    return Reproduction(simulation, fits, closed_form(simulation), generality)
