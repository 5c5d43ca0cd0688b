"""Checks of arguments, each worded once; none waits for a device."""

import math
import operator
from collections.abc import Callable, Sequence
from numbers import Integral, Real
from typing import Any, cast

import torch
from torch import Tensor, nn

from dynorm.errors import ArgumentError, ModelError

Axes = int | tuple[int, ...]
Constant = float | Tensor
Shape = int | Sequence[int]

MOST_CHOSEN = 16
"""Up to this number of witnesses they are chosen one by one; more are a sample of all channels.

All of dynorm computes the two in different ways: kMostFew in kernels/csrc/types.h is the same number.
"""

# Calls that show whether something watches operations one by one: functorch's transforms, modes,
# torch.jit.trace. Each returns None, 0 or False if not.
WATCHERS: tuple[Callable[[], object], ...] = (
    torch._C._functorch.peek_interpreter_stack,
    torch._C._len_torch_dispatch_stack,
    torch._C._len_torch_function_stack,
    torch._C._get_tracing_state,
)

# The attributes that DeepSpeed's ZeRO-3 gives a parameter that it partitions.
_ZERO_MARKS = ("ds_id", "ds_shape", "ds_numel", "ds_status", "ds_tensor")


def watched() -> bool:
    """Return whether torch.compile, a torch.func transform, a mode or a tracer is active."""
    return torch.compiler.is_compiling() or any(bool(watching()) for watching in WATCHERS)


def check_positive(name: str, value: float) -> float:
    """Return ``value``, or raise ArgumentError when it is not a positive finite number."""
    is_number = hasattr(value, "__float__") and not isinstance(value, bool)
    if not (is_number and math.isfinite(value) and value > 0):
        raise ArgumentError(f"{name} must be a positive finite number, got {value!r}")
    return float(value)


def check_not_negative(name: str, value: float) -> float:
    """Return ``value``, or raise ArgumentError if it is negative, not finite or not a number."""
    if isinstance(value, bool) or not (hasattr(value, "__float__") and 0 <= value < math.inf):
        raise ArgumentError(
            f"{name} must be finite and not negative, got {value!r}: give 0 or a small number"
        )
    return float(value)


def check_share(name: str, value: float) -> float:
    """Return ``value``, or raise ArgumentError if it is not a number from 0 to 1.

    NumPy's numbers are accepted.
    """
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= value <= 1:
        raise ArgumentError(f"{name} must be a number from 0 to 1, got {value!r}")
    return float(value)


def check_count(name: str, value: int, least: int = 1) -> int:
    """Return ``value``, or raise ArgumentError if it is not an integer, at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise ArgumentError(f"{name} must be an integer, at least {least}, got {value!r}")
    return int(value)


def check_module(value: nn.Module, name: str = "the model") -> None:
    """Refuse anything but a module."""
    if not isinstance(value, nn.Module):
        raise ArgumentError(f"{name} must be a torch.nn.Module, not {type(value).__name__}")


def require_gathered(model: nn.Module) -> None:
    """Refuse the empty placeholders that DeepSpeed's ZeRO-3 leaves between calls.

    It marks every parameter that it partitions. While a parameter is gathered it has its values,
    and an ordinary empty parameter has no mark.
    """
    for name, parameter in model.named_parameters():
        marks = [mark for mark in _ZERO_MARKS if hasattr(parameter, mark)]
        size = math.prod(getattr(parameter, "ds_shape", (1,)))
        if marks and size and not parameter.numel():
            raise ModelError(
                f"the model's tensors must hold values, but {name!r} is a placeholder of "
                "DeepSpeed's ZeRO-3, which keeps the values elsewhere: do this inside `with "
                "deepspeed.zero.GatheredParameters(list(model.parameters())):`, or before "
                "deepspeed.initialize"
            )
    for path, module in model.named_modules():
        if not getattr(module, "_dynorm_layer", False):
            continue
        for name, parameter in module.named_parameters(recurse=False):
            # Without a mark: other tools empty parameters too. A layer has no empty one.
            if not parameter.numel():
                full_name = f"{path}.{name}".lstrip(".")
                raise ModelError(
                    f"the model's tensors must hold values, but {full_name!r} is empty: gather the "
                    "parameters first, with the tool that keeps their values"
                )


def check_shape(normalized_shape: Shape) -> tuple[int, ...]:
    """Return the normalised shape as a tuple of positive sizes."""
    sizes = _integers("normalized_shape", normalized_shape)
    if min(sizes) < 1:
        raise ArgumentError(f"normalized_shape must be positive, got {normalized_shape!r}")
    return sizes


def check_dim(dim: Shape, shape: tuple[int, ...]) -> Axes:
    """Return the axes of ``shape``: the last ones for -1."""
    dims = _integers("dim", dim)
    if dims == (-1,) and isinstance(dim, int):
        dims = tuple(range(-len(shape), 0))
    if len(dims) != len(shape) or len(set(dims)) != len(dims):
        raise ArgumentError(
            f"dim must name {len(shape)} different axes for normalized_shape {shape}, got {dim!r}"
        )
    if len(dims) == 1:
        return dims[0]
    return dims


def _integers(name: str, value: Shape) -> tuple[int, ...]:
    """Return one integer or several as a tuple; NumPy's are accepted, booleans and floats not."""
    values = tuple(value) if isinstance(value, Sequence) else (value,)
    if not values or any(isinstance(v, bool) or not hasattr(v, "__index__") for v in values):
        raise ArgumentError(f"{name} must be an int or a non-empty sequence of ints, got {value!r}")
    return tuple(operator.index(v) for v in values)


def upcast(value: Tensor) -> Tensor:
    """Return ``value`` in at least float32, so that exp and division keep their digits."""
    if value.dtype in (torch.float32, torch.float64):
        return value
    return value.float()


def clamped(z: Tensor) -> Tensor:
    """Return ``z`` up to the size from which squares no longer matter: 2**63 in float32."""
    # Beyond it the quotient of DyISRU is 1 to rounding for any beta up to 1e30, but the square
    # would overflow and inf / inf be NaN.
    limit = float(torch.finfo(z.dtype).max ** 0.5 / 2)
    return z.clamp(-limit, limit)


def resolve(x: Tensor, dim: Axes) -> tuple[Tensor, tuple[int, ...]]:
    """Return ``x`` in the dtype to compute in, and ``dim`` as axes counted from the front."""
    check_floating("x", x, "convert it, say with .float()")
    dims = (dim,) if isinstance(dim, int) else tuple(dim)
    if not dims or not all(-x.ndim <= d < x.ndim for d in dims):
        raise ArgumentError(
            f"dim must name dimensions of x, which has {x.ndim}, got {dim}: "
            f"give one or more integers from {-x.ndim} to {x.ndim - 1}"
        )
    axes = tuple(d % x.ndim for d in dims)
    if len(set(axes)) < len(axes):
        raise ArgumentError(f"dim must not repeat a dimension, got {dim}: name each one once")
    return upcast(x), axes


def count(z: Tensor, axes: tuple[int, ...]) -> int:
    """Return C, the number of normalised elements."""
    return math.prod([z.shape[axis] for axis in axes])


def check_floating(name: str, value: Tensor, advice: str = "convert it first") -> None:
    """Refuse anything but a real floating point tensor."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        got = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise ArgumentError(f"{name} must be a real floating point tensor, got {got}: {advice}")


def constant(
    name: str,
    value: Constant,
    z: Tensor,
    axes: tuple[int, ...],
    *,
    positive: bool = False,
) -> Constant:
    """Return a constant of a point-wise function ready to be broadcast against ``z``."""
    if not isinstance(value, Tensor):
        # Both comparisons are False for NaN.
        if not (0 if positive else -math.inf) < value < math.inf:
            domain = "positive and finite" if positive else "finite"
            raise ArgumentError(f"{name} must be {domain}, got {value}: give another value")
        return value
    check_floating(name, value)
    shape = tuple(value.shape)
    normalized = tuple(z.shape[axis] for axis in axes)
    if shape == normalized:
        return along(value, z, axes).to(z.dtype)
    # Under torch.compile, "1 in (1, m)" is False when m is symbolic.
    broadcast = len(shape) == z.ndim and all(
        n == 1 or n == m for n, m in zip(shape, z.shape, strict=True)
    )
    if not broadcast and shape not in ((), (1,)):
        raise ArgumentError(
            f"{name} must be a float or a tensor of shape (1,), {normalized} or one that "
            f"broadcasts against x of shape {tuple(z.shape)}, got {shape}: reshape it, or pass the "
            "dim along which it lies"
        )
    return value.to(z.dtype)


def parameter(
    name: str,
    value: Tensor | None,
    z: Tensor,
    axes: tuple[int, ...],
) -> Tensor | None:
    """Return a parameter of the normalised shape ready to be broadcast against ``z``."""
    if value is None:
        return None
    check_floating(name, value)
    normalized = tuple(z.shape[axis] for axis in axes)
    if tuple(value.shape) != normalized:
        raise ArgumentError(
            f"{name} must have the shape {normalized} of the normalised dimensions, "
            f"got {tuple(value.shape)}: reshape it, or pass the dim along which it lies"
        )
    return along(value, z, axes).to(z.dtype)


def along(value: Tensor, z: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Lay ``value``, whose dimensions are ``axes`` of ``z``, along them."""
    ordered = value.permute(sorted(range(len(axes)), key=axes.__getitem__))
    return ordered.reshape([n if axis in axes else 1 for axis, n in enumerate(z.shape)])


def check_witnesses(witnesses: int | Sequence[int], channels: int) -> tuple[int, ...]:
    """Return the positions of witness channels, checked; a number N means the first N."""
    if isinstance(witnesses, Integral) and not isinstance(witnesses, bool):
        count = int(witnesses)
        if not 0 <= count <= channels:
            raise ArgumentError(
                f"the number of witnesses must be from 0 to the {channels} channels, got {count}"
            )
        return tuple(range(count))
    positions: list[int] = []
    try:
        for k in cast("Sequence[Any]", witnesses):
            # Python takes True for an index.
            if isinstance(k, bool):
                raise TypeError(f"{k} is not a position")
            positions.append(operator.index(k))
    except TypeError as error:
        raise ArgumentError(
            "witnesses must be a number of channels, or their positions, integers, got "
            f"{witnesses!r}"
        ) from error
    outside = [k for k in positions if not 0 <= k < channels]
    if outside or len(set(positions)) < len(positions):
        problem = f"{outside[0]} is out of range" if outside else "one is named twice"
        raise ArgumentError(
            f"witnesses must be different channels from 0 to {channels - 1}, but {problem}: "
            f"{tuple(positions)}"
        )
    return tuple(positions)


def check_witness_tensors(witnesses: Tensor, gain: Tensor | None, channels: int) -> None:
    """Refuse witnesses and gains that are not as :func:`dynorm.functional.dyisru_general` says."""
    if (
        witnesses.ndim != 1
        or witnesses.dtype not in (torch.int32, torch.int64)
        or len(witnesses) > channels
    ):
        raise ArgumentError(
            f"witnesses must be an integer tensor (K,) with K at most the {channels} channels of "
            f"x, got {witnesses.dtype} of shape {tuple(witnesses.shape)}: give the positions of "
            "channels, each once"
        )
    # Reading the values is free on the CPU; under a tracer or a transform there are none.
    if type(witnesses) is Tensor and witnesses.is_cpu and not watched():
        check_witnesses(witnesses.tolist(), channels)
    if gain is not None:
        check_floating("gain", gain)
        if gain.shape != witnesses.shape:
            raise ArgumentError(
                f"gain must have the witnesses' shape ({len(witnesses)},), got {tuple(gain.shape)}"
            )
