"""DyT, dynamic tanh (arXiv 2503.10622), scaled as in 2503.21708, eq. 11."""

import torch
from torch import Tensor

from dynorm import kernels, theory
from dynorm.layers.constants import AlphaNorm


class DyT(AlphaNorm):
    r"""Dynamic tanh: ``y = weight * scale * tanh(alpha * x) + bias``.

    It is LayerNorm with its slope factor F(x) held constant. ``scale`` is sqrt(C) by default, as
    for :class:`DyISRU`; ``scale=1`` is the published form, whose checkpoints (``alpha``,
    ``weight``, ``bias``) load unchanged.

    At first the slope at 0 is 1, as for :class:`DyISRU`, and alpha is 0.5 in the published form;
    ``nn.init.constant_(layer.alpha, 0.8)`` sets another.
    Shapes, dtypes and arguments are those of :class:`DyISRU`, without witnesses.

    Raises:
        ArgumentError: an argument of :class:`DyISRU` is outside its domain.

    Example:
        >>> import torch
        >>> layer = DyT(4, scale=1)
        >>> layer(torch.tensor([0.0, 1.0, 2.0, -100.0])).detach()
        tensor([ 0.0000,  0.4621,  0.7616, -1.0000])

    Reference:
        J. Zhu et al., "Transformers without Normalization", arXiv 2503.10622; arXiv 2503.21708, eq.
        4 and 11.
    """

    kernel = kernels.FunctionCode.DYT
    constant_from = staticmethod(theory.scaled_dyt_alpha)

    def f(self, x: Tensor, alpha: Tensor) -> Tensor:
        """Return ``tanh(alpha * x)``."""
        return torch.tanh(alpha * x)
