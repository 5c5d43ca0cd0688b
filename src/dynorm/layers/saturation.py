"""When a layer saturates: its outputs lie near the bound, where gradients vanish."""

from torch import Tensor

from dynorm.layers.pointwise import PointwiseNorm
from dynorm.wrappers import gathered

# An output is saturated beyond this share of its bound: for inputs beyond 3 sqrt(beta) of DyISRU.
SATURATION = 0.95


def saturated_share(layer: PointwiseNorm, tokens: Tensor) -> Tensor:
    """Return the share of a layer's outputs (tokens, C) that lie near its bound.

    For the linear control, which has no bound, it is the bound of the norm.
    """
    factor, bias = layer.factor(), layer.bias
    if bias is not None:
        tokens = tokens - gathered(bias.detach()).flatten()
    bound: float | Tensor = SATURATION * abs(layer.scale)
    if factor is not None:
        bound = bound * gathered(factor.detach()).flatten().abs()
    return (tokens.abs() > bound).float().mean()
