"""Closed forms: LayerNorm and RMSNorm are DyISRUs whose constants depend on other channels.

Witness channels are between DyISRU, which has none, and RMSNorm, which uses all channels.
"""

import math

import torch
from sympy import Eq, Ge, Gt, Integer, Ne, Rational, exp, log, sqrt
from torch import Tensor

from dynorm.functional import center, dyisru, dyisru_general, rms_norm
from dynorm.paper.proof.statement import OURS, Statement
from dynorm.paper.proof.vocabulary import (
    TOKEN,
    C,
    R,
    beta_i,
    d,
    from_mean,
    from_others,
    g_k,
    isr_unit,
    limit,
    m_i,
    mu,
    n,
    others,
    positive,
    real,
    sigma,
    sigma_others,
    sum_k,
    v_i,
    x_i,
    x_k,
    y_i,
)
from dynorm.theory import (
    channel_beta,
    layer_norm_as_dyisru,
    leave_one_out_beta,
    leave_one_out_mean,
    leave_one_out_variance,
    rms_norm_as_dyisru,
)


def closed_form_1() -> Statement:
    around_mean = others((x_k - mu) ** 2)
    around_others = others((x_k - m_i) ** 2)
    statement = Statement(
        "closed-form-1",
        title="The constant of eq. 14 does not depend on its channel",
        source=OURS,
        equations="14",
        claim=r"$\beta_i = \frac{C-1}{C} \sum_{k \neq i} (x_k - m_i)^2 = \frac{(C-1)^2}{C} v_i$,"
        " without $x_i$",
        assumes="$C > 1$; $m_i$ and $v_i$ are mean and biased variance of the $C - 1$ other "
        "channels",
        definitions=TOKEN,
    )
    statement.step(
        Eq(mu - m_i, 1 / C * from_others), "The mean, relative to the mean of the others."
    )
    statement.step(Eq(from_mean, n / C * from_others), "The deviation from the mean.")
    statement.step(
        Eq(around_mean, around_others + n * (mu - m_i) ** 2),
        "The squares around a point that is not their mean.",
    )
    statement.then(around_others + n / C**2 * from_others**2, "Inserted.")
    statement.step(
        Eq(beta_i, n / C * around_mean - 1 / C * from_mean**2),
        "Appendix A.4, before eq. 14.",
    )
    statement.then(
        n / C * (around_others + n / C**2 * from_others**2) - 1 / C * (n / C * from_others) ** 2,
        "Inserted.",
    )
    statement.then(n / C * around_others, "Both terms with $x_i$ cancel.")
    statement.then(n**2 / C * v_i, "The definition of $v_i$.")
    statement.step(Eq(d(beta_i), 0), "So it is constant while $x_i$ moves.")
    statement.step(Ge(beta_i, 0), "It is not negative.")
    statement.step(
        Eq(sigma_others**2, v_i + 1 / C**2 * from_others**2),
        r"$\sigma_{\neq i}$ does move: it is larger than the deviation of the others.",
    )
    statement.compare(beta_i, lambda x, _: channel_beta(x))
    statement.compare(v_i, lambda x, _: leave_one_out_variance(x))
    return statement


def closed_form_2() -> Statement:
    eps = positive("eps")
    with_eps = from_mean / sqrt(sigma**2 + eps)
    statement = Statement(
        "closed-form-2",
        title="LayerNorm is a DyISRU",
        source=OURS,
        equations="3, 13, 14",
        claim=r"$\mathrm{LN}(x)_i = \sqrt{C-1}\,\frac{x_i - m_i}{\sqrt{C v_i + (x_i - m_i)^2}}$",
        assumes=r"$C > 1$, $\sigma > 0$; with $\varepsilon$ inside the root, $\varepsilon > 0$",
        definitions=TOKEN,
    )
    statement.step(Eq(y_i, R * isr_unit(from_mean, beta_i)), "Theorem 4.")
    statement.then(
        R * (n / C * from_others / sqrt(n**2 / C * v_i + (n / C * from_others) ** 2)),
        "closed-form-1.",
    )
    statement.then(
        R * isr_unit(from_others, C * v_i),
        r"$\frac{C-1}{C} > 0$ cancels.",
    )
    statement.step(
        Eq(d(y_i), R * (C * v_i) * (C * v_i + from_others**2) ** Rational(-3, 2)),
        "Its derivative at constant $m_i$, $v_i$ is that of LayerNorm, because neither moves with "
        "$x_i$.",
    )
    statement.step(
        Eq(
            with_eps,
            R * isr_unit(from_others, C * v_i + C**2 / n * eps),
        ),
        r"With $\varepsilon$ inside LayerNorm's root the constant gains "
        r"$\frac{C^2}{C-1}\,\varepsilon$.",
    )
    statement.step(
        Ne(
            with_eps,
            R * isr_unit(from_others, C * v_i + C * eps),
        ),
        r"$C \varepsilon$ is right for RMSNorm, but not here.",
    )
    statement.compare(y_i, lambda x, _: layer_norm_as_dyisru(x))
    statement.compare(with_eps, lambda x, at: layer_norm_as_dyisru(x, at.eps))
    statement.compare(
        from_mean / sqrt(eps + sigma**2),
        lambda x, at: dyisru_general(
            x, leave_one_out_beta(x, eps=at.eps).detach(), leave_one_out_mean(x).detach()
        ),
    )
    return statement


def closed_form_3() -> Statement:
    eps = positive("eps")
    MS = real("MS")
    RMS_i = real("RMS_i")
    s_i = real("s_i")
    centered = from_mean / sqrt(sigma**2 + eps)
    statement = Statement(
        "closed-form-3",
        title="RMSNorm is a DyISRU without a centre, and with all channels as witnesses",
        source=OURS,
        equations="15",
        claim=r"$\mathrm{RMS}(x)_i = \sqrt{C}\,\frac{x_i}{\sqrt{s_i + x_i^2}}$ with $s_i = "
        r"\sum_{k \neq i} x_k^2$",
        assumes=r"$C > 1$, x not 0, $\varepsilon > 0$",
        definitions={
            **TOKEN,
            MS: sum_k(x_k**2) / C,
            RMS_i: x_i / sqrt(MS),
            s_i: others(x_k**2),
        },
    )
    statement.step(Eq(RMS_i, x_i / sqrt(1 / C * sum_k(x_k**2))), "The definition.")
    statement.then(sqrt(C) * (x_i / sqrt(sum_k(x_k**2))), "C is taken out of the root.")
    statement.then(sqrt(C) * isr_unit(x_i, others(x_k**2)), "$k = i$ is taken out of the sum.")
    statement.then(sqrt(C) * isr_unit(x_i, s_i), "The definition of $s_i$.")
    statement.step(Eq(d(s_i), 0), "The constant does not move with $x_i$.")
    statement.step(
        Eq(d(RMS_i), 1 / (C * sqrt(MS)) * (C - RMS_i**2)),
        "RMSNorm's derivative is eq. 5 with C for $C - 1$.",
    )
    statement.step(
        Eq(x_i / sqrt(MS + eps), sqrt(C) * isr_unit(x_i, s_i + C * eps)),
        r"With $\varepsilon$ the constant gains $C \varepsilon$: all channels are witnesses, of gain 1.",
    )
    statement.step(
        Eq(centered, sqrt(C) * isr_unit(from_mean, others((x_k - mu) ** 2) + C * eps)),
        "So is LayerNorm of the centred token. Its centre is a statistic, so LayerNorm is not a "
        "function of a few channels.",
    )
    statement.compare(RMS_i, lambda x, _: rms_norm_as_dyisru(x))
    statement.compare(x_i / sqrt(MS), lambda x, _: rms_norm(x, eps=0.0))
    statement.compare(x_i / sqrt(MS + eps), lambda x, at: rms_norm_as_dyisru(x, at.eps))
    statement.compare(x_i / sqrt(MS + eps), lambda x, at: _by_witnesses(x, at.eps))
    statement.compare(centered, lambda x, at: _by_witnesses(center(x), at.eps))
    return statement


def _by_witnesses(x: Tensor, eps: float) -> Tensor:
    """Return RMSNorm as a DyISRU with every channel as a witness of gain 1."""
    channels = x.shape[-1]
    # A tensor: a float must be positive, but beta is 0 without eps.
    beta = torch.full((1,), eps * channels, dtype=x.dtype)
    return dyisru(x, beta, scale=math.sqrt(channels), witnesses=torch.arange(channels))


def closed_form_4() -> Statement:
    beta = positive("beta")
    beta_t = positive("beta_t")
    p = real("p")
    t = positive("t")
    z = real("z")
    moved_center = (1 - t) * m_i + t * p
    constant = exp((1 - t) * log(C * v_i) + t * log(beta))
    path = R * isr_unit(x_i - moved_center, constant)
    statement = Statement(
        "closed-form-4",
        title="The path from LayerNorm to DyISRU",
        source=OURS,
        equations="3, 13",
        claim=r"With centre $(1-t)\,m_i + t\,p$ and $\log b = (1-t) \log(C v_i) + t \log \beta$,"
        " a DyISRU is LayerNorm at $t = 0$ and uses no statistic at $t = 1$",
        assumes=r"$v_i > 0$, hence $C > 2$ and the other channels not all equal; $\beta > 0$ and"
        " the centre p are learned",
        definitions=TOKEN,
        least_channels=3,
    )
    statement.step(
        Eq(path.xreplace({t: Integer(0)}), y_i),
        "At $t = 0$ the constants are those of the others: LayerNorm, by closed-form-2.",
    )
    statement.step(
        Eq(path.xreplace({t: Integer(1)}), R * isr_unit(x_i - p, beta)),
        "At $t = 1$ it is eq. 13 with learned constants.",
    )
    statement.step(Eq(d(constant), 0), "On the whole path the constant does not move with $x_i$.")
    statement.step(
        Gt(n, (R * isr_unit(z, beta_t)) ** 2),
        r"The bound is the same for every constant $\beta_t > 0$ and every deviation $z$ from the "
        "centre.",
    )
    statement.compare(
        path,
        lambda x, at: dyisru_general(
            x,
            leave_one_out_beta(x) ** (1 - at.t) * at.beta**at.t,
            (1 - at.t) * leave_one_out_mean(x) + at.t * at.p,
        ),
    )
    return statement


def closed_form_5() -> Statement:
    sigma = positive("sigma")
    x = positive("x")
    scaled = sqrt(C) * x / sqrt(C * sigma**2 + x**2)
    slope_at_0 = limit(d(R * x / sqrt(C * sigma**2 + x**2), x), x)
    statement = Statement(
        "closed-form-5",
        title="A constant that needs no tuning",
        source=OURS,
        equations="15",
        claim=r"With $\beta_0 = C \sigma^2$ and scale $\sqrt{C}$, DyISRU has slope $1/\sigma$ at"
        r" 0 and bound $\sqrt{C}$",
        assumes=r"$C > 1$; $\sigma > 0$ is the standard deviation of a site's activations, a constant",
        remarks=(
            r"Scale and constant belong together: $\sqrt{C}$ with $\beta_0 = C\sigma^2$, or "
            r"$\sqrt{C-1}$ with $(C-1)\,\sigma^2$.",
        ),
    )
    statement.step(
        Eq(limit(d(scaled, x), x), 1 / sigma),
        r"The slope at 0 is that of LayerNorm at a token of deviation $\sigma$.",
    )
    statement.step(Gt(C, (scaled) ** 2), "The bound.")
    statement.step(
        Eq(slope_at_0, sqrt(n / C) / sigma),
        r"With the scale $\sqrt{C-1}$ of eq. 15 the slope is a little less.",
    )
    statement.step(
        Ne(slope_at_0, 1 / sigma),
        r"That is, not $1/\sigma$.",
    )
    statement.compare(
        sqrt(C) * x_i / sqrt(C * sigma**2 + x_i**2),
        lambda x, at: dyisru(x, at.C * at.sigma**2, scale=math.sqrt(at.C)),
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
