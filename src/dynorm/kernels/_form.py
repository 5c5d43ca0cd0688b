"""A kernel call: its tensors as :class:`Parameters`, and the rest as :class:`Form`."""

from collections.abc import Callable
from enum import IntEnum
from typing import NamedTuple

from torch import Tensor

from dynorm import functional
from dynorm.arguments import Axes, upcast


class FunctionCode(IntEnum):
    """The number of a function in the kernels, as in csrc/types.h."""

    DYISRU = 0
    DYT = 1
    DERF = 2
    LINEAR = 3


DEFINITIONS: dict[int, Callable[..., Tensor]] = {
    FunctionCode.DYISRU: functional.dyisru_general,
    FunctionCode.DYT: functional.dyt,
    FunctionCode.DERF: functional.derf,
    FunctionCode.LINEAR: functional.linear,
}


class Parameters(NamedTuple):
    """The parameters of a layer, in the order in which all kernels take them.

    The first three have one element, or one per channel; ``weight`` and ``bias`` have one per
    channel.
    """

    constant: Tensor  # beta, alpha or the slope, as Form.constant reads it
    shift: Tensor | None = None  # only of Derf
    center: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None
    log_gain: Tensor | None = None  # one element per witness; None for gains of 1


class Form(NamedTuple):
    """Everything in a kernel call except its tensors.

    The channel of flat element i of x is ``(i // inner) % channels``.
    """

    function: int  # a FunctionCode
    # Whether the constant is stored as log(beta); the linear slope is then 1 / sqrt(beta).
    logarithmic: bool
    scale: float  # the layer's fixed factor
    channels: int
    inner: int  # elements from one channel to the next; 1 if the channels come last
    # The channels whose squares are added to beta, token by token; only if ``inner`` is 1.
    witnesses: tuple[int, ...] = ()

    def constant(self, stored: Tensor) -> Tensor:
        """Return the constant in at least float32, not its logarithm."""
        value = upcast(stored)
        if not self.logarithmic:
            return value
        if self.function == FunctionCode.LINEAR:
            return (-0.5 * value).exp()
        return value.exp()

    def definition(
        self, x: Tensor, parameters: Parameters, dim: Axes = -1, witnesses: Tensor | None = None
    ) -> Tensor:
        """Return y by the definition, with the channels at ``dim``.

        The witnesses are given by their positions, a tensor; those of the form are not read.
        """
        stored, shift, center, weight, bias, log_gain = parameters
        constants = [self.constant(stored)]
        if self.function == FunctionCode.DERF and shift is not None:
            constants.append(shift)
        gain = None
        if log_gain is not None:
            gain = upcast(log_gain).exp()
        return DEFINITIONS[self.function](
            x,
            *constants,
            weight=weight,
            bias=bias,
            center=center,
            scale=self.scale,
            dim=dim,
            witnesses=witnesses,
            gain=gain,
        )
