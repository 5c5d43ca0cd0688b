"""DyISRU, also called ELN: the exact counterpart of LayerNorm (arXiv 2503.21708, eq. 15)."""

import torch
from torch import Tensor

from dynorm import kernels
from dynorm.arguments import clamped
from dynorm.layers.witnesses import WitnessNorm


class DyISRU(WitnessNorm):
    r"""Dynamic inverse square root unit: ``y = weight * scale * x / sqrt(beta + x^2) + bias``.

    With beta the sum of squares of the other channels this is RMSNorm, exactly; with leave-one-out
    mean and variance it is LayerNorm. Here beta is learned instead, as ``log_beta``: positive by
    construction, so there is no ``eps``. It begins as C, right for inputs of unit variance;
    :meth:`set_slope_` sets another. All arguments except the first are passed by name.

    Args:
        normalized_shape: the size C of the channel axis, an int or a sequence of one.
        elementwise_affine: learn ``weight`` (and ``bias``), of shape (C,).
        bias: learn ``bias``; only with ``elementwise_affine``.
        scale: the fixed factor, the bound of the function; sqrt(C) by default, as for RMSNorm. Eq.
            15 has sqrt(C - 1), LayerNorm's bound; ``convert_`` sets whichever the replaced norm
            has.
        witnesses: the positions of at most 16 channels that show a token's scale, or a number N for
            the first N: beta becomes ``beta + sum of gain_k * x_k^2`` over the witnesses k other
            than the channel itself. With none, the default, a value depends on its own channel.
        dim: the channel axis, -1 or any other (1 for channels-first).
        device: where the parameters live.
        dtype: the parameters' dtype.

    Shape:
        input and output ``(*, C)``, or C at ``dim``; any floating dtype, computed in at least
        float32.

    Raises:
        ArgumentError: a size, ``dim``, ``scale``, ``dtype`` or a witness is outside its domain.

    Example:
        >>> import torch
        >>> layer = DyISRU(4)
        >>> layer(torch.tensor([0.0, 2.0, 100.0, -100.0])).detach()
        tensor([ 0.0000,  1.4142,  1.9996, -1.9996])

    Reference:
        F. Stollenwerk, "The Mathematical Relationship Between Layer Normalization and Dynamic
        Activation Functions", arXiv 2503.21708, eq. 13 and 15.
    """

    kernel = kernels.FunctionCode.DYISRU

    def f(self, x: Tensor, beta: Tensor) -> Tensor:
        """Return ``x / sqrt(beta + x^2)``, which ``scale`` makes ``sqrt(C) x / sqrt(beta + x^2)``."""
        x = clamped(x)
        return x / torch.sqrt(beta + x * x)
