"""Derf, dynamic error function (arXiv 2512.10938)."""

import math
from typing import Unpack

from torch import nn

from dynorm import kernels, theory
from dynorm.arguments import Shape
from dynorm.errors import ArgumentError
from dynorm.layers.pointwise import AlphaNorm, LayerArguments, arguments_by_name


class Derf(AlphaNorm):
    r"""Dynamic erf: ``y = weight * scale * erf(alpha * (x - center) + shift) + bias``.

    The published checkpoints (``alpha``, ``shift``, ``weight``, ``bias``) load unchanged.

    Shapes, dtypes and arguments are those of :class:`DyISRU`, except these; ``scale`` is 1 by
    default.

    Args:
        normalized_shape: the size C of the channel axis, or the sizes of the last axes.
        alpha_init: the first alpha, positive; 0.5 as published.
        shift_init: the first shift; 0 as published.

    Raises:
        ArgumentError: an argument of :class:`DyISRU`, or ``alpha_init`` or ``shift_init``, is
            outside its domain.

    Example:
        >>> import torch
        >>> layer = Derf(4)
        >>> layer(torch.tensor([0.0, 1.0, 2.0, -100.0])).detach()
        tensor([ 0.0000,  0.5205,  0.8427, -1.0000])

    Reference:
        M. Chen et al., "Stronger Normalization-Free Transformers", arXiv 2512.10938.
    """

    kernel = kernels.FunctionCode.DERF
    constant_from = staticmethod(theory.derf_alpha)
    constants = ("alpha", "shift")
    own_arguments = ("alpha_init", "shift_init")
    slope_ratio = math.pi / 4
    shift: nn.Parameter

    @arguments_by_name
    def __init__(
        self,
        normalized_shape: Shape,
        *,
        alpha_init: float = 0.5,
        shift_init: float = 0.0,
        **options: Unpack[LayerArguments],
    ) -> None:
        if not math.isfinite(shift_init):
            raise ArgumentError(f"shift_init must be a finite number, got {shift_init!r}")
        self.shift_init = float(shift_init)
        super().__init__(normalized_shape, alpha_init=alpha_init, **options)

    def constant_rates(self) -> dict[nn.Parameter, float]:
        """Return the rates as every layer does, with 1 / scale for shift.

        A step of shift moves all outputs by ``scale`` times its size.
        """
        return {**super().constant_rates(), self.shift: 1 / abs(self.scale)}
