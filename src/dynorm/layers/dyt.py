"""DyT, dynamic tanh (arXiv 2503.10622), and with another scale scaled DyT (2503.21708, eq. 11)."""

from dynorm import kernels, theory
from dynorm.layers.pointwise import AlphaNorm


class DyT(AlphaNorm):
    r"""Dynamic tanh: ``y = weight * scale * tanh(alpha * (x - center)) + bias``.

    ``scale`` is 1 as published; sqrt(C - 1) makes it scaled DyT, LayerNorm with its slope factor
    F(x) held constant. The published checkpoints (``alpha``, ``weight``, ``bias``) load unchanged.

    Shapes, dtypes and arguments are those of :class:`DyISRU`, except these.

    Args:
        normalized_shape: the size C of the channel axis, or the sizes of the last axes.
        alpha_init: the first alpha, positive; 0.5 as published.

    Raises:
        ArgumentError: an argument of :class:`DyISRU`, or ``alpha_init``, is outside its domain.

    Example:
        >>> import torch
        >>> layer = DyT(4)
        >>> layer(torch.tensor([0.0, 1.0, 2.0, -100.0])).detach()
        tensor([ 0.0000,  0.4621,  0.7616, -1.0000])

    Reference:
        J. Zhu et al., "Transformers without Normalization", arXiv 2503.10622; arXiv 2503.21708, eq.
        4 and 11.
    """

    kernel = kernels.FunctionCode.DYT
    constant_from = staticmethod(theory.scaled_dyt_alpha)
