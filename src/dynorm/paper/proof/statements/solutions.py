"""Functions that solve the differential equation: theorems 2 to 4, equation 15, appendix B."""

import math

from sympy import Eq, Ge, Gt, Rational, exp, log, sqrt, tanh

from dynorm.functional import dyisru, dyisru_general, dyt, isru, scaled_dyt
from dynorm.paper.proof.statement import PAPER, Statement
from dynorm.paper.proof.vocabulary import (
    SUBSTITUTED,
    TOKEN,
    C,
    F,
    R,
    beta_i,
    d,
    dy_du,
    from_mean,
    isr_unit,
    limit,
    mu,
    n,
    others,
    positive,
    real,
    sigma,
    sigma_others,
    sum_k,
    u,
    w,
    x_i,
    x_k,
    y,
    y_i,
)
from dynorm.theory import channel_beta


def theorem_2() -> Statement:
    F = positive("F")
    x = real("x")
    c = real("c")
    y = real("y")
    Dy = real("Dy")
    Q = real("Q")
    A = real("A")
    y_0 = real("y_0")
    alpha = real("alpha")
    integral = 1 / (2 * R) * log((R + y) / (R - y))
    growth = exp(2 * R * F * x)
    solution = R * tanh(alpha * x)
    shifted = exp(2 * R * F * x + c)
    statement = Statement(
        "theorem-2",
        title="Theorem 2: scaled DyT",
        source=PAPER,
        equations="4, 9-11",
        claim=r"$\frac{dy}{dx} = F\,(C - 1 - y^2)$ with $y(0) = 0$ is solved by $y = "
        r"\sqrt{C-1}\,\tanh(\alpha x)$",
        assumes=r"$C > 1$, $F > 0$ constant (eq. 8), $|y| < \sqrt{C-1}$: every such $y$ is "
        r"$\sqrt{C-1}\,\frac{w-1}{w+1}$ with some $w > 0$. The index i is dropped",
        definitions={
            y: R * (w - 1) / (w + 1),
            Dy: F * (C - 1 - y**2),
            Q: (R + y) / (R - y),
            A: exp(c),
            y_0: R * (A - 1) / (A + 1),
            alpha: R * F,
        },
        remarks=(
            r"Dividing by $C - 1 - y^2$ leaves out the constant solutions $y = \pm\sqrt{C-1}$ "
            "of eq. 7; eq. 10 excludes them.",
        ),
    )
    statement.step(
        Eq(F, 1 / (C - 1 - y**2) * Dy),
        "Eq. 9, divided by $C - 1 - y^2 > 0$: the variables are separated.",
    )
    statement.then(1 / (2 * R) * (1 / (R + y) + 1 / (R - y)) * Dy, "Partial fractions.")
    statement.step(
        Eq(d(integral, y), 1 / (C - 1 - y**2)),
        "An integral of the right hand side over $y$, checked by its derivative.",
    )
    statement.step(
        Eq(Dy * d(integral, y), d(F * x, x)),
        "Along $x$, with $dy/dx$ of eq. 9, it moves as $F x$ does: the two differ by a constant, which is called $c$.",
    )
    statement.step(
        Eq(exp(2 * R * (F * x + c / (2 * R))), shifted),
        r"Both are equal; times $2\sqrt{C-1}$, and exponentiated, the right one gives $Q$.",
    )
    statement.step(Eq(exp(2 * R * integral), Q), "The left one is $Q$ itself.")
    statement.step(Eq(R + y, (R - y) * Q), "$Q$ is a quotient; times its denominator.")
    statement.step(Eq(y, R * ((Q - 1) / (Q + 1))), "Solved for $y$; $Q + 1$ is never 0.")
    statement.step(
        Eq(
            R * ((shifted - 1) / (shifted + 1)),
            R * ((A * growth - 1) / (A * growth + 1)),
        ),
        "$Q$ is inserted again, with $A = e^c$.",
    )
    statement.step(
        Eq(R * ((A * exp(0) - 1) / (A * exp(0) + 1)), y_0), "At $x = 0$ the solution is $y_0$."
    )
    statement.step(
        Eq(A, (R + y_0) / (R - y_0)),
        "So $A$ follows from $y_0$, and $y_0 = 0$, eq. 10, gives $A = 1$.",
        tag="10",
    )
    statement.step(
        Eq(R * ((growth - 1) / (growth + 1)), solution),
        r"With $A = 1$ and $\alpha = \sqrt{C-1}\,F$ it is the scaled DyT.",
        tag="11",
    )
    statement.step(
        Eq(d(solution, x), F * (C - 1 - solution**2)),
        "Inserted again: eq. 11 solves eq. 9.",
        tag="9",
    )
    statement.step(Eq(R * tanh(0 * alpha), 0), "It satisfies eq. 10, too.", tag="10")
    statement.step(
        Gt(n, solution**2),
        r"It stays within $\pm\sqrt{C-1}$, as was assumed when dividing.",
    )
    statement.step(
        Eq(solution / R, tanh(alpha * x)),
        r"Divided by $\sqrt{C-1}$ it is DyT as first published.",
        tag="4",
    )
    statement.compare(
        R * tanh(alpha * x_i / C),
        lambda x, at: scaled_dyt(x, math.sqrt(at.C - 1) * at.F / at.C),
    )
    statement.compare(
        tanh(alpha * x_i / C), lambda x, at: dyt(x, math.sqrt(at.C - 1) * at.F / at.C)
    )
    return statement


def theorem_3() -> Statement:
    z = positive("z")
    beta = positive("beta")
    c_lhs = positive("c_lhs")
    c_rhs = positive("c_rhs")
    c = real("c")
    Y = real("Y")
    Y_i = real("Y_i")
    # Both sides of the separated equation, and their logarithms.
    rate = 1 / C * (1 / from_mean)
    integrand = 1 / (n * y - y**3)
    log_mean = log(from_mean**2)
    ratio = n * y ** (-2) - 1
    statement = Statement(
        "theorem-3",
        title="Theorem 3: general DyISRU",
        source=PAPER,
        equations="5, 12, 13, 24, 27-29",
        claim=r"$\frac{dy_i}{dx_i} = F(x)\,(C - 1 - y_i^2)$ with $\frac{dy_i}{dx_i} \geq 0$ is "
        r"solved by $\tilde{y}_i = \sqrt{C-1}\,\frac{x_i - \mu}{\sqrt{\beta + (x_i - "
        r"\mu)^2}}$",
        assumes=r"$C > 2$, $\sigma > 0$, $x_i \neq \mu$, $0 < |y| < \sqrt{C-1}$: the square of "
        r"every such $y$ is $\frac{C-1}{w+1}$ with some $w > 0$; $\beta$, $c$ and $z$ "
        "are positive",
        definitions={
            **TOKEN,
            **SUBSTITUTED,
            c: z * sqrt(ratio),
            Y: R * isr_unit(from_mean, beta),
            Y_i: R * isr_unit(from_mean, beta_i),
        },
        remarks=(
            r"The texts write $\log(x - \mu)$, which needs $x > \mu$; the proof here holds "
            "on both sides.",
            "The last two lines of eq. 28 (27 in the first version) are the same line, "
            "printed twice.",
            r"With $C = 2$ LayerNorm gives $y_i = \pm 1 = \pm\sqrt{C-1}$ always, and the "
            "variables cannot be separated.",
            r"The equation uses $\frac{d}{dx}(x - \mu) = \frac{C-1}{C}$, not 1: with 1 the "
            "factor $C - 1$ would be lost.",
        ),
        least_channels=3,
    )
    statement.step(Eq(F, 1 / (C - 1 - y_i**2) * d(y_i)), "Eq. 5, divided by $C - 1 - y^2$.")
    statement.step(Eq(F, 1 / (C * sqrt(sigma**2))), "Eq. 6.")
    statement.then(
        y_i / (C * from_mean), r"Eq. 3: $\sigma = (x_i - \mu) / y_i$ where $x_i \neq \mu$."
    )
    statement.step(
        Eq(rate, 1 / (n * y_i - y_i**3) * d(y_i)),
        "Both together, divided by $y$.",
        tag="27",
    )
    statement.step(Eq(d(from_mean), n / C), "The mean moves with $x_i$.", tag="24")
    statement.step(
        Eq(rate, 1 / n * (1 / from_mean) * d(from_mean)),
        r"Eq. 24: $dx = \frac{C}{C-1}\,d(x - \mu)$; C cancels.",
    )
    statement.then(
        d(1 / (2 * n) * log_mean + log(c_lhs) / n),
        r"Its integral; $\frac{1}{2}\,\log (x - \mu)^2$ is $\log(x - \mu)$ where $x > \mu$, and "
        "covers both sides of $\\mu$.",
        tag="28",
    )
    statement.step(Eq(d(y ** (-2), y), -(2 * y ** (-3))), "For the right hand side: $u = y^{-2}$.")
    statement.step(
        Eq(integrand * dy_du, -(y**3 / (2 * (n * y - y**3)))),
        "$dy/du$ is one over the derivative before.",
    )
    statement.then(-(1 / (2 * (n * u - 1))), "Divided through by $y^3$; $u = y^{-2}$.")
    statement.then(
        d(-(1 / (2 * n) * log(n * u - 1)), u),
        "Its integral over $u$, checked by its derivative.",
    )
    statement.step(
        Eq(
            d(-(1 / (2 * n) * log(ratio)) + log(c_rhs) / n, y),
            integrand,
        ),
        "The same in $y$, with a constant.",
        tag="29",
    )
    statement.step(
        Eq(
            d(1 / (2 * n) * log_mean),
            d(-(1 / (2 * n) * log(n * y_i ** (-2) - 1))),
        ),
        "Along $x_i$ the integrals of both sides move alike, so they differ by a constant, which "
        "is called $c$.",
    )
    statement.step(
        Eq(
            1 / n * log(z),
            -(1 / (2 * n) * log(ratio)) + log(c) / n,
        ),
        r"Eq. 28 equals eq. 29: with $z = |x - \mu|$ and $c = c^{\mathrm{RHS}} / "
        r"c^{\mathrm{LHS}}$ this sets $c$.",
    )
    statement.step(Eq(log(c**2 / z**2), log(ratio)), "Times $-2\\,(C - 1)$, as one logarithm.")
    statement.step(Eq(c**2 / z**2, ratio), "Exponentiated.")
    statement.step(Eq(1 / n * (c**2 / z**2 + 1), y ** (-2)), "Solved for $y^{-2}$.")
    statement.step(Eq(n * (z**2 / (c**2 + z**2)), y**2), r"Inverted, with $\beta = c^2$.")
    statement.step(
        Eq(Y**2, n * (from_mean**2 / (beta + from_mean**2))),
        "The root leaves two signs; this is eq. 13 squared.",
    )
    statement.step(
        Gt(d(Y), 0),
        r"Eq. 13 rises with $x_i$ on both sides of $\mu$, as eq. 12 asks; with the "
        "other sign it would fall.",
        tag="12",
    )
    statement.step(
        Eq(d(Y), Y / (C * from_mean) * (C - 1 - Y**2)),
        r"Inserted again: eq. 13 solves eq. 5 for every constant $\beta$, with $F = y / (C (x - "
        r"\mu))$ as above.",
        tag="13",
    )
    statement.step(
        Eq(d(Y_i), F * (C - 1 - Y_i**2)),
        r"With $\beta_i$ of theorem 4, which does not move with $x_i$, it solves eq. 5 with $F = 1/(C\sigma)$ "
        "as eq. 6 has it.",
        tag="5",
    )
    statement.compare(Y, lambda x, at: dyisru_general(x, at.beta, x.mean()))
    return statement


def theorem_4() -> Statement:
    beta = positive("beta")
    Y = real("Y")
    squares = others((x_k - mu) ** 2)
    statement = Statement(
        "theorem-4",
        title="Theorem 4: the constant of each channel",
        source=PAPER,
        equations="13, 14",
        claim=r"$\frac{x_i - \mu}{\sqrt{\sigma^2}} = \sqrt{C-1}\,\frac{x_i - \mu}{\sqrt{\beta + "
        r"(x_i - \mu)^2}} \Leftrightarrow \beta = \beta_i = (C-1)\,\sigma_{\neq i}^2 - "
        r"\sigma^2$",
        assumes=r"$C > 1$, $\sigma > 0$; the converse, that no other $\beta$ solves it, needs $x_i"
        r" \neq \mu$",
        definitions={
            **TOKEN,
            Y: R * isr_unit(from_mean, beta),
        },
        remarks=(
            r"The texts state the equivalence without $x_i \neq \mu$. At $x_i = \mu$ both "
            r"sides are 0 for every $\beta$.",
            r"With $C = 2$, and whenever all other channels are equal, $\beta_i = 0$ and $y_i "
            r"= \pm\sqrt{C-1}$.",
            r"$\sigma_{\neq i}$ is taken around the mean $\mu$ of all channels, so it moves "
            "with $x_i$; see closed-form-1.",
        ),
    )
    statement.step(Eq(y_i, from_mean / sqrt(sigma**2)), "Eq. 3.")
    statement.then(from_mean / sqrt(1 / C * sum_k((x_k - mu) ** 2)), "Eq. 2.")
    statement.then(
        sqrt(C) * isr_unit(from_mean, squares),
        "$k = i$ is taken out of the sum.",
    )
    statement.then(
        R * (from_mean / sqrt(n / C * squares + n / C * from_mean**2)),
        r"Multiplied and divided by $\sqrt{(C-1)/C}$.",
    )
    statement.then(
        R * (from_mean / sqrt(n / C * squares - 1 / C * from_mean**2 + from_mean**2)),
        r"$\frac{C-1}{C} = 1 - \frac{1}{C}$.",
    )
    statement.then(
        R * isr_unit(from_mean, beta_i),
        r"This is eq. 13 with $\beta = \beta_i$.",
        tag="13",
    )
    statement.step(
        Eq(
            n / C * squares - 1 / C * from_mean**2,
            squares - 1 / C * sum_k((x_k - mu) ** 2),
        ),
        r"$-\frac{1}{C}$ of the other squares moves to the second sum.",
    )
    statement.then(n * sigma_others**2 - sigma**2, "The definitions of both variances.", tag="14")
    statement.step(
        Eq(n * from_mean**2 / Y**2 - from_mean**2, beta),
        r"Conversely, eq. 13 can be solved for $\beta$ where $x_i \neq \mu$.",
    )
    statement.step(
        Eq(
            n * from_mean**2 / y_i**2 - from_mean**2,
            n * sigma_others**2 - sigma**2,
        ),
        "So the $y_i$ of eq. 3 determines it.",
        tag="14",
    )
    statement.step(Ge(beta_i, 0), "It is not negative, so that the root of eq. 13 is real.")
    statement.compare(beta_i, lambda x, _: channel_beta(x))
    statement.compare(
        y_i, lambda x, _: dyisru_general(x, channel_beta(x).clamp(min=1e-300), x.mean())
    )
    return statement


def equation_15() -> Statement:
    beta = positive("beta")
    mu = real("mu")
    x = real("x")
    h = positive("h")
    far_quotient = R * isr_unit(1 / h - mu, beta) / (R * isr_unit(1 / h, beta))
    exact = R * isr_unit(x - mu, beta)
    dropped = R * isr_unit(x, beta)
    statement = Statement(
        "equation-15",
        title="Equation 15: DyISRU, and the error of dropping the centre",
        source=PAPER,
        equations="15",
        claim=r"For $|x| \gg |\mu|$, eq. 13 approaches $y = \sqrt{C-1}\,\frac{x}{\sqrt{\beta"
        " + x^2}}$",
        assumes=r"$C > 1$, $\beta > 0$ and $\mu$ constant; $h = 1/x$ goes to 0 from above; the "
        "other side is the same",
    )
    statement.step(
        Eq(limit(far_quotient, h), 1),
        "Far out, the quotient of eq. 13 and eq. 15 goes to 1.",
        tag="15",
    )
    statement.step(
        Eq(limit((1 - far_quotient) / h**3, h), beta * mu),
        "The rest falls with the third power of the distance.",
    )
    statement.step(
        Eq(
            dropped**2 - exact**2,
            n * beta * mu * (2 * x - mu) / ((beta + x**2) * (beta + (x - mu) ** 2)),
        ),
        "The exact difference of the squares.",
    )
    statement.step(Eq(R * isr_unit(-x, beta), -dropped), "The function is odd.")
    statement.step(Gt(n, dropped**2), "Its bound is that of eq. 7.")
    statement.compare(
        R * from_mean / sqrt(beta + from_mean**2),
        lambda x, at: dyisru_general(x, at.beta, at.mu),
    )
    statement.compare(R * x_i / sqrt(beta + x_i**2), lambda x, at: dyisru(x, at.beta))
    return statement


def appendix_b() -> Statement:
    alpha = positive("alpha")
    x = real("x")
    beta = real("beta")
    isru_of_x = x / sqrt(1 + alpha * x**2)
    statement = Statement(
        "appendix-b",
        title="Appendix B: the inverse square root unit",
        source=PAPER,
        equations="30-32",
        claim=r"$\frac{x}{\sqrt{1 + \alpha x^2}} = \frac{\sqrt{\beta}\,x}{\sqrt{\beta + x^2}}$ "
        r"with $\beta = 1/\alpha$",
        assumes=r"$\alpha > 0$, x real",
        definitions={
            beta: 1 / alpha,
        },
    )
    statement.step(
        Eq(isru_of_x, x / sqrt(alpha * (1 / alpha + x**2))),
        r"Eq. 30, with $\alpha$ factored out under the root.",
    )
    statement.then(
        x / (sqrt(alpha) * sqrt(1 / alpha + x**2)), "The root of a product of positive numbers."
    )
    statement.then(sqrt(beta) * x / sqrt(beta + x**2), r"Eq. 32: $\beta = 1/\alpha$.", tag="31, 32")
    statement.step(
        Eq(
            R * isr_unit(x, beta),
            sqrt(n / beta) * (sqrt(beta) * x / sqrt(beta + x**2)),
        ),
        r"DyISRU is the ISRU with another height: $\sqrt{C-1}$ in place of $\sqrt{\beta}$.",
    )
    statement.step(
        Eq(d(isru_of_x, x), (1 + alpha * x**2) ** Rational(-3, 2)),
        "The slope of ISRU, 1 at 0.",
    )
    statement.step(Gt(beta, (isru_of_x) ** 2), "Its height.")
    statement.compare(x_i / sqrt(1 + alpha * x_i**2), lambda x, at: isru(x, at.alpha))
    statement.compare(
        sqrt(beta) * x_i / sqrt(beta + x_i**2),
        lambda x, at: dyisru(x, 1 / at.alpha, scale=at.alpha ** (-0.5)),
    )
    return statement
