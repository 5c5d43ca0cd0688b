"""Theorem 1, LayerNorm's derivative, and theorem 2, which holds F constant: equations 5 to 11, appendix A.1, A.2."""

from __future__ import annotations

from dynorm.paper.proof.statement import PAPER, TOKEN, Statement, Step, chain

_SIGMA = r"$C > 1$ channels that are not all equal, so that $\sigma > 0$"

_QUOTIENT = (
    Step("The quotient rule, of $y_i = f / g$ with $f = x_i - \\mu$ and $g = \\sqrt{\\sigma^2}$ (eq. 20 to 22).",
         "d(y_i)", "(d(f)*g - f*d(g)) / g**2", tag="23"),
)  # fmt: skip

_NUMERATOR = chain(
    "d(f)",
    ("1 - d(1/C*sum_k(x_k))", "The mean moves with $x_i$: by eq. 1 it is a sum that holds $x_i$."),
    ("1 - 1/C", "One term of the sum is $x_i$, the others stay."),
    ("(C - 1) / C", "Over a common denominator.", "24"),
)

_DENOMINATOR = chain(
    "d(g)",
    ("1/(2*sqrt(sigma**2)) * d(sigma**2)", "The chain rule for the root; $\\sigma > 0$."),
    ("1/(2*sqrt(sigma**2)) * d(1/C*sum_k((x_k - mu)**2))", "Eq. 2."),
    ("1/(2*C*sqrt(sigma**2)) * d((x_i - mu)**2 + others((x_k - mu)**2))", "The term $k = i$ is taken out of the sum."),
    (
        "1/(C*sqrt(sigma**2)) * ((x_i - mu)*d(x_i - mu) + others((x_k - mu)*d(x_k - mu)))",
        "The chain rule for each square.",
    ),
    (
        "1/(C*sqrt(sigma**2)) * ((x_i - mu)*(1 - 1/C) - others((x_k - mu)*(1/C)))",
        "Eq. 24; for $k \\neq i$ only the mean moves, by $1/C$.",
    ),
    (
        "1/(C*sqrt(sigma**2)) * ((x_i - mu) - 1/C*sum_k(x_k - mu))",
        "The term $-\\frac{1}{C}\\,(x_i - \\mu)$ completes the sum.",
    ),
    ("1/(C*sqrt(sigma**2)) * ((x_i - mu) - 1/C*(C*mu - C*mu))", "Eq. 1: $\\sum_k x_k = C \\mu$."),
    ("1/(C*sqrt(sigma**2)) * (x_i - mu)", "Deviations from the mean add up to 0."),
    ("y_i / C", "Eq. 3.", "25"),
)

_TOGETHER = chain(
    "d(y_i)",
    ("(d(f)*g - f*d(g)) / g**2", "Eq. 23 again."),
    ("((C - 1)/C*sqrt(sigma**2) - (x_i - mu)*(y_i/C)) / sigma**2", "Eq. 24 and 25 are put in."),
    ("((C - 1)/C*sqrt(sigma**2) - 1/C*sqrt(sigma**2)*y_i**2) / sigma**2", "Eq. 3: $x_i - \\mu = \\sigma y_i$."),
    ("1/(C*sqrt(sigma**2)) * (C - 1 - y_i**2)", "One $\\sigma$ cancels.", "26"),
    ("F*(C - 1 - y_i**2)", "Eq. 6.", "5"),
)

THEOREM_1 = Statement(
    name="theorem-1",
    title="Theorem 1: the derivative of LayerNorm",
    source=PAPER,
    equations="1-3, 5, 6, 20-26",
    claim=r"$\frac{dy_i}{dx_i} = F(x)\,(C - 1 - y_i^2)$ with $F(x) = \frac{1}{C\sqrt{\sigma^2}}$",
    assumes=_SIGMA + r"; the other channels are held while $x_i$ moves, $\mu$ and $\sigma$ move with it",
    steps=_QUOTIENT + _NUMERATOR + _DENOMINATOR + _TOGETHER,
    definitions={**TOKEN, "f": "x_i - mu", "g": "sqrt(sigma**2)"},
    remarks=(
        r"Both texts abbreviate $f^\prime = df/dx$; $df/dx_i$ is meant, as eq. 24 has it.",
        "C need not be an integer for the algebra: any real $C > 1$ passes.",
    ),
)

EQUATION_7 = Statement(
    name="equation-7",
    title="Equation 7: the extreme values are stationary",
    source=PAPER,
    equations="7",
    claim=r"$y_i = \pm\sqrt{C-1} \Rightarrow \frac{dy_i}{dx_i} = 0$",
    assumes=_SIGMA,
    steps=(
        Step("Eq. 5 at the upper extreme.", "F*(C - 1 - sqrt(C - 1)**2)", "0", tag="7"),
        Step("Eq. 5 at the lower extreme.", "F*(C - 1 - (-sqrt(C - 1))**2)", "0", tag="7"),
        Step("No other value is stationary: the factor vanishes at these two alone, and $F > 0$.",
             "C - 1 - y_i**2", "(sqrt(C - 1) - y_i)*(sqrt(C - 1) + y_i)"),
        Step("How far $y_i$ stays from them: $v_i$ is the variance of the other channels.",
             "C - 1 - y_i**2", "(C - 1)*(C*v_i) / (C*v_i + (x_i - m_i)**2)"),
        Step("So no channel passes them, and one reaches them only where all others are equal, $v_i = 0$; "
             "with $C = 2$ that is always so.", "C - 1 - y_i**2", "0", ">="),
    ),
    definitions=TOKEN,
)  # fmt: skip

EQUATION_8 = Statement(
    name="equation-8",
    title="Equation 8: what holding F constant neglects",
    source=PAPER,
    equations="8",
    claim=r"$\frac{dF}{dx_i} = -y_i\,F^2$, so F is constant to first order only at $x_i = \mu$",
    assumes=_SIGMA,
    steps=(
        *chain(
            "d(F)",
            ("d(1/(C*sigma))", "Eq. 6."),
            ("-(1/(C*sigma**2)*d(sigma))", "The chain rule."),
            ("-(1/(C*sigma**2)*(y_i/C))", "Eq. 25."),
            ("-(y_i*F**2)", "Eq. 6."),
        ),
        Step("Eq. 8 itself is an approximation, not an identity: the exact F does move.", "d(F)", "0", "!=", "8"),
        Step("The largest relative rate of change is that of an outlier, $F\\sqrt{C-1}$.",
             "(C - 1)*F**2 - (d(F)/F)**2", "0", ">="),
    ),
    definitions=TOKEN,
)  # fmt: skip

_ROOT = "sqrt(C - 1)"
_PRODUCT = f"(({_ROOT} - y)*({_ROOT} + y))"
_GROWTH = f"exp(2*{_ROOT}*F*x)"

_SEPARATION = chain(
    "F",
    ("1/(C - 1 - y**2) * Dy", "Eq. 9, divided by $C - 1 - y^2 > 0$: the variables are separated."),
    (f"1/{_PRODUCT} * Dy", "A difference of squares."),
    (f"1/(2*{_ROOT}) * (({_ROOT} - y + {_ROOT} + y)/{_PRODUCT}) * Dy", "$y$ is added and taken away."),
    (f"1/(2*{_ROOT}) * (1/({_ROOT} + y) + 1/({_ROOT} - y)) * Dy", "Partial fractions."),
)

_INTEGRATION = (
    Step("An integral of the right hand side over $y$, checked by its derivative.",
         f"diff(1/(2*{_ROOT}) * log(({_ROOT} + y)/({_ROOT} - y)), y)", "1/(C - 1 - y**2)"),
    Step("An integral of the left hand side over $x$, with the constant $c$.",
         f"diff(F*x + c/(2*{_ROOT}), x)", "F"),
    Step("Along $x$, with $dy/dx$ of eq. 9, the two differ by a constant alone: $c$ is its name.",
         f"diff(1/(2*{_ROOT}) * log(({_ROOT} + y)/({_ROOT} - y)), y) * Dy", "diff(F*x, x)"),
    Step("Both are equal; times $2\\sqrt{C-1}$, and exponentiated, the right one gives $Q$.",
         f"exp(2*{_ROOT}*(F*x + c/(2*{_ROOT})))", f"exp(2*{_ROOT}*F*x + c)"),
    Step("And the left one.", f"exp(2*{_ROOT}*(1/(2*{_ROOT}) * log(({_ROOT} + y)/({_ROOT} - y))))",
         "Q"),
)  # fmt: skip

_SOLVING = (
    Step("$Q$ is the quotient; it is solved for $y$.", f"({_ROOT} + y) / ({_ROOT} - y)", "Q"),
    Step("Times the denominator.", f"{_ROOT} + y", f"({_ROOT} - y)*Q"),
    Step("Multiplied out.", f"{_ROOT} + y", f"{_ROOT}*Q - Q*y"),
    Step("$y$ to one side.", "Q*y + y", f"{_ROOT}*(Q - 1)"),
    Step("Collected.", "(Q + 1)*y", f"{_ROOT}*(Q - 1)"),
    Step("$Q + 1$ is never 0.", "y", f"{_ROOT} * ((Q - 1)/(Q + 1))"),
)

_BOUNDARY = (
    Step("$Q$ is put in again, with $A = e^c$.",
         f"{_ROOT} * ((exp(2*{_ROOT}*F*x + c) - 1)/(exp(2*{_ROOT}*F*x + c) + 1))",
         f"{_ROOT} * ((A*{_GROWTH} - 1)/(A*{_GROWTH} + 1))"),
    Step("At $x = 0$ the solution is $y_0$.", f"{_ROOT} * ((A*exp(0) - 1)/(A*exp(0) + 1))", "y_0"),
    Step("So $A$ follows from $y_0$, and $y_0 = 0$, eq. 10, leaves $A = 1$ alone.",
         "A", f"({_ROOT} + y_0) / ({_ROOT} - y_0)", tag="10"),
    Step("With $A = 1$ and $\\alpha = \\sqrt{C-1}\\,F$ it is the scaled DyT.",
         f"{_ROOT} * (({_GROWTH} - 1)/({_GROWTH} + 1))", f"{_ROOT} * tanh(alpha*x)", tag="11"),
)  # fmt: skip

_BACK = (
    Step("Put back: eq. 11 solves eq. 9.",
         f"diff({_ROOT}*tanh(alpha*x), x)", f"F*(C - 1 - ({_ROOT}*tanh(alpha*x))**2)", tag="9"),
    Step("And meets eq. 10.", f"{_ROOT}*tanh(alpha*0)", "0", tag="10"),
    Step("It stays within $\\pm\\sqrt{C-1}$, as was assumed when dividing.",
         "C - 1", f"({_ROOT}*tanh(alpha*x))**2", ">"),
    Step("Divided by $\\sqrt{C-1}$ it is DyT as first published.",
         f"{_ROOT}*tanh(alpha*x) / {_ROOT}", "tanh(alpha*x)", tag="4"),
)  # fmt: skip

THEOREM_2 = Statement(
    name="theorem-2",
    title="Theorem 2: scaled DyT",
    source=PAPER,
    equations="4, 9-11",
    claim=r"$\frac{dy}{dx} = F\,(C - 1 - y^2)$ with $y(0) = 0$ is solved by $y = \sqrt{C-1}\,\tanh(\alpha x)$",
    assumes=r"$C > 1$, $F > 0$ constant (eq. 8), $|y| < \sqrt{C-1}$: every such $y$ is "
    r"$\sqrt{C-1}\,\frac{w-1}{w+1}$ with some $w > 0$. The index i is dropped",
    steps=_SEPARATION + _INTEGRATION + _SOLVING + _BOUNDARY + _BACK,
    definitions={
        "y": f"{_ROOT}*(w - 1)/(w + 1)",
        "Dy": "F*(C - 1 - y**2)",
        "Q": f"({_ROOT} + y) / ({_ROOT} - y)",
        "A": "exp(c)",
        "y_0": f"{_ROOT}*(A - 1)/(A + 1)",
        "alpha": f"{_ROOT}*F",
    },
    numbers={"F": "positive", "w": "positive", "x": "real", "c": "real"},
    remarks=(
        r"Dividing by $C - 1 - y^2$ leaves out the constant solutions $y = \pm\sqrt{C-1}$ of eq. 7; "
        "eq. 10 excludes them.",
    ),
)

STATEMENTS = (THEOREM_1, EQUATION_7, EQUATION_8, THEOREM_2)
