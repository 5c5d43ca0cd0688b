"""Misprints of the sources: the printed formula is another function, the corrected one holds."""

import math

import torch
from sympy import Eq, Ne, log, sqrt
from torch import Tensor

from dynorm.paper.proof.statement import FIRST_VERSION, NOTE_SOURCE, Statement
from dynorm.paper.proof.vocabulary import (
    SUBSTITUTED,
    C,
    d,
    delta,
    dy_du,
    i,
    k,
    mu,
    positive,
    real,
    sum_k,
    u,
    x_i,
    x_k,
    y,
)


def slope_by_integrand(x: Tensor) -> Tensor:
    """Return the derivative of the intended integral over y, divided by its integrand: always 1."""
    n = len(x) - 1
    y = math.sqrt(n) * torch.sigmoid(x)

    def integral(y: Tensor) -> Tensor:
        return -torch.log(n * y**-2 - 1) / (2 * n)

    slope: Tensor = torch.func.vmap(torch.func.grad(integral))(y)
    return slope * (n * y - y**3)


def misprint_first_version() -> Statement:
    z = positive("z")
    Dy = real("Dy")
    c = real("c")
    integrand = 1 / ((C - 1) * y - y**3)
    ratio = (C - 1) * y ** (-2) - 1
    integral = -(1 / (2 * (C - 1)) * log(ratio))
    integrand_u = -(1 / ((C - 1) * u - 1) / 2)
    # The same as printed: 1 * y for 1y.
    printed_ratio = C - 1 * y ** (-2) - 1
    printed_integral = -(1 / (2 * C - 1) * log(printed_ratio))
    printed_integrand_u = -(1 / (C - 1 * u - 1) / 2)
    printed_integral_u = -(1 / (2 * C - 1) * log(C - 1 * u - 1))
    statement = Statement(
        "misprint-first-version",
        title="Appendix A.3 of the first version: lost parentheses",
        source=FIRST_VERSION,
        equations="28 and the lines around it",
        claim="Wherever the first version prints $C - 1$ before a factor, $(C - 1)$ is meant: "
        r"$C - 1y - y^3$ should read $(C-1)\,y - y^3$",
        assumes=r"$0 < y < \sqrt{C-1}$, that is $w > 0$, and $z = |x - \mu| > 0$; the "
        r"printed formula is read by the usual precedence, $1y$ as $1 \cdot y$",
        definitions={
            **SUBSTITUTED,
            Dy: y / (C * z) * (C - 1 - y**2),
            c: z * sqrt(ratio),
        },
        remarks=(
            "The later text has all of these right. It also numbers the separated equation, so "
            "that 27 and 28 became 28 and 29.",
            "The first version also draws $N = 50$ values (section 4.1) where a token has $C "
            "= 100$; the later one has C.",
        ),
        misprint=True,
    )
    statement.step(
        Ne(1 / C * (1 / z), 1 / (C - 1 * y - y**3) * Dy),
        "Printed in the separated equation: taken literally, it is another function.",
    )
    statement.step(Eq(1 / C * (1 / z), integrand * Dy), "Meant.")
    statement.step(
        Ne(integrand * dy_du, -(1 / (printed_ratio) / 2)),
        "Printed after substitution, in $y$: taken literally, it is another function.",
    )
    statement.step(Eq(integrand * dy_du, -(1 / (ratio) / 2)), "Meant.")
    statement.step(
        Ne(integrand * dy_du, printed_integrand_u),
        "Printed after substitution, in $u$: taken literally, it is another function.",
    )
    statement.step(Eq(integrand * dy_du, integrand_u), "Meant.")
    statement.step(
        Ne(integrand_u, d(printed_integral_u, u)),
        "Printed in the integral over $u$: taken literally, it is another function.",
    )
    statement.step(
        Eq(integrand_u, d(-(1 / (2 * (C - 1)) * log((C - 1) * u - 1)), u)),
        "Meant.",
    )
    statement.step(
        Ne(printed_integrand_u, d(printed_integral_u, u)),
        "Nor is it consistent: the printed integral is not an integral of the printed integrand.",
    )
    statement.step(
        Ne(integrand, d(printed_integral, y)),
        "Printed in eq. 28: taken literally, it is another function.",
    )
    statement.step(
        Eq(integrand, d(integral, y)),
        "Meant.",
    )
    statement.step(
        Ne(1 / (C - 1) * log(z), printed_integral + log(c) / (C - 1)),
        "Printed where both sides are compared: taken literally, it is another function.",
    )
    statement.step(
        Eq(
            1 / (C - 1) * log(z),
            integral + log(c) / (C - 1),
        ),
        "Meant.",
    )
    statement.step(
        Ne(log(c**2 / z**2), log(printed_ratio)),
        "Printed in the next three lines: taken literally, it is another function.",
    )
    statement.step(Eq(log(c**2 / z**2), log(ratio)), "Meant.")
    statement.step(
        Ne(c**2 / z**2, printed_ratio),
        "Printed where they are exponentiated: taken literally, it is another function.",
    )
    statement.step(Eq(c**2 / z**2, ratio), "Meant.")
    statement.step(
        Ne(y ** (-2), (c**2 + z**2) / (C - 1 * z**2)),
        "Printed in the last line but one: taken literally, it is another function.",
    )
    statement.step(Eq(y ** (-2), (c**2 + z**2) / ((C - 1) * z**2)), "Meant.")
    statement.step(
        Ne(y**2, (C - 1 * z**2) / (c**2 + z**2)),
        "Printed in the last line: taken literally, it is another function.",
    )
    statement.step(Eq(y**2, (C - 1) * z**2 / (c**2 + z**2)), "Meant.")
    statement.compare(1, lambda x, _: slope_by_integrand(x))
    return statement


def misprint_note() -> Statement:
    statement = Statement(
        "misprint-note",
        title="The note's centring matrix: 1 for I",
        source=NOTE_SOURCE,
        equations="c(x)",
        claim=r"The note's first display has $x\,(1 - \frac{1}{d} 1^\top 1)$; $I - \frac{1}{d} "
        r"1^\top 1$ is meant, as its later lines have it",
        assumes=r"a number minus a matrix is taken entry by entry: each is $1 - \frac{1}{C}$",
        definitions={
            mu: sum_k(x_k) / C,
        },
        misprint=True,
    )
    statement.step(
        Ne(x_i - mu, sum_k(x_k * (1 - 1 / C))), "Printed: taken literally, it does not centre."
    )
    statement.step(Eq(x_i - mu, sum_k(x_k * (delta(k, i) - 1 / C))), "Meant.")
    statement.compare(x_i - mu, lambda x, at: x @ (torch.eye(at.C).double() - 1 / at.C))
    return statement
