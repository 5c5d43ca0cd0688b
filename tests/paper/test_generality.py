"""The study over many samples: each sample is the one that its seed gives, and wins are counted."""

from collections.abc import Sequence

import numpy as np
import pytest

from dynorm.paper.fits import FITTED, closed_form, fit
from dynorm.paper.generality import SETTINGS, Setting, reproduce, study
from dynorm.paper.simulation import simulate


@pytest.mark.parametrize(("channels", "sigma", "mean"), [(100, 2.0, 0.0), (5, 0.7, 3.0)])
def test_each_sample_is_that_of_its_seed(channels: int, sigma: float, mean: float) -> None:
    many = study(channels, sigma, mean, samples=12)
    for row in range(12):
        one = simulate(channels, sigma, mean, seed=row + 1)
        for name in FITTED:
            alone = fit(name, one.outliers, one.outputs, channels).mean_absolute_residual
            assert many.residuals[name][row] == pytest.approx(alone, rel=1e-7, abs=1e-13)
        assert closed_form(one).mean_absolute_residual < 1e-13
        assert many.closed_residuals[row] < 1e-13


def test_the_settings_and_the_winners_in_them() -> None:
    seen: list[Setting] = []

    def track(settings: Sequence[Setting]) -> Sequence[Setting]:
        seen.extend(settings)
        return settings

    studies = reproduce(20, track).studies
    settings = [(found.channels, found.sigma, found.mean) for found in studies]
    assert settings == seen == list(SETTINGS)
    lost = {setting: found.lost for setting, found in zip(settings, studies, strict=True)}
    assert lost[100, 2, 0] == 0
    # A mean that is large beside sigma is a centre, which DyISRU leaves out.
    assert lost[100, 2, 16] == 20
    assert studies[0].to_dict()["dyt_wins"] == 0
    median, low, high = studies[0].middle("DyISRU")
    assert 0 < low < median < high < 0.05


@pytest.mark.parametrize("setting", SETTINGS)
def test_every_outlier_is_positive_so_that_functions_through_0_can_be_fitted(
    setting: Setting,
) -> None:
    firsts = [simulate(*setting, seed=seed).outliers[0] for seed in range(1, 1001)]
    assert np.min(firsts) > 0
