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

from dynorm.guard import HOOK_TABLES


class CannotProbeError(Exception):
    """A module raised on our tokens, or did not return a tensor of their shape."""


@contextmanager
def plain_arithmetic() -> Iterator[None]:
    """Let a module compute without autocast, and without warnings about the odd inputs of a trial."""
    with (
        torch.autocast("cpu", enabled=False),
        torch.autocast("cuda", enabled=False),
        warnings.catch_warnings(action="ignore"),
    ):
        yield


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a module by name."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def tensor_like(module: nn.Module, model: nn.Module) -> Tensor:
    """Return a tensor with the device and dtype for a layer in place of ``module``.

    It is the first suitable tensor of the module, or else of the model.
    """
    for owner in (module, model):
        for tensor in (*owner.parameters(), *owner.buffers()):
            # One byte is a weight quantized to float8, which is not a dtype to compute in.
            if tensor.is_floating_point() and tensor.element_size() > 1:
                return tensor
    return torch.empty(0, dtype=torch.float32, device="cpu")


def plain_copy(
    module: nn.Module, dtype: torch.dtype | None = None, *, random: bool = False
) -> nn.Module:
    """Copy a module to experiment on: with tensors, lists, dicts and sets of its own, without hooks.

    Everything else is shared.

    The tensors are cast to ``dtype`` if it is not None. ``copy.deepcopy`` would also copy the
    objects that hooks and attributes refer to, perhaps the model, and fails on tensors that belong
    to a graph. With ``random`` every vector is filled with other positive numbers, so that each is
    identified by its effect. Single numbers, such as a learned gain or an eps in a buffer, keep
    their values.
    """
    known: dict[int, object] = {}

    def copied(value: object) -> Any:
        if value is None:
            return None
        if id(value) in known:
            return known[id(value)]
        if isinstance(value, Tensor):
            is_cast = dtype is not None and value.is_floating_point()
            tensor = value.detach().to(dtype if is_cast else value.dtype, copy=True)
            if isinstance(value, nn.Parameter):
                tensor = nn.Parameter(tensor, requires_grad=False)
            known[id(value)] = tensor
            return tensor
        twin = value.__class__.__new__(value.__class__)
        known[id(value)] = twin
        for name, attribute in value.__dict__.items():
            if name in HOOK_TABLES:
                twin.__dict__[name] = type(attribute)()
            elif name in ("_modules", "_parameters", "_buffers"):
                twin.__dict__[name] = {key: copied(part) for key, part in attribute.items()}
            elif isinstance(attribute, Tensor):
                twin.__dict__[name] = copied(attribute)
            elif type(attribute) in (list, dict, set):
                twin.__dict__[name] = copy.copy(attribute)
            # A patched forward is bound to the original; the class has the true one.
            elif name != "forward":
                twin.__dict__[name] = attribute
        return twin

    replica: nn.Module = copied(module)
    if not random:
        return replica
    generator = torch.Generator(device="cpu").manual_seed(0)
    for tensor in named_tensors(replica).values():
        if tensor.is_floating_point() and tensor.numel() > 1:
            values = torch.rand(
                tensor.shape, generator=generator, dtype=torch.float64, device="cpu"
            )
            tensor.detach().copy_(values + 0.5)
    return replica


@dataclass(frozen=True)
class TokenFunction:
    """A module as a map from tokens (n, C) to tokens (n, C), float64 outside and ``dtype`` inside."""

    module: nn.Module  # or a copy of it
    shape: tuple[int, ...]  # of its input
    axis: int  # the axis of the channels, not negative
    dtype: torch.dtype
    device: torch.device

    @property
    def channels(self) -> int:
        """Return the number of channels."""
        return self.shape[self.axis]

    @property
    def count(self) -> int:
        """Return how many tokens an input holds."""
        return math.prod(self.shape) // self.channels

    @property
    def is_half(self) -> bool:
        """Return whether inputs are rounded to half precision."""
        return self.dtype not in (torch.float32, torch.float64)

    def __call__(self, tokens: Tensor) -> Tensor:
        """Return the module's output; n must be a multiple of the count."""
        parts = torch.split(tokens.to(self.dtype), self.count)
        return torch.cat([self._run(part) for part in parts])

    def _run(self, tokens: Tensor) -> Tensor:
        others = [size for axis, size in enumerate(self.shape) if axis != self.axis]
        laid_out = tokens.reshape(*others, self.channels).movedim(-1, self.axis)
        # A copy, since a module may write into its input.
        x = laid_out.to(self.device, copy=True, memory_format=torch.contiguous_format)
        try:
            output = self.module(x)
        # The user's code may raise anything; its message becomes part of the reason for a refusal.
        except Exception as error:
            first_line = str(error).partition("\n")[0]
            raise CannotProbeError(f"{type(error).__name__}: {first_line}") from error
        if not isinstance(output, Tensor) or output.shape != x.shape:
            raise CannotProbeError("its output has another shape for other values")
        # A copy again: a module may return the same buffer every time.
        values = output.detach().to("cpu", torch.float64, copy=True)
        return values.movedim(self.axis, -1).reshape(tokens.shape)

    def odd_and_even(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return (f(x) - f(-x)) / 2 and (f(x) + f(-x)) / 2."""
        plus = self(tokens)
        minus = self(-tokens)
        return (plus - minus) / 2, (plus + minus) / 2

    def sample(self, scale: float, seed: int, at_least: int = 1) -> Tensor:
        """Return tokens for two calls or more, at least ``at_least``, rounded to ``dtype``.

        They distinguish formulas: every token has another mean, and every third one an outlier. The
        global random state is not used.
        """
        calls = max(2, math.ceil(at_least / self.count))
        count = calls * self.count
        generator = torch.Generator(device="cpu").manual_seed(seed)
        options: Any = {"generator": generator, "dtype": torch.float64, "device": "cpu"}
        tokens = torch.randn(count, self.channels, **options)
        tokens += 2 * torch.randn(count, 1, **options)
        outliers = torch.arange(0, count, 3, device="cpu")
        tokens[outliers, (7 * outliers) % self.channels] += 4 + math.sqrt(self.channels)
        return (tokens * scale).to(self.dtype).double()
