"""A module as a function of tokens, and a copy of it that may be tried out."""

import copy
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dynorm.guard import HOOK_TABLES, undisturbed


class CannotProbeError(Exception):
    """A module raised, or gave something else than a tensor of its input's shape, when tried on our tokens."""


@contextmanager
def plain_arithmetic(module: nn.Module) -> Iterator[None]:
    """Leave the module undisturbed, with no gradients, no autocast, and no warnings about the odd inputs of a trial."""
    with (
        undisturbed(module),
        torch.autocast("cpu", enabled=False),
        torch.autocast("cuda", enabled=False),
        warnings.catch_warnings(action="ignore"),
    ):
        yield


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a module by name."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def plain_copy(
    module: nn.Module, dtype: torch.dtype | None = None, *, random: bool = False
) -> nn.Module:
    """Copy a module to experiment on: own tensors, cast to ``dtype`` if one is given, no hooks, the rest shared.

    ``copy.deepcopy`` would also copy what hooks and attributes refer to, which may be a whole
    model, and fails on tensors that belong to a graph. With ``random`` every vector is filled with
    other positive numbers, so that each shows by its effect; single numbers, such as a learned gain
    or an eps held in a buffer, keep their values.
    """
    known: dict[int, Any] = {}

    def copied(value: Any) -> Any:
        if value is None or id(value) in known:
            return known.get(id(value))
        if isinstance(value, Tensor):
            values = value.detach().to(
                dtype if dtype and value.is_floating_point() else value.dtype, copy=True
            )
            new = (
                nn.Parameter(values, requires_grad=False)
                if isinstance(value, nn.Parameter)
                else values
            )
            known[id(value)] = new
            return new
        new = known[id(value)] = value.__class__.__new__(value.__class__)
        for name, held in value.__dict__.items():
            if name in HOOK_TABLES:
                new.__dict__[name] = type(held)()
            elif name in ("_modules", "_parameters", "_buffers"):
                new.__dict__[name] = {key: copied(part) for key, part in held.items()}
            # A patched forward is bound to the original; the class knows the true one.
            elif name != "forward":
                is_own = type(held) in (list, dict, set)
                new.__dict__[name] = (
                    copied(held)
                    if isinstance(held, Tensor)
                    else copy.copy(held)
                    if is_own
                    else held
                )
        return new

    replica: nn.Module = copied(module)
    generator = torch.Generator(device="cpu").manual_seed(0)
    for tensor in named_tensors(replica).values() if random else ():
        if tensor.is_floating_point() and tensor.numel() > 1:
            tensor.detach().copy_(
                torch.rand(tensor.shape, generator=generator, dtype=torch.float64, device="cpu")
                + 0.5
            )
    return replica


@dataclass(frozen=True)
class TokenFunction:
    """A module as a map from tokens (n, C) to tokens (n, C), in float64 outside and its own dtype inside."""

    module: nn.Module  # or a copy of it
    shape: tuple[int, ...]  # of its input
    axes: tuple[int, ...]  # those that hold the channels, ascending and non-negative
    dtype: torch.dtype
    device: torch.device

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the sizes of the channel axes."""
        return tuple(self.shape[axis] for axis in self.axes)

    @property
    def count(self) -> int:
        """Return how many tokens an input holds."""
        return math.prod(self.shape) // math.prod(self.sizes)

    @property
    def is_half(self) -> bool:
        """Return whether inputs are rounded to half precision."""
        return self.dtype not in (torch.float32, torch.float64)

    def __call__(self, tokens: Tensor) -> Tensor:
        """Return the module's output; n must be a multiple of the count."""
        return torch.cat(
            [self._run(part) for part in torch.split(tokens.to(self.dtype), self.count)]
        )

    def _run(self, tokens: Tensor) -> Tensor:
        others = [size for axis, size in enumerate(self.shape) if axis not in self.axes]
        last = tuple(range(-len(self.axes), 0))
        laid_out = tokens.reshape(*others, *self.sizes).movedim(last, self.axes)
        # A copy, since a module may write into its input.
        given = laid_out.to(self.device, copy=True, memory_format=torch.contiguous_format)
        try:
            output = self.module(given)
        # Foreign code may raise anything; its message becomes part of the reason for a refusal.
        except Exception as error:
            message = str(error).splitlines()[0] if str(error) else ""
            raise CannotProbeError(f"{type(error).__name__}: {message}") from error
        if not isinstance(output, Tensor) or output.shape != given.shape:
            raise CannotProbeError("its output has another shape for other values")
        # A copy again: a module may return the same buffer every time.
        values = output.detach().to("cpu", torch.float64, copy=True)
        return values.movedim(self.axes, last).reshape(tokens.shape)

    def odd_and_even(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return (f(x) - f(-x)) / 2 and (f(x) + f(-x)) / 2."""
        plus, minus = self(tokens), self(-tokens)
        return (plus - minus) / 2, (plus + minus) / 2

    def sample(self, scale: float, seed: int, at_least: int = 1) -> Tensor:
        """Return tokens for two calls, or for more until there are enough, rounded as the module will see them.

        They tell formulas apart: each has its own mean, and every third an outlier. The global
        random state is left alone.
        """
        count, channels = self.count, math.prod(self.sizes)
        count *= max(2, -(-at_least // count))
        generator = torch.Generator(device="cpu").manual_seed(seed)
        tokens = torch.randn(
            count, channels, generator=generator, dtype=torch.float64, device="cpu"
        )
        tokens += 2 * torch.randn(count, 1, generator=generator, dtype=torch.float64, device="cpu")
        outliers = torch.arange(0, count, 3, device="cpu")
        tokens[outliers, (7 * outliers) % channels] += 4 + math.sqrt(channels)
        return (tokens * scale).to(self.dtype).double()
