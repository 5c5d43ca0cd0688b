"""The linear control: DyISRU without its bound, so that a study can tell what the bound is worth."""

from dynorm import kernels
from dynorm.layers.base import LogBetaNorm


class LinearControl(LogBetaNorm):
    r"""A constant slope: ``y = weight * scale * (x - center) / sqrt(beta) + bias``.

    The same constant as DyISRU's and the same slope at 0, but no bound. Where it does as well as
    DyISRU, the bound is not what helps. Only with witnesses, whose squares must stay finite, does
    an input farther than 2**63 (float64: 2**511) from the centre count as that far.

    Shapes, dtypes and all arguments are those of :class:`DyISRU`.

    Raises:
        ArgumentError: an argument of :class:`DyISRU`, or ``beta_init``, is outside its domain.

    Example:
        >>> import torch
        >>> LinearControl(4)(torch.tensor([0.0, 2.0, 100.0, -100.0])).detach()
        tensor([   0.,    2.,  100., -100.])
    """

    kernel = kernels.FunctionCode.LINEAR
