r"""The mathematics as pure functions: the norms, and the point-wise functions that replace them.

Everything else in dynorm is tested against this file. All functions compute in at least float32.
They raise :class:`dynorm.errors.ArgumentError` when an argument is outside its domain. C is the
number of channels, the size of ``x`` at ``dim``. Shared arguments are explained once: those of the
statistics at :func:`rms`, of the norms at :func:`layer_norm`, of the point-wise functions at
:func:`dyisru_general`.

A constant of a point-wise function (``alpha``, ``beta``, ``shift``, ``slope``, ``scale``,
``center``) is a float or a floating point tensor: of shape (1,), (C,), or with the
dimensions of ``x`` and broadcast against it, as one constant per token is. ``weight`` and ``bias`` have the
shape (C,). The values of tensors are not validated, to avoid waiting for a device.

Every point-wise function is put together in the same way:

.. math:: y = \mathrm{weight} \cdot \mathrm{scale} \cdot f(x) + \mathrm{bias}

DyISRU may have witness channels, a set K of chosen channels. Its beta then depends on the token:

.. math:: \beta_i(x) = \beta + \sum_{k \in K, k \neq i} g_k x_k^2

A token's size enters as a sum because beta is one by the closed form: with all channels in K, g = 1,
:math:`\beta = C \varepsilon` and scale :math:`\sqrt{C}` it is RMSNorm, exactly. With K empty it is the
function of one channel, bit for bit. RMSNorm over some channels is pRMSNorm (arXiv 1910.07467).
Only :func:`dyisru_general` has a center, which it subtracts from x first.

Equation numbers are those of arXiv 2503.21708; "the note" is "LayerNorm is centring, then RMSNorm,
then the bias".
"""

import math

import torch
from torch import Tensor

from dynorm.arguments import (
    Constant,
    check_kind,
    check_not_negative,
    clamped,
    constant,
    parameter,
    resolve,
)
from dynorm.errors import ArgumentError
from dynorm.token_sums import beta_of_token

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


def mean_square(x: Tensor, dim: int = -1, keepdim: bool = False) -> Tensor:
    r"""Return the mean of squares, the only statistic of RMSNorm (the note).

    .. math:: \mathrm{MS}(x) = \frac{1}{C} \sum_k x_k^2

    Arguments, shape and dtype are those of :func:`rms`.

    Example:
        >>> mean_square(torch.tensor([3.0, 4.0]))
        tensor(12.5000)
    """
    z, axis = resolve(x, dim)
    return (z * z).mean(axis, keepdim).to(x.dtype)


def rms(
    x: Tensor,
    dim: int = -1,
    eps: float = 0.0,
    keepdim: bool = False,
) -> Tensor:
    r"""Return the root mean square, by which RMSNorm divides (the note).

    .. math:: \mathrm{RMS}(x) = \sqrt{\mathrm{MS}(x) + \varepsilon}

    Args:
        x: Floating point tensor of any shape.
        dim: The dimension of the channels.
        eps: Added inside the root, not negative.
        keepdim: Whether that dimension stays, with size 1.

    Returns:
        The shape of ``x`` without ``dim`` (or with size 1 there), the dtype of ``x``.

    Example:
        >>> rms(torch.tensor([1.0, 7.0]))
        tensor(5.)
    """
    z, _ = resolve(x, dim)
    check_not_negative("eps", eps)
    return torch.sqrt(mean_square(z, dim, keepdim) + eps).to(x.dtype)


def center(x: Tensor, dim: int = -1) -> Tensor:
    r"""Subtract the mean over ``dim`` (eq. 1; c(x) of the note); the shape and dtype stay.

    .. math:: c(x) = x - \mu = x \left(I - \tfrac{1}{C} 1^\top 1\right)

    Example:
        >>> center(torch.tensor([1.0, 2.0, 6.0]))
        tensor([-2., -1.,  3.])
    """
    z, axis = resolve(x, dim)
    return (z - z.mean(axis, keepdim=True)).to(x.dtype)


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
    dim: int = -1,
) -> Tensor:
    r"""Return LayerNorm, written as centring, then RMSNorm, then the bias (eq. 1-3; the note).

    .. math:: \mathrm{LN}(x) = \mathrm{RMSNorm}(c(x)) + \mathrm{bias}
        = \frac{x - \mu}{\sqrt{\sigma^2 + \varepsilon}} \odot \mathrm{weight} + \mathrm{bias}

    Args:
        x: Floating point tensor of any shape.
        weight: Factor of shape (C,), or None for 1.
        bias: Offset of the same shape, or None for 0.
        eps: Added to the variance, not negative.
        dim: The dimension of the channels.

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
    dim: int = -1,
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
    z, axis = resolve(x, dim)
    y = z / rms(z, dim, eps, keepdim=True)
    return _affine(y, None, weight, bias, axis).to(x.dtype)


def isru(x: Tensor, alpha: Constant, *, dim: int = -1) -> Tensor:
    r"""Return the Inverse Square Root Unit (eq. 30-32), bounded by :math:`1 / \sqrt\alpha`.

    .. math:: f(x) = \frac{x}{\sqrt{1 + \alpha x^2}} = \frac{\sqrt\beta x}{\sqrt{\beta + x^2}},
        \quad \beta = 1 / \alpha

    ``alpha`` is a positive constant, and ``dim`` the dimension along which it lies.
    The shape and dtype of ``x`` stay.

    Example:
        >>> isru(torch.tensor([-torch.inf, 0.0, 1.5]), 4.0)
        tensor([-0.5000,  0.0000,  0.4743])
    """
    z, axis = resolve(x, dim)
    beta = 1 / constant("alpha", alpha, z, axis, positive=True)
    return dyisru(z, beta, scale=beta**0.5, dim=dim).to(x.dtype)


def dyt(
    x: Tensor,
    alpha: Constant,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    scale: Constant = 1.0,
    dim: int = -1,
) -> Tensor:
    r"""Return the Dynamic Tanh (eq. 4; "Transformers without Normalization", arXiv 2503.10622).

    .. math:: y = \mathrm{weight} \cdot \mathrm{scale} \cdot \tanh(\alpha x) + \mathrm{bias}

    The constant ``alpha`` is the slope at 0. The other arguments, shape and dtype are those of
    :func:`dyisru_general`.

    Example:
        >>> dyt(torch.tensor([-torch.inf, 0.0, 1.0]), 0.5)
        tensor([-1.0000,  0.0000,  0.4621])
    """
    z, axis = resolve(x, dim)
    alpha = constant("alpha", alpha, z, axis)
    y = torch.tanh(alpha * z)
    return _affine(y, scale, weight, bias, axis).to(x.dtype)


def scaled_dyt(
    x: Tensor,
    alpha: Constant,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    dim: int = -1,
) -> Tensor:
    r"""Return the Dynamic Tanh with the bound of LayerNorm (eq. 11, Theorem 2).

    .. math:: y = \mathrm{weight} \cdot \sqrt{C - 1} \tanh(\alpha x) + \mathrm{bias}

    Arguments, shape and dtype are those of :func:`dyt`.

    Example:
        >>> scaled_dyt(torch.tensor([-torch.inf, 0.0, 1.0, 2.0, 3.0]), 0.5)
        tensor([-2.0000,  0.0000,  0.9242,  1.5232,  1.8103])
    """
    _, axis = resolve(x, dim)
    return dyt(x, alpha, weight, bias, scale=_bound(x, axis), dim=dim)


def dyisru(
    x: Tensor,
    beta: Constant,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    scale: Constant | None = None,
    dim: int = -1,
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
    dim: int = -1,
    witnesses: Tensor | None = None,
    gain: Tensor | None = None,
) -> Tensor:
    r"""Return DyISRU around a given centre, where the paper has the mean (eq. 13, Theorem 3).

    .. math:: y = \mathrm{weight} \cdot \mathrm{scale} \cdot
        \frac{x - \mathrm{center}}{\sqrt{\beta + (x - \mathrm{center})^2}} + \mathrm{bias}

    Args:
        x: Floating point tensor of any shape; infinities give the bound.
        beta: Positive constant, float or tensor.
        center: Subtracted from ``x``: where the function is 0; a constant, or None for 0.
        weight: Factor of shape (C,), or None for 1.
        bias: Offset of the same shape, or None for 0.
        scale: Bound of the function before ``weight``, or a factor of the linear map; a constant,
            or None for :math:`\sqrt{C - 1}`.
        dim: The dimension of the channels.
        witnesses: Integer tensor (K,): the positions of the few channels that show a token's size,
            each once; None for none.
        gain: Positive tensor (K,): the weight of each witness's square, or None for 1.

    Returns:
        The shape and dtype of ``x``.

    Example:
        >>> dyisru_general(torch.tensor([-torch.inf, 2.0, 3.0, 1e30, 5.0]), 3.0, 2.0)
        tensor([-2.0000,  0.0000,  1.0000,  2.0000,  1.7321])
    """
    z, axis = resolve(x, dim)
    beta = constant("beta", beta, z, axis, positive=True)
    if center is not None:
        z = z - constant("center", center, z, axis)
    u = clamped(z)
    check_kind("witnesses", witnesses, Tensor | None, "a tensor (K,), or None")
    check_kind("gain", gain, Tensor | None, "a tensor (K,), or None")
    if witnesses is not None and witnesses.numel():
        u, beta = beta_of_token(u, beta, axis, witnesses, gain)
    elif gain is not None and gain.numel():
        raise ArgumentError(
            f"gain must come with witnesses, got {tuple(gain.shape)} for none: give both"
        )
    y = u / torch.sqrt(beta + u * u)
    if scale is None:
        scale = _bound(z, axis)
    return _affine(y, scale, weight, bias, axis).to(x.dtype)


def derf(
    x: Tensor,
    alpha: Constant,
    shift: Constant = 0.0,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    scale: Constant = 1.0,
    dim: int = -1,
) -> Tensor:
    r"""Return the Dynamic error function (arXiv 2512.10938).

    .. math:: y = \mathrm{weight} \cdot \mathrm{scale} \cdot
        \mathrm{erf}(\alpha x + \mathrm{shift}) + \mathrm{bias}

    It is the function of "Stronger Normalization-Free Transformers".
    ``alpha`` and ``shift`` are constants. The other arguments, shape and dtype are those of
    :func:`dyisru_general`.

    Example:
        >>> derf(torch.tensor([-torch.inf, 0.0, 1.0]), 0.5)
        tensor([-1.0000,  0.0000,  0.5205])
    """
    z, axis = resolve(x, dim)
    alpha = constant("alpha", alpha, z, axis)
    shift = constant("shift", shift, z, axis)
    y = torch.erf(alpha * z + shift)
    return _affine(y, scale, weight, bias, axis).to(x.dtype)


def linear(
    x: Tensor,
    slope: Constant,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    scale: Constant = 1.0,
    dim: int = -1,
) -> Tensor:
    r"""Return a linear map, the control of studies: LayerNorm with constant statistics (eq. 3).

    .. math:: y = \mathrm{weight} \cdot \mathrm{scale} \cdot \mathrm{slope} \cdot x + \mathrm{bias}

    It has no bound; ``slope`` is a constant. The other arguments, shape and dtype are those of
    :func:`dyisru_general`.

    Example:
        >>> linear(torch.tensor([-1.0, 0.0, 2.0]), 0.5)
        tensor([-0.5000,  0.0000,  1.0000])
    """
    z, axis = resolve(x, dim)
    slope = constant("slope", slope, z, axis)
    scale = constant("scale", scale, z, axis)
    return _affine(z, slope * scale, weight, bias, axis).to(x.dtype)


def _affine(
    f: Tensor,
    scale: Constant | None,
    weight: Tensor | None,
    bias: Tensor | None,
    axis: int,
) -> Tensor:
    """Return ``weight * scale * f + bias``, leaving out parts that are None."""
    factor = None if scale is None else constant("scale", scale, f, axis)
    weight = parameter("weight", weight, f, axis)
    bias = parameter("bias", bias, f, axis)
    if weight is not None:
        # The product of two small tensors is cheaper than another pass over x.
        factor = weight if factor is None else weight * factor
    f = f if factor is None else f * factor
    return f if bias is None else f + bias


def _bound(x: Tensor, axis: int) -> float:
    """Return ``sqrt(C - 1)``, the largest value that a normalised channel can take."""
    return math.sqrt(max(x.shape[axis] - 1, 0))
