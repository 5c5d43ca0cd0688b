"""Checks of arguments, each worded once; none waits for a device."""

import math
import operator
import os
from collections.abc import Collection, Sequence
from numbers import Integral, Real
from pathlib import Path
from types import UnionType
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn

from dynorm.errors import ArgumentError, ModelError

Constant = float | Tensor
Shape = int | Sequence[int]

MOST_WITNESSES = 16
"""The largest number of witnesses: a sum over more channels is a norm again."""

# Each is None, 0 or False unless something watches: functorch's transforms, modes, torch.jit.trace.
_interpreter = torch._C._functorch.peek_interpreter_stack
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_trace = torch._C._get_tracing_state


def watched() -> bool:
    """Return whether torch.compile, a torch.func transform, a mode or a tracer is active."""
    return torch.compiler.is_compiling() or watched_eagerly()


def watched_eagerly() -> bool:
    """Return the same without torch.compile."""
    # Not a loop over the four, which takes three times as long: layers ask at every call.
    return bool(_interpreter() or _dispatch_modes() or _function_modes() or _trace())


def _is_number(value: object) -> bool:
    """Return whether a value is a number; of any library, also a size that torch.compile does not know, but no bool."""
    # torch.compile cannot look for an attribute such as __float__.
    numbers = (float, int, Real, Tensor, torch.SymInt, torch.SymFloat)
    return isinstance(value, numbers) and not isinstance(value, bool)


def check_positive(name: str, value: float) -> float:
    """Return ``value``, or raise ArgumentError when it is not a positive finite number."""
    if not (_is_number(value) and 0 < value < math.inf):
        raise ArgumentError(f"{name} must be a positive finite number, got {value!r}")
    return float(value)


def check_finite(name: str, value: float) -> float:
    """Return ``value``, or raise ArgumentError when it is not a finite number."""
    if not (_is_number(value) and -math.inf < value < math.inf):
        raise ArgumentError(f"{name} must be a finite number, got {value!r}")
    return float(value)


def check_not_negative(name: str, value: float) -> float:
    """Return ``value``, or raise ArgumentError if it is negative, not finite or not a number."""
    if not (_is_number(value) and 0 <= value < math.inf):
        raise ArgumentError(
            f"{name} must be finite and not negative, got {value!r}: give 0 or a small number"
        )
    return float(value)


def check_share(name: str, value: float) -> float:
    """Return ``value``, or raise ArgumentError if it is not a number from 0 to 1."""
    if not (_is_number(value) and 0 <= value <= 1):
        raise ArgumentError(f"{name} must be a number from 0 to 1, got {value!r}")
    return float(value)


def check_count(name: str, value: int, least: int = 1) -> int:
    """Return ``value``, or raise ArgumentError if it is not an integer, at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise ArgumentError(f"{name} must be an integer, at least {least}, got {value!r}")
    return int(value)


def check_seed(seed: int) -> None:
    """Refuse a seed that not all generators of random numbers take."""
    if check_count("seed", seed, 0) >= 2**32:
        raise ArgumentError(f"seed must be from 0 to 2**32 - 1, got {seed}")


def check_kind(name: str, value: object, kind: type | UnionType, wanted: str) -> None:
    """Refuse a value that is not of a class; ``wanted`` says in words what it must be."""
    if not isinstance(value, kind):
        raise ArgumentError(f"{name} must be {wanted}, got {value!r:.60}")


def check_path(name: str, value: Any) -> Path:
    """Return a path, or raise ArgumentError if it is neither a string nor a path."""
    check_kind(name, value, str | os.PathLike, "a path: give a str or a pathlib.Path")
    return Path(value)


def check_items(name: str, values: Any, kind: type, remedy: str) -> None:
    """Refuse anything but a collection whose items are all of one class."""
    is_collection = isinstance(values, Collection) and not isinstance(values, str)
    if not is_collection or not all(isinstance(value, kind) for value in values):
        raise ArgumentError(
            f"{name} must be a list of {kind.__name__}, got {values!r:.60}: {remedy}"
        )


def check_module(value: nn.Module, name: str = "the model") -> None:
    """Refuse anything but a module."""
    if not isinstance(value, nn.Module):
        raise ArgumentError(f"{name} must be a torch.nn.Module, not {type(value).__name__}")


def require_gathered(model: nn.Module) -> None:
    """Refuse the empty placeholders that DeepSpeed's ZeRO-3 leaves between calls.

    Other tools empty parameters too, without a mark; a point-wise layer has no empty one.
    """
    for path, module in model.named_modules():
        is_layer = getattr(module, "_dynorm_layer", False)
        for name, parameter in module.named_parameters(recurse=False):
            is_marked = hasattr(parameter, "ds_id") and math.prod(parameter.ds_shape) > 0
            if parameter.numel() or not (is_layer or is_marked):
                continue
            full_name = f"{path}.{name}".lstrip(".")
            raise ModelError(
                f"the model's tensors must hold values, but {full_name!r} is an empty placeholder, "
                "as DeepSpeed's ZeRO-3 leaves one: do this inside `with "
                "deepspeed.zero.GatheredParameters(list(model.parameters())):`, or before "
                "deepspeed.initialize"
            )


def check_channels(normalized_shape: Shape) -> int:
    """Return the size C of the channel axis, given as an int or as a sequence of one."""
    value: Any = normalized_shape
    if isinstance(value, Sequence) and not isinstance(value, str):
        if len(value) != 1:
            raise ArgumentError(
                f"normalized_shape must be the size of one axis, got {normalized_shape!r}: keep a "
                "norm over several axes, or flatten them in front of it"
            )
        value = value[0]
    return check_count("normalized_shape", value)


def check_dim(dim: int) -> int:
    """Return the channel axis, or raise ArgumentError if it is not an integer."""
    if isinstance(dim, bool) or not isinstance(dim, Integral):
        raise ArgumentError(f"dim must be an int, got {dim!r}")
    return int(dim)


def upcast(value: Tensor) -> Tensor:
    """Return ``value`` in at least float32, so that exp and division keep their digits."""
    if value.dtype in (torch.float32, torch.float64):
        return value
    return value.float()


def writes_of(tensor: Tensor) -> int | None:
    """Return how often torch has noted a write into a tensor, or None if it keeps no count."""
    if tensor.is_inference():
        return None
    return tensor._version


def is_exporting() -> bool:
    """Return whether torch.export traces.

    In torch.compile, releases of torch up to 2.12 say that ``torch.compiler.is_exporting()`` is True.
    """
    return torch.compiler._is_exporting_flag


def clamped(z: Tensor) -> Tensor:
    """Return ``z`` up to the size from which squares no longer matter: 2**63 in float32."""
    # Beyond it the quotient of DyISRU is 1 to rounding for any beta up to 1e30, but the square
    # would overflow and inf / inf be NaN.
    limit = float(torch.finfo(z.dtype).max ** 0.5 / 2)
    u = z.clamp(-limit, limit)
    is_exported = is_exporting() or (not torch.compiler.is_compiling() and _trace())
    if not z.requires_grad or is_exported:
        return u
    # The gradient of clamp is 0 at NaN, and would hide it.
    return torch.where(z.isnan(), z, u)


def resolve(x: Tensor, dim: int) -> tuple[Tensor, int]:
    """Return ``x`` in the dtype to compute in, and ``dim`` counted from the front."""
    check_floating("x", x, "convert it, say with .float()")
    if x.ndim == 0:
        raise ArgumentError("x must have an axis of channels, but is a scalar")
    if not isinstance(dim, int) or not -x.ndim <= dim < x.ndim:
        raise ArgumentError(
            f"dim must name one dimension of x, which has {x.ndim}, got {dim}: give an integer "
            f"from {-x.ndim} to {x.ndim - 1}"
        )
    return upcast(x), dim % x.ndim


def check_floating(name: str, value: Tensor, advice: str = "convert it first") -> None:
    """Refuse anything but a real floating point tensor."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        got = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise ArgumentError(f"{name} must be a real floating point tensor, got {got}: {advice}")


def constant(
    name: str, value: Constant, z: Tensor, axis: int, *, positive: bool = False
) -> Constant:
    """Return a constant of a point-wise function ready to be broadcast against ``z``."""
    if not isinstance(value, Tensor):
        # Both comparisons are False for NaN.
        least = 0 if positive else -math.inf
        if not (_is_number(value) and least < value < math.inf):
            domain = "positive and finite" if positive else "finite"
            raise ArgumentError(f"{name} must be {domain}, got {value!r:.60}: give another value")
        return value
    check_floating(name, value)
    shape = tuple(value.shape)
    # First the number of axes: sizes that depend on data cannot be compared.
    if len(shape) == 1 and shape[0] == z.shape[axis]:
        return along(value, z, axis).to(z.dtype)
    # Under torch.compile, "1 in (1, m)" is False when m is symbolic, and whether a size that depends
    # on data is 1 cannot be asked.
    broadcast = len(shape) == z.ndim and all(
        (isinstance(n, int) and n == 1) or n == m for n, m in zip(shape, z.shape, strict=True)
    )
    if not broadcast and shape not in ((), (1,)):
        raise ArgumentError(
            f"{name} must be a float or a tensor of shape (1,), ({z.shape[axis]},) or one that "
            f"broadcasts against x of shape {tuple(z.shape)}, got {shape}: reshape it, or pass the "
            "dim along which it lies"
        )
    return value.to(z.dtype)


def parameter(name: str, value: Tensor | None, z: Tensor, axis: int) -> Tensor | None:
    """Return a parameter with one number per channel ready to be broadcast against ``z``."""
    if value is None:
        return None
    check_floating(name, value)
    if tuple(value.shape) != (z.shape[axis],):
        raise ArgumentError(
            f"{name} must have the shape ({z.shape[axis]},) of the channels, got "
            f"{tuple(value.shape)}: reshape it, or pass the dim along which it lies"
        )
    return along(value, z, axis).to(z.dtype)


def along(value: Tensor, z: Tensor, axis: int) -> Tensor:
    """Lay a vector along an axis of ``z``, counted from the front."""
    if axis == z.ndim - 1:
        return value
    return value.reshape([-1 if d == axis else 1 for d in range(z.ndim)])


def check_witnesses(witnesses: int | Sequence[int], channels: int) -> tuple[int, ...]:
    """Return the positions of witness channels, checked; a number N means the first N."""
    if isinstance(witnesses, Integral) and not isinstance(witnesses, bool):
        number = int(witnesses)
        if not 0 <= number <= channels:
            raise ArgumentError(
                f"the number of witnesses must be from 0 to the {channels} channels, got {number}"
            )
        positions = tuple(range(number))
    else:
        positions = _positions(witnesses)
    if len(positions) > MOST_WITNESSES:
        raise ArgumentError(
            f"there must be at most {MOST_WITNESSES} witnesses, got {len(positions)}: a sum over "
            "many channels is a norm again, so keep the norm"
        )
    check_different_channels(positions, channels)
    return positions


def refuse_witnesses(owner: str, got: object) -> NoReturn:
    """Refuse witnesses for a function other than DyISRU."""
    raise ArgumentError(
        f"witnesses must be 0 for {owner}, got {got!r}: only DyISRU's beta is a sum, to which the size "
        'of a token can be added; leave them out there (0), or use DyISRU (to="dyisru")'
    )


def _positions(witnesses: object) -> tuple[int, ...]:
    """Return a sequence of integers as a tuple."""
    try:
        values = tuple(cast("Sequence[Any]", witnesses))
        # Python takes True for an index.
        if any(isinstance(value, bool) for value in values):
            raise TypeError("a position is not a bool")
        return tuple(operator.index(value) for value in values)
    except TypeError as error:
        raise ArgumentError(
            "witnesses must be a number of channels, or their positions, integers, got "
            f"{witnesses!r}"
        ) from error


def check_different_channels(positions: Sequence[int], channels: int) -> None:
    """Refuse a position that is out of range or named twice."""
    outside = [k for k in positions if not 0 <= k < channels]
    if outside or len(set(positions)) < len(positions):
        problem = f"{outside[0]} is out of range" if outside else "one is named twice"
        raise ArgumentError(
            f"witnesses must be different channels from 0 to {channels - 1}, but {problem}: "
            f"{tuple(positions)}"
        )


def check_witness_tensors(witnesses: Tensor, gain: Tensor | None, channels: int) -> None:
    """Refuse witnesses and gains that are not as :func:`dynorm.functional.dyisru_general` says."""
    is_index = witnesses.ndim == 1 and witnesses.dtype in (torch.int32, torch.int64)
    if not is_index or len(witnesses) > channels:
        raise ArgumentError(
            f"witnesses must be an integer tensor (K,) with K at most the {channels} channels of "
            f"x, got {witnesses.dtype} of shape {tuple(witnesses.shape)}: give the positions of "
            "channels, each once"
        )
    # Reading the values is free on the CPU; under a tracer or a transform there are none.
    if type(witnesses) is Tensor and witnesses.is_cpu and not watched():
        check_different_channels(witnesses.tolist(), channels)
    if gain is not None:
        check_floating("gain", gain)
        if gain.shape != witnesses.shape:
            raise ArgumentError(
                f"gain must have the witnesses' shape ({len(witnesses)},), got {tuple(gain.shape)}"
            )
