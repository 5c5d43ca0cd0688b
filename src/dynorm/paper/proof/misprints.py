"""Where a text's print is wrong: what is printed fails, what is meant holds."""

from __future__ import annotations

from dynorm.paper.proof.statement import FIRST_TEXT, NOTE, Statement, Step
from dynorm.paper.proof.theorems_3_4 import SUBSTITUTED


def _pair(where: str, left: str, printed: str, meant: str) -> tuple[Step, Step]:
    """Return what is printed, which fails, and what is meant, which holds."""
    return (
        Step(f"Printed {where}: read as it stands, it is another function.", left, printed, "!="),
        Step("Meant.", left, meant),
    )


FIRST_VERSION = Statement(
    name="misprint-first-version",
    title="Appendix A.3 of the first version: lost parentheses",
    source=FIRST_TEXT,
    equations="28 and the lines around it",
    claim=r"Wherever the first version prints $C - 1$ before a factor, $(C - 1)$ is meant: "
    r"$C - 1y - y^3$ should read $(C-1)\,y - y^3$",
    assumes=r"$0 < y < \sqrt{C-1}$, that is $w > 0$, and $z = |x - \mu| > 0$; what is printed is read by the "
    r"usual precedence, $1y$ as $1 \cdot y$",
    steps=(
        *_pair("in the separated equation", "1/C*(1/z)", "1/(C - 1*y - y**3)*Dy", "1/((C - 1)*y - y**3)*Dy"),
        *_pair("where $u$ is put in, by $y$", "1/((C - 1)*y - y**3)*dy_du",
               "-(1/2*(1/(C - 1*y**(-2) - 1)))", "-(1/2*(1/((C - 1)*y**(-2) - 1)))"),
        *_pair("where $u$ is put in, by $u$", "1/((C - 1)*y - y**3)*dy_du",
               "-(1/2*(1/(C - 1*u - 1)))", "-(1/2*(1/((C - 1)*u - 1)))"),
        *_pair("in the integral over $u$", "-(1/2*(1/((C - 1)*u - 1)))",
               "diff(-(1/(2*C - 1)*log(C - 1*u - 1)), u)", "diff(-(1/(2*(C - 1))*log((C - 1)*u - 1)), u)"),
        Step("Nor is it consistent: the integral as printed is none of the integrand as printed.",
             "-(1/2*(1/(C - 1*u - 1)))", "diff(-(1/(2*C - 1)*log(C - 1*u - 1)), u)", "!="),
        *_pair("in eq. 28", "1/((C - 1)*y - y**3)",
               "diff(-(1/(2*C - 1)*log(C - 1*y**(-2) - 1)), y)", "diff(-(1/(2*(C - 1))*log((C - 1)*y**(-2) - 1)), y)"),
        *_pair("where both sides are compared", "1/(C - 1)*log(z)",
               "-(1/(2*C - 1)*log(C - 1*y**(-2) - 1)) + log(c)/(C - 1)",
               "-(1/(2*(C - 1))*log((C - 1)*y**(-2) - 1)) + log(c)/(C - 1)"),
        *_pair("in the next three lines", "log(c**2/z**2)", "log(C - 1*y**(-2) - 1)", "log((C - 1)*y**(-2) - 1)"),
        *_pair("where they are exponentiated", "c**2/z**2", "C - 1*y**(-2) - 1", "(C - 1)*y**(-2) - 1"),
        *_pair("in the last line but one", "y**(-2)", "(c**2 + z**2)/(C - 1*z**2)", "(c**2 + z**2)/((C - 1)*z**2)"),
        *_pair("in the last line", "y**2", "(C - 1*z**2)/(c**2 + z**2)", "((C - 1)*z**2)/(c**2 + z**2)"),
    ),
    definitions={
        **SUBSTITUTED,
        "Dy": "y/(C*z)*(C - 1 - y**2)",
        "c": "z*sqrt((C - 1)*y**(-2) - 1)",
    },
    numbers={"w": "positive", "z": "positive"},
    remarks=(
        "The later text has all of these right. It numbers the separated equation too: 27 and 28 became 28 and 29.",
        "The first version also draws $N = 50$ values (section 4.1) where a token has $C = 100$; the later one has C.",
    ),
    misprint=True,
)  # fmt: skip

NOTE_IDENTITY = Statement(
    name="misprint-note",
    title="The note's centring matrix: 1 for I",
    source=NOTE,
    equations="c(x)",
    claim=r"The note's first display has $x\,(1 - \frac{1}{d} 1^\top 1)$; $I - \frac{1}{d} 1^\top 1$ is meant, as "
    "its later lines have it",
    assumes=r"a number less a matrix is read entry by entry: each entry is $1 - \frac{1}{C}$",
    steps=(
        Step("Printed: read as it stands, it does not centre.", "x_i - mu", "sum_k(x_k*(1 - 1/C))", "!="),
        Step("Meant.", "x_i - mu", "sum_k(x_k*(delta_ki - 1/C))"),
    ),
    definitions={"mu": "sum_k(x_k) / C"},
    misprint=True,
)

STATEMENTS = (FIRST_VERSION, NOTE_IDENTITY)
