"""Formula, axis, weight, bias and eps of a norm, recovered from the outputs of a copy of it for our own tokens."""

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from dynorm.dtypes import INPUT, fitting_rule
from dynorm.errors import ModelError
from dynorm.find.tokens import (
    CannotProbeError,
    TokenFunction,
    named_tensors,
    plain_arithmetic,
    plain_copy,
)
from dynorm.site import NormSite
from dynorm.theory import token_deviation, token_moment

# Relative errors that rounding may leave: in float64 a module may still compute in float32 inside.
TOLERANCE = 1e-4
HALF_TOLERANCE = 3e-2

_MIXES = "mixes tokens: the output of one token depends on other tokens"


class NotANormError(Exception):
    """A module is neither LayerNorm nor RMSNorm; the message is the reason."""


@dataclass(frozen=True)
class Formula:
    """core(x) * weight + bias, with one weight and one bias per channel, and its relative error at a function."""

    kind: str
    weight: Tensor
    bias: Tensor
    error: float


def core(tokens: Tensor, kind: str, eps: float = 0.0) -> Tensor:
    """Return the norm without its affine part, over the last axis."""
    moment = token_moment(tokens, kind, keepdim=True)
    return token_deviation(tokens, kind) / (moment + eps).sqrt()


def candidate_axes(module: nn.Module, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return the groups of axes that a module may normalize over, the likeliest first.

    The last axis, axis 1, any other as long as one of the module's tensors, and trailing axes
    together where a tensor or an attribute of the module has just these sizes.

    Example:
        >>> candidate_axes(nn.LayerNorm((5, 7)), (2, 3, 5, 7))
        [(3,), (1,), (2, 3)]
    """
    rank = len(shape)
    lengths = {tensor.numel() for tensor in named_tensors(module).values()}
    single = [
        rank - 1,
        *([1] if rank > 2 else []),
        *(axis for axis in range(rank) if shape[axis] in lengths),
    ]
    groups = [(axis,) for axis in dict.fromkeys(single) if shape[axis] > 1]
    declared = set(_declared_shapes(module))
    return groups + [
        tuple(range(axis, rank)) for axis in range(rank - 1) if shape[axis:] in declared
    ]


def _declared_shapes(module: nn.Module) -> Iterator[tuple[int, ...]]:
    yield from (tuple(parameter.shape) for parameter in module.parameters())
    for part in module.modules():
        for value in part.__dict__.values():
            if (
                isinstance(value, (tuple, list))
                and value
                and all(type(size) is int for size in value)
            ):
                yield tuple(value)


def recover(
    module: nn.Module, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> NormSite:
    """Find out which norm a module is, by trying a copy of it.

    The vectors of the copy are filled with random numbers first. What then scales and shifts the
    channels tells which tensor is the weight, and whether it is w or 1 + w, where the initial ones
    and zeros would tell nothing. The site has no path.
    """
    tried: list[TokenFunction] = []
    failure = CannotProbeError("it has no axis of two channels or more")
    for axes in candidate_axes(module, shape):
        given = TokenFunction(module, shape, axes, dtype, device)
        try:
            function = _open(given)
            _require_scale_invariance(function)
            formula = _closest(function)
            if formula.error <= _tolerance(function):
                return _complete(given, function, formula)
            tried.append(function)
        except CannotProbeError as error:
            failure = error
    raise NotANormError(_explain(tried) if tried else f"cannot be probed: {failure}")


def depends_on_sign(
    module: nn.Module, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> bool:
    """Return whether the output of a copy of a module changes with the sign of its input.

    NotANormError is raised if the copy cannot be tried.
    """
    try:
        function = _open(TokenFunction(module, shape, (len(shape) - 1,), dtype, device))
        odd, even = function.odd_and_even(function.sample(30.0, seed=6))
    except CannotProbeError as error:
        raise NotANormError(f"cannot be probed: {error}") from error
    return _size(odd) > 1e-6 * _size(even) + 1e-30


def measured_affine(given: TokenFunction, kind: str) -> tuple[Tensor, Tensor]:
    """Measure the weight and the bias of a norm of this kind from its outputs, whatever holds them; flat float64."""
    try:
        function = _open(given, random=False)
        formula = _closest(function, (kind,))
    except CannotProbeError as error:
        raise NotANormError(f"cannot be probed: {error}") from error
    if formula.error > _tolerance(function):
        raise NotANormError("parameters of another role: with their present values it is no norm")
    return formula.weight, formula.bias


def _open(given: TokenFunction, random: bool = True) -> TokenFunction:
    """Copy a module, in the widest dtype and then the smallest shape that it takes."""
    failure, shape = CannotProbeError("nothing was tried"), given.shape
    # Two of the first axis, even if the example had one: independence of tokens shows only between
    # tokens. The other axes are short at first; a module may insist on their sizes.
    pair = shape if 0 in given.axes else (2, *shape[1:])
    small = tuple(
        size if axis in given.axes or axis == 0 else min(size, 3) for axis, size in enumerate(pair)
    )
    for wide in dict.fromkeys([torch.float64, torch.float32, given.dtype]):
        for shape in dict.fromkeys([small, pair, given.shape]):
            try:
                # In its own dtype the copy keeps that of each parameter, for they may differ.
                replica = plain_copy(
                    given.module, None if wide == given.dtype else wide, random=random
                )
                function = replace(given, module=replica, shape=shape, dtype=wide)
                function(function.sample(1.0, seed=1))
            except CannotProbeError as error:
                failure = error
            except (RuntimeError, TypeError) as error:
                failure = CannotProbeError(f"no copy in {wide}: {error}")
            else:
                return function
    raise failure


def _tolerance(function: TokenFunction) -> float:
    return HALF_TOLERANCE if function.is_half else TOLERANCE


def _require_scale_invariance(function: TokenFunction) -> None:
    tokens = function.sample(30.0, seed=2)
    once, again, larger = function(tokens), function(tokens), function(3 * tokens)
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


def _closest(
    function: TokenFunction, kinds: Sequence[str] = ("layernorm", "rmsnorm"), positions: int = 1
) -> Formula:
    """Return the formula that is closest to a function, its constants repeated after so many positions.

    A norm's core is odd: f(x) - f(-x) shows the weight alone and f(x) + f(-x) the bias alone. The
    tokens are so large that no eps shows, and their squares finite in half precision.
    """
    count, channels = function.count, math.prod(function.sizes)
    tokens = function.sample(
        30.0 if function.is_half else 1e3, 2, at_least=16 if positions == 1 else 12 * count
    )
    odd, even = (part.reshape(-1, positions * channels) for part in function.odd_and_even(tokens))
    size = _size(odd + even)
    found = []
    for kind in kinds:
        # Least squares, column by column: weight = <z, odd> / <z, z>.
        z = core(tokens, kind).reshape(odd.shape)
        weight, bias = (z * odd).sum(0) / z.square().sum(0).clamp_min(1e-30), even.mean(0)
        error = _size(torch.stack([odd - z * weight, even - bias])) / size if size != 0 else 0.0
        # NaN compares as neither more nor less, so it must not get as far as a comparison.
        found.append(Formula(kind, weight, bias, error if error == error else float("inf")))
    return min(found, key=lambda formula: formula.error)


def _complete(given: TokenFunction, function: TokenFunction, formula: Formula) -> NormSite:
    """Recover the rest of a norm whose formula fits a copy with random vectors."""
    if _mixes_tokens(function):
        raise NotANormError(_MIXES)
    weight, bias = measured_affine(given, formula.kind)
    weight_name, offset = _holder(given, function, formula.weight, weight, (0.0, 1.0))
    bias_name, _ = _holder(given, function, formula.bias, bias, (0.0,))
    slack = 10 * _tolerance(function)
    has_weight = float((formula.weight - 1).abs().max()) > slack
    has_bias = float(formula.bias.abs().max()) > slack
    shape, axes, sizes = given.shape, given.axes, given.sizes
    is_last = axes[-1] == len(shape) - 1
    is_usual = (
        is_last or (len(shape) > 3 and axes == (1,)) or sizes in set(_declared_shapes(given.module))
    )
    if not (weight_name or bias_name or is_usual):
        raise NotANormError(f"unmarked axis: nothing shows that axis {axes[0]} holds the channels")
    dims = tuple(axis - len(shape) for axis in axes) if is_last else axes
    return NormSite(
        path="",
        kind=formula.kind,
        dim=dims if len(dims) > 1 else dims[0],
        normalized_shape=sizes,
        eps=_eps(given, function, formula),
        has_weight=has_weight,
        has_bias=has_bias,
        weight_offset=offset if has_weight else 0.0,
        weight_name=weight_name if has_weight else None,
        bias_name=bias_name if has_bias else None,
        input_shape=shape,
        output_rule=_output_rule(replace(given, shape=function.shape)),
    )


# Of the input and of the parameters: alike as in a whole model, and mixed as after a cast of a part.
_DTYPE_PAIRS = (
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.float64, torch.float64),
)
# These decide only between rules that fit the others: T5's norm has one rule for weights of half
# precision, and another one for float32 and float64.
_WIDE_PAIRS = (
    (torch.float64, torch.float32),
    (torch.float32, torch.float64),
)


def _output_rule(given: TokenFunction) -> str | None:
    """Recover how a norm chooses the dtype of its output, from copies in several dtypes; None for its input's.

    A pair of dtypes on which it raises tells nothing. A choice that no rule describes is left to
    the dtype that the run shows.
    """
    returned: dict[tuple[torch.dtype, torch.dtype], torch.dtype] = {}
    for pair in (*_DTYPE_PAIRS, *_WIDE_PAIRS):
        in_dtype, own_dtype = pair
        x = torch.ones(given.shape, dtype=in_dtype, device=given.device)
        with suppress(RuntimeError, TypeError, ValueError, NotImplementedError):
            returned[pair] = plain_copy(given.module, own_dtype)(x).dtype
    usual = {pair: dtype for pair, dtype in returned.items() if pair not in _WIDE_PAIRS}
    rule = fitting_rule(returned) or fitting_rule(usual)
    return None if rule == INPUT else rule


def _holder(
    given: TokenFunction,
    function: TokenFunction,
    random: Tensor,
    true: Tensor,
    offsets: tuple[float, ...],
) -> tuple[str | None, float]:
    """Find the tensor that explains both the random copy's values and the true ones, and the number added to it."""
    originals, slack = named_tensors(given.module), 10 * _tolerance(function)
    for name, tensor in named_tensors(function.module).items():
        if tensor.numel() != random.numel() or not tensor.is_floating_point():
            continue
        for offset in offsets:
            filled, held = (
                t.detach().cpu().double().flatten() + offset for t in (tensor, originals[name])
            )
            loose = slack * (1 + _size(true))
            if torch.allclose(filled, random, 0, slack) and torch.allclose(
                held, true, slack, loose
            ):
                return name, offset
    return None, 0.0


def _eps(given: TokenFunction, function: TokenFunction, formula: Formula) -> float:
    """Measure eps, and take the number of the module, or the plain decimal, that is as near as measuring can tell."""
    # In the module's own dtype, for eps may depend on it: torch.nn.RMSNorm(eps=None) takes the
    # machine's. Only float16 may be too coarse to show any.
    own = replace(function, module=plain_copy(given.module, random=True), dtype=given.dtype)
    eps = _shown_eps(own, formula) or _shown_eps(function, formula)
    named = [
        (n, v)
        for part in given.module.modules()
        for n, v in part.__dict__.items()
        if type(v) is float
    ]
    attributes = [value for name, value in sorted(named, key=lambda pair: "eps" not in pair[0])]
    machine = [torch.finfo(given.dtype).eps, torch.finfo(torch.float32).eps]
    allowed = 5e-2 if own.is_half else 1e-3
    near = (
        value
        for value in [*attributes, *machine, float(f"{eps:.1e}")]
        if abs(value - eps) <= allowed * eps
    )
    return next(near, eps)


def _shown_eps(function: TokenFunction, formula: Formula) -> float:
    """Measure the number beside the mean square in the root, from ever smaller tokens; 0.0 if they show none.

    With q = |f(x)| / |weight * x| it is 1/q^2 - mean(x^2), read where it outweighs the mean square.
    A number outside the root, or one that bounds it from below, gives the eps with the same limit
    for small tokens.
    """
    unit = core(function.sample(1.0, seed=3), "layernorm")
    eps = 0.0
    # Powers of two scale without rounding; those of float16 end early.
    for exponent in range(1, 13 if function.dtype == torch.float16 else 51, 3):
        tokens = (unit * 2.0**-exponent).to(function.dtype).double()
        squares = token_moment(tokens, formula.kind)
        scaled = formula.weight * token_deviation(tokens, formula.kind)
        q = (function.odd_and_even(tokens)[0] * scaled).sum(-1) / scaled.square().sum(-1)
        square, found = float(squares.median()), float((q**-2 - squares).median())
        if not abs(found) < float("inf"):
            return eps
        eps = found if found > 0.01 * square else 0.0
        if eps > 16 * square:
            return eps
    return eps


def _mixes_tokens(function: TokenFunction) -> bool:
    if function.count == 1:
        return False
    tokens = function.sample(30.0, seed=4)[: function.count]
    changed = tokens.clone()
    changed[0] = 50 - 2 * tokens[0].flip(0)
    before, after = function(tokens)[1:], function(changed)[1:]
    return not _size(after - before) <= _tolerance(function) * _size(before)


def _explain(tried: list[TokenFunction]) -> str:
    """Say why functions of a module, all scale-invariant, are norms over none of the axes tried."""
    # Over the wrong axis every norm mixes tokens; over the right one, if there is any, it does not.
    apart = [function for function in tried if not _mixes_tokens(function)]
    if not apart:
        return _MIXES
    touched = []
    for function in apart:
        if 0 not in function.axes:
            by_position = _closest(function, positions=function.count // function.shape[0])
            if by_position.error <= _tolerance(function):
                return "scale by position: its weight differs between positions, not only between channels"
        # How many outputs of a token change with its first channel.
        tokens = function.sample(30.0, seed=5)
        changed = tokens.clone()
        changed[:, 0] += 100
        difference = (function(changed) - function(tokens)).abs().amax(0)
        touched.append(int((difference > 1e-4 * difference.max()).sum()))
    if 1 < min(touched) < max(math.prod(function.sizes) for function in apart):
        return f"groups: it normalizes groups of {min(touched)} channels"
    return "neither LayerNorm nor RMSNorm: it fits neither over any axis"


def affine_of(module: nn.Module, site: NormSite) -> tuple[Tensor | None, Tensor | None]:
    """Return the weight and the bias that a norm applies to its normalized channels.

    They are detached copies of shape `site.normalized_shape` on the module's device, None for a
    missing one. 1 + w comes in float32 at least: norms that scale so add in float32, and rounded
    to bfloat16 1 + w would lose most digits of a small w. A factor that no tensor holds, such as
    the 1/sqrt(C) of a division by the L2 norm, is measured. ModelError is raised if the site was
    refused, or the module is not the norm that was found.
    """
    if site.refused is not None:
        raise ModelError(f"the site {site.path!r} must be a norm, but was refused: {site.refused}")
    weight, bias = (_held(module, site, name) for name in (site.weight_name, site.bias_name))
    if weight is not None and site.weight_offset:
        weight = weight.to(torch.promote_types(weight.dtype, torch.float32)) + site.weight_offset
    if (site.has_weight and weight is None) or (site.has_bias and bias is None):
        tensors = [
            *named_tensors(module).values(),
            torch.empty(0, dtype=torch.float32, device="cpu"),
        ]
        like = next(tensor for tensor in tensors if tensor.is_floating_point())
        given = TokenFunction(module, site.input_shape, channel_axes(site), like.dtype, like.device)
        try:
            with plain_arithmetic(module):
                flat = measured_affine(given, site.kind)
        except NotANormError as error:
            raise ModelError(
                f"the module at {site.path!r} must be the norm found there, but: {error}"
            ) from error
        measured = [
            part.reshape(site.normalized_shape).to(like.device, like.dtype) for part in flat
        ]
        weight = measured[0] if site.has_weight and weight is None else weight
        bias = measured[1] if site.has_bias and bias is None else bias
    return weight, bias


def channel_axes(site: NormSite) -> tuple[int, ...]:
    """Return the axes of the site's channels in its input, counted from the front."""
    return tuple(dim % len(site.input_shape) for dim in site.dims)


def _held(module: nn.Module, site: NormSite, name: str | None) -> Tensor | None:
    if name is None:
        return None
    tensor = named_tensors(module).get(name)
    if tensor is None:
        raise ModelError(
            f"the module at {site.path!r} must hold {name!r}, as when it was found, but does not"
        )
    if tensor.numel() != torch.Size(site.normalized_shape).numel():
        raise ModelError(
            f"the sites must be this model's, but {name!r} of {site.path!r} has shape "
            f"{tuple(tensor.shape)} and not "
            f"{site.normalized_shape}: call find_norms again"
        )
    return tensor.detach().clone().reshape(site.normalized_shape)
