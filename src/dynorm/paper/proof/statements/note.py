"""The note: LayerNorm is centring, then RMSNorm, then the bias."""

from sympy import Eq, sqrt

from dynorm.functional import center, centering_matrix, layer_norm, mean_square, rms_norm
from dynorm.paper.proof.statement import NOTE_SOURCE, Statement
from dynorm.paper.proof.vocabulary import (
    C,
    as_written,
    bias,
    delta,
    ell,
    from_mean,
    gamma,
    i,
    j,
    k,
    mu,
    positive,
    real,
    sum_k,
    sum_l,
    x_i,
    x_k,
    x_l,
)

Var = real("Var")
MS = real("MS")
c_i = real("c_i")
MS_c = real("MS_c")

with as_written():
    # The centring matrix.
    entry_ki = delta(k, i) - 1 / C
    entry_kl = delta(k, ell) - 1 / C
    entry_lk = delta(ell, k) - 1 / C
    CENTERED = {
        mu: sum_k(x_k) / C,
        Var: sum_k((x_k - mu) ** 2) / C,
        MS: sum_k(x_k**2) / C,
        c_i: sum_k(x_k * entry_ki),
        MS_c: sum_k(sum_l(x_l * entry_lk) ** 2) / C,
    }


def note_centering() -> Statement:
    statement = Statement(
        "note-centering",
        title="Centring is a projection",
        source=NOTE_SOURCE,
        equations="mean, c(x)",
        claim=r"$c(x) = x - \mu 1 = x\,(I - \frac{1}{C} 1^\top 1)$, and this matrix is its own "
        "square",
        assumes=r"C channels, x a row; entry (k, i) of the matrix is $\delta_{ki} - \frac{1}{C}$",
        definitions=CENTERED,
    )
    statement.step(Eq(from_mean, x_i - 1 / C * sum_k(x_k)), r"The mean is $\frac{1}{C}\,x 1^\top$.")
    statement.then(sum_k(x_k * delta(k, i)) - sum_k(x_k * (1 / C)), "$x_i$ is entry i of $x I$.")
    statement.then(sum_k(x_k * entry_ki), r"Entry i of $x\,(I - \frac{1}{C} 1^\top 1)$.")
    statement.step(
        Eq(sum_l(entry_kl * (delta(ell, j) - 1 / C)), delta(k, j) - 1 / C),
        "The matrix is its own square: centring twice is centring once.",
    )
    statement.step(Eq(sum_k(entry_ki), 0), "It takes a constant row to 0.")
    statement.step(Eq(sum_k(x_k - mu), 0), "So a centred row has mean 0.")
    statement.step(
        Eq(sum_k(delta(k, k) - 1 / C), C - 1),
        "Its trace is its rank: one dimension, the mean, is lost.",
    )
    statement.compare(from_mean, lambda x, _: center(x))
    statement.compare(c_i, lambda x, at: x @ centering_matrix(at.C, dtype=x.dtype))
    return statement


def note_rmsnorm() -> Statement:
    eps = positive("eps")
    output = from_mean / sqrt(Var + eps) * gamma[i] + bias[i]
    centered = c_i / sqrt(Var + eps) * gamma[i] + bias[i]
    statement = Statement(
        "note-rmsnorm",
        title="LayerNorm is centring, then RMSNorm, then the bias",
        source=NOTE_SOURCE,
        equations="MS, Var, RMSNorm, LayerNorm",
        claim=r"$\mathrm{LayerNorm}(x) = \mathrm{RMSNorm}(c(x)) + \mathrm{bias} = "
        r"\frac{x}{\sqrt{\mathrm{Var}(x) + \varepsilon}}\,(I - \frac{1}{C} 1^\top 1)\,"
        r"\mathrm{diag}(\gamma) + \mathrm{bias}$",
        assumes=r"C channels, $\varepsilon > 0$ (or $\sigma > 0$), any weight $\gamma$ and bias",
        definitions=CENTERED,
    )
    statement.step(Eq(Var, 1 / C * sum_k((x_k - mu) ** 2)), "The definition.")
    statement.then(
        1 / C * sum_k(sum_l(x_l * entry_lk) ** 2),
        "Each deviation is an entry of $c(x)$, by note-centering.",
    )
    statement.then(MS_c, "The variance is the mean square after centring.")
    statement.step(Eq(Var, MS - mu**2), "It is also the mean square less the square of the mean.")
    statement.step(Eq(output, centered), r"note-centering: $x_i - \mu = c(x)_i$.")
    statement.then(
        c_i / sqrt(MS_c + eps) * gamma[i] + bias[i],
        r"$\mathrm{Var}(x) = \mathrm{MS}(c(x))$; without the bias it is RMSNorm of $c(x)$.",
    )
    statement.step(
        Eq(centered, sum_k(x_k / sqrt(Var + eps) * entry_ki) * gamma[i] + bias[i]),
        "The matrix form: the division, the only step that is not linear, is the same for all channels.",
    )
    statement.compare(Var, lambda x, _: x.var(correction=0))
    statement.compare(MS - mu**2, lambda x, _: mean_square(center(x)))
    statement.compare(output, lambda x, at: layer_norm(x, at.gamma, at.bias, at.eps))
    statement.compare(centered, lambda x, at: rms_norm(center(x), at.gamma, None, at.eps) + at.bias)
    return statement
