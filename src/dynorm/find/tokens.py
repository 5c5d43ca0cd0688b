"""A module as a function of tokens: a copy that may be tried out, and the packing of tokens into its input."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

HOOK_TABLES = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)


class CannotProbeError(Exception):
    """A module raised, or gave something else than a tensor, when tried on tokens of our own."""


def plain_copy(module: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
    """A copy to experiment on: own tensors, no hooks, everything else shared with the original.

    `copy.deepcopy` would also copy what hooks and attributes refer to, which may be a whole model, and fails on tensors
    that belong to a graph.

    Args:
        module: The module; its mode is kept.
        dtype: Element type of the copy's floating-point tensors; None keeps theirs.

    Returns:
        The copy, on the same device.

    Example:
        >>> original = nn.LayerNorm(4)
        >>> plain_copy(original, torch.float64).weight.dtype, original.weight.dtype
        (torch.float64, torch.float32)
    """
    return _copy_module(module, dtype, {})


def _copy_module(module: nn.Module, dtype: torch.dtype | None, known: dict[int, Any]) -> nn.Module:
    if id(module) in known:
        return cast(nn.Module, known[id(module)])
    new = known[id(module)] = module.__class__.__new__(module.__class__)
    for name, value in module.__dict__.items():
        new.__dict__[name] = copy.copy(value) if type(value) in (list, dict, set) else value
    # A patched forward is bound to the original; the class knows the true one.
    new.__dict__.pop("forward", None)
    for name in module.__dict__.keys() & set(HOOK_TABLES):
        new.__dict__[name] = type(module.__dict__[name])()
    new.__dict__["_modules"] = {
        name: child if child is None else _copy_module(child, dtype, known) for name, child in module._modules.items()
    }
    new.__dict__["_buffers"] = {
        n: b if b is None else _copy_tensor(b, dtype, known) for n, b in module._buffers.items()
    }
    new.__dict__["_parameters"] = {
        n: p if p is None else _copy_tensor(p, dtype, known) for n, p in module._parameters.items()
    }
    for name, value in module.__dict__.items():
        if isinstance(value, Tensor):
            new.__dict__[name] = _copy_tensor(value, dtype, known)
    return new


def _copy_tensor(tensor: Tensor, dtype: torch.dtype | None, known: dict[int, Any]) -> Tensor:
    if id(tensor) not in known:
        wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        values = tensor.detach().to(wanted, copy=True)
        known[id(tensor)] = nn.Parameter(values, requires_grad=False) if isinstance(tensor, nn.Parameter) else values
    return cast(Tensor, known[id(tensor)])


def randomize_(module: nn.Module, seed: int = 0) -> nn.Module:
    """Fills every vector of a module with other positive numbers, so that each shows by its effect.

    Single numbers (a learned gain, an eps held in a buffer) keep their values.

    Args:
        module: A copy; it is changed.
        seed: Of the numbers.

    Returns:
        The module.

    Example:
        >>> norm = randomize_(nn.LayerNorm(4))
        >>> bool(((norm.weight - norm.bias).abs() > 0).all())
        True
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in [*module.parameters(), *module.buffers()]:
            if tensor.is_floating_point() and tensor.numel() > 1:
                tensor.copy_(torch.rand(tensor.shape, generator=generator, dtype=torch.float64) + 0.5)
    return module


@dataclass(frozen=True)
class Packing:
    """How tokens of C channels lie in a tensor.

    Args:
        shape: The tensor's shape.
        axes: The axes, ascending and non-negative, that hold the channels.

    Example:
        >>> packing = Packing((2, 5, 3), axes=(1,))
        >>> packing.channels, packing.count, packing.unpack(torch.zeros(2, 5, 3)).shape
        (5, 6, torch.Size([6, 5]))
    """

    shape: tuple[int, ...]
    axes: tuple[int, ...]

    @property
    def channel_sizes(self) -> tuple[int, ...]:
        """The sizes of the channel axes."""
        return tuple(self.shape[axis] for axis in self.axes)

    @property
    def channels(self) -> int:
        """C, the number of channels of a token."""
        return math.prod(self.channel_sizes)

    @property
    def count(self) -> int:
        """How many tokens the tensor holds."""
        return math.prod(self.shape) // self.channels

    def pack(self, tokens: Tensor) -> Tensor:
        """Lays `count` tokens, (count, C), into a tensor of the shape."""
        others = [size for axis, size in enumerate(self.shape) if axis not in self.axes]
        tensor = tokens.reshape(*others, *self.channel_sizes)
        return tensor.movedim(self._last(), self.axes).contiguous()

    def unpack(self, tensor: Tensor) -> Tensor:
        """The tokens of a tensor with these axes, (count, C); the other axes may have other sizes."""
        return tensor.movedim(self.axes, self._last()).reshape(-1, self.channels)

    def _last(self) -> tuple[int, ...]:
        return tuple(range(len(self.shape) - len(self.axes), len(self.shape)))


def packings(shape: tuple[int, ...], axes: tuple[int, ...]) -> Iterator[Packing]:
    """Packings to try, the small ones first: a module may insist on the sizes of axes that are not its channels'.

    Example:
        >>> [packing.shape for packing in packings((8, 100, 16), axes=(2,))]
        [(2, 3, 16), (2, 100, 16), (8, 100, 16)]
    """

    def resized(first: int | None, rest: int | None) -> tuple[int, ...]:
        wish = [first, *[rest] * (len(shape) - 1)]
        return tuple(
            size if axis in axes or w is None else (w if axis == 0 else min(size, w))
            for axis, (size, w) in enumerate(zip(shape, wish, strict=True))
        )

    # Two of the first axis, even if the example had one: independence of tokens shows only between tokens.
    for sizes in dict.fromkeys([resized(2, 3), resized(2, None), resized(None, None)]):
        yield Packing(sizes, axes)


class TokenFunction:
    """A module as a map from tokens (n, C) to tokens (n, C), in float64 outside and its own dtype inside.

    Args:
        module: A copy of the module.
        packing: How its input holds tokens.
        dtype: Element type of its input.
        device: Device of its input.

    Example:
        >>> function = TokenFunction(nn.LayerNorm(4), Packing((2, 4), (1,)), torch.float32, torch.device("cpu"))
        >>> function(torch.eye(4, dtype=torch.float64)).shape
        torch.Size([4, 4])
    """

    def __init__(self, module: nn.Module, packing: Packing, dtype: torch.dtype, device: torch.device) -> None:
        self.module = module
        self.packing = packing
        self.dtype = dtype
        self.device = device

    def rounded(self, tokens: Tensor) -> Tensor:
        """The tokens as the module will see them, rounded to its dtype."""
        return tokens.to(self.dtype).double()

    def __call__(self, tokens: Tensor) -> Tensor:
        """The module's output; n must be a multiple of the packing's count."""
        parts = torch.split(tokens, self.packing.count)
        return torch.cat([self._run(part) for part in parts])

    def _run(self, tokens: Tensor) -> Tensor:
        given = self.packing.pack(tokens.to(self.dtype)).to(self.device)
        try:
            output = self.module(given)
        # Foreign code may raise anything; what it raised becomes part of the reason why it is refused.
        except Exception as error:
            raise CannotProbeError(
                f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            ) from error
        if not isinstance(output, Tensor) or output.shape != given.shape:
            raise CannotProbeError("its output has another shape for other values")
        return self.packing.unpack(output.detach().cpu().double())


def sample_tokens(count: int, channels: int, scale: float, seed: int) -> Tensor:
    """Tokens that tell formulas apart: each with its own mean, and every third with an outlier.

    Args:
        count: Number of tokens.
        channels: C.
        scale: Standard deviation of the plain channels.
        seed: Of the numbers; the global random state is left alone.

    Returns:
        A float64 tensor (count, C).

    Example:
        >>> sample_tokens(6, 4, 1.0, seed=0).shape
        torch.Size([6, 4])
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randn(count, channels, generator=generator, dtype=torch.float64)
    tokens += 2 * torch.randn(count, 1, generator=generator, dtype=torch.float64)
    outliers = torch.arange(0, count, 3)
    tokens[outliers, (7 * outliers) % channels] += 4 + math.sqrt(channels)
    return tokens * scale
