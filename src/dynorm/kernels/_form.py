"""A kernel call: its tensors as :class:`Parameters`, the rest as :class:`Form`; and its definition."""

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from dynorm import functional
from dynorm.arguments import upcast
from dynorm.errors import ArgumentError

# The fields of Parameters and of Form: layers pass tuples and lists, because a call takes microseconds.
Numbers = Sequence[Tensor | None]
Fields = tuple[int, bool, float]
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
# Of the tensors that a kernel takes: a subclass may be anything.
PLAIN_TYPES = (Tensor, Parameter)


class UnfitError(Exception):
    """The tensors of a call are not as the kernels take them, so the definition must compute."""


class FunctionCode(IntEnum):
    """The number of a function in the kernels, as in csrc/types.h."""

    DYISRU = 0
    DYT = 1
    DERF = 2
    LINEAR = 3


DEFINITIONS: dict[int, Callable[..., Tensor]] = {
    FunctionCode.DYISRU: functional.dyisru,
    FunctionCode.DYT: functional.dyt,
    FunctionCode.DERF: functional.derf,
    FunctionCode.LINEAR: functional.linear,
}
# A copy of the package under another name has its operators under that name.
NAMESPACE = __name__.partition(".")[0]
# Parameters and Form in the schemas of these operators.
TENSORS = "Tensor constant, Tensor? shift, Tensor? weight, Tensor? bias"
FORM = "int function, bool logarithmic, float scale"
# A bit for each gradient of a call, in the order of its tensors: of x, of the parameters, and of the
# tokens' numbers.
GRADIENTS = (1, 2, 4, 8, 16, 32)
OF_X, OF_CONSTANT, OF_SHIFT, OF_WEIGHT, OF_BIAS, OF_TOKENS = GRADIENTS


class Parameters(NamedTuple):
    """The parameters of a layer, in the order in which all kernels take them.

    The first two have one element, ``weight`` and ``bias`` one per channel.
    """

    constant: Tensor  # beta, alpha or the slope, as Form.constant reads it
    shift: Tensor | None = None  # only of Derf
    weight: Tensor | None = None
    bias: Tensor | None = None


class Form(NamedTuple):
    """Everything in a kernel call except its tensors."""

    function: int  # a FunctionCode
    # Whether the constant is stored as log(beta); the linear slope is then 1 / sqrt(beta).
    logarithmic: bool
    scale: float  # the layer's fixed factor

    def constant(self, stored: Tensor) -> Tensor:
        """Return the constant in at least float32, not its logarithm."""
        value = upcast(stored)
        if not self.logarithmic:
            return value
        if self.function == FunctionCode.LINEAR:
            return (-0.5 * value).exp()
        return value.exp()

    def definition(
        self, x: Tensor, parameters: Numbers, token_constant: Tensor | None = None
    ) -> Tensor:
        """Return y by the formula in ``dynorm.functional``, which can be differentiated again."""
        constant, shift, weight, bias = parameters
        assert constant is not None
        constants = [self.constant(constant)]
        if token_constant is not None:
            require_dyisru(self.function)
            constants = [constants[0] + token_constant[..., None]]
        if self.function == FunctionCode.DERF and shift is not None:
            constants.append(shift)
        function = DEFINITIONS[self.function]
        return function(x, *constants, weight=weight, bias=bias, scale=self.scale)


def require_dyisru(function: int) -> None:
    """Refuse one number per token for a function whose constant is no sum."""
    if function != FunctionCode.DYISRU:
        raise ArgumentError(
            "token_constant must be None for every function except DyISRU, whose beta it is added "
            f"to, but came for {FunctionCode(function).name}: leave it out"
        )
