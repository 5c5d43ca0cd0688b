"""The fits: the published constants, agreement with scipy's own least squares, and data that cannot be fitted."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy.optimize import curve_fit
from scipy.special import erf

import dynorm
from dynorm.paper.fits import FAMILIES, Array, fit, fit_many
from dynorm.paper.generality import reproduce
from dynorm.paper.simulation import simulate

MODELS: dict[str, Callable[[Array, float, float], Array]] = {
    "DyT": lambda x, alpha, scale: scale * np.tanh(alpha * x),
    "Derf": lambda x, alpha, scale: scale * erf(alpha * x),
    "DyISRU": lambda x, beta, scale: scale * x / np.sqrt(beta + x * x),
}
# math.md's starts; Derf has none there.
STARTS = {"DyT": 0.1, "Derf": 0.1, "DyISRU": 800.0}


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


def test_every_run_gives_the_same_digits() -> None:
    digits = "[(repr(f.value), f.residuals.tolist()) for f in reproduce().fits.values()]"
    script = f"from dynorm.paper.generality import reproduce; print({digits})"
    other = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    ).stdout
    assert other.strip() == str(eval(digits, {"reproduce": reproduce}))


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(
    ("channels", "sigma", "seed"), [(100, 2.0, 1), (100, 2.0, 820), (80, 2.0, 2), (300, 4.0, 3)]
)
def test_scipys_fit_from_the_papers_starts_agrees(
    name: str, channels: int, sigma: float, seed: int
) -> None:
    simulation, scale = simulate(channels, sigma, seed=seed), math.sqrt(channels - 1)
    x, y = simulation.outliers, simulation.outputs
    ours = fit(name, x, y, channels)
    both = np.concatenate([x, -x]), np.concatenate([y, -y])
    (theirs,), _ = curve_fit(
        lambda z, c: MODELS[name](z, c, scale), *both, p0=STARTS[name], xtol=1e-12, ftol=1e-12
    )
    assert ours.value == pytest.approx(theirs, rel=1e-6)
    np.testing.assert_allclose(
        ours.residuals, MODELS[name](x, ours.value, scale) - y, rtol=0, atol=1e-13
    )


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(
    ("channels", "sigma", "mean"),
    [(3, 2.0, 0.0), (4, 0.25, 0.0), (100, 64.0, 0.0), (4096, 2.0, 40.0)],
)
def test_no_constant_on_a_fine_grid_is_better(
    name: str, channels: int, sigma: float, mean: float
) -> None:
    simulation, scale = simulate(channels, sigma, mean, seed=5), math.sqrt(channels - 1)
    fitted = fit(name, simulation.outliers, simulation.outputs, channels)
    grid = fitted.value * np.exp(np.linspace(-12, 12, 4001))
    misses = (
        MODELS[name](simulation.outliers[:, None], grid[None], scale) - simulation.outputs[:, None]
    )  # type: ignore[arg-type]
    assert (fitted.residuals**2).sum() <= (misses**2).sum(0).min() * (1 + 1e-9) + 1e-28


@pytest.mark.parametrize("name", FAMILIES)
def test_many_fits_at_once_are_the_single_ones(name: str) -> None:
    simulations = [simulate(30, 3.0, seed=seed) for seed in range(20)]
    x, y = (np.stack([getattr(s, field) for s in simulations]) for field in ("outliers", "outputs"))
    single = [fit(name, s.outliers, s.outputs, 30).value for s in simulations]
    np.testing.assert_allclose(fit_many(name, x, y, 30), single, rtol=1e-12)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_constant_is_recovered_exactly(name: str) -> None:
    constant = {"DyT": 0.07, "Derf": 0.05, "DyISRU": 250.0}[name]
    x = np.array([2.0, 9.0, 30.0])
    fitted = fit(name, x, MODELS[name](x, constant, math.sqrt(49)), 50)
    assert fitted.value == pytest.approx(constant, rel=1e-12)
    assert fitted.mean_absolute_residual < 1e-13


@pytest.mark.parametrize("name", FAMILIES)
def test_a_familys_parts_belong_together(name: str) -> None:
    family, k = FAMILIES[name], torch.tensor([0.3], dtype=torch.float64)
    z = torch.linspace(-2, 2, 41, dtype=torch.float64, requires_grad=True)
    f = family.curve(z / k, k**family.power, scale=1.0)
    (slope,) = torch.autograd.grad(f.sum(), z)
    torch.testing.assert_close(family.slope(z.detach()), slope)
    torch.testing.assert_close(family.inverse(f.detach()), z.detach())


def test_the_linear_fit_is_that_of_numpy() -> None:
    simulation = simulate(seed=3)
    x, y = simulation.outliers, simulation.outputs
    expected = np.linalg.lstsq(x[:, None], y, rcond=None)[0][0]
    assert fit("linear", x, y, 100).value == pytest.approx(expected, rel=1e-12)


def test_the_function_takes_any_shape_and_layout() -> None:
    fitted = fit("DyT", [2.0, 4.0], [3.0, 5.0], channels=50)
    x = np.arange(6.0).reshape(2, 3)[:, ::-1]
    x.flags.writeable = False
    expected = 7 * np.tanh(fitted.value * x)
    np.testing.assert_allclose(fitted.function(x), expected, rtol=1e-13)
    assert fitted.function(1.5).shape == ()
    np.testing.assert_allclose(
        fitted.function(np.array([2.0, 4.0])) - [3.0, 5.0], fitted.residuals, rtol=1e-12
    )


@pytest.mark.parametrize("name", [*FAMILIES, "linear"])
@pytest.mark.parametrize(
    ("x", "y", "channels", "match"),
    [
        ([1.0], [0.5, 0.6], 10, "the same shape"),
        ([], [], 10, "one point"),
        ([[1.0]], [[0.5]], 10, r"shape \(n,\)"),
        ([1.0], [0.5], 1, "at least 2 channels"),
        ([1.0, -1.0], [0.5, 0.5], 10, "sign.*y"),
        ([math.nan], [0.5], 10, "sign.*y"),
        ([math.inf], [0.5], 10, "must be finite"),
        ([1.0], [3.5], 10, "must lie within"),
        ([1.0, 2.0], [1.0, 1.0], 2, "not all"),
    ],
)
def test_what_cannot_be_fitted(
    name: str, x: list[float], y: list[float], channels: int, match: str
) -> None:
    with pytest.raises(dynorm.errors.ArgumentError, match=match):
        fit(name, x, y, channels)


def test_unknown_functions_are_named() -> None:
    with pytest.raises(dynorm.errors.ArgumentError, match=r"DyT.*DyISRU"):
        fit_many("tanh", [[1.0]], [[0.5]], 10)


def test_without_scipy_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.optimize.elementwise", None)
    with pytest.raises(dynorm.errors.ArgumentError, match=r"scipy.*install"):
        fit("DyT", [1.0], [0.5], 10)
