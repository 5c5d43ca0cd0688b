"""Derf, dynamic error function (arXiv 2512.10938)."""

import math

import torch
from torch import Tensor, nn

from dynorm import kernels, theory
from dynorm.layers.constants import AlphaNorm


class Derf(AlphaNorm):
    r"""Dynamic erf: ``y = weight * scale * erf(alpha * x + shift) + bias``.

    ``scale`` is sqrt(C) by default, as for :class:`DyISRU`; ``scale=1`` is the published form, whose
    checkpoints (``alpha``, ``shift``, ``weight``, ``bias``) load unchanged.

    At first the slope at 0 is 1, as for :class:`DyISRU`, and alpha is 0.5 in the published form.
    Shapes, dtypes and arguments are those of :class:`DyISRU`, without witnesses.

    Raises:
        ArgumentError: an argument of :class:`DyISRU` is outside its domain.

    Example:
        >>> import torch
        >>> layer = Derf(4, scale=1)
        >>> layer(torch.tensor([0.0, 1.0, 2.0, -100.0])).detach()
        tensor([ 0.0000,  0.5205,  0.8427, -1.0000])

    Reference:
        M. Chen et al., "Stronger Normalization-Free Transformers", arXiv 2512.10938.
    """

    kernel = kernels.FunctionCode.DERF
    constant_from = staticmethod(theory.derf_alpha)
    constants = ("alpha", "shift")
    slope_ratio = math.pi / 4
    shift: nn.Parameter

    def initial_constants(self) -> dict[str, float]:
        """Return the first ``alpha``, and a shift of 0, as published."""
        return {**super().initial_constants(), "shift": 0.0}

    def f(self, x: Tensor, alpha: Tensor) -> Tensor:
        """Return ``erf(alpha * x + shift)``."""
        return torch.erf(alpha * x + self.shift)
