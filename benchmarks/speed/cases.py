"""Define the inputs that all contenders of a size and dtype share, and the functions as in their papers."""

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
        log_beta = torch.full((1,), math.log(channels))
        self.log_beta = nn.Parameter(log_beta)

    def forward(self, x: Tensor) -> Tensor:
        """Return the function of x."""
        root = torch.sqrt(self.log_beta.exp() + x * x)
        return self.weight * (self.scale * x / root) + self.bias


EAGER: dict[str, Callable[[int], nn.Module]] = {
    "dyisru": DyISRUEager,
    "dyt": DyTEager,
    "derf": DerfEager,
}
# The parameters of all functions by name, in float64.
ByName = Mapping[str, Tensor]


def witnesses_of(channels: int) -> tuple[int, ...]:
    """Return up to four channels that lie far apart."""
    chosen = {0, channels // 3, channels // 2, channels - 1}
    return tuple(sorted(chosen))


def _copy(x: Tensor, p: ByName) -> Tensor:
    return x.clone()


def _layer_norm(x: Tensor, p: ByName) -> Tensor:
    return functional.layer_norm(x, p["weight"], p["bias"], EPS)


def _rms_norm(x: Tensor, p: ByName) -> Tensor:
    return functional.rms_norm(x, p["weight"], None, EPS)


def _dyisru(x: Tensor, p: ByName) -> Tensor:
    beta = p["log_beta"].exp()
    scale = math.sqrt(x.shape[-1])
    return functional.dyisru(x, beta, p["weight"], p["bias"], scale=scale)


def _dyisru_witnesses(x: Tensor, p: ByName) -> Tensor:
    beta = p["log_beta"].exp()
    channels = x.shape[-1]
    return functional.dyisru(
        x,
        beta,
        p["weight"],
        p["bias"],
        witnesses=torch.tensor(witnesses_of(channels), device=x.device),
        gain=p["log_gain"].exp(),
        scale=math.sqrt(channels),
    )


def _dyt(x: Tensor, p: ByName) -> Tensor:
    return functional.dyt(x, p["alpha"], p["weight"], p["bias"])


def _derf(x: Tensor, p: ByName) -> Tensor:
    return functional.derf(x, p["alpha"], p["shift"], p["weight"], p["bias"])


def _linear(x: Tensor, p: ByName) -> Tensor:
    scale = math.sqrt(x.shape[-1])
    slope = scale * (-0.5 * p["log_beta"]).exp()
    return functional.linear(x, slope, p["weight"], p["bias"])


# Each function of x and the parameters.
REFERENCES: dict[str, Callable[[Tensor, ByName], Tensor]] = {
    "copy": _copy,
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "dyisru": _dyisru,
    "dyisru_witnesses": _dyisru_witnesses,
    "dyt": _dyt,
    "derf": _derf,
    "linear": _linear,
}


@dataclass(frozen=True)
class Case:
    """The inputs, parameters and output of a size and dtype; contenders copy the parameters they take.

    Args:
        dtype: the name of the dtype.
        x: the input, (rows, channels).
        leaf: the memory of x as a tensor that requires a gradient.
        grad: the gradient of the output.
        out: the output of contenders that write into one.
        parameters: the parameters of all functions by name.
    """

    dtype: str
    x: Tensor
    leaf: Tensor
    grad: Tensor
    out: Tensor
    parameters: dict[str, Tensor]

    @property
    def rows(self) -> int:
        """The number of rows of x."""
        return self.x.shape[0]

    @property
    def channels(self) -> int:
        """C, the number of channels of x."""
        return self.x.shape[1]


def make_case(
    rows: int,
    channels: int,
    dtype: str,
    device: str = "cpu",
    seed: int = 0,
) -> Case:
    """Draw the inputs, with the same numbers on every device.

    x and the gradient are normal, weights are about 1, and biases about 0.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, mean: float = 0.0, width: float = 1.0) -> Tensor:
        numbers = torch.randn(shape, generator=generator).mul_(width).add_(mean)
        return numbers.to(device, DTYPES[dtype])

    witnesses = len(witnesses_of(channels))
    x = normal(rows, channels)
    parameters = {
        "weight": normal(channels, mean=1.0, width=0.1),
        "bias": normal(channels, width=0.1),
        "alpha": normal(1, mean=0.7, width=0.0),
        "shift": normal(1, mean=0.1, width=0.0),
        "log_beta": normal(1, mean=math.log(channels), width=0.0),
        "log_gain": torch.zeros(witnesses, device=device, dtype=DTYPES[dtype]),
    }
    return Case(
        dtype=dtype,
        x=x,
        leaf=x.detach().requires_grad_(),
        grad=normal(rows, channels),
        out=torch.empty_like(x),
        parameters=parameters,
    )
