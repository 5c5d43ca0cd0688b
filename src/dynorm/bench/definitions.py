"""The functions as their papers print them: in eager mode to be timed, and in float64 to be right."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from dynorm import functional

__all__ = ["EAGER", "EPS", "REFERENCES", "DerfEager", "DyISRUEager", "DyTEager"]

EPS = 1e-5
Reference = Callable[[Tensor, Mapping[str, Tensor]], Tensor]


class DyTEager(nn.Module):
    """``weight * tanh(alpha * x) + bias`` (arXiv 2503.10622, eq. 1), an operation at a time.

    Args:
        channels: C.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.full((1,), 0.5))
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        """Return the function of x."""
        return self.weight * torch.tanh(self.alpha * x) + self.bias


class DerfEager(nn.Module):
    """``weight * erf(alpha * x + shift) + bias`` (arXiv 2512.10938), an operation at a time.

    Args:
        channels: C.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.full((1,), 0.5))
        self.shift = nn.Parameter(torch.zeros(1))
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        """Return the function of x."""
        return self.weight * torch.erf(self.alpha * x + self.shift) + self.bias


class DyISRUEager(nn.Module):
    """``weight * sqrt(C) * x / sqrt(beta + x^2) + bias`` (arXiv 2503.21708, eq. 15), an operation at a time.

    Args:
        channels: C.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.scale = math.sqrt(channels)
        self.log_beta = nn.Parameter(torch.full((1,), math.log(channels)))
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        """Return the function of x."""
        return self.weight * (self.scale * x / torch.sqrt(self.log_beta.exp() + x * x)) + self.bias


EAGER: dict[str, Callable[[int], nn.Module]] = {"dyisru": DyISRUEager, "dyt": DyTEager, "derf": DerfEager}


def _dyisru(x: Tensor, p: Mapping[str, Tensor]) -> Tensor:
    return functional.dyisru(x, p["log_beta"].exp(), p["weight"], p["bias"], scale=math.sqrt(x.shape[-1]))


def _linear(x: Tensor, p: Mapping[str, Tensor]) -> Tensor:
    slope = math.sqrt(x.shape[-1]) * (-0.5 * p["log_beta"]).exp()
    return functional.linear(x, slope, p["weight"], p["bias"])


# Given x and the parameters by name, in float64.
REFERENCES: dict[str, Reference] = {
    "copy": lambda x, p: x.clone(),
    "layer_norm": lambda x, p: functional.layer_norm(x, p["weight"], p["bias"], EPS),
    "rms_norm": lambda x, p: functional.rms_norm(x, p["weight"], None, EPS),
    "dyisru": _dyisru,
    "dyt": lambda x, p: functional.dyt(x, p["alpha"], p["weight"], p["bias"]),
    "derf": lambda x, p: functional.derf(x, p["alpha"], p["shift"], p["weight"], p["bias"]),
    "linear": _linear,
}
