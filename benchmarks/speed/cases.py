"""The inputs that all contenders of a size and dtype share, and the functions as their papers print them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dynorm import functional

EPS = 1e-5
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


class Eager(nn.Module):
    """A function of the family with its parameters, computed one operation at a time."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))


class DyTEager(Eager):
    """``weight * tanh(alpha * x) + bias`` (arXiv 2503.10622, eq. 1)."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.alpha = nn.Parameter(torch.full((1,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        """Return the function of x."""
        return self.weight * torch.tanh(self.alpha * x) + self.bias


class DerfEager(DyTEager):
    """``weight * erf(alpha * x + shift) + bias`` (arXiv 2512.10938)."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.shift = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        """Return the function of x."""
        return self.weight * torch.erf(self.alpha * x + self.shift) + self.bias


class DyISRUEager(Eager):
    """``weight * sqrt(C) * x / sqrt(beta + x^2) + bias`` (arXiv 2503.21708, eq. 15)."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.scale = math.sqrt(channels)
        self.log_beta = nn.Parameter(torch.full((1,), math.log(channels)))

    def forward(self, x: Tensor) -> Tensor:
        """Return the function of x."""
        return self.weight * (self.scale * x / torch.sqrt(self.log_beta.exp() + x * x)) + self.bias


EAGER: dict[str, Callable[[int], nn.Module]] = {
    "dyisru": DyISRUEager,
    "dyt": DyTEager,
    "derf": DerfEager,
}


def _dyisru(x: Tensor, p: Mapping[str, Tensor]) -> Tensor:
    return functional.dyisru(
        x, p["log_beta"].exp(), p["weight"], p["bias"], scale=math.sqrt(x.shape[-1])
    )


def witnesses_of(channels: int) -> tuple[int, ...]:
    """Return up to four channels that lie far apart."""
    return tuple(sorted({0, channels // 3, channels // 2, channels - 1}))


def _witnessed(x: Tensor, p: Mapping[str, Tensor]) -> Tensor:
    chosen = torch.tensor(witnesses_of(x.shape[-1]), device=x.device)
    options = {"witnesses": chosen, "gain": p["log_gain"].exp(), "scale": math.sqrt(x.shape[-1])}
    return functional.dyisru(x, p["log_beta"].exp(), p["weight"], p["bias"], **options)


def _linear(x: Tensor, p: Mapping[str, Tensor]) -> Tensor:
    slope = math.sqrt(x.shape[-1]) * (-0.5 * p["log_beta"]).exp()
    return functional.linear(x, slope, p["weight"], p["bias"])


# Given x and the parameters by name, in float64.
REFERENCES: dict[str, Callable[[Tensor, Mapping[str, Tensor]], Tensor]] = {
    "copy": lambda x, p: x.clone(),
    "layer_norm": lambda x, p: functional.layer_norm(x, p["weight"], p["bias"], EPS),
    "rms_norm": lambda x, p: functional.rms_norm(x, p["weight"], None, EPS),
    "dyisru": _dyisru,
    "dyisru_witnesses": _witnessed,
    "dyt": lambda x, p: functional.dyt(x, p["alpha"], p["weight"], p["bias"]),
    "derf": lambda x, p: functional.derf(x, p["alpha"], p["shift"], p["weight"], p["bias"]),
    "linear": _linear,
}


@dataclass(frozen=True)
class Case:
    """The inputs, parameters and output of a size and dtype; each contender has copies of the parameters it takes."""

    dtype: str
    x: Tensor
    # The same memory, which takes a gradient.
    leaf: Tensor
    # Of the output.
    grad: Tensor
    # Where an output goes that is given.
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


def make_case(rows: int, channels: int, dtype: str, device: str = "cpu", seed: int = 0) -> Case:
    """Draw the inputs, the same numbers on every device: x and the gradient normal, weights about 1, biases about 0."""
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
        "log_gain": torch.zeros(len(witnesses_of(channels)), device=device, dtype=DTYPES[dtype]),
    }
    return Case(
        dtype,
        x,
        x.detach().requires_grad_(),
        normal(rows, channels),
        torch.empty_like(x),
        parameters,
    )
