"""The report's sums: ranks, histograms and samples compared with a computation on all values at once."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

from dynorm.report.output import average_ranks, pairs_alike, spearman
from dynorm.report.stats import FUNCTIONS, Histogram, Reservoir


class TestRanks:
    @pytest.mark.parametrize("seed", range(5))
    def test_spearman_with_ties_is_scipys(self, seed: int) -> None:
        a, b = np.random.default_rng(seed).integers(0, 9, (2, 60))
        expected = stats.spearmanr(a, b).statistic
        assert spearman(torch.tensor(a).float(), torch.tensor(b).float()) == pytest.approx(
            expected, abs=1e-12
        )
        assert average_ranks(torch.tensor(a)).tolist() == stats.rankdata(a).tolist()

    def test_what_has_no_order(self) -> None:
        assert spearman(torch.ones(5), torch.arange(5.0)) is None
        assert pairs_alike(torch.eye(2), torch.eye(2)) == (None, None)

    def test_of_many_samples_an_even_choice_is_taken(self) -> None:
        a = nn.functional.normalize(
            torch.randn(2500, 3, generator=torch.Generator().manual_seed(0)), dim=1
        )
        assert pairs_alike(a, a) == (pytest.approx(1.0), 1)
        correlation, neighbours = pairs_alike(a, a.flip(0))
        assert correlation == pytest.approx(0.0, abs=0.1)
        assert neighbours is not None
        assert neighbours < 0.01

    def test_a_sample_is_not_its_own_neighbour(self) -> None:
        angles = torch.tensor([[0.0, 1.0, 3.0, 3.5], [0.0, 2.0, 3.0, 3.5]])
        before, now = torch.stack([angles.cos(), angles.sin()], dim=-1)
        # The second has the first beside it, then the third.
        assert pairs_alike(before, now)[1] == 0.75
        assert pairs_alike(before[:2], now[:2])[1] is None


class TestStatistics:
    @pytest.mark.parametrize("name", list(FUNCTIONS))
    @pytest.mark.parametrize("offset", [0.0, 0.5, 100.0])
    def test_a_histogram_measures_as_well_as_the_values(self, name: str, offset: float) -> None:
        generator = torch.Generator().manual_seed(0)
        x = offset + torch.randn(20_000, generator=generator, dtype=torch.float64) ** 3
        y = (x - offset) / (1 + 0.1 * (x - offset).abs()) + 0.1 * torch.randn(
            20_000, generator=generator
        )
        histogram = Histogram(origin=offset + 0.01, unit=1.5)
        for part in zip(x.split(999), y.split(999), strict=True):
            histogram.add(*part)
        betas = torch.tensor([10.0, 100.0, 1000.0], dtype=torch.float64)
        found = histogram.error(name, betas, offset, 10.0)
        expected = [
            (FUNCTIONS[name](x, beta, offset, 10.0) - y).norm() / y.norm() for beta in betas
        ]
        assert found.tolist() == pytest.approx([float(e) for e in expected], rel=1e-5)
        assert histogram.mean() == pytest.approx(float(x.mean()), rel=1e-9)
        assert len(histogram) == 20_000

    def test_bins_say_mean_and_deviation(self) -> None:
        x = torch.cat([torch.full((100,), -3.0), torch.full((50,), 4.0), torch.tensor([100.0])])
        y = torch.cat([torch.linspace(0, 1, 100), torch.full((50,), 2.0), torch.tensor([9.0])])
        histogram = Histogram(0.0, 1.0)
        histogram.add(x, y)
        bins = histogram.bins(most=20, least=10)
        assert [(round(b.x, 6), round(b.mean, 6), b.count) for b in bins] == [
            (-3.0, 0.5, 100),
            (4.0, 2.0, 50),
        ]
        assert bins[0].std == pytest.approx(float(y[:100].std(correction=0)), rel=1e-5)

    def test_a_reservoir_keeps_each_value_once_and_prefers_the_heavy(self) -> None:
        reservoir = Reservoir(size=100, seed=0)
        for start in range(0, 10_000, 500):
            x = torch.arange(start, start + 500.0)
            reservoir.add(x, -x, torch.where(x < 100, 200.0, 1.0))
        x, y = reservoir.points()
        assert len(set(x)) == 100
        assert x == sorted(x)
        assert y == [-v for v in x]
        assert 50 < sum(v < 100 for v in x) < 95
