"""The simulation of section 4: its published sample to all digits, and its closed form."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dynorm.paper.fits import closed_form
from dynorm.paper.simulation import channel_betas, simulate


def test_the_published_sample() -> None:
    simulation = simulate()
    assert simulation.tokens.shape == (10, 100)
    drawn = np.sort(2 * np.random.RandomState(1).randn(100))
    for step, token in enumerate(simulation.tokens):
        assert token[:-1].tolist() == drawn[:-1].tolist()
        assert token[-1] == drawn[-1] + 5 * step
    assert simulation.outliers.tolist() == simulation.tokens[1:, -1].tolist()


def test_the_outputs_are_layer_norms() -> None:
    simulation = simulate(channels=12, sigma=0.5, mean=3.0, seed=4)
    tokens = torch.from_numpy(simulation.tokens)
    expected = torch.nn.functional.layer_norm(tokens, (12,), eps=0.0).numpy()
    np.testing.assert_allclose(simulation.normalized, expected, rtol=0, atol=1e-13)
    assert simulation.outputs.tolist() == simulation.normalized[1:, -1].tolist()


def test_the_closed_form_of_the_published_sample_needs_no_fit() -> None:
    simulation = simulate()
    closed = closed_form(simulation)
    others = simulation.tokens[0, :-1]
    assert closed.center == pytest.approx(others.mean(), rel=1e-13)
    assert closed.value == pytest.approx(100 * others.var(), rel=1e-13)
    assert round(closed.value, 2) == 298.14
    assert np.abs(closed.residuals).max() < 1e-13
    # The constant of equation 14 is the same at every step.
    betas = channel_betas(simulation)
    assert betas.round(3).tolist() == [292.204] * 9
    np.testing.assert_allclose(betas, (99 / 100) ** 2 * closed.value, rtol=1e-13)


@settings(deadline=None, max_examples=40)
@given(
    channels=st.integers(2, 300),
    sigma=st.floats(0.01, 100),
    mean=st.floats(-100, 100),
    seed=st.integers(0, 2**32 - 1),
)
def test_the_closed_form_is_exact_everywhere(
    channels: int, sigma: float, mean: float, seed: int
) -> None:
    simulation = simulate(channels, sigma, mean, seed)
    # A mean that is large beside sigma costs LayerNorm itself digits.
    lost = (1 + abs(mean) / sigma) * math.sqrt(channels)
    assert np.abs(closed_form(simulation).residuals).max() < 1e-13 * lost


def test_two_channels_are_plus_and_minus_one() -> None:
    simulation = simulate(channels=2)
    np.testing.assert_allclose(simulation.normalized, [[-1.0, 1.0]] * 10, rtol=0, atol=1e-14)
    assert closed_form(simulation).value == 0
