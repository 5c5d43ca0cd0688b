"""Witness channels: between DyISRU, which has none, and RMSNorm, which uses all channels."""

import torch
from sympy import Eq, Gt, Rational, sqrt

from dynorm.functional import center, dyisru, dyisru_general
from dynorm.paper.proof.statement import OURS, Statement
from dynorm.paper.proof.vocabulary import (
    TOKEN,
    C,
    R,
    d,
    from_mean,
    g_k,
    isr_unit,
    mu,
    others,
    positive,
    real,
    sigma,
    sum_k,
    x_i,
    x_k,
)
from dynorm.theory import rms_norm_by_witnesses


def witness_none() -> Statement:
    beta = positive("beta")
    p = real("p")
    statement = Statement(
        "witness-none",
        title="Without witness channels it is DyISRU",
        source=OURS,
        equations="13, 15",
        claim=r"With $\beta_i(x) = \beta + \sum_{k \neq i} g_k (x_k - p)^2$ and no witness, $g ="
        " 0$, the function is eq. 13, and eq. 15 if the centre p is 0",
        assumes=r"$C > 1$, $\beta > 0$; $g_k \geq 0$, and 0 if channel k is not a witness",
    )
    statement.step(Eq(beta + others(0 * (x_k - p) ** 2), beta), "Every gain is 0.")
    statement.step(
        Eq(
            R * isr_unit(x_i - p, beta + others(0 * (x_k - p) ** 2)),
            R * isr_unit(x_i - p, beta),
        ),
        "So it is eq. 13 with a constant centre.",
        tag="13",
    )
    statement.step(
        Eq(R * isr_unit(x_i, beta + others(0 * x_k**2)), R * isr_unit(x_i, beta)),
        "With centre 0 it is eq. 15.",
        tag="15",
    )
    statement.compare(
        R * isr_unit(x_i - p, beta),
        lambda x, at: dyisru_general(x, at.beta, at.p, witnesses=torch.arange(0)),
    )
    statement.compare(
        R * isr_unit(x_i, beta),
        lambda x, at: dyisru(x, at.beta, witnesses=torch.arange(0)),
    )
    return statement


def witness_all() -> Statement:
    eps = positive("eps")
    MS = real("MS")
    statement = Statement(
        "witness-all",
        title="With all channels as witnesses it is RMSNorm",
        source=OURS,
        equations="3, 15",
        claim=r"With all channels as witnesses of gain 1, $\beta = C \varepsilon$, scale "
        r"$\sqrt{C}$ and centre 0, the function is RMSNorm; centred at $\mu$ it is "
        "LayerNorm",
        assumes=r"$C > 1$, $\varepsilon > 0$",
        definitions={
            **TOKEN,
            MS: sum_k(x_k**2) / C,
        },
    )
    statement.step(
        Eq(x_i / sqrt(MS + eps), sqrt(C) * (x_i / sqrt(C * eps + sum_k(x_k**2)))),
        "C is taken out of the root.",
    )
    statement.then(
        sqrt(C) * isr_unit(x_i, C * eps + others(1 * x_k**2)),
        "$k = i$ is taken out of the sum; every gain is 1.",
    )
    statement.step(
        Eq(
            from_mean / sqrt(sigma**2 + eps),
            sqrt(C) * (from_mean / sqrt(C * eps + sum_k((x_k - mu) ** 2))),
        ),
        "The same for LayerNorm.",
    )
    statement.then(
        sqrt(C) * isr_unit(from_mean, C * eps + others(1 * (x_k - mu) ** 2)),
        "Its centre is a statistic, so LayerNorm is not a function of a few channels.",
    )
    statement.compare(x_i / sqrt(MS + eps), lambda x, at: rms_norm_by_witnesses(x, at.eps))
    statement.compare(
        from_mean / sqrt(sigma**2 + eps), lambda x, at: rms_norm_by_witnesses(center(x), at.eps)
    )
    return statement


def witness_derivative() -> Statement:
    beta = positive("beta")
    s = positive("s")
    r = positive("r")
    h = positive("h")
    p = real("p")
    u = real("u")
    z = real("z")
    beta_i = real("beta_i")
    y_i = real("y_i")
    Y = real("Y")
    output = s * isr_unit(u, r + h * z**2)
    falling = (r + h * z**2 + u**2) ** Rational(-3, 2)
    statement = Statement(
        "witness-derivative",
        title="The derivative with witness channels",
        source=OURS,
        equations="13, 15",
        claim=r"$\frac{dy_i}{dx_i} = s\,\beta_i(x)\,(\beta_i(x) + (x_i - p)^2)^{-3/2}$ with "
        r"$\beta_i(x) = \beta + \sum_{k \neq i} g_k (x_k - p)^2$, which does not move with "
        "$x_i$",
        assumes=r"$C > 1$, $\beta > 0$, $s > 0$, $g_k \geq 0$; a witness that is another channel"
        " has gain h and lies z from its centre",
        definitions={
            beta_i: beta + others(g_k * (x_k - p) ** 2),
            y_i: s * isr_unit(x_i - p, beta_i),
            Y: s * isr_unit(x_i, beta + others(g_k * x_k**2)),
        },
    )
    statement.step(Eq(d(beta_i), 0), "A channel is not its own witness.")
    statement.step(
        Gt(beta + others(g_k * x_k**2), 0),
        "No gain is negative, so the root is real. Here x is already centred.",
    )
    statement.step(
        Eq(d(y_i), s * beta_i * (beta_i + (x_i - p) ** 2) ** Rational(-3, 2)),
        "So its derivative is that of eq. 13 with this constant.",
    )
    statement.step(Gt(d(Y), 0), "It rises.")
    statement.step(Gt(s**2, Y**2), "Its bound is the scale, with any witnesses.")
    statement.step(
        Eq(
            d(output, z),
            -(s * u * h * z * falling),
        ),
        "If another channel is a witness, the output shrinks as that channel moves away; r is the "
        r"rest of $\beta_i(x)$.",
    )
    statement.step(
        Eq(
            d(output, h),
            -(s * u * z**2 * falling / 2),
        ),
        "It also shrinks as the gain grows.",
    )
    statement.compare(
        y_i,
        lambda x, at: dyisru_general(
            x, at.beta, at.p, scale=at.s, witnesses=at.g.nonzero().flatten(), gain=at.g[at.g > 0]
        ),
    )
    return statement
