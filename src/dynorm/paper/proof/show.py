"""The report in the terminal, and as one HTML page whose formulas are MathML.

The page needs no other file: browsers show MathML without help.
"""

import os
import re
from collections.abc import Iterator

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dynorm.errors import require_library
from dynorm.files import require_writable, write_text
from dynorm.paper.proof.notation import RELATIONS, as_html, as_text, latex, mathml, one_line
from dynorm.paper.proof.prove import CheckedStep, Report
from dynorm.paper.proof.statement import Statement, Step, symbols_in
from dynorm.report.rendering import rendered

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


def prepare(path: str | os.PathLike[str]) -> None:
    """Check, before the long work, that :func:`save` can write a page there; make its folder."""
    require_library("latex2mathml", "the page of proofs", "paper")
    require_writable(path)


def save(report: Report, path: str | os.PathLike[str]) -> None:
    """Write a report as one HTML page, all or nothing; errors are those of :func:`prepare`."""
    prepare(path)
    write_text(path, render(report))


def render(report: Report) -> str:
    """Return the page as text."""
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
        equations=equations,
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


def show(report: Report, console: Console) -> None:
    """Print one row per statement, and each step that does not hold; the page has all steps."""
    console.print(_table(report))
    console.print(summary(report), markup=False)
    for checked in report.statements:
        for step in checked.steps:
            if not step.holds:
                line = f"{checked.statement.name}: {failure(step)}"
                console.print(line, style="red", markup=False)


def _table(report: Report) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("statement", no_wrap=True)
    table.add_column("equations", overflow="fold")
    table.add_column("for every C")
    for title in ("autograd", "50 digits", "seconds"):
        table.add_column(title, justify="right", no_wrap=True)
    for checked in report.statements:
        table.add_row(
            checked.statement.name,
            checked.statement.equations,
            Text("proven", "green") if checked.proven else Text("not proven", "bold red"),
            _error(checked.autograd, checked.autograd_holds),
            _error(checked.digits, checked.digits_hold),
            f"{checked.seconds:.2f}",
        )
    return table


def _error(error: float, holds: bool) -> Text:
    return Text(f"{error:.0e}", style="" if holds else "bold red")


def summary(report: Report) -> str:
    """Return the report in one sentence."""
    count = len(report.statements)
    steps = sum(len(checked.steps) for checked in report.statements)
    failed = [checked.statement.name for checked in report.statements if not checked.holds]
    if failed:
        return f"{len(failed)} of {count} statements do not hold: {', '.join(failed)}"
    subject = "The statement holds" if count == 1 else f"All {count} statements hold"
    return (
        f"{subject}: {steps} steps, each proven for every C and confirmed to 50 digits, "
        f"in {report.seconds:.1f} s"
    )


def failure(checked: CheckedStep) -> str:
    """Return in one line why a step does not hold."""
    outcome = "proven" if checked.verdict.proven else "not proven"
    numbers = "numbers agree" if checked.measured.holds else "numbers contradict"
    step = checked.step
    relation = as_text(f"${RELATIONS[step.relation]}$")
    formula = f"{one_line(step.left)} {relation} {one_line(step.right)}"
    line = f"{formula}: {outcome}, {numbers}"
    if checked.verdict.remains:
        line += f"; rest of the difference: {checked.verdict.remains}"
    return line


def equations(statement: Statement) -> str:
    """Return the numbers of a statement's equations, or their names if they have no numbers."""
    if statement.equations[0].isdigit():
        return f"eq. {statement.equations}"
    return statement.equations
