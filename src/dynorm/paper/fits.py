"""One-constant fits of the point-wise functions to LayerNorm's outliers, and the closed form.

Each bounded function is sqrt(C - 1) f(k x), where f rises from -1 to 1, and its constant is a power
of k. One point (x, y) determines k. The least-squares k of several points therefore lies between
the smallest and the largest k of the single points. In that bracket the root of the derivative is
found to the last digit or two, and no starting value is needed. The paper also fits the mirror
images (-x, -y); these double the sum of squares and do not change the constants.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from dynorm.errors import ArgumentError, require_library
from dynorm.functional import derf, dyisru, dyisru_general, dyt, linear
from dynorm.paper.simulation import Array, Simulation
from dynorm.theory import leave_one_out_beta, leave_one_out_mean


@dataclass(frozen=True)
class Family:
    """A bounded function sqrt(C - 1) f(k x) with one constant, ``k ** power``."""

    name: str
    constant: str
    power: int
    # The function of :mod:`dynorm.functional`; it takes x, the constant and the keyword scale.
    curve: Callable[..., Tensor]
    inverse: Callable[[Tensor], Tensor]  # the inverse of f


DYT = Family(
    "DyT",
    constant="alpha",
    power=1,
    curve=dyt,
    inverse=torch.atanh,
)
DERF = Family(
    "Derf",
    constant="alpha",
    power=1,
    curve=derf,
    inverse=torch.erfinv,
)
DYISRU = Family(
    "DyISRU",
    constant="beta",
    power=-2,
    curve=dyisru,
    inverse=lambda f: f / ((1 - f) * (1 + f)) ** 0.5,
)
FAMILIES = {family.name: family for family in (DYT, DERF, DYISRU)}
FITTED = (*FAMILIES, "linear")
CLOSED = "closed form"


@dataclass(frozen=True, eq=False)
class Fit:
    """A function with its constant, fitted or known, and its distance from some points."""

    name: str  # DyT, Derf, DyISRU, linear or closed form
    constant: str  # the name of the constant: alpha, beta or slope
    value: float
    x: Array
    y: Array
    of: Callable[[Tensor], Tensor]
    center: float = 0.0  # subtracted from x; only the closed form has one

    def function(self, x: ArrayLike) -> Array:
        """Return the function of an array of any shape."""
        return self.of(torch.tensor(x, dtype=torch.float64)).numpy()

    @cached_property
    def residuals(self) -> Array:
        """The function minus y, at each x."""
        return self.function(self.x) - self.y

    @property
    def mean_absolute_residual(self) -> float:
        """The mean of ``abs(residuals)``, which the paper reports."""
        return float(np.abs(self.residuals).mean())


def fit(name: str, x: ArrayLike, y: ArrayLike, channels: int) -> Fit:
    r"""Fit the constant of one function by least squares (eq. 11, 15, 18 and 19).

    .. math:: \min_\alpha \sum_S \left(\sqrt{C - 1} \tanh(\alpha x_S) - y_S\right)^2

    is the fit of ``"DyT"``. ``"Derf"`` has the error function in place of tanh, and ``"DyISRU"`` is
    :math:`\sqrt{C - 1} \, x / \sqrt{\beta + x^2}`. The slope of ``"linear"``, the control, is
    :math:`\sum_S x_S y_S / \sum_S x_S^2` for every C.

    Args:
        name: One of the four functions.
        x: Inputs of shape (n,).
        y: Outputs of shape (n,), with the signs of x and within the bounds of LayerNorm.
        channels: C.

    Raises:
        ArgumentError: If a function has no fit to the points, or if scipy is not installed.
    """
    inputs = np.array(x, dtype=np.float64)
    outputs = np.array(y, dtype=np.float64)
    constants = fit_many(name, inputs[None], outputs[None], channels)
    value = float(constants[0])
    label = FAMILIES[name].constant if name in FAMILIES else "slope"

    def fitted(z: Tensor) -> Tensor:
        return outputs_of(name, z, value, channels)

    return Fit(name, label, value, inputs, outputs, fitted)


def closed_form(simulation: Simulation) -> Fit:
    r"""Return LayerNorm as a function of the outlier, computed from the sample without a fit.

    .. math:: y_o = \sqrt{C - 1} \frac{x_o - m_o}{\sqrt{C v_o + (x_o - m_o)^2}}

    m_o, the centre, and v_o are the mean and the biased variance of the other channels. They do not
    change when the outlier does, so the sample determines them and they are the same at every step.
    This is eq. 13 with that centre; its beta, C v_o, is that of eq. 14 times (C / (C - 1))**2. The
    residuals are rounding errors.
    """
    sample = torch.from_numpy(simulation.tokens[0])
    center = float(leave_one_out_mean(sample)[-1])
    # With C = 2 beta is 0, which the function accepts only as a tensor.
    beta = leave_one_out_beta(sample)[-1:]
    scale = math.sqrt(simulation.channels - 1)
    return Fit(
        CLOSED,
        constant="beta",
        value=float(beta),
        x=simulation.outliers,
        y=simulation.outputs,
        of=partial(dyisru_general, beta=beta, center=center, scale=scale),
        center=center,
    )


def outputs_of(name: str, x: Tensor, constant: float | Tensor, channels: int) -> Tensor:
    """Return the outputs of a function at x; ``constant`` is a number, or has one per row of x."""
    if name == "linear":
        return linear(x, constant)
    return FAMILIES[name].curve(x, constant, scale=math.sqrt(channels - 1))


def fit_many(name: str, x: ArrayLike, y: ArrayLike, channels: int) -> Array:
    """Return the constant that :func:`fit` finds for each of many sets of points.

    x and y have the shape (sets, n), the constants the shape (sets,).
    """
    inputs = torch.tensor(x, dtype=torch.float64)
    outputs = torch.tensor(y, dtype=torch.float64)
    if name == "linear":
        slopes = (inputs * outputs).sum(-1) / (inputs * inputs).sum(-1)
        return slopes.numpy()
    family = FAMILIES[name]
    scale = math.sqrt(channels - 1)
    # The log of the k with which the function goes through each point. The output of an extreme
    # outlier rounds to the bound, which no finite k reaches.
    relative = (outputs / scale).clamp(np.nextafter(-1.0, 0.0), np.nextafter(1.0, 0.0))
    exact = torch.log(family.inverse(relative) / inputs).numpy()

    def gradient(log_k: Array, row: Array) -> Array:
        # The search passes only the sets that have not converged, with their row numbers.
        rows = torch.from_numpy(row).long()
        logs = torch.from_numpy(log_k)[:, None].requires_grad_()
        constants = (family.power * logs).exp()
        residuals = family.curve(inputs[rows], constants, scale=scale) - outputs[rows]
        (slope,) = torch.autograd.grad(residuals.square().sum(), logs)
        return slope[:, 0].numpy()

    require_library("scipy.optimize.elementwise", "the fits", "paper")
    from scipy.optimize.elementwise import find_root

    # Below the smallest exact k every output is too small, above the largest every output is too
    # large, so the derivative changes sign. If all points of a set agree, the bracket has no width;
    # the margin covers rounding.
    low = exact.min(-1) - 1e-9
    high = exact.max(-1) + 1e-9
    every_row = np.arange(len(inputs), dtype=np.float64)
    search = find_root(gradient, (low, high), args=(every_row,))
    if not search.success.all():
        failed = (~search.success).sum()
        raise ArgumentError(
            f"each x must have the sign of its y, and LayerNorm's y must not all be at the bound, but "
            f"{name} has no least-squares fit to {failed} of {len(inputs)} sets: check the points"
        )
    return np.asarray(np.exp(family.power * search.x))
