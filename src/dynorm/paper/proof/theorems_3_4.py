"""Theorem 3, general DyISRU, and theorem 4, its constant: equations 12 to 15, appendix A.3 and A.4."""

from __future__ import annotations

from dynorm.paper.proof.statement import PAPER, TOKEN, Statement, Step, chain

GENERAL = "sqrt(C - 1)*((x_i - mu)/sqrt(beta + (x_i - mu)**2))"
SUBSTITUTED = {"y": "sqrt((C - 1)/(w + 1))", "u": "y**(-2)", "dy_du": "1/diff(y**(-2), y)"}
"""Any y with 0 < y < sqrt(C - 1), by a number w > 0, and the substitution of A.3."""

_SEPARATION = (
    Step("Eq. 5, divided by $C - 1 - y^2$.", "F", "1/(C - 1 - y_i**2) * d(y_i)"),
    *chain(
        "F",
        ("1 / (C*sqrt(sigma**2))", "Eq. 6."),
        ("1/C * (y_i/(x_i - mu))", "Eq. 3: $\\sigma = (x_i - \\mu) / y_i$ where $x_i \\neq \\mu$."),
    ),
    Step("Both together, divided by $y$.", "1/C * (1/(x_i - mu))", "1/((C - 1)*y_i - y_i**3) * d(y_i)", tag="27"),
)

_LEFT = (
    Step("The mean moves with $x_i$.", "d(x_i - mu)", "(C - 1) / C", tag="24"),
    *chain(
        "1/C * (1/(x_i - mu))",
        ("1/C * (1/(x_i - mu)) * d(x_i - mu) * (C/(C - 1))", "Eq. 24: $dx = \\frac{C}{C-1}\\,d(x - \\mu)$."),
        ("1/(C - 1) * (1/(x_i - mu)) * d(x_i - mu)", "C cancels."),
        (
            "d(1/(C - 1)*(log((x_i - mu)**2)/2) + log(c_lhs)/(C - 1))",
            "Its integral; $\\frac{1}{2}\\,\\log (x - \\mu)^2$ is "
            "$\\log(x - \\mu)$ where $x > \\mu$, and it serves both sides.",
            "28",
        ),
    ),
)

_RIGHT = (
    Step("For the right hand side: $u = y^{-2}$.", "diff(y**(-2), y)", "-(2*y**(-3))"),
    *chain(
        "1/((C - 1)*y - y**3) * dy_du",
        ("1/((C - 1)*y - y**3) * (-(1/2*y**3))", "$dy/du$ is one over the derivative before."),
        ("-(1/2*(1/((C - 1)*y**(-2) - 1)))", "Divided through by $y^3$."),
        ("-(1/2*(1/((C - 1)*u - 1)))", "$u = y^{-2}$."),
        ("diff(-(1/(2*(C - 1))*log((C - 1)*u - 1)), u)", "Its integral over $u$, checked by its derivative."),
    ),
    Step("The same in $y$, with a constant.",
         "diff(-(1/(2*(C - 1))*log((C - 1)*y**(-2) - 1)) + log(c_rhs)/(C - 1), y)", "1/((C - 1)*y - y**3)", tag="29"),
)  # fmt: skip

_COMPARISON = (
    Step("Along $x_i$ the integrals of both sides move alike, so they differ by a constant alone: $c$ is its name.",
         "d(1/(C - 1)*(log((x_i - mu)**2)/2))", "d(-(1/(2*(C - 1))*log((C - 1)*y_i**(-2) - 1)))"),
    Step("Eq. 28 equals eq. 29: with $z = |x - \\mu|$ and $c = c^{\\mathrm{RHS}} / c^{\\mathrm{LHS}}$ this sets $c$.",
         "1/(C - 1)*log(z)", "-(1/(2*(C - 1))*log((C - 1)*y**(-2) - 1)) + log(c)/(C - 1)"),
    Step("Times $C - 1$.", "log(z) - log(c)", "-(1/2*log((C - 1)*y**(-2) - 1))"),
    Step("One logarithm.", "log(z/c)", "-(1/2*log((C - 1)*y**(-2) - 1))"),
    Step("Times $-2$.", "log(c**2/z**2)", "log((C - 1)*y**(-2) - 1)"),
    Step("Exponentiated.", "c**2/z**2", "(C - 1)*y**(-2) - 1"),
    Step("Solved for $y^{-2}$.", "1/(C - 1)*(c**2/z**2 + 1)", "y**(-2)"),
    Step("Over a common denominator.", "1/(C - 1)*((c**2 + z**2)/z**2)", "y**(-2)"),
    Step("Inverted, with $\\beta = c^2$.", "(C - 1)*(z**2/(c**2 + z**2))", "y**2"),
)  # fmt: skip

_SIGN = (
    Step("The root leaves two signs; eq. 13 squared is what was found.",
         "Y**2", "(C - 1)*((x_i - mu)**2/(beta + (x_i - mu)**2))"),
    Step("Eq. 13 rises with $x_i$ on both sides of $\\mu$, as eq. 12 asks.", "d(Y)", "0", ">", tag="12"),
    Step("With the other sign it would fall.", "0", "d(-Y)", ">", tag="12"),
)  # fmt: skip

_BACK = (
    Step("Put back: eq. 13 solves eq. 5 for every constant $\\beta$, F being $y / (C (x - \\mu))$ as above.",
         "d(Y)", "Y/(C*(x_i - mu)) * (C - 1 - Y**2)", tag="13"),
    Step("The constant that belongs to a token, $\\beta_i$ of theorem 4, indeed does not move with $x_i$.",
         "d(beta_i)", "0"),
    Step("With it, eq. 13 solves eq. 5 with $F = 1/(C\\sigma)$ as eq. 6 has it.",
         "d(Y_i)", "F*(C - 1 - Y_i**2)", tag="5"),
)  # fmt: skip

THEOREM_3 = Statement(
    name="theorem-3",
    title="Theorem 3: general DyISRU",
    source=PAPER,
    equations="5, 12, 13, 24, 27-29",
    claim=r"$\frac{dy_i}{dx_i} = F(x)\,(C - 1 - y_i^2)$ with $\frac{dy_i}{dx_i} \geq 0$ is solved by "
    r"$\tilde{y}_i = \sqrt{C-1}\,\frac{x_i - \mu}{\sqrt{\beta + (x_i - \mu)^2}}$",
    assumes=r"$C > 2$, $\sigma > 0$, $x_i \neq \mu$, $0 < |y| < \sqrt{C-1}$: the square of every such $y$ is "
    r"$\frac{C-1}{w+1}$ with some $w > 0$; $\beta$, $c$ and $z$ are positive",
    steps=_SEPARATION + _LEFT + _RIGHT + _COMPARISON + _SIGN + _BACK,
    definitions={
        **TOKEN,
        **SUBSTITUTED,
        "c": "z*sqrt((C - 1)*y**(-2) - 1)",
        "Y": GENERAL,
        "Y_i": "sqrt(C - 1)*((x_i - mu)/sqrt(beta_i + (x_i - mu)**2))",
    },
    numbers={"w": "positive", "z": "positive", "beta": "positive", "c_lhs": "positive", "c_rhs": "positive"},
    least_channels=3,
    remarks=(
        r"The texts write $\log(x - \mu)$, which asks for $x > \mu$; the proof here holds on both sides.",
        "The last two lines of eq. 28 (27 in the first version) are the same line, printed twice.",
        r"With $C = 2$ LayerNorm gives $y_i = \pm 1 = \pm\sqrt{C-1}$ always, and the variables cannot be separated.",
        r"The equation uses $\frac{d}{dx}(x - \mu) = \frac{C-1}{C}$, not 1: with 1 the factor $C - 1$ would be lost.",
    ),
)

_ALL, _OTHERS = "sum_k((x_k - mu)**2)", "others((x_k - mu)**2)"

_MATCHING = chain(
    "y_i",
    ("(x_i - mu) / sqrt(sigma**2)", "Eq. 3."),
    (f"(x_i - mu) / sqrt(1/C*{_ALL})", "Eq. 2."),
    (f"sqrt(C) * ((x_i - mu)/sqrt({_OTHERS} + (x_i - mu)**2))", "$k = i$ is taken out of the sum."),
    (
        f"sqrt(C - 1) * ((x_i - mu)/sqrt((C - 1)/C*{_OTHERS} + (C - 1)/C*(x_i - mu)**2))",
        "Multiplied and divided by $\\sqrt{(C-1)/C}$.",
    ),
    (
        f"sqrt(C - 1) * ((x_i - mu)/sqrt((C - 1)/C*{_OTHERS} - 1/C*(x_i - mu)**2 + (x_i - mu)**2))",
        "$\\frac{C-1}{C} = 1 - \\frac{1}{C}$.",
    ),
    ("sqrt(C - 1) * ((x_i - mu)/sqrt(beta_i + (x_i - mu)**2))", "This is eq. 13 with $\\beta = \\beta_i$.", "13"),
)

_CONSTANT = chain(
    f"(C - 1)/C*{_OTHERS} - 1/C*(x_i - mu)**2",
    (f"{_OTHERS} - 1/C*{_ALL}", "$-\\frac{1}{C}$ of the other squares goes to the second sum."),
    ("(C - 1)*sigma_others**2 - sigma**2", "The definitions of both variances.", "14"),
)

_ONLY = (
    Step("Conversely, eq. 13 can be solved for $\\beta$ where $x_i \\neq \\mu$.",
         "(C - 1)*(x_i - mu)**2/Y**2 - (x_i - mu)**2", "beta"),
    Step("So the $y_i$ of eq. 3 leaves one value for it.",
         "(C - 1)*(x_i - mu)**2/y_i**2 - (x_i - mu)**2", "(C - 1)*sigma_others**2 - sigma**2", tag="14"),
    Step("It is not negative, so that the root of eq. 13 is real.", "beta_i", "0", ">="),
)  # fmt: skip

THEOREM_4 = Statement(
    name="theorem-4",
    title="Theorem 4: the constant of each channel",
    source=PAPER,
    equations="13, 14",
    claim=r"$\frac{x_i - \mu}{\sqrt{\sigma^2}} = \sqrt{C-1}\,\frac{x_i - \mu}{\sqrt{\beta + (x_i - \mu)^2}}"
    r" \Leftrightarrow \beta = \beta_i = (C-1)\,\sigma_{\neq i}^2 - \sigma^2$",
    assumes=r"$C > 1$, $\sigma > 0$; the converse, that no other $\beta$ will do, needs $x_i \neq \mu$",
    steps=_MATCHING + _CONSTANT + _ONLY,
    definitions={**TOKEN, "Y": GENERAL},
    numbers={"beta": "positive"},
    remarks=(
        r"The texts state the equivalence without $x_i \neq \mu$. At $x_i = \mu$ both sides are 0 for every $\beta$.",
        r"With $C = 2$, and wherever all other channels are equal, $\beta_i = 0$ and $y_i = \pm\sqrt{C-1}$.",
        r"$\sigma_{\neq i}$ is taken around the mean $\mu$ of all channels, so it moves with $x_i$; see closed-form-1.",
    ),
)

_EXACT, _DROPPED = "sqrt(C - 1)*(x - mu)/sqrt(beta + (x - mu)**2)", "sqrt(C - 1)*x/sqrt(beta + x**2)"
_FAR_EXACT, _FAR = (f.replace("x", "(1/h)") for f in (_EXACT, _DROPPED))

EQUATION_15 = Statement(
    name="equation-15",
    title="Equation 15: DyISRU, and what dropping the centre neglects",
    source=PAPER,
    equations="15",
    claim=r"For $|x| \gg |\mu|$, eq. 13 goes over into $y = \sqrt{C-1}\,\frac{x}{\sqrt{\beta + x^2}}$",
    assumes=r"$C > 1$, $\beta > 0$ and $\mu$ constant; $h = 1/x$ goes to 0 from above, the other side is alike",
    steps=(
        Step("Far out, the quotient of eq. 13 and eq. 15 goes to 1.",
             f"limit(({_FAR_EXACT})/({_FAR}), h)", "1", tag="15"),
        Step("It does so with the third power of the distance.",
             f"limit((1 - ({_FAR_EXACT})/({_FAR}))/h**3, h)", "beta*mu"),
        Step("What is neglected, exactly, of the squares.",
             f"({_DROPPED})**2 - ({_EXACT})**2",
             "(C - 1)*beta*mu*(2*x - mu)/((beta + x**2)*(beta + (x - mu)**2))"),
        Step("The function is odd.", "sqrt(C - 1)*(-x)/sqrt(beta + (-x)**2)", f"-({_DROPPED})"),
        Step("Its bound is that of eq. 7.", "C - 1", f"({_DROPPED})**2", ">"),
    ),
    numbers={"beta": "positive", "mu": "real", "x": "real", "h": "positive"},
)  # fmt: skip

STATEMENTS = (THEOREM_3, THEOREM_4, EQUATION_15)
