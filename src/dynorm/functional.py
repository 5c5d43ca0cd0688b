"""The mathematics as pure functions: the norms, and the point-wise functions that take their place.

Everything else in dynorm is tested against this file. All functions compute in at least float32 and return
the dtype of ``x``; C is the number of normalised elements, the product of ``x.shape[d]`` over ``dim``.

A constant of a point-wise function (``alpha``, ``beta``, ``shift``, ``slope``, ``scale``, ``center``) is a
float or a floating point tensor: of shape (1,), of the normalised shape ``[x.shape[d] for d in dim]``, or
with as many dimensions as ``x`` and broadcast against it, as a constant per token is. ``weight`` and ``bias``
have the normalised shape. The values of tensors are never looked at: nothing waits for a device.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

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


def mean_square(x: Tensor, dim: int | tuple[int, ...] = -1, keepdim: bool = False) -> Tensor:
    r"""Mean of squares, the only statistic of RMSNorm.

    .. math:: \mathrm{MS}(x) = \frac{1}{C} \sum_k x_k^2

    Args:
        x: Floating point tensor of any shape.
        dim: The normalised dimension, or several.
        keepdim: Whether the normalised dimensions stay, with size 1.

    Returns:
        The shape of ``x`` without ``dim`` (or with size 1 there), the dtype of ``x``.

    Raises:
        ArgumentError: If ``x`` is not floating point or ``dim`` is out of range or repeated.

    Example:
        >>> mean_square(torch.tensor([3.0, 4.0]))
        tensor(12.5000)

    Reference:
        MS(x) of the note "LayerNorm is centring, then RMSNorm, then the bias".
    """
    z, axes = _resolve(x, dim)
    return (z * z).mean(axes, keepdim).to(x.dtype)


def rms(x: Tensor, dim: int | tuple[int, ...] = -1, eps: float = 0.0, keepdim: bool = False) -> Tensor:
    r"""Root mean square, what RMSNorm divides by.

    .. math:: \mathrm{RMS}(x) = \sqrt{\mathrm{MS}(x) + \varepsilon}

    Args:
        x: Floating point tensor of any shape.
        dim: The normalised dimension, or several.
        eps: Added inside the root, not negative.
        keepdim: Whether the normalised dimensions stay, with size 1.

    Returns:
        The shape of ``x`` without ``dim`` (or with size 1 there), the dtype of ``x``.

    Raises:
        ArgumentError: If ``x``, ``dim`` or ``eps`` is outside its domain.

    Example:
        >>> rms(torch.tensor([1.0, 7.0]))
        tensor(5.)

    Reference:
        RMS(x) of the note "LayerNorm is centring, then RMSNorm, then the bias".
    """
    z, _ = _resolve(x, dim)
    _check_not_negative("eps", eps)
    return torch.sqrt(mean_square(z, dim, keepdim) + eps).to(x.dtype)


def center(x: Tensor, dim: int | tuple[int, ...] = -1) -> Tensor:
    r"""Subtract the mean.

    .. math:: c(x) = x - \mu = x \left(I - \tfrac{1}{C} 1^\top 1\right)

    Args:
        x: Floating point tensor of any shape.
        dim: The normalised dimension, or several.

    Returns:
        The shape and dtype of ``x``; its mean over ``dim`` is 0.

    Raises:
        ArgumentError: If ``x`` is not floating point or ``dim`` is out of range or repeated.

    Example:
        >>> center(torch.tensor([1.0, 2.0, 6.0]))
        tensor([-2., -1.,  3.])

    Reference:
        Eq. 1 and c(x) of the note "LayerNorm is centring, then RMSNorm, then the bias".
    """
    z, axes = _resolve(x, dim)
    return (z - z.mean(axes, keepdim=True)).to(x.dtype)


def centering_matrix(
    channels: int, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
) -> Tensor:
    r"""The matrix that centres a row vector; it can be folded into the linear map before it.

    .. math:: I - \tfrac{1}{C} 1^\top 1

    Args:
        channels: C, at least 1.
        dtype: Floating point dtype of the matrix; torch's default when None.
        device: Device of the matrix; torch's default when None.

    Returns:
        A symmetric projection of shape (C, C).

    Raises:
        ArgumentError: If ``channels`` is less than 1.

    Example:
        >>> centering_matrix(2)
        tensor([[ 0.5000, -0.5000],
                [-0.5000,  0.5000]])

    Reference:
        The centring matrix of the note "LayerNorm is centring, then RMSNorm, then the bias".
    """
    if channels < 1:
        raise ArgumentError(f"channels must be at least 1, got {channels}: give the number of channels")
    return torch.eye(channels, dtype=dtype, device=device) - 1 / channels


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    dim: int | tuple[int, ...] = -1,
) -> Tensor:
    r"""LayerNorm, written as centring, then RMSNorm, then the bias.

    .. math:: \mathrm{LN}(x) = \mathrm{RMSNorm}(c(x)) + \mathrm{bias}
        = \frac{x - \mu}{\sqrt{\sigma^2 + \varepsilon}} \odot \mathrm{weight} + \mathrm{bias}

    Args:
        x: Floating point tensor of any shape.
        weight: Gain of shape ``[x.shape[d] for d in dim]``, or None for 1.
        bias: Offset of the same shape, or None for 0.
        eps: Added to the variance, not negative.
        dim: The normalised dimension, or several.

    Returns:
        The shape and dtype of ``x``.

    Raises:
        ArgumentError: If an argument is outside its domain.

    Example:
        >>> layer_norm(torch.tensor([1.0, 2.0, 6.0]), eps=0.0)
        tensor([-0.9258, -0.4629,  1.3887])

    Reference:
        Eq. 1-3 and LayerNorm of the note "LayerNorm is centring, then RMSNorm, then the bias".
    """
    z, axes = _resolve(x, dim)
    offset = _parameter("bias", bias, z, axes)
    normed = rms_norm(center(z, dim), weight, None, eps, dim)
    return _affine(normed, None, offset).to(x.dtype)


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    dim: int | tuple[int, ...] = -1,
) -> Tensor:
    r"""RMSNorm: LayerNorm without centring.

    .. math:: \mathrm{RMSNorm}(x) = \frac{x}{\sqrt{\mathrm{MS}(x) + \varepsilon}} \odot \mathrm{weight}
        + \mathrm{bias}

    Args:
        x: Floating point tensor of any shape.
        weight: Gain of shape ``[x.shape[d] for d in dim]``, or None for 1.
        bias: Offset of the same shape, or None for 0.
        eps: Added to the mean of squares, not negative.
        dim: The normalised dimension, or several.

    Returns:
        The shape and dtype of ``x``.

    Raises:
        ArgumentError: If an argument is outside its domain.

    Example:
        >>> rms_norm(torch.tensor([1.0, 7.0]), eps=0.0)
        tensor([0.2000, 1.4000])

    Reference:
        RMSNorm of the note "LayerNorm is centring, then RMSNorm, then the bias".
    """
    z, axes = _resolve(x, dim)
    gain, offset = _parameter("weight", weight, z, axes), _parameter("bias", bias, z, axes)
    return _affine(z / rms(z, dim, eps, keepdim=True), gain, offset).to(x.dtype)


def isru(x: Tensor, alpha: float | Tensor, *, dim: int | tuple[int, ...] = -1) -> Tensor:
    r"""Inverse Square Root Unit: slope 1 at 0, bounded by :math:`1 / \sqrt\alpha`.

    .. math:: f(x) = \frac{x}{\sqrt{1 + \alpha x^2}} = \frac{\sqrt\beta x}{\sqrt{\beta + x^2}},
        \quad \beta = 1 / \alpha

    Args:
        x: Floating point tensor of any shape.
        alpha: Positive constant, float or tensor.
        dim: The dimension, or several, along which ``alpha`` lies.

    Returns:
        The shape and dtype of ``x``.

    Raises:
        ArgumentError: If an argument is outside its domain.

    Example:
        >>> isru(torch.tensor([-torch.inf, 0.0, 1.5]), 4.0)
        tensor([-0.5000,  0.0000,  0.4743])

    Reference:
        Eq. 30-32.
    """
    z, axes = _resolve(x, dim)
    beta = 1 / _constant("alpha", alpha, z, axes, positive=True)
    return (_soft_sign(z, beta) * beta**0.5).to(x.dtype)


def dyt(
    x: Tensor,
    alpha: float | Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    center: float | Tensor | None = None,
    scale: float | Tensor = 1.0,
    dim: int | tuple[int, ...] = -1,
) -> Tensor:
    r"""Dynamic Tanh.

    .. math:: y = \mathrm{weight} \cdot \mathrm{scale} \cdot
        \tanh(\alpha (x - \mathrm{center})) + \mathrm{bias}

    Args:
        x: Floating point tensor of any shape.
        alpha: Constant, float or tensor.
        weight: Gain of shape ``[x.shape[d] for d in dim]``, or None for 1.
        bias: Offset of the same shape, or None for 0.
        center: Where the function is 0; a constant, or None for 0.
        scale: Bound of the function before ``weight``; a constant.
        dim: The normalised dimension, or several.

    Returns:
        The shape and dtype of ``x``.

    Raises:
        ArgumentError: If an argument is outside its domain.

    Example:
        >>> dyt(torch.tensor([-torch.inf, 0.0, 1.0]), 0.5)
        tensor([-1.0000,  0.0000,  0.4621])

    Reference:
        Eq. 4; "Transformers without Normalization", arXiv 2503.10622.
    """
    z, axes = _resolve(x, dim)
    alpha = _constant("alpha", alpha, z, axes)
    gain, offset = _gain_and_offset(scale, weight, bias, z, axes)
    return _affine(torch.tanh(alpha * _shifted(z, center, axes)), gain, offset).to(x.dtype)


def scaled_dyt(
    x: Tensor,
    alpha: float | Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    center: float | Tensor | None = None,
    dim: int | tuple[int, ...] = -1,
) -> Tensor:
    r"""Dynamic Tanh with the bound of LayerNorm.

    .. math:: y = \mathrm{weight} \cdot \sqrt{C - 1} \tanh(\alpha (x - \mathrm{center})) + \mathrm{bias}

    Args:
        x: Floating point tensor of any shape.
        alpha: Constant, float or tensor.
        weight: Gain of shape ``[x.shape[d] for d in dim]``, or None for 1.
        bias: Offset of the same shape, or None for 0.
        center: Where the function is 0; a constant, or None for 0.
        dim: The normalised dimension, or several; C is their product.

    Returns:
        The shape and dtype of ``x``.

    Raises:
        ArgumentError: If an argument is outside its domain.

    Example:
        >>> scaled_dyt(torch.tensor([-torch.inf, 0.0, 1.0, 2.0, 3.0]), 0.5)
        tensor([-2.0000,  0.0000,  0.9242,  1.5232,  1.8103])

    Reference:
        Eq. 11, Theorem 2.
    """
    _, axes = _resolve(x, dim)
    return dyt(x, alpha, weight, bias, center=center, scale=_bound(x, axes), dim=dim)


def dyisru(
    x: Tensor,
    beta: float | Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    scale: float | Tensor | None = None,
    dim: int | tuple[int, ...] = -1,
) -> Tensor:
    r"""Dynamic Inverse Square Root Unit, first called Elementwise Layer Normalization (ELN).

    .. math:: y = \mathrm{weight} \cdot \mathrm{scale} \cdot \frac{x}{\sqrt{\beta + x^2}} + \mathrm{bias}

    Args:
        x: Floating point tensor of any shape; infinities give the bound.
        beta: Positive constant, float or tensor.
        weight: Gain of shape ``[x.shape[d] for d in dim]``, or None for 1.
        bias: Offset of the same shape, or None for 0.
        scale: Bound of the function before ``weight``; a constant, or None for :math:`\sqrt{C - 1}`.
        dim: The normalised dimension, or several; C is their product.

    Returns:
        The shape and dtype of ``x``.

    Raises:
        ArgumentError: If an argument is outside its domain.

    Example:
        >>> dyisru(torch.tensor([-torch.inf, 0.0, 1.0, 1e30, 3.0]), 3.0)
        tensor([-2.0000,  0.0000,  1.0000,  2.0000,  1.7321])

    Reference:
        Eq. 15.
    """
    return dyisru_general(x, beta, None, weight, bias, scale=scale, dim=dim)


def dyisru_general(
    x: Tensor,
    beta: float | Tensor,
    center: float | Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    scale: float | Tensor | None = None,
    dim: int | tuple[int, ...] = -1,
) -> Tensor:
    r"""DyISRU around a given centre, which stands where the paper has the mean.

    .. math:: y = \mathrm{weight} \cdot \mathrm{scale} \cdot
        \frac{x - \mathrm{center}}{\sqrt{\beta + (x - \mathrm{center})^2}} + \mathrm{bias}

    Args:
        x: Floating point tensor of any shape; infinities give the bound.
        beta: Positive constant, float or tensor.
        center: Where the function is 0; a constant, or None for 0.
        weight: Gain of shape ``[x.shape[d] for d in dim]``, or None for 1.
        bias: Offset of the same shape, or None for 0.
        scale: Bound of the function before ``weight``; a constant, or None for :math:`\sqrt{C - 1}`.
        dim: The normalised dimension, or several; C is their product.

    Returns:
        The shape and dtype of ``x``.

    Raises:
        ArgumentError: If an argument is outside its domain.

    Example:
        >>> dyisru_general(torch.tensor([-torch.inf, 2.0, 3.0, 1e30, 5.0]), 3.0, 2.0)
        tensor([-2.0000,  0.0000,  1.0000,  2.0000,  1.7321])

    Reference:
        Eq. 13, Theorem 3.
    """
    z, axes = _resolve(x, dim)
    beta = _constant("beta", beta, z, axes, positive=True)
    gain, offset = _gain_and_offset(_bound(z, axes) if scale is None else scale, weight, bias, z, axes)
    return _affine(_soft_sign(_shifted(z, center, axes), beta), gain, offset).to(x.dtype)


def derf(
    x: Tensor,
    alpha: float | Tensor,
    shift: float | Tensor = 0.0,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    center: float | Tensor | None = None,
    scale: float | Tensor = 1.0,
    dim: int | tuple[int, ...] = -1,
) -> Tensor:
    r"""Dynamic error function.

    .. math:: y = \mathrm{weight} \cdot \mathrm{scale} \cdot
        \mathrm{erf}(\alpha (x - \mathrm{center}) + \mathrm{shift}) + \mathrm{bias}

    Args:
        x: Floating point tensor of any shape.
        alpha: Constant, float or tensor.
        shift: Added inside the error function; a constant.
        weight: Gain of shape ``[x.shape[d] for d in dim]``, or None for 1.
        bias: Offset of the same shape, or None for 0.
        center: Subtracted from ``x``; a constant, or None for 0.
        scale: Bound of the function before ``weight``; a constant.
        dim: The normalised dimension, or several.

    Returns:
        The shape and dtype of ``x``.

    Raises:
        ArgumentError: If an argument is outside its domain.

    Example:
        >>> derf(torch.tensor([-torch.inf, 0.0, 1.0]), 0.5)
        tensor([-1.0000,  0.0000,  0.5205])

    Reference:
        "Stronger Normalization-Free Transformers", arXiv 2512.10938.
    """
    z, axes = _resolve(x, dim)
    alpha, shift = _constant("alpha", alpha, z, axes), _constant("shift", shift, z, axes)
    gain, offset = _gain_and_offset(scale, weight, bias, z, axes)
    return _affine(torch.erf(alpha * _shifted(z, center, axes) + shift), gain, offset).to(x.dtype)


def linear(
    x: Tensor,
    slope: float | Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    center: float | Tensor | None = None,
    scale: float | Tensor = 1.0,
    dim: int | tuple[int, ...] = -1,
) -> Tensor:
    r"""The control of every study: the same slope at the centre, without a bound.

    .. math:: y = \mathrm{weight} \cdot \mathrm{scale} \cdot \mathrm{slope} \cdot (x - \mathrm{center}) + \mathrm{bias}

    Args:
        x: Floating point tensor of any shape.
        slope: Constant, float or tensor.
        weight: Gain of shape ``[x.shape[d] for d in dim]``, or None for 1.
        bias: Offset of the same shape, or None for 0.
        center: Where the function is 0; a constant, or None for 0.
        scale: Factor before ``weight``; a constant.
        dim: The normalised dimension, or several.

    Returns:
        The shape and dtype of ``x``.

    Raises:
        ArgumentError: If an argument is outside its domain.

    Example:
        >>> linear(torch.tensor([0.0, 1.0, 3.0]), 0.5, center=1.0)
        tensor([-0.5000,  0.0000,  1.0000])

    Reference:
        LayerNorm with its statistics held constant, Eq. 3.
    """
    z, axes = _resolve(x, dim)
    slope = _constant("slope", slope, z, axes)
    gain, offset = _gain_and_offset(slope * _constant("scale", scale, z, axes), weight, bias, z, axes)
    return _affine(_shifted(z, center, axes), gain, offset).to(x.dtype)


def _soft_sign(d: Tensor, beta: float | Tensor) -> Tensor:
    """Return ``d / sqrt(beta + d**2)``, which goes from -1 to 1."""
    # Beyond the limit, 2**63 in float32, the quotient is 1 to rounding for any beta up to 1e30, but the square would
    # overflow and inf / inf be NaN.
    limit = torch.finfo(d.dtype).max ** 0.5 / 2
    d = d.clamp(-limit, limit)
    return d / torch.sqrt(beta + d * d)


def _affine(y: Tensor, gain: float | Tensor | None, offset: Tensor | None) -> Tensor:
    """Return ``y * gain + offset``, leaving out what is None."""
    y = y if gain is None else y * gain
    return y if offset is None else y + offset


def _shifted(z: Tensor, center: float | Tensor | None, axes: tuple[int, ...]) -> Tensor:
    """Return ``z - center``."""
    return z if center is None else z - _constant("center", center, z, axes)


def _bound(x: Tensor, axes: tuple[int, ...]) -> float:
    """Return ``sqrt(C - 1)``, the largest value that a normalised channel can take."""
    return math.sqrt(max(math.prod([x.shape[axis] for axis in axes]) - 1, 0))


def _gain_and_offset(
    scale: float | Tensor, weight: Tensor | None, bias: Tensor | None, z: Tensor, axes: tuple[int, ...]
) -> tuple[float | Tensor, Tensor | None]:
    """Return ``scale * weight`` and ``bias``, laid along ``axes``."""
    factor = _constant("scale", scale, z, axes)
    gain = _parameter("weight", weight, z, axes)
    # The product of two small tensors is cheaper than another pass over x.
    return factor if gain is None else gain * factor, _parameter("bias", bias, z, axes)


def _resolve(x: Tensor, dim: int | tuple[int, ...]) -> tuple[Tensor, tuple[int, ...]]:
    """Return ``x`` in the dtype to compute in, and ``dim`` as axes counted from the front."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        got = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise ArgumentError(f"x must be a real floating point tensor, got {got}: convert it, say with .float()")
    dims = (dim,) if isinstance(dim, int) else tuple(dim)
    if not dims or not all(-x.ndim <= d < x.ndim for d in dims):
        raise ArgumentError(
            f"dim must name dimensions of x, which has {x.ndim}, got {dim}: "
            f"give one or more integers from {-x.ndim} to {x.ndim - 1}"
        )
    axes = tuple(d % x.ndim for d in dims)
    if len(set(axes)) < len(axes):
        raise ArgumentError(f"dim must not repeat a dimension, got {dim}: name each one once")
    return x if x.dtype in (torch.float32, torch.float64) else x.float(), axes


def _constant(
    name: str, value: float | Tensor, z: Tensor, axes: tuple[int, ...], *, positive: bool = False
) -> float | Tensor:
    """Return ``value`` ready to be broadcast against ``z``; a tensor's values are never looked at."""
    if not isinstance(value, Tensor):
        # Both comparisons are False for NaN.
        if not (0 if positive else -math.inf) < value < math.inf:
            raise ArgumentError(
                f"{name} must be {'positive and ' if positive else ''}finite, got {value}: give another value"
            )
        return value
    _check_floating(name, value)
    shape, normalized = tuple(value.shape), tuple(z.shape[axis] for axis in axes)
    if shape == normalized:
        return _along(value, z, axes)
    # Under torch.compile, "1 in (1, m)" is False when m is symbolic.
    broadcast = len(shape) == z.ndim and all(n == 1 or n == m for n, m in zip(shape, z.shape, strict=True))
    if not broadcast and shape not in ((), (1,)):
        raise ArgumentError(
            f"{name} must be a float or a tensor of shape (1,), {normalized} or one that broadcasts against "
            f"x of shape {tuple(z.shape)}, got {shape}: reshape it, or pass the dim along which it lies"
        )
    return value.to(z.dtype)


def _parameter(name: str, value: Tensor | None, z: Tensor, axes: tuple[int, ...]) -> Tensor | None:
    """Return ``value``, of the normalised shape, ready to be broadcast against ``z``."""
    if value is None:
        return None
    _check_floating(name, value)
    normalized = tuple(z.shape[axis] for axis in axes)
    if tuple(value.shape) != normalized:
        raise ArgumentError(
            f"{name} must have the shape {normalized} of the normalised dimensions, "
            f"got {tuple(value.shape)}: reshape it, or pass the dim along which it lies"
        )
    return _along(value, z, axes)


def _along(value: Tensor, z: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Lay ``value``, whose dimensions are ``axes`` of ``z``, along them."""
    ordered = value.permute(sorted(range(len(axes)), key=axes.__getitem__))
    return ordered.reshape([n if axis in axes else 1 for axis, n in enumerate(z.shape)]).to(z.dtype)


def _check_floating(name: str, value: Tensor) -> None:
    """Refuse what is not a real floating point tensor."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        got = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise ArgumentError(f"{name} must be a real floating point tensor, got {got}: convert it first")


def _check_not_negative(name: str, value: float) -> None:
    """Refuse negative, infinite and NaN numbers."""
    if not 0 <= value < math.inf:
        raise ArgumentError(f"{name} must be finite and not negative, got {value}: give 0 or a small number")
