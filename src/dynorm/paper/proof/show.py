"""The report in the terminal, and as one HTML page whose formulas are MathML.

The page needs no other file: browsers show MathML without help.
"""

import re
from collections.abc import Iterator

from dynorm.paper.proof.notation import RELATIONS, as_html, latex, mathml, one_line
from dynorm.paper.proof.prove import CheckedStep, Report
from dynorm.paper.proof.statement import Statement, Step, symbols_in
from dynorm.report.rendering import rendered
from dynorm.table import Table

METHOD = (
    "Each step is one formula, written once. The page, the algebra and the numbers all use the "
    "same sympy expression.",
    "Algebra: the statement “The dependence of one channel on its token” shows that sums over "
    "channels can be replaced by $x_i$, C and mean $m_i$ and variance $v_i$ of the other channels, "
    r"which describe every token: $m_i$ is any number and $v_i \geq 0$ any other. After "
    "differentiation, each step is a quotient of polynomials in $x_i - m_i$, $m_i$, $v_i$, $C - 1$ "
    "and in roots of quantities that are not negative. Two sides are equal if the numerator of "
    "their difference, divided by the relations of the roots, is the zero polynomial. A step that "
    "sympy cannot bring to that form is “not proven”, which counts as a failure.",
    "Numbers: both sides are evaluated at a random token to 65 digits, sums channel by channel, "
    "derivatives by differences at 130 digits. They must agree to 50 digits. No rule of the "
    "algebra is used.",
    "A step with ≠ is proven by one exact token at which the two sides differ.",
)
"""How statements are proven, in paragraphs."""
NOTES = (
    "equations: the numbers of the paper; for every C: algebra with the number of channels as a symbol",
    "autograd: largest difference of dynorm's functions and their automatic derivatives, in float64",
    "50 digits: largest difference of two equal sides at random tokens; both relative",
)
"""The meanings of the columns in the terminal."""


def render(report: Report) -> str:
    """Return the page as text; it needs the library latex2mathml."""
    names = "|".join(checked.statement.name for checked in report.statements)

    def linked(sentence: str) -> str:
        """Return a sentence as HTML in which names of statements are links to them."""
        return re.sub(rf"\b({names})\b", r'<a href="#\1">\1</a>', as_html(sentence))

    return rendered(
        "proofs.html",
        report=report,
        method=METHOD,
        summary=summary,
        source=_linked_source,
        definitions=_definitions,
        formula=_formula,
        failure=failure,
        as_html=as_html,
        linked=linked,
    )


def _linked_source(source: str) -> str:
    link = r'<a href="https://arxiv.org/abs/\g<0>">arXiv \g<0></a>'
    return re.sub(r"\d{4}\.\d{5}", link, source)


def _formula(step: Step) -> str:
    left = "" if step.follows else latex(step.left)
    return mathml(f"{left} {RELATIONS[step.relation]} {latex(step.right)}", display=True)


def _definitions(statement: Statement) -> Iterator[str]:
    """Yield the definitions that a proof uses, directly or through others, as MathML."""
    used = set()
    for step in statement.steps:
        used |= symbols_in(step.left) | symbols_in(step.right)
    # A definition uses only those before it.
    for symbol, formula in reversed(statement.definitions.items()):
        if symbol in used:
            used |= symbols_in(formula)
    for symbol, formula in statement.definitions.items():
        if symbol in used:
            yield mathml(f"{latex(symbol)} = {latex(formula)}")


def as_text(report: Report) -> str:
    """Return one row per statement, and each step that does not hold; the page has all steps."""
    lines = [str(_table(report)), "", summary(report)]
    for checked in report.statements:
        for step in checked.steps:
            if not step.holds:
                lines.append(f"{checked.statement.name}: {failure(step)}")
    return "\n".join(lines)


def _table(report: Report) -> Table:
    columns = ["statement", "equations", "for every C", "autograd", "50 digits"]
    rows = []
    for checked in report.statements:
        rows.append(
            [
                checked.statement.name,
                checked.statement.equations,
                "proven" if checked.proven else "not proven",
                f"{checked.autograd:.0e}",
                f"{checked.digits:.0e}",
            ]
        )
    return Table(columns, rows, NOTES)


def summary(report: Report) -> str:
    """Return the report in one sentence."""
    count = len(report.statements)
    steps = sum(len(checked.steps) for checked in report.statements)
    failed = [checked.statement.name for checked in report.statements if not checked.holds]
    if failed:
        return f"{len(failed)} of {count} statements do not hold: {', '.join(failed)}"
    subject = "The statement holds" if count == 1 else f"All {count} statements hold"
    return f"{subject}: {steps} steps, each proven for every C and confirmed to 50 digits"


def failure(checked: CheckedStep) -> str:
    """Return in one line why a step does not hold."""
    outcome = "proven" if checked.verdict.proven else "not proven"
    numbers = "numbers agree" if checked.measured.holds else "numbers contradict"
    step = checked.step
    formula = f"{one_line(step.left)} {step.relation} {one_line(step.right)}"
    line = f"{formula}: {outcome}, {numbers}"
    if checked.verdict.remains:
        line += f"; rest of the difference: {checked.verdict.remains}"
    return line
