"""Recover formula, axis, weight, bias and eps of a norm, by trying a copy of it on our tokens."""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from dynorm.find.tokens import CannotProbeError, TokenFunction, named_tensors, plain_copy
from dynorm.functional import mean_square, rms
from dynorm.site import NormSite
from dynorm.theory import norm_numerator

# Relative errors that rounding may leave: in float64 a module may still compute in float32 inside.
TOLERANCE = 1e-4
HALF_TOLERANCE = 3e-2

ANOTHER_DTYPE = (
    "another dtype: its output has neither the dtype of its input, nor the one that input and "
    "weight are promoted to"
)
_MIXES = "mixes tokens: the output of one token depends on other tokens"
_COMPUTED = (
    "its {} is computed: no tensor holds one number per channel, which a layer could take over, as "
    "in a norm to a learned or fixed length, or by the unbiased deviation"
)


class NotANormError(Exception):
    """A module is neither LayerNorm nor RMSNorm; the message is the reason."""


@dataclass(frozen=True)
class Formula:
    """The formula core(x) * weight + bias, and its relative error for the outputs of a function.

    There is one weight and one bias per channel.
    """

    kind: str
    weight: Tensor
    bias: Tensor
    error: float


def core(tokens: Tensor, kind: str, eps: float = 0.0) -> Tensor:
    """Return the norm without its affine part, over the last axis."""
    numerator = norm_numerator(tokens, kind)
    return numerator / rms(numerator, eps=eps, keepdim=True)


def candidate_axes(module: nn.Module, shape: tuple[int, ...]) -> list[int]:
    """Return the axes that a module may normalize over, the likeliest first.

    They are the last axis, axis 1, and any other as long as one of the module's tensors.

    Example:
        >>> candidate_axes(nn.LayerNorm(5), (2, 5, 3, 7))
        [3, 1]
    """
    rank = len(shape)
    lengths = {tensor.numel() for tensor in named_tensors(module).values()}
    axes = [rank - 1]
    if rank > 2:
        axes.append(1)
    axes += [axis for axis in range(rank) if shape[axis] in lengths]
    return [axis for axis in dict.fromkeys(axes) if shape[axis] > 1]


def recover(
    module: nn.Module,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> NormSite:
    """Find out which norm a module is, by trying a copy of it.

    The vectors of the copy are filled with random numbers first. The scale and the shift of its
    channels then identify the tensor that is the weight, and whether it is w or 1 + w; the initial
    ones and zeros would not. The site has no path.
    """
    tried: list[TokenFunction] = []
    failure = CannotProbeError("it has no axis of two channels or more")
    for axis in candidate_axes(module, shape):
        original = TokenFunction(module, shape, axis, dtype, device)
        try:
            function = _open(original)
            _require_scale_invariance(function)
            formula = _closest(function)
            if formula.error <= _tolerance(function):
                return _complete(original, function, formula)
            tried.append(function)
        except CannotProbeError as error:
            failure = error
    if not tried:
        raise NotANormError(f"cannot be probed: {failure}")
    # Over the wrong axis every norm mixes tokens; over the right one, if there is any, it does not.
    if all(map(_mixes_tokens, tried)):
        raise NotANormError(_MIXES)
    raise NotANormError(
        "neither LayerNorm nor RMSNorm: it fits neither over any axis; it may normalize groups of "
        "channels, or scale by position"
    )


def _open(original: TokenFunction, random: bool = True) -> TokenFunction:
    """Copy a module, in the widest dtype and then the smallest shape that it takes."""
    # Two of the first axis, even if the example had one: only a second token shows whether tokens
    # are independent. The other axes are short at first, but a module may insist on their sizes.
    pair = list(original.shape)
    if original.axis != 0:
        pair[0] = 2
    short = list(pair)
    for axis in range(1, len(short)):
        if axis != original.axis:
            short[axis] = min(short[axis], 3)
    shapes = dict.fromkeys([tuple(short), tuple(pair), original.shape])
    failure = CannotProbeError("nothing was tried")
    for dtype in dict.fromkeys([torch.float64, torch.float32, original.dtype]):
        # In its own dtype the copy keeps the dtype of each parameter, because they may differ.
        cast = None if dtype == original.dtype else dtype
        for shape in shapes:
            try:
                replica = plain_copy(original.module, cast, random=random)
                function = replace(original, module=replica, shape=shape, dtype=dtype)
                function(function.sample(1.0, seed=1))
            except CannotProbeError as error:
                failure = error
            except (RuntimeError, TypeError) as error:
                failure = CannotProbeError(f"no copy in {dtype}: {error}")
            else:
                return function
    raise failure


def _tolerance(function: TokenFunction) -> float:
    if function.is_half:
        return HALF_TOLERANCE
    return TOLERANCE


def _require_scale_invariance(function: TokenFunction) -> None:
    tokens = function.sample(30.0, seed=2)
    once = function(tokens)
    again = function(tokens)
    larger = function(3 * tokens)
    if not torch.equal(once.nan_to_num(), again.nan_to_num()):
        raise NotANormError(
            "random: two calls with one input differ, as with dropout in train mode"
        )
    size = _size(once)
    # Written so that NaN is refused too.
    if not _size(larger - once) <= 0.05 * size:
        raise NotANormError("not a norm: its output changes with the scale of the input")
    if _size(once - once.mean(0)) <= 1e-6 * size:
        raise NotANormError("constant: its output does not depend on the input")


def _size(tensor: Tensor) -> float:
    return float(tensor.square().mean().sqrt())


def _closest(function: TokenFunction, kinds: Sequence[str] = ("layernorm", "rmsnorm")) -> Formula:
    """Return the formula closest to a function.

    A norm's core is odd: f(x) - f(-x) depends only on the weight, and f(x) + f(-x) only on the
    bias. eps has no effect on tokens of this size, whose squares are finite even in half
    precision.
    """
    scale = 30.0 if function.is_half else 1e3
    tokens = function.sample(scale, 2, at_least=16)
    odd, even = function.odd_and_even(tokens)
    size = _size(odd + even)
    formulas = []
    for kind in kinds:
        # Least squares, column by column: weight = <z, odd> / <z, z>.
        z = core(tokens, kind)
        weight = (z * odd).sum(0) / z.square().sum(0).clamp_min(1e-30)
        bias = even.mean(0)
        error = 0.0
        if size != 0:
            error = _size(torch.stack([odd - z * weight, even - bias])) / size
        # NaN compares as neither more nor less, so it must not get as far as a comparison.
        if math.isnan(error):
            error = math.inf
        formulas.append(Formula(kind, weight, bias, error))
    return min(formulas, key=lambda formula: formula.error)


def _complete(original: TokenFunction, function: TokenFunction, formula: Formula) -> NormSite:
    """Recover the rest of a norm whose formula fits a copy with random vectors."""
    if _mixes_tokens(function):
        raise NotANormError(_MIXES)
    present = _closest(_open(original, random=False), (formula.kind,))
    if present.error > _tolerance(function):
        raise NotANormError(
            "parameters of another role: with their present values it is not a norm"
        )
    weight_name, offset = _holder(original, function, formula.weight, present.weight, (0.0, 1.0))
    bias_name, _ = _holder(original, function, formula.bias, present.bias, (0.0,))
    slack = 10 * _tolerance(function)
    if weight_name is None and float((formula.weight - 1).abs().max()) > slack:
        raise NotANormError(_COMPUTED.format("scale"))
    if bias_name is None and float(formula.bias.abs().max()) > slack:
        raise NotANormError(_COMPUTED.format("shift"))
    rank = len(original.shape)
    is_last = original.axis == rank - 1
    is_image = rank > 3 and original.axis == 1
    if not (weight_name or bias_name or is_last or is_image):
        raise NotANormError(
            f"unmarked axis: nothing shows that axis {original.axis} holds the channels"
        )
    return NormSite(
        path="",
        kind=formula.kind,
        dim=-1 if is_last else original.axis,
        normalized_shape=(original.channels,),
        eps=_eps(original, function, formula),
        weight_offset=offset,
        weight_name=weight_name,
        bias_name=bias_name,
        input_shape=original.shape,
        promote=_promotes(replace(original, shape=function.shape)),
    )


def _promotes(original: TokenFunction) -> bool:
    """Return whether the output has the dtype that input and weight are promoted to.

    A copy shows it with inputs of half precision; otherwise it has that of the input.
    """
    half = torch.bfloat16
    x = torch.ones(original.shape, dtype=half, device=original.device)
    returned = {}
    for weights in (half, torch.float32):
        # A module may refuse two dtypes.
        with suppress(RuntimeError, TypeError, ValueError, NotImplementedError):
            returned[weights] = plain_copy(original.module, weights)(x).dtype
    if returned.get(half, half) != half:
        raise NotANormError(ANOTHER_DTYPE)
    return returned.get(torch.float32) == torch.float32


def _holder(
    original: TokenFunction,
    function: TokenFunction,
    random_values: Tensor,
    true_values: Tensor,
    offsets: tuple[float, ...],
) -> tuple[str | None, float]:
    """Find the tensor that holds a weight or bias, and the number that the norm adds to it.

    It must explain the values of the random copy and those of the original.
    """
    slack = 10 * _tolerance(function)
    loose = slack * (1 + _size(true_values))
    originals = named_tensors(original.module)
    for name, tensor in named_tensors(function.module).items():
        if tensor.numel() != random_values.numel() or not tensor.is_floating_point():
            continue
        random = tensor.detach().cpu().double().flatten()
        true = originals[name].detach().cpu().double().flatten()
        for offset in offsets:
            fits_random = torch.allclose(random + offset, random_values, 0, slack)
            if fits_random and torch.allclose(true + offset, true_values, slack, loose):
                return name, offset
    return None, 0.0


def _eps(original: TokenFunction, function: TokenFunction, formula: Formula) -> float:
    """Measure eps, and return the likeliest number within the error of the measurement."""
    # In the module's dtype, because eps may depend on it: torch.nn.RMSNorm(eps=None) takes the
    # machine's. Only float16 may be too coarse to show any.
    replica = plain_copy(original.module, random=True)
    in_its_dtype = replace(function, module=replica, dtype=original.dtype)
    eps = _shown_eps(in_its_dtype, formula) or _shown_eps(function, formula)
    # The likeliest first: a number of the module called eps, another number of the module, a
    # machine's eps, the plain decimal.
    named: list[tuple[str, Any]] = []
    for part in original.module.modules():
        named += vars(part).items()
    named.sort(key=lambda item: "eps" not in item[0])
    likely = [value for _, value in named if type(value) is float]
    likely += [torch.finfo(dtype).eps for dtype in (original.dtype, torch.float32)]
    likely.append(float(f"{eps:.1e}"))
    allowed = 5e-2 if in_its_dtype.is_half else 1e-3
    for value in likely:
        if abs(value - eps) <= allowed * eps:
            return value
    return eps


def _shown_eps(function: TokenFunction, formula: Formula) -> float:
    """Measure the number added to the mean square in the root, from smaller and smaller tokens.

    It is 0.0 if they show none. With q = |f(x)| / |weight * x| it is 1/q^2 - mean(x^2), read where
    it outweighs the mean square. For a number outside the root, or a lower bound of the root, it is
    the eps with the same limit for small tokens.
    """
    unit = core(function.sample(1.0, seed=3), "layernorm")
    eps = 0.0
    # Powers of two scale without rounding; those of float16 end early.
    last = 13 if function.dtype == torch.float16 else 51
    for exponent in range(1, last, 3):
        tokens = (unit * 2.0**-exponent).to(function.dtype).double()
        numerator = norm_numerator(tokens, formula.kind)
        squares = mean_square(numerator)
        scaled = formula.weight * numerator
        odd, _ = function.odd_and_even(tokens)
        q = (odd * scaled).sum(-1) / scaled.square().sum(-1)
        square = float(squares.median())
        shown = float((q**-2 - squares).median())
        if not math.isfinite(shown):
            return eps
        eps = shown if shown > 0.01 * square else 0.0
        if eps > 16 * square:
            return eps
    return eps


def _mixes_tokens(function: TokenFunction) -> bool:
    if function.count == 1:
        return False
    tokens = function.sample(30.0, seed=4)[: function.count]
    changed = tokens.clone()
    changed[0] = 50 - 2 * tokens[0].flip(0)
    before = function(tokens)[1:]
    after = function(changed)[1:]
    return not _size(after - before) <= _tolerance(function) * _size(before)
