"""A kernel's call without its tensors, and the order of its parameters: what all kernels agree on."""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from dynorm import functional
from dynorm.arguments import Axes, upcast

# The definitions by name; a function's number is its place, as in csrc/types.h.
FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "dyisru": functional.dyisru_general,
    "dyt": functional.dyt,
    "derf": functional.derf,
    "linear": functional.linear,
}
DYISRU, DYT, DERF, LINEAR = range(len(FUNCTIONS))
# Constant, shift, center, weight and bias: the first three of one element or one per channel, the
# last two per channel. A form with witnesses has a sixth, the logarithms of their gains, of one
# element per witness; None for gains of 1.
Parameters = (
    tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]
    | tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]
)


class Form(NamedTuple):
    """All of a call but its tensors; the channel of flat element i of x is ``(i // inner) % channels``."""

    function: int  # one of DYISRU, DYT, DERF and LINEAR
    logarithmic: (
        bool  # the constant is stored as log(beta); the linear slope is then 1 / sqrt(beta)
    )
    scale: float  # the layer's fixed factor
    channels: int
    inner: int  # elements from one channel to the next, 1 where channels come last
    witnesses: tuple[
        int, ...
    ] = ()  # whose squares are added to beta, token by token; only where ``inner`` is 1

    def constant(self, stored: Tensor) -> Tensor:
        """Return the constant in at least float32, not its logarithm."""
        value = upcast(stored)
        if not self.logarithmic:
            return value
        return (-0.5 * value).exp() if self.function == LINEAR else value.exp()

    def definition(
        self, x: Tensor, parameters: Parameters, dim: Axes = -1, witnesses: Tensor | None = None
    ) -> Tensor:
        """Return y by the definition, with the channels at ``dim``; the sixth parameter is of ``witnesses``."""
        stored, shift, center, weight, bias, *told = parameters
        constants = [self.constant(stored)] + (
            [shift] if self.function == DERF and shift is not None else []
        )
        options: dict[str, Any] = {
            "weight": weight,
            "bias": bias,
            "center": center,
            "scale": self.scale,
            "dim": dim,
        }
        if told:
            options |= {
                "witnesses": witnesses,
                "gain": None if told[0] is None else upcast(told[0]).exp(),
            }
        return list(FUNCTIONS.values())[self.function](x, *constants, **options)
