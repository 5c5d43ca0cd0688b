"""The study over many samples: each sample is the one that its seed gives, and wins are counted."""

import pytest

from dynorm.errors import ArgumentError
from dynorm.paper import generality
from dynorm.paper.fits import FITTED, closed_form, fit
from dynorm.paper.generality import study, study_all
from dynorm.paper.simulation import simulate


@pytest.mark.parametrize(("channels", "sigma", "mean"), [(100, 2.0, 0.0), (5, 0.7, 3.0)])
def test_each_sample_is_that_of_its_seed(channels: int, sigma: float, mean: float) -> None:
    many = study(channels, sigma, mean, samples=12)
    assert many.seeds.tolist() == list(range(1, 13))
    for row, seed in enumerate(many.seeds.tolist()):
        one = simulate(channels, sigma, mean, seed)
        for name in FITTED:
            alone = fit(name, one.outliers, one.outputs, channels).mean_absolute_residual
            assert many.residuals[name][row] == pytest.approx(alone, rel=1e-7, abs=1e-13)
        assert closed_form(one).mean_absolute_residual < 1e-13
        assert many.closed_residuals[row] < 1e-13


def test_the_settings_and_who_wins_in_them() -> None:
    seen = []

    def track(settings: list[generality.Setting]) -> list[generality.Setting]:
        seen.extend(settings)
        return settings

    studies = study_all(samples=20, track=track)
    settings = [(found.channels, found.sigma, found.mean) for found in studies]
    assert settings == seen
    assert len(set(settings)) == 10
    assert settings[0] == (100, 2, 0)
    lost = {setting: found.lost for setting, found in zip(settings, studies, strict=True)}
    assert lost[100, 2, 0] == 0
    # A mean that is large beside sigma is a centre, which DyISRU leaves out.
    assert lost[100, 2, 16] == 20
    assert studies[0].to_dict()["dyt_wins"] == 0
    median, low, high = studies[0].middle("DyISRU")
    assert 0 < low < median < high < 0.05


def test_samples_without_a_positive_outlier_are_counted_not_fitted() -> None:
    some = study(3, 1000.0, samples=50)
    below = [seed for seed in range(1, 51) if simulate(3, 1000.0, seed=seed).outliers[0] <= 0]
    assert some.skipped == len(below) > 0
    assert set(some.seeds.tolist()) == set(range(1, 51)) - set(below)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"channels": 2}, "not all"),
        ({"samples": 0}, "samples.*1"),
        ({"mean": -1000.0}, "positive.*first step"),
    ],
)
def test_what_it_refuses(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        study(**{"samples": 5, **settings})  # type: ignore[arg-type]
