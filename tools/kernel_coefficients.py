"""Derive the coefficients of csrc/functions.h and csrc/tanh_table.h, printed as C++ hexadecimal floats.

Run it with ``python tools/kernel_coefficients.py``; it needs mpmath (``dynorm[paper]``). Lawson's
method: least squares whose weights grow where the error is large, until the error is level.
"""

from __future__ import annotations

import mpmath
import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def main() -> None:
    """Print the polynomials with the largest relative error that each leaves in its function."""
    mpmath.mp.dps = 40
    nodes = np.cos(np.pi * (np.arange(4000) + 0.5) / 4000)

    # expm1(r) = r + r^2 q(r) for |r| <= log(2) / 2, a little more because r is rounded.
    r = nodes * 0.34665
    exact = np.array([float((mpmath.expm1(v) - v) / mpmath.mpf(v) ** 2) for v in r])
    report("expm1", *minimax(r, exact, np.abs(r**2 / np.expm1(r)), degree=4))

    # erf(x) = -expm1(-w), w = x (c0 + x q(x)), for 0 <= x <= 3.93, where erf rounds to 1.
    x = (nodes + 1) / 2 * 3.93
    c0 = 2 / mpmath.sqrt(mpmath.pi)
    log_erfc = [-mpmath.log(mpmath.erfc(v)) for v in x]
    exact = np.array(
        [float((w / mpmath.mpf(v) - c0) / mpmath.mpf(v)) for v, w in zip(x, log_erfc, strict=True)]
    )
    w = np.array([float(value) for value in log_erfc])
    report("erf", *minimax(x, exact, x**2 * np.exp(-w) / -np.expm1(-w), degree=7))
    high = np.float32(float(c0))
    print(
        "c0 =", float(high).hex(), "+", float(np.float32(float(c0 - mpmath.mpf(float(high))))).hex()
    )

    for row in tanh_table(degree=6).T:
        print("    {" + ", ".join(shortest(value) for value in row) + "},")


def tanh_table(degree: int) -> Array:
    """Return the polynomials of tanh(node + d) in d, (16 nodes, degree + 1), rounded to float32.

    The node of z is found by the bits of 1 + |z|: two of the mantissa and the last two of the
    exponent, so that the first node, 0, is number 12.
    """
    nodes = np.cos(np.pi * (np.arange(600) + 0.5) / 600)
    table = np.zeros((16, degree + 1))
    for place in range(16):
        octave, quarter = divmod((place + 4) % 16, 4)
        left, width = 2.0**octave * (1 + quarter / 4) - 1, 2.0**octave / 4
        if left >= 9.1:  # tanh rounds to 1
            table[place, 0] = 1
            continue
        d = (nodes + 1) / 2 * width
        exact = [mpmath.tanh(mpmath.mpf(left) + mpmath.mpf(v)) for v in d]
        table[place, 0] = np.float32(float(mpmath.tanh(left)))
        # One coefficient after another is rounded, and the others are fitted again.
        for power in range(1, degree + 1):
            known = [
                mpmath.polyval(
                    [mpmath.mpf(c) for c in table[place, power - 1 :: -1]], mpmath.mpf(v)
                )
                for v in d
            ]
            left_over = zip(exact, known, d, strict=True)
            rest = np.array([float((v - k) / mpmath.mpf(x) ** power) for v, k, x in left_over])
            weight = d**power / np.array([float(v) for v in exact])
            last = (weight**2 * rest).sum() / (weight**2).sum()
            table[place, power] = np.float32(
                last if power == degree else minimax(d, rest, weight, degree - power)[0][0]
            )
    return table


def shortest(value: float) -> str:
    """Return a float32 as C++ writes it, without the zeros that say nothing."""
    if value in (0.0, 1.0):
        return f"{value:g}"
    digits, exponent = value.hex().split("p")
    return f"{digits.rstrip('0').rstrip('.')}p{int(exponent)}f"


def minimax(x: Array, y: Array, weight: Array, degree: int) -> tuple[Array, float]:
    """Return coefficients, the constant first, and the largest weighted error."""
    basis = np.polynomial.chebyshev.chebvander(scaled(x), degree)
    lawson = np.ones_like(x) / len(x)
    best, least = np.zeros(degree + 1), np.inf
    for _ in range(500):
        root = np.sqrt(lawson) * weight
        fit = np.linalg.lstsq(basis * root[:, None], y * root, rcond=None)[0]
        error = np.abs(basis @ fit - y) * weight
        if error.max() < least:
            best, least = fit, error.max()
        lawson *= error
        lawson /= lawson.sum()
    series = np.polynomial.Chebyshev(best, domain=[x.min(), x.max()])
    return series.convert(kind=np.polynomial.Polynomial, domain=[-1, 1]).coef, least


def scaled(x: Array) -> Array:
    """Map the interval of ``x`` to [-1, 1]."""
    return (2 * x - x.min() - x.max()) / (x.max() - x.min())


def report(name: str, coefficients: Array, error: float) -> None:
    """Print one polynomial."""
    print(f"{name}: largest relative error 2^{np.log2(error):.2f}")
    for k, c in enumerate(coefficients):
        print(f"  c{k} = {float(np.float32(c)).hex()}f")


if __name__ == "__main__":
    main()
