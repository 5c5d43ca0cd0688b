"""The simulation of section 4: one random token whose largest element is pushed away, step by step."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from dynorm.errors import ArgumentError
from dynorm.functional import layer_norm
from dynorm.theory import channel_beta

Array = NDArray[np.float64]

STEP, STEPS = 5.0, 9  # the paper's (eq. 17)
# The squares of larger numbers, summed, may leave the range of float64.
_LARGEST = 1e100


@dataclass(frozen=True)
class Simulation:
    """One token in several versions, each with a larger outlier, before and after LayerNorm.

    Row S of ``tokens`` is the sample, sorted, with ``STEP * S`` added to its last and largest
    element; row 0 is the sample itself. ``normalized`` holds LayerNorm of each row without eps.
    Both have the shape (STEPS + 1, channels).
    """

    channels: int
    sigma: float
    mean: float
    seed: int
    tokens: Array
    normalized: Array

    @property
    def outliers(self) -> Array:
        """Return the raised element x_o for S = 1, 2, ..., of shape (STEPS,): the paper fits on these."""
        return self.tokens[1:, -1]

    @property
    def outputs(self) -> Array:
        """Return LayerNorm's output y_o at each outlier, of shape (STEPS,)."""
        return self.normalized[1:, -1]


def simulate(
    channels: int = 100, sigma: float = 2.0, mean: float = 0.0, seed: int = 1
) -> Simulation:
    r"""Draw a token, push its largest element away in equal steps, and normalise every version.

    .. math:: x \sim \mathcal{N}(\mathrm{mean}, \sigma^2), \quad x_o \to x_o + 5 S, \quad S = 0, \dots, 9

    The defaults are the paper's (eq. 16 and 17), the seed, of NumPy's legacy generator, that of its
    figures. LayerNorm ignores scale and offset, so only C, sigma and the seed matter to its
    outputs.
    """
    check_settings(channels, sigma, mean, seed)
    sample = np.sort(mean + sigma * np.random.RandomState(seed).randn(channels))
    if sample[0] == sample[-1]:
        raise ArgumentError(
            f"the values of a sample must differ, got {channels} times {sample[0]}: LayerNorm "
            "would divide by 0; "
            "give a sample with some spread"
        )
    tokens = raised(sample)
    normalized = layer_norm(torch.from_numpy(tokens), eps=0.0).numpy()
    if not np.isfinite(normalized).all():
        raise ArgumentError(
            "the variance must be within the range of float64, which it is not with "
            f"sigma={sigma} and mean={mean}: choose another unit of x, on which LayerNorm does not "
            "depend"
        )
    return Simulation(channels, float(sigma), float(mean), seed, tokens, normalized)


def raised(samples: Array) -> Array:
    """Return each sorted sample (..., C) as it is, and with its largest element raised step by step."""
    tokens = np.repeat(samples[..., None, :], STEPS + 1, axis=-2)
    tokens[..., -1] += STEP * np.arange(STEPS + 1)
    return tokens


def channel_betas(simulation: Simulation) -> Array:
    """Return Theorem 4's constant of the outlier's channel (STEPS,): always the same, as it does not contain x_o."""
    return channel_beta(torch.from_numpy(simulation.tokens[1:]))[:, -1].numpy()


def check_settings(channels: int, sigma: float, mean: float, seed: int) -> None:
    """Refuse what no sample can be drawn from."""
    if channels < 2:
        raise ArgumentError(
            f"channels must be at least 2 to have a variance, got {channels}: give more"
        )
    if not 0 < sigma < _LARGEST:
        raise ArgumentError(
            f"sigma must be positive and less than {_LARGEST:g}, got {sigma}: the paper's is 2"
        )
    if not abs(mean) < _LARGEST:
        raise ArgumentError(
            f"mean must be between -{_LARGEST:g} and {_LARGEST:g}, got {mean}: the paper's is 0"
        )
    if not 0 <= seed < 2**32:
        raise ArgumentError(f"seed must be from 0 to 2**32 - 1, got {seed}: the paper's is 1")
