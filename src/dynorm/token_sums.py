r"""The constant of a token that has witnesses, without a square that overflows.

With a set K of witness channels, beta depends on the token:

.. math:: \beta_i(x) = \beta + \sum_{k \in K, k \neq i} g_k u_k^2

Each number is divided by the largest of those that it is added to before it is squared, so no
square overflows, not even in float16, to which other tools convert a whole graph. A result does not
depend on the units, so they need no gradient.
"""

import math
from functools import reduce
from typing import TypeGuard

import torch
from torch import Tensor

from dynorm.arguments import Constant, along, check_witness_tensors, clamped
from dynorm.errors import ArgumentError

# The smallest normal number of float16, so that it stays a divisor after a conversion to it.
_SMALLEST_UNIT = 2.0**-14


def has_witnesses(witnesses: Tensor | None, gain: Tensor | None) -> TypeGuard[Tensor]:
    """Return whether there are witnesses; refuse gains without them."""
    if witnesses is not None and witnesses.numel():
        return True
    if gain is not None and gain.numel():
        raise ArgumentError(
            f"gain must come with witnesses, got {tuple(gain.shape)} for none: give both"
        )
    return False


def beta_of_token(
    u: Tensor, beta: Constant, axis: int, witnesses: Tensor, gain: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return v and b with ``v / sqrt(b + v^2) = u / sqrt(beta_i + u^2)``, as DyISRU needs them.

    A witness is not in its own sum. The others are added, instead of subtracting it from a total,
    because a witness is often larger than all of them together.
    """
    u = clamped(u)
    total, largest = _sum(u, axis, witnesses, gain, leave_one_out=True)
    if isinstance(beta, Tensor):
        unit = torch.maximum(largest, beta.detach().sqrt())
    else:
        unit = largest.clamp_min(math.sqrt(beta))
    token_beta = beta / unit / unit + total * (largest / unit).square()
    size = torch.maximum(u.detach().abs(), unit)
    return u / size, token_beta * (unit / size).square()


def slope_of_token(
    u: Tensor,
    slope: Constant,
    axis: int,
    witnesses: Tensor,
    gain: Tensor | None,
    ratio: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Return v and s with ``s v = u / sqrt(1 / slope^2 + ratio * sum)``, as the other functions need them.

    The sum has all witnesses. ``ratio`` is ``1 / (beta * slope**2)``.
    """
    u = clamped(u)
    total, largest = _sum(u, axis, witnesses, gain, leave_one_out=False)
    if isinstance(slope, Tensor):
        unit = torch.maximum(largest, 1 / slope.detach().abs().clamp_min(_SMALLEST_UNIT))
    else:
        unit = largest.clamp_min(1 / max(abs(slope), _SMALLEST_UNIT))
    steep = slope * unit
    size = steep.detach().abs().clamp_min(1)
    # As a factor, so that the slope keeps its sign and a slope of 0 is not a divisor.
    factor = steep / size
    witnessed = ratio * (factor * (largest / unit)).square() * total
    square = (1 / size).square() + witnessed
    return u / unit, factor * torch.rsqrt(square)


def _sum(
    u: Tensor, axis: int, witnesses: Tensor, gain: Tensor | None, *, leave_one_out: bool
) -> tuple[Tensor, Tensor]:
    """Return ``sum_k g_k (u_k / largest)^2`` and the size of the largest witness, per token.

    Both have size 1 along the channels; with ``leave_one_out`` there is one sum per channel.
    """
    channels = u.shape[axis]
    check_witness_tensors(witnesses, gain, channels)
    # Compared and added one by one, so that the graph has no reduction, not even over the few.
    shown = torch.split(u.index_select(axis, witnesses), 1, axis)
    sizes = [value.detach().abs() for value in shown]
    largest = reduce(torch.maximum, sizes).clamp_min(_SMALLEST_UNIT)
    position = along(torch.arange(channels, device=u.device), u, axis)
    gains = None if gain is None else gain.to(u.dtype).unbind()
    terms: list[Tensor] = []
    for number, (witness, value) in enumerate(zip(witnesses.unbind(), shown, strict=True)):
        term = (value / largest).square()
        if gains is not None:
            term = term * gains[number]
        if leave_one_out:
            term = torch.where(position == witness, 0, term)
        terms.append(term)
    return reduce(torch.add, terms), largest
