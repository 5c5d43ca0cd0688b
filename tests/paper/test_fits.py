"""The fits: the published constants, agreement with scipy's least squares, and data that cannot be fitted."""

import math
import sys
from collections.abc import Callable

import numpy as np
import pytest
from scipy.optimize import curve_fit
from scipy.special import erf

from dynorm.errors import ArgumentError
from dynorm.paper.fits import FAMILIES, Array, fit, fit_many
from dynorm.paper.simulation import simulate

MODELS: dict[str, Callable[[Array, float, float], Array]] = {
    "DyT": lambda x, alpha, scale: scale * np.tanh(alpha * x),
    "Derf": lambda x, alpha, scale: scale * erf(alpha * x),
    "DyISRU": lambda x, beta, scale: scale * x / np.sqrt(beta + x * x),
}
# The paper's starts; Derf has none there.
STARTS = {"DyT": 0.1, "Derf": 0.1, "DyISRU": 800.0}
families = pytest.mark.parametrize("name", FAMILIES)


@pytest.mark.parametrize(
    ("name", "constant", "value", "residual"),
    [
        ("DyT", "alpha", 0.0486101350961, 0.327877002522),
        ("DyISRU", "beta", 301.059953889, 0.00481420846386),
        ("Derf", "alpha", 0.0404997191232, 0.465413153436),
        ("linear", "slope", 0.244759188727, 1.85939325928),
    ],
)
def test_the_published_sample(name: str, constant: str, value: float, residual: float) -> None:
    simulation = simulate()
    fitted = fit(name, simulation.outliers, simulation.outputs, 100)
    assert fitted.constant == constant
    assert fitted.value == pytest.approx(value, rel=1e-11)
    assert fitted.mean_absolute_residual == pytest.approx(residual, rel=1e-9)


@families
@pytest.mark.parametrize(("channels", "sigma", "seed"), [(100, 2.0, 820), (300, 4.0, 3)])
def test_scipys_fit_from_the_papers_starts_agrees(
    name: str, channels: int, sigma: float, seed: int
) -> None:
    simulation = simulate(channels, sigma, seed=seed)
    scale = math.sqrt(channels - 1)
    x, y = simulation.outliers, simulation.outputs

    def model(z: Array, constant: float) -> Array:
        return MODELS[name](z, constant, scale)

    ours = fit(name, x, y, channels)
    mirrored = np.concatenate([x, -x]), np.concatenate([y, -y])
    (theirs,), _ = curve_fit(model, *mirrored, p0=STARTS[name], xtol=1e-12, ftol=1e-12)
    assert ours.value == pytest.approx(theirs, rel=1e-6)
    np.testing.assert_allclose(ours.residuals, model(x, ours.value) - y, rtol=0, atol=1e-13)


@families
@pytest.mark.parametrize(
    ("channels", "sigma", "mean"), [(3, 2.0, 0.0), (100, 64.0, 0.0), (4096, 2.0, 40.0)]
)
def test_no_constant_on_a_fine_grid_is_better(
    name: str, channels: int, sigma: float, mean: float
) -> None:
    simulation = simulate(channels, sigma, mean, seed=5)
    fitted = fit(name, simulation.outliers, simulation.outputs, channels)
    grid = fitted.value * np.exp(np.linspace(-12, 12, 4001))
    x = simulation.outliers[:, None]
    outputs = MODELS[name](x, grid, math.sqrt(channels - 1))  # type: ignore[arg-type]
    errors = ((outputs - simulation.outputs[:, None]) ** 2).sum(0)
    assert (fitted.residuals**2).sum() <= errors.min() * (1 + 1e-9) + 1e-28


@families
def test_many_fits_at_once_are_the_single_ones(name: str) -> None:
    simulations = [simulate(30, 3.0, seed=seed) for seed in range(20)]
    x = np.stack([simulation.outliers for simulation in simulations])
    y = np.stack([simulation.outputs for simulation in simulations])
    single = [fit(name, *points, 30).value for points in zip(x, y, strict=True)]
    np.testing.assert_allclose(fit_many(name, x, y, 30), single, rtol=1e-12)


def test_the_function_takes_any_shape() -> None:
    fitted = fit("DyT", [2.0, 4.0], [3.0, 5.0], channels=50)
    x = np.arange(6.0).reshape(2, 3)
    np.testing.assert_allclose(fitted.function(x), 7 * np.tanh(fitted.value * x), rtol=1e-13)


@families
@pytest.mark.parametrize(
    ("x", "y"), [([1.0, -1.0], [0.5, 0.5]), ([math.nan], [0.5]), ([1.0, 2.0], [9.5, 9.5])]
)
def test_points_that_cannot_be_fitted(name: str, x: list[float], y: list[float]) -> None:
    with pytest.raises(ArgumentError, match=f"{name} has no least-squares fit to 1 of 1"):
        fit(name, x, y, 10)


def test_a_missing_scipy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.optimize.elementwise", None)
    with pytest.raises(ArgumentError, match=r"scipy.*install"):
        fit("DyT", [1.0], [0.5], 10)
