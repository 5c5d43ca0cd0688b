"""The linear control: DyISRU without its bound, so that a study can measure the bound's worth."""

from torch import Tensor

from dynorm import kernels
from dynorm.layers.constants import LogBetaNorm


class LinearControl(LogBetaNorm):
    r"""A constant slope: ``y = weight * scale * x / sqrt(beta) + bias``.

    It has the constant of DyISRU and the same slope at 0, but no bound. If it does as well as
    DyISRU, the bound does not help.

    Shapes, dtypes and arguments are those of :class:`DyISRU`, without witnesses.

    Raises:
        ArgumentError: an argument of :class:`DyISRU` is outside its domain.

    Example:
        >>> import torch
        >>> LinearControl(4)(torch.tensor([0.0, 2.0, 100.0, -100.0])).detach()
        tensor([   0.,    2.,  100., -100.])
    """

    kernel = kernels.FunctionCode.LINEAR

    def f(self, x: Tensor, slope: Tensor) -> Tensor:
        """Return ``slope * x``, with ``slope = 1 / sqrt(beta)``."""
        return slope * x
