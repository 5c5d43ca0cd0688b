r"""The mathematics as pure functions: the norms, and the point-wise functions that replace them.

Everything else in dynorm is tested against this file. All functions compute in at least float32.
They raise :class:`dynorm.errors.ArgumentError` when an argument is outside its domain. C is the number of
normalised elements, the product of ``x.shape[d]`` over ``dim``. Shared arguments are explained
once: those of the statistics at :func:`rms`, of the norms at :func:`layer_norm`, of the point-wise
functions at :func:`dyisru_general`.

A constant of a point-wise function (``alpha``, ``beta``, ``shift``, ``slope``, ``scale``,
``center``) is a float or a floating point tensor: of shape (1,), of the normalised shape
``[x.shape[d] for d in dim]``, or with as many dimensions as ``x`` and broadcast against it, as one
constant per token is. ``weight`` and ``bias`` have the normalised shape. The values of tensors are
validated only on the CPU, to avoid waiting for a device.

Every point-wise function is put together in the same way, from ``u = x - center``:

.. math:: y = \mathrm{weight} \cdot \mathrm{scale} \cdot f(u) + \mathrm{bias}

With witness channels, a set K of chosen channels, beta depends on the token:

.. math:: \beta_i(x) = \beta + \sum_{k \in K, k \neq i} g_k u_k^2

DyISRU uses this value as its beta. The other functions keep the term k = i in the sum, and use
:math:`1 / \sqrt{\beta}` as their slope at 0. With K empty they are the functions of one channel,
bit for bit. DyISRU with all channels in K, g = 1, :math:`\beta = C \varepsilon`, center 0 and scale
:math:`\sqrt{C}` is RMSNorm, exactly. RMSNorm over some channels is pRMSNorm (arXiv 1910.07467).

Equation numbers are those of arXiv 2503.21708; "the note" is "LayerNorm is centring, then RMSNorm,
then the bias".
"""

import math
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from dynorm.arguments import (
    MOST_CHOSEN,
    Axes,
    Constant,
    check_not_negative,
    check_witness_tensors,
    clamped,
    constant,
    count,
    parameter,
    resolve,
)
from dynorm.errors import ArgumentError

__all__ = [
    "center",
    "centering_matrix",
    "derf",
    "dyisru",
    "dyisru_general",
    "dyt",
    "isru",
    "layer_norm",
    "linear",
    "mean_square",
    "rms",
    "rms_norm",
    "scaled_dyt",
]


def mean_square(x: Tensor, dim: Axes = -1, keepdim: bool = False) -> Tensor:
    r"""Return the mean of squares, the only statistic of RMSNorm (the note).

    .. math:: \mathrm{MS}(x) = \frac{1}{C} \sum_k x_k^2

    Arguments, shape and dtype are those of :func:`rms`.

    Example:
        >>> mean_square(torch.tensor([3.0, 4.0]))
        tensor(12.5000)
    """
    z, axes = resolve(x, dim)
    return (z * z).mean(axes, keepdim).to(x.dtype)


def rms(
    x: Tensor,
    dim: Axes = -1,
    eps: float = 0.0,
    keepdim: bool = False,
) -> Tensor:
    r"""Return the root mean square, by which RMSNorm divides (the note).

    .. math:: \mathrm{RMS}(x) = \sqrt{\mathrm{MS}(x) + \varepsilon}

    Args:
        x: Floating point tensor of any shape.
        dim: The normalised dimension, or several.
        eps: Added inside the root, not negative.
        keepdim: Whether the normalised dimensions stay, with size 1.

    Returns:
        The shape of ``x`` without ``dim`` (or with size 1 there), the dtype of ``x``.

    Example:
        >>> rms(torch.tensor([1.0, 7.0]))
        tensor(5.)
    """
    z, _ = resolve(x, dim)
    check_not_negative("eps", eps)
    return torch.sqrt(mean_square(z, dim, keepdim) + eps).to(x.dtype)


def center(x: Tensor, dim: Axes = -1) -> Tensor:
    r"""Subtract the mean over ``dim`` (eq. 1; c(x) of the note); the shape and dtype stay.

    .. math:: c(x) = x - \mu = x \left(I - \tfrac{1}{C} 1^\top 1\right)

    Example:
        >>> center(torch.tensor([1.0, 2.0, 6.0]))
        tensor([-2., -1.,  3.])
    """
    z, axes = resolve(x, dim)
    return (z - z.mean(axes, keepdim=True)).to(x.dtype)


def centering_matrix(
    channels: int,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    r"""Return the matrix that centres a row vector (the note).

    .. math:: I - \tfrac{1}{C} 1^\top 1

    It can be folded into the linear map before it. It is a symmetric projection of shape (C, C),
    with C at least 1, and of torch's default dtype and device if these are None.

    Example:
        >>> centering_matrix(2)
        tensor([[ 0.5000, -0.5000],
                [-0.5000,  0.5000]])
    """
    if channels < 1:
        raise ArgumentError(
            f"channels must be at least 1, got {channels}: give the number of channels"
        )
    return torch.eye(channels, dtype=dtype, device=device) - 1 / channels


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    dim: Axes = -1,
) -> Tensor:
    r"""Return LayerNorm, written as centring, then RMSNorm, then the bias (eq. 1-3; the note).

    .. math:: \mathrm{LN}(x) = \mathrm{RMSNorm}(c(x)) + \mathrm{bias}
        = \frac{x - \mu}{\sqrt{\sigma^2 + \varepsilon}} \odot \mathrm{weight} + \mathrm{bias}

    Args:
        x: Floating point tensor of any shape.
        weight: Factor of shape ``[x.shape[d] for d in dim]``, or None for 1.
        bias: Offset of the same shape, or None for 0.
        eps: Added to the variance, not negative.
        dim: The normalised dimension, or several.

    Returns:
        The shape and dtype of ``x``.

    Example:
        >>> layer_norm(torch.tensor([1.0, 2.0, 6.0]), eps=0.0)
        tensor([-0.9258, -0.4629,  1.3887])
    """
    z, _ = resolve(x, dim)
    return rms_norm(center(z, dim), weight, bias, eps, dim).to(x.dtype)


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    dim: Axes = -1,
) -> Tensor:
    r"""Return RMSNorm: LayerNorm without centring (the note).

    .. math:: \mathrm{RMSNorm}(x) = \frac{x}{\sqrt{\mathrm{MS}(x) + \varepsilon}}
        \odot \mathrm{weight} + \mathrm{bias}

    Arguments, shape and dtype are those of :func:`layer_norm`; ``eps`` is added to the mean of
    squares.

    Example:
        >>> rms_norm(torch.tensor([1.0, 7.0]), eps=0.0)
        tensor([0.2000, 1.4000])
    """
    z, axes = resolve(x, dim)
    y = z / rms(z, dim, eps, keepdim=True)
    return _affine(y, None, weight, bias, axes).to(x.dtype)


def isru(x: Tensor, alpha: Constant, *, dim: Axes = -1) -> Tensor:
    r"""Return the Inverse Square Root Unit (eq. 30-32), bounded by :math:`1 / \sqrt\alpha`.

    .. math:: f(x) = \frac{x}{\sqrt{1 + \alpha x^2}} = \frac{\sqrt\beta x}{\sqrt{\beta + x^2}},
        \quad \beta = 1 / \alpha

    ``alpha`` is a positive constant, and ``dim`` the dimension, or several, along which it lies.
    The shape and dtype of ``x`` stay.

    Example:
        >>> isru(torch.tensor([-torch.inf, 0.0, 1.5]), 4.0)
        tensor([-0.5000,  0.0000,  0.4743])
    """
    z, axes = resolve(x, dim)
    beta = 1 / constant("alpha", alpha, z, axes, positive=True)
    return (_soft_sign(z, beta) * beta**0.5).to(x.dtype)


def dyt(
    x: Tensor,
    alpha: Constant,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    center: Constant | None = None,
    scale: Constant = 1.0,
    dim: Axes = -1,
    witnesses: Tensor | None = None,
    gain: Tensor | None = None,
) -> Tensor:
    r"""Return the Dynamic Tanh (eq. 4; "Transformers without Normalization", arXiv 2503.10622).

    .. math:: y = \mathrm{weight} \cdot \mathrm{scale} \cdot \tanh(\alpha (x - \mathrm{center}))
        + \mathrm{bias}

    The constant ``alpha`` is the slope at 0. The other arguments, shape and dtype are those of
    :func:`dyisru_general`.

    Example:
        >>> dyt(torch.tensor([-torch.inf, 0.0, 1.0]), 0.5)
        tensor([-1.0000,  0.0000,  0.4621])
    """
    z, axes = resolve(x, dim)
    alpha = constant("alpha", alpha, z, axes)
    u, slope = _sloped(z, center, alpha, axes, (witnesses, gain))
    y = torch.tanh(slope * u)
    return _affine(y, scale, weight, bias, axes).to(x.dtype)


def scaled_dyt(
    x: Tensor,
    alpha: Constant,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    center: Constant | None = None,
    dim: Axes = -1,
) -> Tensor:
    r"""Return the Dynamic Tanh with the bound of LayerNorm (eq. 11, Theorem 2).

    .. math:: y = \mathrm{weight} \cdot \sqrt{C - 1} \tanh(\alpha (x - \mathrm{center}))
        + \mathrm{bias}

    Arguments, shape and dtype are those of :func:`dyt`.

    Example:
        >>> scaled_dyt(torch.tensor([-torch.inf, 0.0, 1.0, 2.0, 3.0]), 0.5)
        tensor([-2.0000,  0.0000,  0.9242,  1.5232,  1.8103])
    """
    _, axes = resolve(x, dim)
    return dyt(x, alpha, weight, bias, center=center, scale=_bound(x, axes), dim=dim)


def dyisru(
    x: Tensor,
    beta: Constant,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    scale: Constant | None = None,
    dim: Axes = -1,
    witnesses: Tensor | None = None,
    gain: Tensor | None = None,
) -> Tensor:
    r"""Return the Dynamic Inverse Square Root Unit (eq. 15).

    .. math:: y = \mathrm{weight} \cdot \mathrm{scale} \cdot \frac{x}{\sqrt{\beta + x^2}}
        + \mathrm{bias}

    It was first called Elementwise Layer Normalization (ELN). Arguments, shape and dtype are those
    of :func:`dyisru_general`; the centre is 0.

    Example:
        >>> dyisru(torch.tensor([-torch.inf, 0.0, 1.0, 1e30, 3.0]), 3.0)
        tensor([-2.0000,  0.0000,  1.0000,  2.0000,  1.7321])
    """
    return dyisru_general(
        x, beta, None, weight, bias, scale=scale, dim=dim, witnesses=witnesses, gain=gain
    )


def dyisru_general(
    x: Tensor,
    beta: Constant,
    center: Constant | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    scale: Constant | None = None,
    dim: Axes = -1,
    witnesses: Tensor | None = None,
    gain: Tensor | None = None,
) -> Tensor:
    r"""Return DyISRU around a given centre, where the paper has the mean (eq. 13, Theorem 3).

    .. math:: y = \mathrm{weight} \cdot \mathrm{scale} \cdot
        \frac{x - \mathrm{center}}{\sqrt{\beta + (x - \mathrm{center})^2}} + \mathrm{bias}

    Args:
        x: Floating point tensor of any shape; infinities give the bound.
        beta: Positive constant, float or tensor.
        center: Subtracted from ``x``: where the function is 0 (Derf's too, without a shift); a
            constant, or None for 0.
        weight: Factor of shape ``[x.shape[d] for d in dim]``, or None for 1.
        bias: Offset of the same shape, or None for 0.
        scale: Bound of the function before ``weight``, or a factor of the linear map; a constant,
            or None for :math:`\sqrt{C - 1}`.
        dim: The normalised dimension, or several; C is their product.
        witnesses: Integer tensor (K,): the positions in the normalised shape of the channels that
            show a token's size, each once; None for none.
        gain: Positive tensor (K,): the weight of each witness's square, or None for 1.

    Returns:
        The shape and dtype of ``x``.

    Example:
        >>> dyisru_general(torch.tensor([-torch.inf, 2.0, 3.0, 1e30, 5.0]), 3.0, 2.0)
        tensor([-2.0000,  0.0000,  1.0000,  2.0000,  1.7321])
    """
    z, axes = resolve(x, dim)
    beta = constant("beta", beta, z, axes, positive=True)
    u, witness_sum = _shifted(z, center, axes, (witnesses, gain), leave_one_out=True)
    if witness_sum is None:
        y = _soft_sign(u, beta)
    else:
        y = _soft_sign_of_token(u, beta, witness_sum)
    if scale is None:
        scale = _bound(z, axes)
    return _affine(y, scale, weight, bias, axes).to(x.dtype)


def derf(
    x: Tensor,
    alpha: Constant,
    shift: Constant = 0.0,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    center: Constant | None = None,
    scale: Constant = 1.0,
    dim: Axes = -1,
    witnesses: Tensor | None = None,
    gain: Tensor | None = None,
) -> Tensor:
    r"""Return the Dynamic error function (arXiv 2512.10938).

    .. math:: y = \mathrm{weight} \cdot \mathrm{scale} \cdot
        \mathrm{erf}(\alpha (x - \mathrm{center}) + \mathrm{shift}) + \mathrm{bias}

    It is the function of "Stronger Normalization-Free Transformers".
    ``alpha`` and ``shift`` are constants. The other arguments, shape and dtype are those of
    :func:`dyisru_general`.

    Example:
        >>> derf(torch.tensor([-torch.inf, 0.0, 1.0]), 0.5)
        tensor([-1.0000,  0.0000,  0.5205])
    """
    z, axes = resolve(x, dim)
    # The slope of erf at 0 is 2 / sqrt(pi).
    alpha = constant("alpha", alpha, z, axes)
    shift = constant("shift", shift, z, axes)
    u, slope = _sloped(z, center, alpha, axes, (witnesses, gain), ratio=4 / math.pi)
    y = torch.erf(slope * u + shift)
    return _affine(y, scale, weight, bias, axes).to(x.dtype)


def linear(
    x: Tensor,
    slope: Constant,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    center: Constant | None = None,
    scale: Constant = 1.0,
    dim: Axes = -1,
    witnesses: Tensor | None = None,
    gain: Tensor | None = None,
) -> Tensor:
    r"""Return a linear map, the control of studies: LayerNorm with constant statistics (eq. 3).

    .. math:: y = \mathrm{weight} \cdot \mathrm{scale} \cdot \mathrm{slope}
        \cdot (x - \mathrm{center}) + \mathrm{bias}

    It has no bound; ``slope`` is a constant. The other arguments, shape and dtype are those of
    :func:`dyisru_general`.

    Example:
        >>> linear(torch.tensor([0.0, 1.0, 3.0]), 0.5, center=1.0)
        tensor([-0.5000,  0.0000,  1.0000])
    """
    z, axes = resolve(x, dim)
    slope = constant("slope", slope, z, axes)
    scale = constant("scale", scale, z, axes)
    u, slope = _sloped(z, center, slope, axes, (witnesses, gain))
    return _affine(u, slope * scale, weight, bias, axes).to(x.dtype)


def _soft_sign(d: Tensor, beta: Constant) -> Tensor:
    """Return ``d / sqrt(beta + d**2)``, which goes from -1 to 1."""
    d = clamped(d)
    return d / torch.sqrt(beta + d * d)


def _soft_sign_of_token(u: Tensor, beta: Constant, witness_sum: "_WitnessSum") -> Tensor:
    """Return ``u / sqrt(beta + sum + u**2)``, where the witnesses give the sum."""
    total, largest = witness_sum
    # Each number is divided by the largest of those that it is added to, before it is squared. No
    # square then overflows, not even in float16, to which other tools convert a whole graph.
    # The result does not depend on the units, so they need no gradient.
    unit = _at_least(largest, _root(beta))
    constant = beta / unit / unit + total * (largest / unit).square()
    size = torch.maximum(u.detach().abs(), unit)
    d = u / size
    return d / torch.sqrt(constant * (unit / size).square() + d * d)


def _root(beta: Constant) -> Constant:
    """Return the root of a constant, without a gradient."""
    return beta.detach().sqrt() if isinstance(beta, Tensor) else math.sqrt(beta)


def _at_least(size: Tensor, least: Constant) -> Tensor:
    """Return the larger of the two, element by element."""
    return torch.maximum(size, least) if isinstance(least, Tensor) else size.clamp_min(least)


# The smallest normal number of float16, so that it stays a divisor after a conversion to it.
_SMALLEST_UNIT = 2.0**-14

_WitnessesAndGains = tuple[Tensor | None, Tensor | None]


class _WitnessSum(NamedTuple):
    """The squares of a token's witnesses, in units in which none of them overflows."""

    total: Tensor  # ``sum_k g_k (u_k / largest)**2``
    largest: Tensor  # the size of the largest witness


def _sloped(
    z: Tensor,
    center: Constant | None,
    slope: Constant,
    axes: tuple[int, ...],
    witnesses_and_gains: _WitnessesAndGains,
    *,
    ratio: float = 1.0,
) -> tuple[Tensor, Constant]:
    """Return two factors of the token's slope times ``z - center``, which no square overflows.

    Without witnesses they are u and the slope. ``ratio`` is ``1 / (beta * slope**2)``.
    """
    u, witness_sum = _shifted(z, center, axes, witnesses_and_gains)
    if witness_sum is None:
        return u, slope
    total, largest = witness_sum
    if isinstance(slope, Tensor):
        width: Constant = 1 / slope.detach().abs().clamp_min(_SMALLEST_UNIT)
    else:
        width = 1 / max(abs(slope), _SMALLEST_UNIT)
    # As in DyISRU, all numbers are divided before they are squared, by units without a gradient.
    unit = _at_least(largest, width)
    steep = slope * unit
    size = steep.detach().abs().clamp_min(1)
    # As a factor, so that the slope keeps its sign and a slope of 0 is not a divisor.
    factor = steep / size
    witnessed = ratio * (factor * (largest / unit)).square() * total
    square = (1 / size).square() + witnessed
    return u / unit, factor * torch.rsqrt(square)


def _shifted(
    z: Tensor,
    center: Constant | None,
    axes: tuple[int, ...],
    witnesses_and_gains: _WitnessesAndGains,
    *,
    leave_one_out: bool = False,
) -> tuple[Tensor, _WitnessSum | None]:
    """Return u, that is ``z - center``, and the sum and the largest of the witnesses, if any.

    With ``leave_one_out`` a witness is not in its own sum. The others are added, instead of
    subtracting it from a total, because a witness is often larger than all of them together.
    """
    witnesses, gain = witnesses_and_gains
    u = z if center is None else z - constant("center", center, z, axes)
    if witnesses is None or witnesses.numel() == 0:
        if gain is not None and gain.numel():
            raise ArgumentError(
                f"gain must come with witnesses, got {tuple(gain.shape)} for none: give both"
            )
        return u, None
    channels = count(z, axes)
    check_witness_tensors(witnesses, gain, channels)
    u = clamped(u)
    last = tuple(range(-len(axes), 0))
    flat = u.movedim(axes, last).flatten(-len(axes))
    chosen = flat.index_select(-1, witnesses)
    is_sample = len(witnesses) > MOST_CHOSEN
    sizes = chosen.detach().abs()
    # The few are compared and added one by one, so that there is no reduction, not even over them.
    largest = sizes.amax(-1) if is_sample else reduce(torch.maximum, sizes.unbind(-1))
    largest = largest.clamp_min(_SMALLEST_UNIT)
    terms = (chosen / largest[..., None]).square()
    terms = terms if gain is None else terms * gain.to(u.dtype)
    if is_sample:
        sums = _sum_of_many(terms, witnesses, channels, leave_one_out)
    else:
        sums = _sum_of_few(terms, witnesses, channels, leave_one_out)
    one_per_token = [1 if axis in axes else n for axis, n in enumerate(z.shape)]
    if leave_one_out:
        total = sums.reshape_as(u.movedim(axes, last)).movedim(last, axes)
    else:
        total = sums.reshape(one_per_token)
    return u, _WitnessSum(total, largest.reshape(one_per_token))


def _sum_of_few(terms: Tensor, witnesses: Tensor, channels: int, leave_one_out: bool) -> Tensor:
    """Return the sum of the witnesses' terms (..., K) for all channels, (..., 1).

    With ``leave_one_out`` it is one sum per channel, (..., channels): a witness is not in its own.
    """
    squares = [term[..., None] for term in terms.unbind(-1)]
    if leave_one_out:
        position = torch.arange(channels, device=terms.device)
        squares = [
            torch.where(position == k, 0, term)
            for k, term in zip(witnesses.unbind(), squares, strict=True)
        ]
    return reduce(torch.add, squares)


def _sum_of_many(terms: Tensor, witnesses: Tensor, channels: int, leave_one_out: bool) -> Tensor:
    """Return the same as :func:`_sum_of_few`, by reductions: they take less time for many witnesses."""
    if not leave_one_out:
        return terms.sum(-1, keepdim=True)
    # Only the largest term can be more than half of the sum, so that a difference loses no digits of
    # the others. A sum of the terms before and after each one would need no difference, but torch
    # 2.13 compiles cumsum to code that writes beyond its memory.
    is_largest = torch.arange(len(witnesses), device=terms.device) == terms.argmax(-1, keepdim=True)
    rest = torch.where(is_largest, 0, terms).sum(-1, keepdim=True)
    total = rest + torch.where(is_largest, terms, 0).sum(-1, keepdim=True)
    own = torch.where(is_largest, rest, total - terms)
    sums = torch.cat([own, total], -1)
    # The place of each channel's sum: its own if it is a witness, else the last. (index_copy into the
    # expanded total would be shorter, but torch 2.13 compiles it to a wrong result.)
    is_witness = torch.arange(channels, device=terms.device)[:, None] == witnesses
    place = torch.where(is_witness.any(1), is_witness.int().argmax(1), len(witnesses))
    return sums.index_select(-1, place)


def _affine(
    f: Tensor,
    scale: Constant | None,
    weight: Tensor | None,
    bias: Tensor | None,
    axes: tuple[int, ...],
) -> Tensor:
    """Return ``weight * scale * f + bias``, leaving out parts that are None."""
    factor = None if scale is None else constant("scale", scale, f, axes)
    weight = parameter("weight", weight, f, axes)
    bias = parameter("bias", bias, f, axes)
    if weight is not None:
        # The product of two small tensors is cheaper than another pass over x.
        factor = weight if factor is None else weight * factor
    f = f if factor is None else f * factor
    return f if bias is None else f + bias


def _bound(x: Tensor, axes: tuple[int, ...]) -> float:
    """Return ``sqrt(C - 1)``, the largest value that a normalised channel can take."""
    return math.sqrt(max(count(x, axes) - 1, 0))
