"""When a layer saturates: its outputs lie near the bound, where gradients vanish."""

from torch import Tensor

from dynorm.layers.base import PointwiseNorm, gathered

# A value is saturated when the function gives more than this share of its bound: beyond 3
# sqrt(beta) for DyISRU.
SATURATION = 0.95


def saturated_share(layer: PointwiseNorm, tokens: Tensor) -> Tensor:
    """Return the share of a layer's outputs (tokens, C) that lie near its bound; the linear control's is the norm's."""
    weight, bias = (
        None if p is None else gathered(p.detach()).flatten() for p in (layer.factor(), layer.bias)
    )
    bound = SATURATION * abs(layer.scale) * (1.0 if weight is None else weight.abs())
    return ((tokens if bias is None else tokens - bias).abs() > bound).float().mean()
