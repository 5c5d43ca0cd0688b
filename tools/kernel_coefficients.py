"""Derive the coefficients of csrc/functions.h and csrc/tanh_table.h, printed as C++ hexadecimal floats.

Run it with ``python tools/kernel_coefficients.py``. It needs mpmath (``dynorm[paper]``). The fits
use Lawson's method: least squares whose weights grow where the error is large, until the largest
errors are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import mpmath
import numpy as np
from numpy.polynomial import Chebyshev, Polynomial
from numpy.polynomial.chebyshev import chebvander
from numpy.typing import NDArray

Array = NDArray[np.float64]

# The range of expm1's argument: log(2) / 2, and a little more because the argument is rounded.
EXPM1_LIMIT = 0.34665
# Beyond these, erf and tanh are 1 in float32.
ERF_LIMIT = 3.93
TANH_LIMIT = 9.1


def main() -> None:
    """Print each polynomial, and the largest relative error of the function that uses it."""
    mpmath.mp.dps = 40
    print_expm1()
    print_erf()
    print_quotient("tanh", mpmath.tanh, limit=8.8, degree=4)
    print_quotient("erf", mpmath.erf, limit=3.85, degree=5)
    print_erf_slope()
    for row in tanh_table(degree=6).T:
        values = [shortest(value) for value in row]
        print("    {" + ", ".join(values) + "},")


def print_expm1() -> None:
    """Print q of expm1(r) = r + r^2 q(r), for r up to log(2) / 2 on both sides."""
    r = chebyshev_nodes(4000) * EXPM1_LIMIT
    exact = []
    for value in r:
        remainder = mpmath.expm1(value) - value
        exact.append(remainder / mpmath.mpf(value) ** 2)
    weight = np.abs(r**2 / np.expm1(r))
    print_fit("expm1", minimax(r, floats(exact), weight, degree=4))


def print_erf() -> None:
    """Print c0 and q of erf(x) = -expm1(-w) with w = x (c0 + x q(x)), for x from 0."""
    x = (chebyshev_nodes(4000) + 1) / 2 * ERF_LIMIT
    c0 = 2 / mpmath.sqrt(mpmath.pi)
    exact_w = [-mpmath.log(mpmath.erfc(value)) for value in x]
    exact = []
    for value, w in zip(x, exact_w, strict=True):
        argument = mpmath.mpf(value)
        exact.append((w / argument - c0) / argument)
    w = floats(exact_w)
    weight = x**2 * np.exp(-w) / -np.expm1(-w)
    print_fit("erf", minimax(x, floats(exact), weight, degree=7))
    # c0 as the sum of two float32.
    high = to_float32(c0)
    low = to_float32(c0 - mpmath.mpf(high))
    print("c0 =", high.hex(), "+", low.hex())


def print_quotient(name: str, function: Callable[[Any], Any], limit: float, degree: int) -> None:
    """Print P and Q of f(x) = x P(x^2) / Q(x^2), for x up to a limit; Q's last coefficient is 1.

    Each round divides the weights of a linear fit of x P - f Q by the last Q. In functions.h some
    coefficients differ in the last bits, by a search for the least error after rounding.
    """
    x = (chebyshev_nodes(1500) + 1) / 2 * limit
    exact = floats(function(mpmath.mpf(value)) for value in x)
    basis = chebvander(2 * (x / limit) ** 2 - 1, degree)
    lawson = np.ones_like(x) / len(x)
    quotient = np.ones_like(x)
    for _ in range(800):
        weight = np.sqrt(lawson) / np.abs(quotient) / exact
        columns = np.hstack([basis * x[:, None], -basis[:, 1:] * exact[:, None]])
        solution = np.linalg.lstsq(columns * weight[:, None], exact * weight, rcond=1e-16)[0]
        top = solution[: degree + 1]
        bottom = np.array([1.0, *solution[degree + 1 :]])
        quotient = basis @ bottom
        error = np.abs(x * (basis @ top) / quotient / exact - 1)
        lawson *= error / error.max() + 1e-12
        lawson /= lawson.sum()
    polynomials = []
    for series in (top, bottom):
        chebyshev = Chebyshev(series, domain=[0, limit**2])
        polynomials.append(chebyshev.convert(kind=Polynomial, domain=[-1, 1]).coef)
    last = polynomials[1][-1]
    for letter, coefficients in zip("PQ", polynomials, strict=True):
        print_fit(f"{name}, {letter}", Fit(coefficients / last, error.max()))


def print_erf_slope() -> None:
    """Print 2^r for r up to 1/2, and p of erf(x) = 1 - erf'(x) t p(t) with t = 1 / (1 + 0.475 x)."""
    r = chebyshev_nodes(3000) / 2
    print_fit("power of 2", minimax(r, 2**r, 2**-r, degree=5))
    x = np.linspace(0, 5.2, 1500)
    slope = 2 / np.sqrt(np.pi) * np.exp(-(x**2))
    t = 1 / (1 + 0.475 * x)
    rest = floats(mpmath.erfc(mpmath.mpf(value)) for value in x) / slope
    print_fit("erf by its slope", minimax(t, rest / t, slope * t, degree=4))


def tanh_table(degree: int) -> Array:
    """Return the polynomials of tanh(node + d) in d, (16 nodes, degree + 1), rounded to float32.

    The node of z is found by the bits of 1 + |z|: two of the mantissa and the last two of the
    exponent. The first node, 0, therefore has number 12.
    """
    table = np.zeros((16, degree + 1))
    for number in range(16):
        octave, quarter = divmod((number + 4) % 16, 4)
        node = 2.0**octave * (1 + quarter / 4) - 1
        width = 2.0**octave / 4
        if node >= TANH_LIMIT:
            table[number, 0] = 1
        else:
            table[number] = tanh_polynomial(node, width, degree)
    return table


def tanh_polynomial(node: float, width: float, degree: int) -> Array:
    """Return the polynomial of tanh(node + d) for d from 0 to ``width``, rounded to float32."""
    d = (chebyshev_nodes(600) + 1) / 2 * width
    exact = [mpmath.tanh(mpmath.mpf(node) + mpmath.mpf(value)) for value in d]
    coefficients = np.zeros(degree + 1)
    coefficients[0] = to_float32(mpmath.tanh(node))
    # Round one coefficient after another, and fit the remaining ones again.
    for power in range(1, degree + 1):
        rounded = [mpmath.mpf(value) for value in coefficients[power - 1 :: -1]]
        remaining = []
        for value, tanh in zip(d, exact, strict=True):
            argument = mpmath.mpf(value)
            known = mpmath.polyval(rounded, argument)
            remaining.append((tanh - known) / argument**power)
        y = floats(remaining)
        weight = d**power / floats(exact)
        if power < degree:
            coefficient = minimax(d, y, weight, degree - power).coefficients[0]
        else:
            coefficient = (weight**2 * y).sum() / (weight**2).sum()
        coefficients[power] = to_float32(coefficient)
    return coefficients


@dataclass
class Fit:
    """A polynomial that approximates a function."""

    coefficients: Array  # the constant first
    error: float  # the largest weighted one


def minimax(x: Array, y: Array, weight: Array, degree: int) -> Fit:
    """Fit a polynomial with the least possible largest weighted error."""
    low = x.min()
    high = x.max()
    scaled = (2 * x - low - high) / (high - low)
    basis = chebvander(scaled, degree)
    lawson = np.ones_like(x) / len(x)
    best = np.zeros(degree + 1)
    least = np.inf
    for _ in range(500):
        root = np.sqrt(lawson) * weight
        weighted_basis = basis * root[:, None]
        candidate = np.linalg.lstsq(weighted_basis, y * root, rcond=None)[0]
        error = np.abs(basis @ candidate - y) * weight
        if error.max() < least:
            best = candidate
            least = error.max()
        lawson *= error
        lawson /= lawson.sum()
    series = Chebyshev(best, domain=[low, high])
    polynomial = series.convert(kind=Polynomial, domain=[-1, 1])
    return Fit(polynomial.coef, least)


def chebyshev_nodes(count: int) -> Array:
    """Return points from 1 to -1 that lie closer together near the ends."""
    return np.cos(np.pi * (np.arange(count) + 0.5) / count)


def floats(values: Iterable[Any]) -> Array:
    """Return mpmath's numbers as float64."""
    return np.array([float(value) for value in values])


def to_float32(value: Any) -> float:
    """Return the nearest number that float32 has."""
    return float(np.float32(float(value)))


def shortest(value: float) -> str:
    """Return a float32 as C++ writes it, without trailing zeros."""
    if value in (0.0, 1.0):
        return f"{value:g}"
    digits, exponent = value.hex().split("p")
    mantissa = digits.rstrip("0").rstrip(".")
    return f"{mantissa}p{int(exponent)}f"


def print_fit(name: str, fit: Fit) -> None:
    """Print one polynomial and its error."""
    print(f"{name}: largest relative error 2^{np.log2(fit.error):.2f}")
    for power, coefficient in enumerate(fit.coefficients):
        print(f"  c{power} = {to_float32(coefficient).hex()}f")


if __name__ == "__main__":
    main()
