"""One-constant fits of the point-wise functions to LayerNorm's outliers, and the closed form, which needs none.

Each bounded function is sqrt(C - 1) f(k x) with an f that rises from -1 to 1, and its constant is a
power of k. A point (x, y) therefore names the k that meets it exactly, and the best k of several
points lies between the least and the largest of theirs. In that bracket the root of the sum of
squares' derivative is found to the last digit or two, with no start to choose. The mirror images
(-x, -y), which the paper fits along, double the sum and change no constant.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from dynorm.errors import ArgumentError
from dynorm.functional import derf, dyisru, dyisru_general, dyt, linear
from dynorm.paper.simulation import Array, Simulation
from dynorm.theory import leave_one_out_beta, leave_one_out_mean


@dataclass(frozen=True)
class Family:
    """A bounded function sqrt(C - 1) f(k x) with one constant, ``k ** power``."""

    name: str
    constant: str
    power: int
    # The function of :mod:`dynorm.functional`: of x, the constant and the keyword scale, sqrt(C -
    # 1).
    curve: Callable[..., Tensor]
    slope: Callable[[Tensor], Tensor]  # f'
    inverse: Callable[[Tensor], Tensor]  # the inverse of f


FAMILIES = {
    family.name: family
    for family in (
        Family("DyT", "alpha", 1, dyt, lambda z: torch.cosh(z) ** -2, torch.atanh),
        Family(
            "Derf",
            "alpha",
            1,
            derf,
            lambda z: 2 / math.sqrt(math.pi) * torch.exp(-z * z),
            torch.erfinv,
        ),
        Family(
            "DyISRU",
            "beta",
            -2,
            dyisru,
            lambda z: (1 + z * z) ** -1.5,
            lambda f: f / ((1 - f) * (1 + f)) ** 0.5,
        ),
    )
}
FITTED = (*FAMILIES, "linear")
CLOSED = "closed form"


@dataclass(frozen=True, eq=False)
class Fit:
    """A function with its constant, fitted or known, and how far it is from some points."""

    name: str  # DyT, Derf, DyISRU, linear or closed form
    constant: str  # what the constant is called: alpha, beta or slope
    value: float
    x: Array
    y: Array
    of: Callable[[Tensor], Tensor]
    center: float = 0.0  # what is taken off x; of the closed form alone

    def function(self, x: ArrayLike) -> Array:
        """Return the function of an array of any shape."""
        # A copy: torch refuses read-only and reversed arrays.
        copied = torch.from_numpy(np.array(x, dtype=np.float64, order="C", ndmin=1))
        return self.of(copied).numpy().reshape(np.shape(x))

    @cached_property
    def residuals(self) -> Array:
        """Return the function minus y, at each x."""
        return self.function(self.x) - self.y

    @property
    def mean_absolute_residual(self) -> float:
        """Return the mean of ``abs(residuals)``, the paper's measure."""
        return float(np.abs(self.residuals).mean())


def fit(name: str, x: ArrayLike, y: ArrayLike, channels: int) -> Fit:
    r"""Fit one function by least squares, ``"DyT"``, ``"Derf"``, ``"DyISRU"`` or ``"linear"`` (eq. 11, 15, 18 and 19).

    .. math:: \min_\alpha \sum_S \left(\sqrt{C - 1} \tanh(\alpha x_S) - y_S\right)^2

    is the fit of DyT. Derf has the error function in place of tanh, and DyISRU is
    :math:`\sqrt{C - 1} \, x / \sqrt{\beta + x^2}`. The linear control's slope is
    :math:`\sum_S x_S y_S / \sum_S x_S^2`, whatever C.

    x has the shape (n,), each of the sign of its output y, which is within the bounds of LayerNorm.
    ArgumentError is raised for points that cannot be fitted, and where scipy is not installed.
    """
    inputs, outputs = (points.numpy() for points in _points(x, y, channels))
    (value,) = fit_many(name, inputs[None], outputs[None], channels).tolist()
    label = FAMILIES[name].constant if name in FAMILIES else "slope"
    return Fit(name, label, value, inputs, outputs, lambda z: outputs_of(name, z, value, channels))


def closed_form(simulation: Simulation) -> Fit:
    r"""Return LayerNorm's function of the outlier, known before any outlier is seen: no fit is needed.

    .. math:: y_o = \sqrt{C - 1} \frac{x_o - m_o}{\sqrt{C v_o + (x_o - m_o)^2}}

    m_o, the centre, and v_o are the mean and the biased variance of the other channels. They do not
    change when the outlier does, so they are taken from the sample alone, and one pair of constants
    serves every step. This is eq. 13 with that centre; its beta, C v_o, is eq. 14's times (C / (C -
    1))**2. The residuals are rounding errors.
    """
    # A beta of 0, at C = 2, is refused as a float: it stays a tensor.
    sample, scale = torch.from_numpy(simulation.tokens[0]), math.sqrt(simulation.channels - 1)
    center, beta = float(leave_one_out_mean(sample)[-1]), leave_one_out_beta(sample)[-1:]
    function = partial(dyisru_general, beta=beta, center=center, scale=scale)
    return Fit(
        CLOSED, "beta", float(beta), simulation.outliers, simulation.outputs, function, center
    )


def outputs_of(name: str, x: Tensor, constant: float | Tensor, channels: int) -> Tensor:
    """Return the outputs of a function at x, with its constant, or one constant per row."""
    if name == "linear":
        return linear(x, constant)
    return FAMILIES[name].curve(x, constant, scale=math.sqrt(channels - 1))


def fit_many(name: str, x: ArrayLike, y: ArrayLike, channels: int) -> Array:
    """Return the constants (sets,) that :func:`fit` would find for each of many sets of points, x and y (sets, n)."""
    if name not in FITTED:
        raise ArgumentError(
            f"the function must be one of {', '.join(FITTED)}, got {name!r}: give one of those"
        )
    inputs, outputs = _points(x, y, channels, dimensions=2)
    if name == "linear":
        return ((inputs * outputs).sum(-1) / (inputs * inputs).sum(-1)).numpy()
    family, scale = FAMILIES[name], math.sqrt(channels - 1)
    # The log of the k with which the function goes through each point. An extreme outlier's output
    # rounds to the bound, which no finite k reaches.
    share = (outputs / scale).clamp(np.nextafter(-1.0, 0.0), np.nextafter(1.0, 0.0))
    exact = torch.log(family.inverse(share) / inputs).numpy()

    def gradient(log_k: Array, row: Array) -> Array:
        # Sets that have converged are left out by the search, and the row numbers of those that
        # remain passed.
        rows = torch.from_numpy(row).long()
        logs, x = torch.from_numpy(log_k)[:, None], inputs[rows]
        misses = family.curve(x, (family.power * logs).exp(), scale=scale) - outputs[rows]
        z = logs.exp() * x
        return (misses * (scale * z * family.slope(z))).sum(-1).numpy()

    try:
        # Only the fits need scipy.
        from scipy.optimize.elementwise import find_root
    except ImportError as error:
        raise ArgumentError(
            "the fits need scipy 1.15 or newer: pip install 'dynorm[paper]'"
        ) from error
    # Below the least exact k every output is too small, above the largest too large: the derivative
    # changes sign. A bracket of no width, where all points of a set agree, is widened by what
    # rounding may have cost.
    low, high = exact.min(-1) - 1e-9, exact.max(-1) + 1e-9
    found = find_root(gradient, (low, high), args=(np.arange(len(inputs), dtype=np.float64),))
    if not found.success.all():
        raise ArgumentError(
            f"{name} has no least-squares fit to {(~found.success).sum()} sets: check the points"
        )
    return np.asarray(np.exp(family.power * found.x))


def _points(
    x: ArrayLike, y: ArrayLike, channels: int, dimensions: int = 1
) -> tuple[Tensor, Tensor]:
    """Return the points as tensors, refusing those to which no such function comes near."""
    inputs, outputs = (np.array(values, dtype=np.float64, order="C") for values in (x, y))
    if (
        inputs.shape != outputs.shape
        or inputs.ndim != dimensions
        or inputs.size == 0
        or channels < 2
    ):
        shape = "(n,)" if dimensions == 1 else "(sets, n)"
        raise ArgumentError(
            f"a fit needs x and y of the same shape {shape}, at least one point, and at least 2 "
            "channels, "
            f"got {inputs.shape}, {outputs.shape} and {channels} channels: give those"
        )
    # Written so that NaN is refused too.
    if not ((inputs * outputs > 0) & np.isfinite(inputs)).all():
        raise ArgumentError(
            "each x must be finite and have the sign of its y, as a function through 0 can have no "
            "other: "
            "leave out the other points, or subtract a centre from x"
        )
    bound = math.sqrt(channels - 1)
    if (
        not (np.abs(outputs) < bound * (1 + 1e-12)).all()
        or (np.abs(outputs) > bound * (1 - 1e-12)).all()
    ):
        raise ArgumentError(
            f"LayerNorm's outputs must lie within sqrt(C - 1) = {bound:g} and not all on it, got "
            f"{outputs.min():g} to "
            f"{outputs.max():g}: no constant fits these; take more than 2 channels, or less "
            "extreme outliers"
        )
    return torch.from_numpy(inputs), torch.from_numpy(outputs)
