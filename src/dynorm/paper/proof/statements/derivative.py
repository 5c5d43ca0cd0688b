"""The derivative of LayerNorm: theorem 1 and the equations around it."""

import torch
from sympy import Eq, Ge, Ne, sqrt

from dynorm.functional import center, layer_norm
from dynorm.paper.proof.statement import OURS, PAPER, Statement
from dynorm.paper.proof.vocabulary import (
    TOKEN,
    C,
    F,
    R,
    d,
    from_mean,
    from_others,
    m_i,
    mu,
    n,
    others,
    real,
    sigma,
    sum_k,
    v_i,
    x_i,
    x_k,
    y_i,
)
from dynorm.theory import (
    layer_norm_derivative,
    layer_norm_slope_factor,
    leave_one_out_mean,
    leave_one_out_variance,
)


def reduction() -> Statement:
    p = real("p")
    q = real("q")
    r = real("r")
    statement = Statement(
        "reduction",
        title="The dependence of one channel on its token",
        source=OURS,
        equations="1, 2",
        claim=r"Every mean and variance of a token depends only on $x_i$, C, $\sum_{k \neq i} x_k$ "
        r"and $\sum_{k \neq i} x_k^2$, and the last two do not move with $x_i$",
        assumes=r"$C \geq 2$ an integer, $1 \leq i \leq C$; the first five steps are proven "
        "with sympy's own sums and derivatives over symbolic bounds, and all other "
        "proofs rest on them. p, q and r are free of k",
        definitions=TOKEN,
    )
    statement.step(
        Eq(sum_k(p + q * x_k + r * x_k**2), C * p + q * sum_k(x_k) + r * sum_k(x_k**2)),
        "A sum of polynomials of degree 2 is known from two sums.",
        by_sums=True,
    )
    statement.step(
        Eq(others(p + q * x_k + r * x_k**2), n * p + q * others(x_k) + r * others(x_k**2)),
        "So is a sum that leaves channel i out.",
        by_sums=True,
    )
    statement.step(
        Eq(d(sum_k(x_k)), 1), "The whole sum moves with $x_i$ as fast as $x_i$.", by_sums=True
    )
    statement.step(
        Eq(d(sum_k(x_k**2)), 2 * x_i),
        "The sum of squares moves as its one square does.",
        by_sums=True,
    )
    statement.step(
        Eq(d(others(p * x_k + q * x_k**2)), 0), "Without channel i, neither moves.", by_sums=True
    )
    statement.step(
        Eq(others(x_k), n * m_i),
        "The two sums are expressed by mean and variance of the other channels: any $m_i$ and "
        r"any $v_i \geq 0$.",
    )
    statement.step(
        Eq(others(x_k**2), n * (v_i + m_i**2)),
        "The second sum; $v_i$ is a mean of squares, hence not negative.",
    )
    statement.step(
        Eq(from_mean, n / C * from_others),
        "The deviation from the mean of all, by the deviation from the mean of the others.",
    )
    statement.step(
        Eq(C * sigma**2, n * v_i + n / C * from_others**2),
        "The variance of all, by the variance of the others and one deviation.",
    )
    statement.compare(from_mean, lambda x, _: center(x))
    statement.compare(sigma**2, lambda x, _: x.var(correction=0))
    statement.compare(m_i, lambda x, _: leave_one_out_mean(x))
    statement.compare(v_i, lambda x, _: leave_one_out_variance(x))
    return statement


def theorem_1() -> Statement:
    f = real("f")
    g = real("g")
    root = sqrt(sigma**2)
    quotient_rule = (d(f) * g - f * d(g)) / g**2
    slope_factor = 1 / (C * root)
    statement = Statement(
        "theorem-1",
        title="Theorem 1: the derivative of LayerNorm",
        source=PAPER,
        equations="1-3, 5, 6, 20-26",
        claim=r"$\frac{dy_i}{dx_i} = F(x)\,(C - 1 - y_i^2)$ with $F(x) = "
        r"\frac{1}{C\sqrt{\sigma^2}}$",
        assumes=r"$C > 1$ channels that are not all equal, so that $\sigma > 0$; the other "
        r"channels are constant while $x_i$ moves, $\mu$ and $\sigma$ move with it",
        definitions={
            **TOKEN,
            f: from_mean,
            g: root,
        },
        remarks=(
            r"Both texts abbreviate $f^\prime = df/dx$; $df/dx_i$ is meant, as eq. 24 has it.",
            "C need not be an integer for the algebra: any real $C > 1$ passes.",
        ),
    )
    statement.step(
        Eq(d(f), 1 - d(1 / C * sum_k(x_k))),
        "The mean moves with $x_i$: by eq. 1 it is a sum that contains $x_i$.",
    )
    statement.then(n / C, "One term of the sum is $x_i$, the others stay.", tag="24")
    statement.step(
        Eq(d(g), 1 / (2 * root) * d(sigma**2)),
        r"The chain rule for the root; $\sigma > 0$.",
    )
    statement.then(1 / (2 * root) * d(1 / C * sum_k((x_k - mu) ** 2)), "Eq. 2.")
    statement.then(
        1 / (2 * C * root) * d(from_mean**2 + others((x_k - mu) ** 2)),
        "The term $k = i$ is taken out of the sum.",
    )
    statement.then(
        slope_factor * (from_mean * d(from_mean) + others((x_k - mu) * d(x_k - mu))),
        "The chain rule for each square.",
    )
    statement.then(
        slope_factor * (from_mean * (1 - 1 / C) - others((x_k - mu) * (1 / C))),
        r"Eq. 24; for $k \neq i$ only the mean moves, by $1/C$.",
    )
    statement.then(
        slope_factor * (x_i - mu - 1 / C * sum_k(x_k - mu)),
        r"The term $-\frac{1}{C}\,(x_i - \mu)$ completes the sum.",
    )
    statement.then(
        slope_factor * from_mean, r"Deviations from the mean add up to 0: $\sum_k x_k = C \mu$."
    )
    statement.then(y_i / C, "Eq. 3.", tag="25")
    statement.step(
        Eq(d(y_i), quotient_rule),
        r"The quotient rule, of $y_i = f / g$ with $f = x_i - \mu$ and $g = \sqrt{\sigma^2}$ "
        "(eq. 20 to 22).",
        tag="23",
    )
    statement.then(
        (n / C * root - from_mean * (y_i / C)) / sigma**2,
        "Eq. 24 and 25 are inserted.",
    )
    statement.then(
        (n / C * root - 1 / C * root * y_i**2) / sigma**2,
        r"Eq. 3: $x_i - \mu = \sigma y_i$.",
    )
    statement.then(slope_factor * (C - 1 - y_i**2), r"One $\sigma$ cancels.", tag="26")
    statement.then(F * (C - 1 - y_i**2), "Eq. 6.", tag="5")
    statement.compare(y_i, lambda x, _: layer_norm(x, eps=0.0))
    statement.compare(F * (C - 1 - y_i**2), lambda x, _: layer_norm_derivative(x))
    statement.compare(sigma, lambda x, _: x.std(correction=0))
    return statement


def equation_7() -> Statement:
    statement = Statement(
        "equation-7",
        title="Equation 7: the extreme values are stationary",
        source=PAPER,
        equations="7",
        claim=r"$y_i = \pm\sqrt{C-1} \Rightarrow \frac{dy_i}{dx_i} = 0$",
        assumes=r"$C > 1$ channels that are not all equal, so that $\sigma > 0$",
        definitions=TOKEN,
    )
    statement.step(Eq(F * (C - 1 - R**2), 0), "Eq. 5 at the upper extreme.", tag="7")
    statement.step(Eq(F * (C - 1 - (-R) ** 2), 0), "Eq. 5 at the lower extreme.", tag="7")
    statement.step(
        Eq(C - 1 - y_i**2, (R - y_i) * (R + y_i)),
        "No other value is stationary: the factor is 0 only at these two, and $F > 0$.",
    )
    statement.step(
        Eq(C - 1 - y_i**2, n * (C * v_i) / (C * v_i + from_others**2)),
        "The distance of $y_i$ from them; $v_i$ is the variance of the other channels.",
    )
    statement.step(
        Ge(C - 1 - y_i**2, 0),
        "So no channel passes them. A channel reaches them only if all others are equal, $v_i = 0$; "
        "with $C = 2$ that is always so.",
    )
    statement.compare(R, lambda x, _: layer_norm(torch.diag(x.abs() + 1), eps=0.0).diagonal())
    statement.compare(-R, lambda x, _: layer_norm(-torch.diag(x.abs() + 1), eps=0.0).diagonal())
    return statement


def equation_8() -> Statement:
    statement = Statement(
        "equation-8",
        title="Equation 8: the error of a constant F",
        source=PAPER,
        equations="8",
        claim=r"$\frac{dF}{dx_i} = -y_i\,F^2$, so F is constant to first order only at $x_i = "
        r"\mu$",
        assumes=r"$C > 1$ channels that are not all equal, so that $\sigma > 0$",
        definitions=TOKEN,
    )
    statement.step(Eq(d(F), d(1 / (C * sigma))), "Eq. 6.")
    statement.then(-(1 / (C * sigma**2) * d(sigma)), "The chain rule.")
    statement.then(-(y_i / (C**2 * sigma**2)), "Eq. 25.")
    statement.then(-(y_i * F**2), "Eq. 6.")
    statement.step(
        Ne(d(F), 0),
        "Eq. 8 itself is an approximation, not an identity: the exact F does move.",
        tag="8",
    )
    statement.step(
        Ge(n * F**2 - (d(F) / F) ** 2, 0),
        r"The largest relative rate of change is that of an outlier, $F\sqrt{C-1}$.",
    )
    statement.compare(F, lambda x, _: layer_norm_slope_factor(x))
    return statement
