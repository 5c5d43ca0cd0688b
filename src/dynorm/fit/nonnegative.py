"""Least squares with coefficients that must not be negative."""

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
# Rounds for each unknown, after which the last solution stands.
_ROUNDS_PER_UNKNOWN = 5
# A part of the diagonal and of the largest target that counts as rounding.
_ROUNDING = 1e-12
_TINY = 1e-300


def nonnegative_least_squares(products: Array, targets: Array) -> Array:
    r"""Return the :math:`g \ge 0` that minimises :math:`\|A g - b\|^2`.

    The problem is given by :math:`A^T A` and :math:`A^T b`, because these are sums over tokens and
    can be streamed; ``scipy.optimize.nnls`` needs A, which has a row per token. The method is
    Lawson and Hanson's: free one unknown after the other, and hold at 0 those that would become
    negative.

    Args:
        products: (n, n), symmetric and not negative definite; it may be singular.
        targets: (n).

    Returns:
        The solution, (n).
    """
    # Each unknown in a unit that makes the diagonal 1.
    scale: Array = 1 / np.sqrt(products.diagonal().clip(_TINY))
    # Without the addition a matrix with two like columns has no solution.
    matrix = products * np.outer(scale, scale) + _ROUNDING * np.eye(len(targets))
    target = targets * scale
    # Plain least squares solves most problems.
    optimum = np.linalg.solve(matrix, target)
    if (optimum >= 0).all():
        return optimum * scale
    solution = np.zeros_like(target)
    free = np.zeros(len(target), dtype=bool)
    least = _ROUNDING * np.abs(target).max()
    for _ in range(_ROUNDS_PER_UNKNOWN * len(target)):
        # Half the error's fall per unit of each unknown that is held at 0.
        descent = np.where(free, -np.inf, target - matrix @ solution)
        best = descent.argmax()
        if descent[best] <= least:
            break
        free[best] = True
        solution = _within(matrix, target, solution, free)
    return solution * scale


def _within(matrix: Array, target: Array, solution: Array, free: NDArray[np.bool_]) -> Array:
    """Return the best solution of the free unknowns, and hold in ``free`` those that reach 0."""
    while free.any():
        optimum = np.zeros_like(target)
        optimum[free] = np.linalg.solve(matrix[free][:, free], target[free])
        blocked = free & (optimum <= 0)
        if not blocked.any():
            return optimum
        # Go only so far that the first of them reaches 0.
        steps = solution[blocked] / (solution[blocked] - optimum[blocked]).clip(_TINY)
        solution = (solution + steps.min() * (optimum - solution)).clip(0)
        free &= ~blocked | (solution > _ROUNDING)
        solution[~free] = 0
    return solution
