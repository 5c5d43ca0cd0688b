"""Closed forms that tie the norms to the point-wise functions, for tokens of C channels.

m_i and v_i are the mean and the biased variance of the C - 1 channels other than i, and s_i is the
sum of their squares. With these as constants, a point-wise function is the norm itself, not an
approximation of it. Equation numbers are those of arXiv 2503.21708. All functions raise
:class:`dynorm.errors.ArgumentError` when an argument is outside its domain.

``x`` is a floating point tensor with the channels last, and ``eps`` the number, not negative, that
the norm adds to its variance or mean of squares. Results have the dtype of ``x``, and its shape
unless a docstring says otherwise. The leave-one-out functions need at least two channels, run in
O(C), and stay accurate if one channel dominates. A ``beta`` argument is a positive float or a tensor
of any shape; the result is of the same kind.
"""

import math
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from dynorm.arguments import check_not_negative, check_positive, resolve
from dynorm.errors import ArgumentError
from dynorm.functional import center, dyisru, dyisru_general, mean_square, rms

__all__ = [
    "channel_beta",
    "derf_alpha",
    "exact_beta",
    "layer_norm_as_dyisru",
    "layer_norm_derivative",
    "layer_norm_slope_factor",
    "leave_one_out_beta",
    "leave_one_out_mean",
    "leave_one_out_square_sum",
    "leave_one_out_variance",
    "norm_numerator",
    "rms_norm_as_dyisru",
    "scaled_dyt_alpha",
]

FloatOrTensor = TypeVar("FloatOrTensor", float, Tensor)


def layer_norm_slope_factor(x: Tensor, keepdim: bool = False) -> Tensor:
    r"""Return the factor of LayerNorm's derivative that depends on the whole token (eq. 6).

    .. math:: F(x) = \frac{1}{C \sigma}

    The result has the shape of ``x`` without its channels, or with size 1 there if ``keepdim`` is set.

    Example:
        >>> layer_norm_slope_factor(torch.tensor([-2.0, 2.0]))
        tensor(0.2500)
    """
    z, _ = resolve(x, -1)
    sigma = rms(center(z), keepdim=keepdim)
    return (1 / (z.shape[-1] * sigma)).to(x.dtype)


def layer_norm_derivative(x: Tensor) -> Tensor:
    r"""Return the diagonal of LayerNorm's Jacobian (eq. 5, Theorem 1).

    .. math:: \frac{dy_i}{dx_i} = F(x) (C - 1 - y_i^2)

    Example:
        >>> layer_norm_derivative(torch.tensor([-1.0, 0.0, 1.0]))
        tensor([0.2041, 0.8165, 0.2041])
    """
    z, _ = resolve(x, -1)
    channels, d = z.shape[-1], center(z)
    y = d / rms(d, keepdim=True)
    factor = layer_norm_slope_factor(z, keepdim=True)
    return (factor * (channels - 1 - y * y)).to(x.dtype)


def channel_beta(x: Tensor) -> Tensor:
    r"""Return each channel's beta that makes DyISRU around the mean LayerNorm (eq. 14, Theorem 4).

    .. math:: \beta_i = (C - 1) \sigma_{\neq i}^2 - \sigma^2 = \frac{(C - 1)^2}{C} v_i,
        \quad \sigma_{\neq i}^2 = \frac{1}{C - 1} \sum_{k \neq i} (x_k - \mu)^2

    It is evaluated as the paper writes it, a difference: where one channel dominates,
    :func:`leave_one_out_beta` keeps more digits.

    Example:
        >>> channel_beta(torch.tensor([0.0, 1.0, 3.0]))
        tensor([1.3333, 3.0000, 0.3333])
    """
    z, _ = resolve(x, -1)
    d = center(z)
    return (leave_one_out_square_sum(d) - mean_square(d, keepdim=True)).to(x.dtype)


def leave_one_out_mean(x: Tensor) -> Tensor:
    r"""Return for each channel the mean of the others.

    .. math:: m_i = \frac{1}{C - 1} \sum_{k \neq i} x_k

    It is the centre of :func:`layer_norm_as_dyisru`.

    Example:
        >>> leave_one_out_mean(torch.tensor([0.0, 1.0, 3.0]))
        tensor([2.0000, 1.5000, 0.5000])
    """
    z, _ = resolve(x, -1)
    rest = _without_outlier(z)
    difference = (rest.peak - rest.deviation) / (rest.channels - 1)
    return (rest.mean + difference).to(x.dtype)


def leave_one_out_variance(x: Tensor) -> Tensor:
    r"""Return for each channel the biased variance of the others about their mean (eq. 14).

    .. math:: v_i = \frac{1}{C - 1} \sum_{k \neq i} (x_k - m_i)^2

    Example:
        >>> leave_one_out_variance(torch.tensor([0.0, 1.0, 3.0]))
        tensor([1.0000, 2.2500, 0.2500])
    """
    z, _ = resolve(x, -1)
    rest = _without_outlier(z)
    others = rest.channels - 1
    # Taking the outlier in and channel i out adds the product of these to the sum of squares. As
    # the outlier is the channel farthest from the mean, both factors have the sign of its
    # deviation, and nothing cancels.
    first = rest.peak - rest.deviation
    second = ((rest.channels - 2) * rest.peak + rest.channels * rest.deviation) / others
    return ((rest.square_sum + first * second) / others).to(x.dtype)


def leave_one_out_beta(x: Tensor, eps: float = 0.0) -> Tensor:
    r"""Return each channel's beta that makes DyISRU LayerNorm around :func:`leave_one_out_mean`.

    .. math:: b_i = C v_i + \frac{C^2}{C - 1} \varepsilon

    This is eq. 14 with its centre moved from the mean to :math:`m_i`, that is divided by
    :math:`((C - 1) / C)^2`. It does not depend on :math:`x_i`.

    Example:
        >>> leave_one_out_beta(torch.tensor([0.0, 1.0, 3.0]))
        tensor([3.0000, 6.7500, 0.7500])
    """
    z, _ = resolve(x, -1)
    check_not_negative("eps", eps)
    channels = _count_at_least_two(z)
    # x_i - mu is (C - 1) / C of x_i - m_i, hence not C eps as for RMSNorm.
    return (channels * leave_one_out_variance(z) + eps * channels**2 / (channels - 1)).to(x.dtype)


def leave_one_out_square_sum(x: Tensor, eps: float = 0.0) -> Tensor:
    r"""Return each channel's beta that makes DyISRU RMSNorm (eq. 14 without a centre).

    .. math:: s_i = \sum_{k \neq i} x_k^2 + C \varepsilon

    It is the square sum of the other channels.

    Example:
        >>> leave_one_out_square_sum(torch.tensor([1.0, 2.0, 3.0]))
        tensor([13., 10.,  5.])
    """
    z, _ = resolve(x, -1)
    check_not_negative("eps", eps)
    channels, squares = _count_at_least_two(z), z * z
    largest = _is_largest(squares)
    rest, peak = _sum_without(largest, squares), _sum_without(~largest, squares)
    # Both terms are non-negative: the plain difference of sums would cancel at an outlier.
    return (rest + (peak - squares) + channels * eps).to(x.dtype)


def exact_beta(x: Tensor, kind: str, eps: float = 0.0) -> Tensor:
    """Return each channel's beta that makes DyISRU the norm: that of a "layernorm" or an "rmsnorm".

    It is :func:`leave_one_out_beta` or :func:`leave_one_out_square_sum`.

    Example:
        >>> exact_beta(torch.tensor([1.0, 2.0, 3.0]), "rmsnorm")
        tensor([13., 10.,  5.])
    """
    if kind == "layernorm":
        return leave_one_out_beta(x, eps=eps)
    return leave_one_out_square_sum(x, eps=eps)


def norm_numerator(x: Tensor, kind: str) -> Tensor:
    r"""Return the numerator of a norm: :math:`x - \mu` of a "layernorm", x of an "rmsnorm".

    The norm divides it by the root of its mean square plus eps.

    Example:
        >>> norm_numerator(torch.tensor([1.0, 2.0, 6.0]), "layernorm")
        tensor([-2., -1.,  3.])
    """
    if kind == "layernorm":
        return center(x)
    return x


def layer_norm_as_dyisru(x: Tensor, eps: float = 0.0) -> Tensor:
    r"""Evaluate LayerNorm as a DyISRU with a centre and beta per channel (eq. 13 and 14).

    .. math:: \mathrm{LN}(x)_i = \sqrt{C - 1} \frac{x_i - m_i}{\sqrt{b_i + (x_i - m_i)^2}}

    Centre and beta leave out the channel that they act on. The result is LayerNorm without weight
    and bias, to rounding.

    Example:
        >>> layer_norm_as_dyisru(torch.tensor([1.0, 2.0, 6.0]))
        tensor([-0.9258, -0.4629,  1.3887])
    """
    z, _ = resolve(x, -1)
    return dyisru_general(z, leave_one_out_beta(z, eps), leave_one_out_mean(z)).to(x.dtype)


def rms_norm_as_dyisru(x: Tensor, eps: float = 0.0) -> Tensor:
    r"""Evaluate RMSNorm as a DyISRU whose beta leaves out the channel that it acts on (eq. 15).

    .. math:: \mathrm{RMSNorm}(x)_i = \sqrt{C} \frac{x_i}{\sqrt{s_i + x_i^2}}

    The result is RMSNorm without weight and bias, to rounding.

    Example:
        >>> rms_norm_as_dyisru(torch.tensor([1.0, 7.0]))
        tensor([0.2000, 1.4000])
    """
    z, _ = resolve(x, -1)
    scale = math.sqrt(z.shape[-1])
    return dyisru(z, leave_one_out_square_sum(z, eps), scale=scale).to(x.dtype)


def scaled_dyt_alpha(beta: FloatOrTensor) -> FloatOrTensor:
    r"""Return the alpha that gives scaled DyT the slope of DyISRU at 0 (eq. 11 and 15).

    .. math:: \alpha = \frac{1}{\sqrt\beta}

    Example:
        >>> scaled_dyt_alpha(16.0)
        0.25
    """
    return _over_root(1.0, beta)


def derf_alpha(beta: FloatOrTensor) -> FloatOrTensor:
    r"""Return the alpha that gives Derf the slope of a DyISRU of the same scale at 0 (eq. 15).

    .. math:: \alpha = \frac{\sqrt\pi}{2 \sqrt\beta}

    Example:
        >>> round(derf_alpha(16.0), 6)
        0.221557
    """
    return _over_root(math.sqrt(math.pi) / 2, beta)


class _Rest(NamedTuple):
    """The token without its outlier, the channel farthest from the mean."""

    channels: int
    mean: Tensor  # mean of the other channels
    deviation: Tensor  # how far each channel, the outlier too, lies above that mean
    square_sum: Tensor  # sum of the squared deviations of the other channels
    peak: Tensor  # the outlier's deviation


def _without_outlier(z: Tensor) -> _Rest:
    """Return the statistics of each token without its outlier.

    Sums over all channels lose the small ones next to a huge one, and subtracting that leaves only
    noise.
    """
    channels = _count_at_least_two(z)
    outlier = _is_largest(center(z).abs())
    mean = _sum_without(outlier, z) / (channels - 1)
    # A second pass removes the rounding of a mean that is large compared to the deviations.
    drift = _sum_without(outlier, z - mean) / (channels - 1)
    deviation = z - mean - drift
    square_sum = _sum_without(outlier, deviation * deviation)
    return _Rest(channels, mean + drift, deviation, square_sum, _sum_without(~outlier, deviation))


def _is_largest(z: Tensor) -> Tensor:
    """Return a mask that is True at one largest element of each token."""
    positions = torch.arange(z.shape[-1], device=z.device)
    return positions == z.argmax(-1, keepdim=True)


def _sum_without(mask: Tensor, z: Tensor) -> Tensor:
    """Return the sum of each token's elements where ``mask`` is False."""
    return torch.where(mask, 0, z).sum(-1, keepdim=True)


def _count_at_least_two(z: Tensor) -> int:
    """Return C, refusing tokens of one channel, of which nothing would remain."""
    channels = z.shape[-1]
    if channels < 2:
        raise ArgumentError(
            f"x must have at least 2 channels to leave one out, got {channels} in shape "
            f"{tuple(z.shape)}: move the channels to the last axis"
        )
    return channels


def _over_root(numerator: float, beta: FloatOrTensor) -> FloatOrTensor:
    """Return ``numerator / sqrt(beta)``."""
    if isinstance(beta, Tensor):
        return numerator / beta.sqrt()
    return numerator / math.sqrt(check_positive("beta", beta))
