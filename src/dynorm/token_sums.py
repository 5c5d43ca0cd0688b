r"""DyISRU's beta of a token that has witnesses, without a square that overflows.

With a set K of witness channels, beta depends on the token:

.. math:: \beta_i(x) = \beta + \sum_{k \in K, k \neq i} g_k u_k^2

Each number is divided by the largest of those that it is added to before it is squared, so no
square overflows, not even in float16, to which other tools convert a whole graph. A result does not
depend on the units, so they need no gradient.
"""

import math
from functools import reduce

import torch
from torch import Tensor

from dynorm.arguments import Constant, along, check_witness_tensors
from dynorm.errors import ArgumentError

# The smallest normal number of float16, so that it stays a divisor after a conversion to it.
_SMALLEST_UNIT = 2.0**-14


def beta_of_token(
    u: Tensor, beta: Constant, axis: int, witnesses: Tensor, gain: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return v and b with ``v / sqrt(b + v^2) = u / sqrt(beta_i + u^2)``, as DyISRU needs them.

    The squares of u must be finite. A witness is not in its own sum. The others are added, instead of
    subtracting it from a total, because a witness is often larger than all of them together.
    """
    total, largest = _sums(u, axis, witnesses, gain)
    if isinstance(beta, Tensor):
        unit = torch.maximum(largest, beta.detach().sqrt())
    else:
        unit = largest.clamp_min(math.sqrt(beta))
    token_beta = beta / unit / unit + total * (largest / unit).square()
    size = torch.maximum(u.detach().abs(), unit)
    return u / size, token_beta * (unit / size).square()


def _sums(u: Tensor, axis: int, witnesses: Tensor, gain: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return ``sum_k g_k (u_k / largest)^2`` of each channel, and the size of a token's largest witness."""
    channels = u.shape[axis]
    if hasattr(u, "device_mesh"):
        raise ArgumentError(
            "x must be a plain tensor where there are witnesses, got a DTensor: leave such layers out of the "
            "parallel plan, or take their witnesses off with layer.set_witnesses_(0)"
        )
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
        terms.append(torch.where(position == witness, 0, term))
    return reduce(torch.add, terms), largest
