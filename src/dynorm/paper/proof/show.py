"""The report in the terminal, and as one HTML page that needs no other file: browsers show its formulas, in MathML."""

import os
import re
from collections.abc import Iterator

from rich.console import Console, Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from dynorm.errors import require_library
from dynorm.files import require_writable, write_text
from dynorm.paper.proof.formula import as_html, as_text, latex, mathml, names, one_line
from dynorm.paper.proof.prove import CheckedStatement, CheckedStep, Report
from dynorm.paper.proof.statement import METHOD, Statement, Step
from dynorm.report.page import rendered

_LATEX = {"=": "=", "!=": r"\neq", ">=": r"\geq", ">": ">"}
_RELATIONS = {"=": "=", "!=": "≠", ">=": "≥", ">": ">"}


def prepare(path: str | os.PathLike[str]) -> None:
    """Make sure, before the long work, that :func:`save` can make a page and write it there; its folder is made."""
    require_library("latex2mathml", "the page of proofs", "paper")
    require_writable(path)


def save(report: Report, path: str | os.PathLike[str]) -> None:
    """Write a report as one HTML page, whole or not at all; errors are those of :func:`prepare`."""
    prepare(path)
    write_text(path, render(report))


def render(report: Report) -> str:
    """Return the page as text."""
    known = "|".join(checked.statement.name for checked in report.statements)

    def formula(step: Step) -> str:
        left = "" if step.follows else latex(step.left)
        return mathml(f"{left} {_LATEX[step.relation]} {latex(step.right)}", display=True)

    return rendered(
        "proofs.html",
        report=report,
        method=METHOD,
        summary=summary,
        source=lambda text: re.sub(
            r"\d{4}\.\d{5}", r'<a href="https://arxiv.org/abs/\g<0>">arXiv \g<0></a>', text
        ),
        equations=equations,
        definitions=_definitions,
        formula=formula,
        failure=failure,
        as_html=as_html,
        # The names of other statements lead to them.
        linked=lambda sentence: re.sub(
            rf"\b({known})\b", r'<a href="#\1">\1</a>', as_html(sentence)
        ),
    )


def _definitions(statement: Statement) -> Iterator[str]:
    """Yield the definitions that the proof uses, itself or through other ones, as MathML."""
    waiting = [formula for step in statement.steps for formula in (step.left, step.right)]
    found: set[str] = set()
    while waiting:
        new = names(waiting.pop()) & statement.definitions.keys() - found
        found |= new
        waiting += [statement.definitions[name] for name in new]
    yield from (
        mathml(f"{latex(k)} = {latex(text)}")
        for k, text in statement.definitions.items()
        if k in found
    )


def show(report: Report, console: Console, *, brief: bool = False) -> None:
    """Print a report; when brief, its table alone."""
    for checked in () if brief else report.statements:
        console.print(_proof(checked))
        console.print()
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
            Text(f"{checked.autograd:.0e}", "" if checked.autograd_holds else "bold red"),
            Text(f"{checked.digits:.0e}", "" if checked.digits_hold else "bold red"),
            f"{checked.seconds:.2f}",
        )
    console.print(table)
    console.print(summary(report), markup=False)
    for checked in report.statements:
        for step in checked.steps:
            if not step.holds:
                console.print(
                    f"{checked.statement.name}: {failure(step)}", style="red", markup=False
                )


def summary(report: Report) -> str:
    """Return the report in one sentence."""
    count, steps = len(report.statements), sum(len(checked.steps) for checked in report.statements)
    failed = [checked.statement.name for checked in report.statements if not checked.holds]
    if failed:
        return f"{len(failed)} of {count} statements do not hold: {', '.join(failed)}"
    what = "The statement holds" if count == 1 else f"All {count} statements hold"
    return f"{what}: {steps} steps, each proven for every C and confirmed to 50 digits, in {report.seconds:.1f} s"


def failure(checked: CheckedStep) -> str:
    """Return in one line what is wrong with a step."""
    claim = f"{one_line(checked.step.left)} {_RELATIONS[checked.step.relation]} {one_line(checked.step.right)}"
    numbers = "numbers agree" if checked.measured.holds else "numbers contradict"
    remains = (
        f"; what remains of the difference: {checked.verdict.remains}"
        if checked.verdict.remains
        else ""
    )
    outcome = checked.verdict.outcome.replace("undecided", "not proven")
    return f"{claim}: {outcome}, {numbers}{remains}"


def equations(statement: Statement) -> str:
    """Return the numbers of a statement's equations, or the names where they have none."""
    return f"{'eq. ' if statement.equations[0].isdigit() else ''}{statement.equations}"


def _proof(checked: CheckedStatement) -> Group:
    statement = checked.statement
    reference = f"   {statement.name}, {equations(statement)}"
    heading = Text.assemble(
        _tick(checked.holds), " ", (statement.title, "bold"), (reference, "dim")
    )
    about = (
        Text(as_text(statement.claim), style="cyan"),
        Text(f"Assumed: {as_text(statement.assumes)}.", style="dim"),
    )
    grid = Table.grid(padding=(0, 1), expand=True)
    grid.add_column(width=1)
    grid.add_column(ratio=3, overflow="fold")
    grid.add_column(justify="right", width=4)
    grid.add_column(ratio=2, overflow="fold", style="dim")
    for row in checked.steps:
        left = " " if row.step.follows else one_line(row.step.left)
        formula = Text(f"{left} {_RELATIONS[row.step.relation]} {one_line(row.step.right)}")
        grid.add_row(
            _tick(row.holds),
            formula,
            f"({row.step.tag})" * bool(row.step.tag),
            as_text(row.step.reason),
        )
    notes = [Text(f"Note: {as_text(remark)}", style="dim") for remark in statement.remarks]
    return Group(heading, Padding(Group(*about, grid, *notes), (0, 0, 0, 2)))


def _tick(holds: bool) -> Text:
    return Text("✓", style="green") if holds else Text("✗", style="bold red")
