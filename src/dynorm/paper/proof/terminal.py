"""The report for the terminal: each proof step by step, and a table of all statements."""

from __future__ import annotations

from rich.console import Console, Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from dynorm.paper.proof.formula import as_text, plain
from dynorm.paper.proof.prove import CheckedStatement, CheckedStep, Report
from dynorm.paper.proof.statement import Statement

_RELATIONS = {"=": "=", "!=": "≠", ">=": "≥", ">": ">"}


def show(report: Report, console: Console, *, brief: bool = False) -> None:
    """Print a report.

    Args:
        report: The report.
        console: Where to.
        brief: Whether the table alone is printed.
    """
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
                console.print(f"{checked.statement.name}: {failure(step)}", style="red", markup=False)


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
    claim = f"{plain(checked.step.left)} {_RELATIONS[checked.step.relation]} {plain(checked.step.right)}"
    numbers = "numbers agree" if checked.measured.holds else "numbers contradict"
    remains = f"; what remains of the difference: {checked.verdict.remains}" if checked.verdict.remains else ""
    outcome = checked.verdict.outcome.replace("undecided", "not proven")
    return f"{claim}: {outcome}, {numbers}{remains}"


def equations(statement: Statement) -> str:
    """Return the numbers of a statement's equations, or the names where they have none."""
    return f"{'eq. ' if statement.equations[0].isdigit() else ''}{statement.equations}"


def _proof(checked: CheckedStatement) -> Group:
    statement = checked.statement
    reference = f"   {statement.name}, {equations(statement)}"
    heading = Text.assemble(_tick(checked.holds), " ", (statement.title, "bold"), (reference, "dim"))
    about = (Text(as_text(statement.claim), style="cyan"), Text(f"Assumed: {as_text(statement.assumes)}.", style="dim"))
    grid = Table.grid(padding=(0, 1), expand=True)
    grid.add_column(width=1)
    grid.add_column(ratio=3, overflow="fold")
    grid.add_column(justify="right", width=4)
    grid.add_column(ratio=2, overflow="fold", style="dim")
    for row in checked.steps:
        left = " " if row.step.follows else plain(row.step.left)
        formula = Text(f"{left} {_RELATIONS[row.step.relation]} {plain(row.step.right)}")
        tag = f"({row.step.tag})" * bool(row.step.tag)
        grid.add_row(_tick(row.holds), formula, tag, as_text(row.step.reason))
    notes = [Text(f"Note: {as_text(remark)}", style="dim") for remark in statement.remarks]
    return Group(heading, Padding(Group(*about, grid, *notes), (0, 0, 0, 2)))


def _tick(holds: bool) -> Text:
    return Text("✓", style="green") if holds else Text("✗", style="bold red")
