"""The report in the terminal, and as one HTML page that needs no other file: browsers show its formulas, in MathML."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from rich.console import Console, Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from dynorm.errors import require_library
from dynorm.files import require_writable, write_text
from dynorm.paper.proof.formula import as_html, as_text, latex, mathml, names, one_line
from dynorm.paper.proof.prove import CheckedStatement, CheckedStep, Report
from dynorm.paper.proof.statement import METHOD, Statement
from dynorm.report.page import whole_page

_LATEX = {"=": "=", "!=": r"\neq", ">=": r"\geq", ">": ">"}
_RELATIONS = {"=": "=", "!=": "≠", ">=": "≥", ">": ">"}
_SOURCES = {"2503.21708": "https://arxiv.org/abs/2503.21708"}


def prepare(path: str | os.PathLike[str]) -> None:
    """Make sure, before the long work, that :func:`save` can make a page and write it there; its folder is made.

    Raises:
        ArgumentError: If latex2mathml is not installed.
        StorageError: If the folder cannot be made or written to, or the path is a folder.

    Example:
        >>> prepare(getfixture("tmp_path") / "new" / "proofs.html")
    """
    require_library("latex2mathml", "the page of proofs", "paper")
    require_writable(path)


def save(report: Report, path: str | os.PathLike[str]) -> None:
    """Write a report as one HTML page, whole or not at all; errors are those of :func:`prepare`.

    Example:
        >>> from dynorm.paper.proof.prove import prove
        >>> save(prove(["note-centering"]), getfixture("tmp_path") / "proofs.html")
    """
    prepare(path)
    write_text(path, render(report))


def render(report: Report) -> str:
    """Return the page as text."""
    known = [checked.statement.name for checked in report.statements]
    sections = "\n".join(_section(checked, known) for checked in report.statements)
    method = "".join(f"<p>{as_html(text)}</p>" for text in METHOD)
    body = f'{_head(report)}\n{sections}\n<section id="method"><h2>How it is done</h2>{method}</section>'
    return whole_page("dynorm: proofs", Path(__file__).with_name("page.css").read_text(encoding="utf-8"), body)


def _head(report: Report) -> str:
    titles = ("Statement", "Equations", "For every C", "Autograd", "50 digits")
    head = "".join(f'<th scope="col">{title}</th>' for title in titles)
    rows = "".join(
        f'<tr><th scope="row"><a href="#{checked.statement.name}">{escape(checked.statement.title)}</a></th>'
        f"<td>{escape(checked.statement.equations)}</td>"
        f"<td>{_mark(checked.proven)} {'proven' if checked.proven else 'not proven'}</td>"
        f"<td{'' if checked.autograd_holds else ' class=bad'}>{_power(checked.autograd)}</td>"
        f"<td{'' if checked.digits_hold else ' class=bad'}>{_power(checked.digits)}</td></tr>"
        for checked in report.statements
    )
    return (
        "<header><h1>From LayerNorm to DyISRU, proven</h1>"
        f'<p class="lead {"" if report.holds else "bad"}">{escape(summary(report))}.</p>'
        "<p>C is a symbol in every proof; nothing is sampled. Each step is decided by exact algebra; then both of its "
        "sides are computed from their definitions, by another program, on random tokens of 2, 3, 7 and 100 channels "
        f"(seed {report.seed}). The functions of dynorm and their automatic derivatives are a third check. "
        '<a href="#method">How it is done</a></p></header>'
        '<nav aria-label="Contents"><h2>Contents</h2>'
        '<div class="scroll" tabindex="0" role="region" aria-label="Table of statements">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
        '<p class="note">Autograd and 50 digits: largest difference found, relative to the larger side or to 1.</p>'
        "</nav>"
    )


def _section(checked: CheckedStatement, known: Sequence[str]) -> str:
    statement = checked.statement
    source = escape(statement.source)
    for number, address in _SOURCES.items():
        source = source.replace(number, f'<a href="{address}">arXiv {number}</a>')
    # The defined names that the proof uses, itself or through other definitions.
    waiting = [formula for step in statement.steps for formula in (step.left, step.right)]
    found: set[str] = set()
    while waiting:
        new = names(waiting.pop()) & statement.definitions.keys() - found
        found |= new
        waiting += [statement.definitions[name] for name in new]
    used = [f"{latex(name)} = {latex(text)}" for name, text in statement.definitions.items() if name in found]
    definitions = f'<ul class="definitions" aria-label="Definitions">{_items(map(mathml, used))}</ul>' if used else ""
    steps = "".join(_step(step, known) for step in checked.steps)
    remarks = _items(_linked(remark, known) for remark in statement.remarks)
    return (
        f'<section id="{statement.name}"{" class=misprint" if statement.misprint else ""}>'
        f"<h2>{_mark(checked.holds)} {escape(statement.title)}</h2>"
        f'<p class="note"><code>{statement.name}</code> {source}, {escape(equations(statement))}</p>'
        f'<p class="claim">{as_html(statement.claim)}.</p>'
        f"<p>Assumed: {_linked(statement.assumes, known)}.</p>{definitions}"
        f'<ol class="steps">{steps}</ol>'
        f"{f'<ul class=remarks>{remarks}</ul>' if remarks else ''}"
        '<p class="up"><a href="#top">Contents</a></p></section>'
    )


def _items(entries: Iterable[str]) -> str:
    return "".join(f"<li>{entry}</li>" for entry in entries)


def _linked(sentence: str, known: Sequence[str]) -> str:
    """Return a sentence as HTML, the names of other statements leading to them."""
    return re.sub(rf"\b({'|'.join(known)})\b", r'<a href="#\1">\1</a>', as_html(sentence))


def _step(checked: CheckedStep, known: Sequence[str]) -> str:
    step = checked.step
    tag = f'<span class="tag">({escape(step.tag)})</span>' if step.tag else ""
    left = "" if step.follows else latex(step.left)
    formula = mathml(f"{left} {_LATEX[step.relation]} {latex(step.right)}", display=True)
    style = " class=follows" if step.follows else " class=meant" if step.relation == "=" else ""
    failed = "" if checked.holds else f'<p class="bad">{escape(failure(checked))}</p>'
    return (
        f"<li{style}>{_mark(checked.holds)}"
        f'<div class="formula" tabindex="0">{formula}</div>{tag}'
        f'<p class="reason">{_linked(step.reason, known)}</p>{failed}</li>'
    )


def _mark(holds: bool) -> str:
    style, label, sign = ("mark", "holds", "✓") if holds else ("mark bad", "does not hold", "✗")
    return f'<span class="{style}" role="img" aria-label="{label}">{sign}</span>'


def _power(value: float) -> str:
    """Return an error as a reader sees it: 3·10⁻⁶⁶."""
    if value == 0 or not abs(value) < float("inf"):
        return "0" if value == 0 else "not finite"
    digits, exponent = f"{value:.0e}".split("e")
    return f"{digits}·10<sup>{str(int(exponent)).replace('-', '−')}</sup>"


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
    claim = f"{one_line(checked.step.left)} {_RELATIONS[checked.step.relation]} {one_line(checked.step.right)}"
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
        left = " " if row.step.follows else one_line(row.step.left)
        formula = Text(f"{left} {_RELATIONS[row.step.relation]} {one_line(row.step.right)}")
        tag = f"({row.step.tag})" * bool(row.step.tag)
        grid.add_row(_tick(row.holds), formula, tag, as_text(row.step.reason))
    notes = [Text(f"Note: {as_text(remark)}", style="dim") for remark in statement.remarks]
    return Group(heading, Padding(Group(*about, grid, *notes), (0, 0, 0, 2)))


def _tick(holds: bool) -> Text:
    return Text("✓", style="green") if holds else Text("✗", style="bold red")
