"""The two kinds of constants: beta, kept as its logarithm, and alpha, a factor of x."""

import math
from typing import ClassVar

from torch import Tensor, nn

from dynorm.arguments import upcast
from dynorm.layers.pointwise import PointwiseNorm


class LogBetaNorm(PointwiseNorm):
    """Base of the layers whose only constant is beta, kept as ``log_beta``, C at first.

    So beta is positive by construction, and a step changes it in proportion.
    """

    constants = ("log_beta",)
    logarithmic = True
    log_beta: nn.Parameter

    def beta(self) -> Tensor:
        """Return ``exp(log_beta)`` in at least float32."""
        return upcast(self.log_beta).exp()

    # Not torch.log itself, whose docstring would appear in the reference.
    @staticmethod
    def constant_from(beta: Tensor, /) -> Tensor:
        """Return ``log(beta)``."""
        return beta.log()

    def _shown_constants(self) -> dict[str, Tensor]:
        return {"beta": self.beta().detach()}

    def initial_constants(self) -> dict[str, float]:
        """Return the first ``log_beta``."""
        return {"log_beta": math.log(self.channels)}


class AlphaNorm(PointwiseNorm):
    """Base of the layers whose first constant is alpha, a factor of x.

    At first the slope at 0 is 1, as DyISRU's is; with ``scale=1``, the published form, alpha is
    0.5.
    """

    constants: ClassVar[tuple[str, ...]] = ("alpha",)
    alpha: nn.Parameter

    def beta(self) -> Tensor:
        """Return DyISRU's beta for the same slope at 0 (shift 0): ``slope_ratio * alpha ** -2``."""
        return self.slope_ratio * upcast(self.alpha) ** -2

    def initial_constants(self) -> dict[str, float]:
        """Return the first ``alpha``."""
        if self.scale == 1:
            return {"alpha": 0.5}
        return {"alpha": math.sqrt(self.slope_ratio) / abs(self.scale)}
