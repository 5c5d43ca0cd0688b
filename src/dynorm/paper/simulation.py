"""The simulation of section 4: a random token whose largest element grows, step by step."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from dynorm.functional import layer_norm
from dynorm.theory import channel_beta

Array = NDArray[np.float64]

# The paper's outlier grows by STEP, STEPS times (eq. 17).
STEP = 5.0
STEPS = 9


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
        """The raised element x_o for S = 1, 2, ..., of shape (STEPS,); the paper fits to these."""
        return self.tokens[1:, -1]

    @property
    def outputs(self) -> Array:
        """LayerNorm's output y_o at each outlier, of shape (STEPS,)."""
        return self.normalized[1:, -1]


def simulate(
    channels: int = 100, sigma: float = 2.0, mean: float = 0.0, seed: int = 1
) -> Simulation:
    r"""Draw a token, raise its largest element in equal steps, and normalise every version.

    .. math::

        x \sim \mathcal{N}(\mathrm{mean}, \sigma^2), \quad x_o \to x_o + 5 S, \quad S = 0, \dots, 9

    The defaults are the paper's (eq. 16 and 17). The seed is that of its figures, for NumPy's
    legacy generator. LayerNorm ignores scale and offset, so its outputs depend only on C, sigma and
    the seed.
    """
    sample = np.sort(mean + sigma * np.random.RandomState(seed).randn(channels))
    tokens = np.repeat(sample[None], STEPS + 1, axis=0)
    tokens[:, -1] += STEP * np.arange(STEPS + 1)
    normalized = layer_norm(torch.from_numpy(tokens), eps=0.0).numpy()
    return Simulation(channels, float(sigma), float(mean), seed, tokens, normalized)


def channel_betas(simulation: Simulation) -> Array:
    """Return Theorem 4's constant of the outlier's channel at each step, of shape (STEPS,).

    It is the same at every step, because it does not depend on x_o.
    """
    betas = channel_beta(torch.from_numpy(simulation.tokens[1:]))
    return betas[:, -1].numpy()
