"""One case: the inputs that all contenders of a size and dtype share."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dynorm.bench.settings import DTYPES

__all__ = ["Case", "make_case"]


@dataclass(frozen=True)
class Case:
    """A size and dtype with its inputs.

    Args:
        dtype: a name of :data:`dynorm.bench.settings.DTYPES`; of inputs, parameters and outputs alike.
        x: the input, (rows, channels), which asks for no gradient.
        leaf: the same memory, asking for its gradient.
        grad: the gradient of the output.
        out: where an output goes that is given.
        parameters: weight, bias, alpha, shift and log_beta; each contender has copies of those it takes.
    """

    dtype: str
    x: Tensor
    leaf: Tensor
    grad: Tensor
    out: Tensor
    parameters: dict[str, Tensor]

    @property
    def rows(self) -> int:
        """How many rows x has."""
        return self.x.shape[0]

    @property
    def channels(self) -> int:
        """C, how many channels x has."""
        return self.x.shape[1]

    def prepared(self, module: nn.Module, renamed: dict[str, str] | None = None) -> nn.Module:
        """Return a module with this case's device, dtype and parameters; ``renamed`` has our names of its own."""
        module.to(self.x.device, self.x.dtype)
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                parameter.copy_(self.parameters[(renamed or {}).get(name, name)])
        return module


def make_case(rows: int, channels: int, dtype: str, device: str = "cpu", seed: int = 0) -> Case:
    """Draw the inputs: x and the gradient are normal, weights about 1, biases about 0.

    Args:
        rows: how many.
        channels: how many.
        dtype: a name of :data:`dynorm.bench.settings.DTYPES`.
        device: where all of it lives.
        seed: of the generator; the same numbers on every device.

    Example:
        >>> make_case(2, 3, "float32").x.shape
        torch.Size([2, 3])
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, mean: float = 0.0, width: float = 1.0) -> Tensor:
        drawn = torch.randn(shape, generator=generator).mul_(width).add_(mean)
        return drawn.to(device, DTYPES[dtype])

    x = normal(rows, channels)
    parameters = {
        "weight": normal(channels, mean=1.0, width=0.1),
        "bias": normal(channels, width=0.1),
        "alpha": normal(1, mean=0.7, width=0.0),
        "shift": normal(1, mean=0.1, width=0.0),
        "log_beta": normal(1, mean=math.log(channels), width=0.0),
    }
    return Case(dtype, x, x.detach().requires_grad_(), normal(rows, channels), torch.empty_like(x), parameters)
