"""Formula, axis, weight, bias and eps of a norm, recovered from what a copy of it makes of our own tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dynorm.find.formula import (
    KINDS,
    Fit,
    core,
    fit_norm,
    large_parts,
    measure_eps,
    regress,
    root_mean_square,
    several_tokens,
    tolerance,
)
from dynorm.find.tokens import (
    CannotProbeError,
    Packing,
    TokenFunction,
    packings,
    plain_copy,
    randomize_,
    sample_tokens,
)


class NotANormError(Exception):
    """A module is neither LayerNorm nor RMSNorm; the message is the reason."""


@dataclass(frozen=True)
class Recovery:
    """What a norm was found to be; the fields are those of `NormSite`, the axes counted from the front."""

    kind: str
    axes: tuple[int, ...]
    normalized_shape: tuple[int, ...]
    eps: float
    has_weight: bool
    has_bias: bool
    weight_name: str | None
    bias_name: str | None
    weight_offset: float


def candidate_axes(module: nn.Module, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Groups of axes that a module may normalize over, the likeliest first.

    The last axis, axis 1, any other as long as one of the module's tensors, and trailing axes together where a tensor
    or an attribute of the module has just these sizes.

    Example:
        >>> candidate_axes(nn.LayerNorm((5, 7)), (2, 3, 5, 7))
        [(3,), (1,), (2, 3)]
    """
    rank = len(shape)
    lengths = {tensor.numel() for tensor in [*module.parameters(), *module.buffers()]}
    single = [rank - 1, *([1] if rank > 2 else []), *(axis for axis in range(rank) if shape[axis] in lengths)]
    groups = [(axis,) for axis in dict.fromkeys(single) if shape[axis] > 1]
    declared = set(_declared_shapes(module))
    return groups + [tuple(range(axis, rank)) for axis in range(rank - 1) if shape[axis:] in declared]


def _declared_shapes(module: nn.Module) -> Iterator[tuple[int, ...]]:
    yield from (tuple(parameter.shape) for parameter in module.parameters())
    for part in module.modules():
        for value in part.__dict__.values():
            if isinstance(value, (tuple, list)) and value and all(type(size) is int for size in value):
                yield tuple(value)


def recover(module: nn.Module, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Recovery:
    """Finds out which norm a module is, by trying a copy of it.

    The vectors of the copy are filled with random numbers first. What then scales and shifts the channels tells which
    tensor is the weight, and whether it is w or 1 + w, where the initial ones and zeros would tell nothing.

    Args:
        module: The module; it is only read.
        shape: Shape of an input it takes.
        dtype: Element type of this input.
        device: Its device.

    Returns:
        What was recovered.

    Raises:
        NotANormError: If the module is no LayerNorm or RMSNorm over any of the candidate axes.

    Example:
        >>> found = recover(nn.LayerNorm(8), (2, 8), torch.float32, torch.device("cpu"))
        >>> found.kind, found.eps, found.weight_name, found.bias_name
        ('layernorm', 1e-05, 'weight', 'bias')
    """
    tried: list[TokenFunction] = []
    failure = CannotProbeError("it has no axis of two channels or more")
    for axes in candidate_axes(module, shape):
        try:
            function = _open(module, shape, axes, dtype, device)
            _require_scale_invariance(function)
            fit = fit_norm(function)
            if fit is not None:
                return _complete(module, function, fit, dtype)
        except CannotProbeError as error:
            failure = error
            continue
        tried.append(function)
    raise NotANormError(_explain(tried) if tried else f"cannot be probed: {failure}")


def measured_affine(
    module: nn.Module,
    packing: Packing,
    kind: str,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """Weight and bias of a norm as its outputs show them, whatever holds them.

    Args:
        module: The norm; it is only read.
        packing: Shape of an input it takes, and its channel axes.
        kind: "layernorm" or "rmsnorm".
        dtype: Element type of the input.
        device: Its device.

    Returns:
        Two flat float64 tensors on the CPU.

    Raises:
        NotANormError: If the module does not fit the kind.

    Example:
        >>> norm = nn.RMSNorm(2, elementwise_affine=False)
        >>> packing = Packing((2, 2), axes=(1,))
        >>> weight, _ = measured_affine(norm, packing, "rmsnorm", torch.float32, torch.device("cpu"))
        >>> weight.round(decimals=6)
        tensor([1., 1.], dtype=torch.float64)
    """
    try:
        fit = fit_norm(_open(module, packing.shape, packing.axes, dtype, device, random=False), (kind,))
    except CannotProbeError as error:
        raise NotANormError(f"cannot be probed: {error}") from error
    if fit is None:
        raise NotANormError("parameters of another role: with their present values it is no norm")
    return fit.weight, fit.bias


def _open(
    module: nn.Module,
    shape: tuple[int, ...],
    axes: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    random: bool = True,
) -> TokenFunction:
    """A copy as a function of tokens, in the widest dtype and then the smallest shape that it takes."""
    failure = CannotProbeError("nothing was tried")
    for wide in dict.fromkeys([torch.float64, torch.float32, dtype]):
        try:
            # In its own dtype the copy keeps that of each parameter, for they may differ.
            replica = plain_copy(module, None if wide == dtype else wide)
        except (RuntimeError, TypeError) as error:
            failure = CannotProbeError(f"no copy in {wide}: {error}")
            continue
        for packing in packings(shape, axes):
            function = TokenFunction(randomize_(replica) if random else replica, packing, wide, device)
            try:
                function(sample_tokens(packing.count, packing.channels, 1.0, seed=1))
            except CannotProbeError as error:
                failure = error
                continue
            return function
    raise failure


def _require_scale_invariance(function: TokenFunction) -> None:
    tokens = several_tokens(function, 30.0, seed=2)
    once, again, larger = function(tokens), function(tokens), function(3 * tokens)
    if not torch.equal(once.nan_to_num(), again.nan_to_num()):
        raise NotANormError("random: two calls with one input differ, as with dropout in train mode")
    size = root_mean_square(once)
    # Written so that NaN is refused too.
    if not root_mean_square(larger - once) <= 0.05 * size:
        raise NotANormError("not a norm: its output changes with the scale of the input")
    if root_mean_square(once - once.mean(0)) <= 1e-6 * size:
        raise NotANormError("constant: its output does not depend on the input")


def _complete(module: nn.Module, function: TokenFunction, fit: Fit, dtype: torch.dtype) -> Recovery:
    if _mixes_tokens(function):
        raise NotANormError(_MIXES)
    packing = function.packing
    weight, bias = measured_affine(module, packing, fit.kind, dtype, function.device)
    slack = 10 * tolerance(function)
    has_weight = float((fit.weight - 1).abs().max()) > slack
    has_bias = float(fit.bias.abs().max()) > slack
    weight_name, offset = _holder(module, function.module, fit.weight, weight, (0.0, 1.0), slack)
    bias_name, _ = _holder(module, function.module, fit.bias, bias, (0.0,), slack)
    if not (weight_name or bias_name or _is_channel_axis(module, packing)):
        raise NotANormError(f"unmarked axis: nothing shows that axis {packing.axes[0]} holds the channels")
    return Recovery(
        kind=fit.kind,
        axes=packing.axes,
        normalized_shape=packing.channel_sizes,
        eps=_eps(module, function, fit, dtype),
        has_weight=has_weight,
        has_bias=has_bias,
        weight_name=weight_name if has_weight else None,
        bias_name=bias_name if has_bias else None,
        weight_offset=offset if has_weight else 0.0,
    )


def _is_channel_axis(module: nn.Module, packing: Packing) -> bool:
    """Whether an axis is that of the channels although no vector of the module says so: as in images, for one."""
    rank = len(packing.shape)
    if packing.axes[-1] == rank - 1 or (rank > 3 and packing.axes == (1,)):
        return True
    return packing.channel_sizes in set(_declared_shapes(module))


def _holder(
    module: nn.Module,
    replica: nn.Module,
    random: Tensor,
    true: Tensor,
    offsets: tuple[float, ...],
    slack: float,
) -> tuple[str | None, float]:
    """The tensor that explains both the random copy's values and the true ones, and what is added to it."""
    originals = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for name, tensor in [*replica.named_parameters(), *replica.named_buffers()]:
        if tensor.numel() != random.numel() or not tensor.is_floating_point():
            continue
        for offset in offsets:
            filled, held = (t.detach().cpu().double().flatten() + offset for t in (tensor, originals[name]))
            loose = slack * (1 + root_mean_square(true))
            if torch.allclose(filled, random, 0, slack) and torch.allclose(held, true, slack, loose):
                return name, offset
    return None, 0.0


def _eps(module: nn.Module, function: TokenFunction, fit: Fit, dtype: torch.dtype) -> float:
    # In the module's own dtype, for eps may depend on it: torch.nn.RMSNorm(eps=None) takes the machine's. Only
    # float16 may be too coarse to show any.
    own = TokenFunction(randomize_(plain_copy(module)), function.packing, dtype, function.device)
    eps = measure_eps(own, fit) or measure_eps(function, fit)
    machine = [torch.finfo(dtype).eps, torch.finfo(torch.float32).eps]
    allowed = 1e-3 if dtype in (torch.float32, torch.float64) else 5e-2
    for value in [*_float_attributes(module), *machine, float(f"{eps:.1e}")]:
        if abs(value - eps) <= allowed * eps:
            return value
    return eps


def _float_attributes(module: nn.Module) -> list[float]:
    """Numbers that the module and its parts hold, those called eps first."""
    named = [(name, v) for part in module.modules() for name, v in part.__dict__.items() if type(v) is float]
    return [value for name, value in sorted(named, key=lambda pair: "eps" not in pair[0])]


_MIXES = "mixes tokens: the output of one token depends on other tokens"


def _mixes_tokens(function: TokenFunction) -> bool:
    if function.packing.count == 1:
        return False
    tokens = several_tokens(function, 30.0, seed=4)[: function.packing.count]
    changed = tokens.clone()
    changed[0] = 50 - 2 * tokens[0].flip(0)
    before, after = function(tokens)[1:], function(changed)[1:]
    return not root_mean_square(after - before) <= tolerance(function) * root_mean_square(before)


def _explain(tried: list[TokenFunction]) -> str:
    """Why functions of a module, all scale-invariant, are norms over none of the axes tried."""
    # Over the wrong axis every norm mixes tokens; over the right one, if there is any, it does not.
    apart = [function for function in tried if not _mixes_tokens(function)]
    if not apart:
        return _MIXES
    if any(_fits_by_position(function) for function in apart):
        return "scale by position: its weight differs between positions, not only between channels"
    touched = min(_touched_channels(function) for function in apart)
    if 1 < touched < max(function.packing.channels for function in apart):
        return f"groups: it normalizes groups of {touched} channels"
    return "neither LayerNorm nor RMSNorm: it fits neither over any axis"


def _fits_by_position(function: TokenFunction) -> bool:
    packing = function.packing
    if 0 in packing.axes:
        return False
    tokens, odd, even = large_parts(function, at_least=12 * packing.count)
    rows = (-1, packing.count // packing.shape[0] * packing.channels)
    fits = [regress(core(tokens, k).reshape(rows), odd.reshape(rows), even.reshape(rows), k) for k in KINDS]
    return min(fit.error for fit in fits) <= tolerance(function)


def _touched_channels(function: TokenFunction) -> int:
    """How many outputs of a token change with its first channel."""
    tokens = several_tokens(function, 30.0, seed=5)
    changed = tokens.clone()
    changed[:, 0] += 100
    difference = (function(changed) - function(tokens)).abs().amax(0)
    return int((difference > 1e-4 * difference.max()).sum())
