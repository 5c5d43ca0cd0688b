"""Witness channels: between DyISRU, which has none, and RMSNorm, which uses all channels."""

from sympy import Eq, Gt, Rational, sqrt

from dynorm.functional import center, dyisru_general
from dynorm.paper.proof.statement import OURS, Statement
from dynorm.paper.proof.vocabulary import (
    TOKEN,
    C,
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
    statement = Statement(
        "witness-derivative",
        title="The derivative with witness channels",
        source=OURS,
        equations="13, 15",
        claim=r"$\frac{dy_i}{dx_i} = s\,\beta_i(x)\,(\beta_i(x) + (x_i - p)^2)^{-3/2}$ with "
        r"$\beta_i(x) = \beta + \sum_{k \neq i} g_k (x_k - p)^2$, which does not move with "
        "$x_i$. Without witnesses it is eq. 13 with a constant centre",
        assumes=r"$C > 1$, $\beta > 0$, $s > 0$, $g_k \geq 0$, and 0 if channel k is not "
        "a witness",
        definitions={
            beta_i: beta + others(g_k * (x_k - p) ** 2),
            y_i: s * isr_unit(x_i - p, beta_i),
            Y: s * isr_unit(u, r),
        },
    )
    statement.step(Eq(d(beta_i), 0), "A channel is not its own witness.", by_sums=True)
    statement.step(
        Eq(d(Y, u), s * r * (r + u**2) ** Rational(-3, 2)),
        r"So its derivative is that of eq. 13: $u = x_i - p$, and r in place of $\beta_i(x)$ is any "
        "positive constant.",
    )
    statement.step(Gt(d(Y, u), 0), "It rises.")
    statement.step(Gt(s**2, Y**2), "Its bound is the scale, with any witnesses.")
    statement.step(
        Eq(
            d(s * isr_unit(u, r + h * z**2), z),
            -(s * u * h * z * (r + h * z**2 + u**2) ** Rational(-3, 2)),
        ),
        "The output shrinks as another channel, a witness of gain h at the distance z from its "
        r"centre, moves away; here r is the rest of $\beta_i(x)$.",
    )
    statement.compare(
        y_i,
        lambda x, at: dyisru_general(
            x, at.beta, at.p, scale=at.s, witnesses=at.g.nonzero().flatten(), gain=at.g[at.g > 0]
        ),
    )
    return statement
