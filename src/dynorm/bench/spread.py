"""Medians and quartiles over rounds, of times and of the ratios of two contenders in the same round."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from dynorm.errors import ArgumentError

__all__ = ["Spread", "ratio", "spread"]


class Spread(NamedTuple):
    """The middle of some values and the half of them around it.

    Args:
        median: the median.
        lower: the first quartile.
        upper: the third quartile.
    """

    median: float
    lower: float
    upper: float

    def scaled(self, factor: float) -> Spread:
        """Return the same in another unit; the factor is positive."""
        return Spread(*(factor * value for value in self))

    def rounded(self, digits: int = 4) -> list[float]:
        """Return median and quartiles to some significant digits, as they are kept."""
        return [significant(value, digits) for value in self]


def spread(values: Sequence[float]) -> Spread:
    """Return the median and the quartiles of what was measured in each round.

    Args:
        values: one a round, finite.

    Returns:
        Median, lower and upper quartile, interpolated between neighbours; all alike for one value.

    Raises:
        ArgumentError: there is no value, or one is not finite.

    Example:
        >>> spread([3.0, 1.0, 2.0, 5.0, 4.0])
        Spread(median=3.0, lower=2.0, upper=4.0)
    """
    if not values or not all(map(math.isfinite, values)):
        raise ArgumentError(f"a spread needs finite values, at least one, got {list(values)[:4]}")
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    lower, median, upper = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median, lower, upper)


def ratio(above: Sequence[float], below: Sequence[float]) -> Spread:
    """Return the spread of the ratios in each round: what slows a whole round down cancels.

    Args:
        above: times of one contender, one a round.
        below: times of another in the same rounds, positive.

    Raises:
        ArgumentError: there are more of the one than of the other.

    Example:
        >>> ratio([2.0, 4.0, 20.0], [1.0, 2.0, 10.0])
        Spread(median=2.0, lower=2.0, upper=2.0)
    """
    if len(above) != len(below):
        raise ArgumentError(f"two contenders must have the same rounds, got {len(above)} and {len(below)}")
    return spread([a / b for a, b in zip(above, below, strict=True)])


def significant(value: float, digits: int = 4) -> float:
    """Return a number rounded to some significant digits.

    Example:
        >>> significant(0.0123456)
        0.01235
    """
    return float(f"{value:.{digits}g}")
