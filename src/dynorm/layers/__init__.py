"""Point-wise layers: DyISRU (ELN), DyT, Derf, the linear control; and their annealed layers."""

from dynorm.layers.annealed import (
    AnnealedDerf,
    AnnealedDyISRU,
    AnnealedDyT,
    AnnealedLinear,
    AnnealedNorm,
)
from dynorm.layers.derf import Derf
from dynorm.layers.drop_in import norm_layer
from dynorm.layers.dyisru import DyISRU
from dynorm.layers.dyt import DyT
from dynorm.layers.groups import param_groups
from dynorm.layers.linear import LinearControl
from dynorm.layers.pointwise import PointwiseNorm

ELN = DyISRU  # the name in the first version of the paper

__all__ = [
    "ELN",
    "AnnealedDerf",
    "AnnealedDyISRU",
    "AnnealedDyT",
    "AnnealedLinear",
    "AnnealedNorm",
    "Derf",
    "DyISRU",
    "DyT",
    "LinearControl",
    "PointwiseNorm",
    "norm_layer",
    "param_groups",
]
