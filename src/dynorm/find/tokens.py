"""A module as a function of tokens: a copy that may be tried out, and the packing of tokens into its input."""

import copy
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dynorm.watch import HOOK_TABLES, undisturbed


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


def plain_copy(module: nn.Module, dtype: torch.dtype | None = None, *, random: bool = False) -> nn.Module:
    """Copy a module to experiment on: own tensors, cast to ``dtype`` if one is given, no hooks, the rest shared.

    ``copy.deepcopy`` would also copy what hooks and attributes refer to, which may be a whole model, and fails on
    tensors that belong to a graph. With ``random`` every vector is filled with other positive numbers, so that each
    shows by its effect; single numbers, such as a learned gain or an eps held in a buffer, keep their values.
    """
    known: dict[int, Any] = {}

    def copied(value: Any) -> Any:
        if value is None or id(value) in known:
            return known.get(id(value))
        if isinstance(value, Tensor):
            values = value.detach().to(dtype if dtype and value.is_floating_point() else value.dtype, copy=True)
            new = nn.Parameter(values, requires_grad=False) if isinstance(value, nn.Parameter) else values
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
                new.__dict__[name] = copied(held) if isinstance(held, Tensor) else copy.copy(held) if is_own else held
        return new

    replica: nn.Module = copied(module)
    generator = torch.Generator().manual_seed(0)
    for tensor in named_tensors(replica).values() if random else ():
        if tensor.is_floating_point() and tensor.numel() > 1:
            tensor.detach().copy_(torch.rand(tensor.shape, generator=generator, dtype=torch.float64) + 0.5)
    return replica


@dataclass(frozen=True)
class Packing:
    """How tokens of C channels lie in a tensor.

    Example:
        >>> packing = Packing((2, 5, 3), axes=(1,))
        >>> packing.channels, packing.count, packing.unpack(torch.zeros(2, 5, 3)).shape
        (5, 6, torch.Size([6, 5]))
    """

    shape: tuple[int, ...]
    axes: tuple[int, ...]  # that hold the channels, ascending and non-negative

    @property
    def channel_sizes(self) -> tuple[int, ...]:
        """Return the sizes of the channel axes."""
        return tuple(self.shape[axis] for axis in self.axes)

    @property
    def channels(self) -> int:
        """Return C, the number of channels of a token."""
        return math.prod(self.channel_sizes)

    @property
    def count(self) -> int:
        """Return how many tokens the tensor holds."""
        return math.prod(self.shape) // self.channels

    def pack(self, tokens: Tensor) -> Tensor:
        """Lay ``count`` tokens, (count, C), into a tensor of the shape."""
        others = [size for axis, size in enumerate(self.shape) if axis not in self.axes]
        return tokens.reshape(*others, *self.channel_sizes).movedim(self._last(), self.axes).contiguous()

    def unpack(self, tensor: Tensor) -> Tensor:
        """Return the tokens of a tensor with these axes, (count, C); the other axes may have other sizes."""
        return tensor.movedim(self.axes, self._last()).reshape(-1, self.channels)

    def _last(self) -> tuple[int, ...]:
        return tuple(range(len(self.shape) - len(self.axes), len(self.shape)))

    def smaller(self) -> list["Packing"]:
        """Return the packings to try, small ones first: a module may insist on the sizes of other axes too.

        Example:
            >>> [packing.shape for packing in Packing((8, 100, 16), axes=(2,)).smaller()]
            [(2, 3, 16), (2, 100, 16), (8, 100, 16)]
        """
        # Two of the first axis, even if the example had one: independence of tokens shows only between tokens.
        pair = self.shape if 0 in self.axes else (2, *self.shape[1:])
        small = tuple(s if axis in self.axes or axis == 0 else min(s, 3) for axis, s in enumerate(pair))
        return [Packing(shape, self.axes) for shape in dict.fromkeys([small, pair, self.shape])]


@dataclass(frozen=True)
class TokenFunction:
    """A module as a map from tokens (n, C) to tokens (n, C), in float64 outside and its own dtype inside."""

    module: nn.Module  # or a copy of it
    packing: Packing  # of its input
    dtype: torch.dtype
    device: torch.device

    @property
    def is_half(self) -> bool:
        """Return whether inputs are rounded to half precision."""
        return self.dtype not in (torch.float32, torch.float64)

    def __call__(self, tokens: Tensor) -> Tensor:
        """Return the module's output; n must be a multiple of the packing's count."""
        return torch.cat([self._run(part) for part in torch.split(tokens.to(self.dtype), self.packing.count)])

    def _run(self, tokens: Tensor) -> Tensor:
        given = self.packing.pack(tokens).to(self.device)
        try:
            output = self.module(given)
        # Foreign code may raise anything; its message becomes part of the reason for a refusal.
        except Exception as error:
            message = str(error).splitlines()[0] if str(error) else ""
            raise CannotProbeError(f"{type(error).__name__}: {message}") from error
        if not isinstance(output, Tensor) or output.shape != given.shape:
            raise CannotProbeError("its output has another shape for other values")
        return self.packing.unpack(output.detach().cpu().double())

    def odd_and_even(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return (f(x) - f(-x)) / 2 and (f(x) + f(-x)) / 2."""
        plus, minus = self(tokens), self(-tokens)
        return (plus - minus) / 2, (plus + minus) / 2

    def sample(self, scale: float, seed: int, at_least: int = 1) -> Tensor:
        """Return tokens for two calls, or for more until there are enough, rounded as the module will see them.

        They tell formulas apart: each has its own mean, and every third an outlier. The global random state is left
        alone.
        """
        count, channels = self.packing.count, self.packing.channels
        count *= max(2, -(-at_least // count))
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randn(count, channels, generator=generator, dtype=torch.float64)
        tokens += 2 * torch.randn(count, 1, generator=generator, dtype=torch.float64)
        outliers = torch.arange(0, count, 3)
        tokens[outliers, (7 * outliers) % channels] += 4 + math.sqrt(channels)
        return (tokens * scale).to(self.dtype).double()
