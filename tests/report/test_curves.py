"""The sample of a norm's values, and the curves that are fitted to it."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.optimize import minimize_scalar

from dynorm import functional
from dynorm.report.curves import FUNCTIONS, Reservoir
from dynorm.report.inspection import NormStats
from dynorm.site import NormSite


def test_a_reservoir_is_a_uniform_sample_of_pairs() -> None:
    reservoir = Reservoir(size=500, seed=0)
    for start in range(0, 10_000, 500):
        x = torch.arange(start, start + 500.0)
        reservoir.add(x, -x)
    x, y = reservoir.pairs
    assert len(set(x.tolist())) == 500
    assert torch.equal(y, -x)
    assert float(x.mean()) == pytest.approx(5000, abs=400)
    assert 180 < int((x < 5000).sum()) < 320


@pytest.mark.parametrize("name", list(FUNCTIONS))
def test_a_fit_is_that_of_least_squares(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x = 0.25 + 3 * torch.randn(4000, generator=generator, dtype=torch.float64) ** 3
    y = 4 * (x - 0.25) / (30 + (x - 0.25) ** 2).sqrt()
    y += 0.1 * torch.randn(4000, generator=generator, dtype=torch.float64)
    reservoir = Reservoir(4000, seed=1)
    reservoir.add(x, y)
    fit = reservoir.fit(center=0.25, scale=4.0, sigma=3.0)

    def error(log_beta: float) -> float:
        f = 4 * FUNCTIONS[name](x - 0.25, torch.tensor(log_beta, dtype=torch.float64).exp())
        return float((f - y).norm() / y.norm())

    best = minimize_scalar(error, bracket=(2.0, 5.0), tol=1e-12)
    # The search is a grid: its last step is 2e-5 wide in log10 beta.
    assert math.log(fit.betas[name]) == pytest.approx(best.x, abs=1e-4)
    assert fit.errors[name] == pytest.approx(best.fun, rel=1e-6)
    assert torch.allclose(
        fit.curve(name, x), 4 * FUNCTIONS[name](x - 0.25, torch.tensor(fit.betas[name]))
    )


def test_the_curves_have_the_slope_that_their_constant_says() -> None:
    u = torch.tensor(1e-6, dtype=torch.float64)
    beta = torch.tensor(25.0, dtype=torch.float64)
    for function in FUNCTIONS.values():
        assert float(function(u, beta) / u) == pytest.approx(0.2)


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_figures_are_those_of_all_tokens(kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300, 24, generator=generator, dtype=torch.float64) + 0.5
    x *= torch.rand(300, 1, generator=generator, dtype=torch.float64) + 0.5
    x[::4, 5] -= 9
    stats = NormStats(NormSite("norm", kind=kind, normalized_shape=(24,)), seed=0)
    for part in x.split(77):
        stats.see(part, part)
    row = stats.report()
    deviation = x - x.mean(1, keepdim=True) if kind == "layernorm" else x
    sigma = deviation.square().mean(1).sqrt()
    norm = functional.layer_norm if kind == "layernorm" else functional.rms_norm
    y = norm(x, eps=0.0)
    assert row.tokens == 300
    assert row.outlier == pytest.approx(float(y.abs().max()))
    assert row.sigma_spread == pytest.approx(float(sigma.log().std(correction=0)))
    # All values fit into the sample, and the picture has some of them.
    center = float(x.mean()) if kind == "layernorm" else 0.0
    assert row.core.center == pytest.approx(center)
    assert row.core.scale == pytest.approx(math.sqrt(23 if kind == "layernorm" else 24))
    picture = row.picture
    core_of = dict(zip(x.flatten().tolist(), y.flatten().tolist(), strict=True))
    for a, b in zip(picture.outlier_x + picture.x, picture.outlier_y + picture.y, strict=True):
        assert core_of[a] == pytest.approx(b)
    largest = y.gather(1, y.abs().argmax(1, keepdim=True))
    assert sorted(picture.outlier_y) == pytest.approx(sorted(largest.flatten().tolist()))
