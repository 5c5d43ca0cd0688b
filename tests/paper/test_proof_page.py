"""The proofs as a page, on the terminal and on the command line."""

import re
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest
from sympy import Rational, exp, sqrt
from typer.testing import CliRunner, Result

from dynorm.cli import app
from dynorm.errors import ArgumentError, StorageError
from dynorm.paper.proof import prove, show
from dynorm.paper.proof.exact import Verdict
from dynorm.paper.proof.notation import SYMBOLS, latex
from dynorm.paper.proof.numbers import Measured
from dynorm.paper.proof.prove import CheckedStatement, CheckedStep, Report
from dynorm.paper.proof.statement import Statement, Step
from dynorm.paper.proof.statements import STATEMENTS
from dynorm.paper.proof.vocabulary import (
    C,
    Expr,
    as_written,
    d,
    delta,
    i,
    k,
    limit,
    mu,
    others,
    positive,
    real,
    sigma,
    sum_k,
    x_i,
    x_k,
    y_i,
)
from tests.pages import Page


def broken_statement() -> Statement:
    """Return a statement with a wrong definition."""
    (statement,) = prove.choose(["appendix-b"])
    return replace(statement, definitions={real("beta"): positive("alpha")})


@pytest.fixture(scope="module")
def report() -> Report:
    """All statements, as if they were proven: test_proof.py does that."""
    verdict, measured = Verdict(True), Measured(True, 0.0)
    checked = []
    for statement in STATEMENTS:
        steps = tuple(CheckedStep(step, verdict, measured) for step in statement.steps)
        checked.append(CheckedStatement(statement, steps, 0.0))
    return Report(tuple(checked))


@pytest.fixture(scope="module")
def broken() -> Report:
    return Report((prove.check(broken_statement()),))


def test_the_page_is_well_formed_and_needs_nothing_else(report: Report) -> None:
    text = show.render(report)
    page = Page(text)
    names = [value for _, name, value in page.attributes if name == "id"]
    assert len(names) == len(set(names))
    assert {statement.name for statement in STATEMENTS} <= set(names)
    links = {value for _, name, value in page.attributes if name in ("href", "src")}
    inside = {link[1:] for link in links if link.startswith("#")}
    assert inside <= set(names)
    assert links - {f"#{name}" for name in inside} == {"https://arxiv.org/abs/2503.21708"}
    assert not page.tags.keys() & {"script", "link", "img", "iframe", "object"}
    assert "url(" not in text
    assert "@import" not in text


def test_every_formula_of_the_page_is_mathml(report: Report) -> None:
    text = show.render(report)
    elements = re.findall(r"<math.*?</math>", text, flags=re.DOTALL)
    assert len(elements) > sum(len(statement.steps) for statement in STATEMENTS)
    for element in elements:
        root = ElementTree.fromstring(element)
        # What latex2mathml does not know it leaves as an empty row, a command or an error.
        words = "".join(root.itertext())
        assert words.strip()
        assert "\\" not in words
        assert root.find(".//{*}merror") is None
    assert "$" not in text


def test_a_failure_is_shown(broken: Report) -> None:
    page, terminal = show.render(broken), show.as_text(broken)
    Page(page)
    assert 'aria-label="does not hold"' in page
    for text in (page, terminal):
        assert "1 of 1 statements do not hold: appendix-b" in text
        assert "not proven" in text
        assert "numbers contradict" in text


def test_the_terminal_shows_a_row_per_statement_and_a_legend(report: Report) -> None:
    text = show.as_text(report)
    assert f"All {len(STATEMENTS)} statements hold" in text
    names = [statement.name for statement in STATEMENTS]
    first_words = [line.split(" ")[0] for line in text.splitlines()]
    assert [word for word in first_words if word in names] == names
    for column in ("equations:", "for every C:", "autograd:", "50 digits:"):
        assert column in text


a = real("a")
b = real("b")
c = real("c")

with as_written():
    NOTATION = [
        ((x_i - mu) / sqrt(sigma**2), r"\frac{x_{i} - \mu}{\sqrt{\sigma^{2}}}"),
        (a - (b - c), r"a - \left(b - c\right)"),
        (a + (b + c), r"a + \left(b + c\right)"),
        (a - b - c, "a - b - c"),
        (C - 1 - y_i**2, "C - 1 - y_{i}^{2}"),
        (a / (b * c), r"\frac{a}{b\,c}"),
        (a * (b / c), r"a\,\frac{b}{c}"),
        (a * (b + c) / 2, r"\frac{a\,\left(b + c\right)}{2}"),
        ((a * b) ** 2, r"\left(a\,b\right)^{2}"),
        ((-a) ** 2, r"\left(- a\right)^{2}"),
        (-(a + b), "- (a + b)"),
        (-(a / b), r"- \frac{a}{b}"),
        (a ** Rational(-3, 2), "a^{-3/2}"),
        ((a + b) ** (-2), r"\frac{1}{\left(a + b\right)^{2}}"),
        (sqrt(a) * sqrt(b + c), r"\sqrt{a}\,\sqrt{b + c}"),
        (exp(a * b), r"e^{a\,b}"),
        (
            sum_k(x_k + a) * b,
            r"\left(\sum\limits_{k=1}^{C} \left(x_{k} + a\right)\right)\,b",
        ),
        (b * others(x_k**2), r"b\,\sum\limits_{k \neq i} x_{k}^{2}"),
        (delta(k, i) - 1 / C, r"\delta_{k i} - \frac{1}{C}"),
        (d(y_i), r"\frac{dy_{i}}{dx_{i}}"),
        (c * d(a * b, a), r"c\,\frac{d}{da} \left(a\,b\right)"),
        (limit(1 / a, a), r"\lim_{a \to 0} \left(\frac{1}{a}\right)"),
        (real("sigma_others") ** 2, r"\sigma_{\neq i}^{2}"),
    ]


@pytest.mark.parametrize(("formula", "expected"), NOTATION)
def test_notation_keeps_the_meaning(formula: Expr, expected: str) -> None:
    assert latex(formula) == expected


def test_only_definitions_that_a_proof_uses_are_shown() -> None:
    with as_written():
        definitions = {b: 3 * x_i, a: 2 * b, c: b}
        statement = Statement("new", "", "ours", "1", "", "", definitions=definitions)
        statement.steps.append(Step(a, "=", 6 * x_i, ""))
    page = show.render(Report((prove.check(statement),)))
    items = re.findall("<li>(<math.*?)</li>", page, flags=re.DOTALL)
    shown = ["".join(ElementTree.fromstring(item).itertext()) for item in items]
    assert shown == ["b=3xi", "a=2b"]


def test_every_formula_in_a_sentence_has_an_end() -> None:
    for statement in STATEMENTS:
        reasons = [step.reason for step in statement.steps]
        for sentence in (statement.claim, statement.assumes, *statement.remarks, *reasons):
            assert sentence.count("$") % 2 == 0


def test_symbols_are_not_repeated() -> None:
    shown = [latex(real(name)) for name in SYMBOLS]
    assert len(shown) == len(set(shown))


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["prove", *arguments])


def test_the_command_writes_a_page(tmp_path: Path) -> None:
    out = tmp_path / "new" / "folder" / "proofs.html"
    result = run("--only", "appendix-*", "--out", str(out))
    assert result.exit_code == 0
    Page(out.read_text("utf-8"))
    assert "The statement holds" in result.stdout
    assert str(out) in result.stdout


def test_a_failure_ends_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prove, "STATEMENTS", (broken_statement(),))
    result = run()
    assert result.exit_code == 1
    assert "do not hold" in result.stdout


# No file can be made in /proc, not even by root.
@pytest.mark.parametrize("place", ["file/proofs.html", "file", "folder", "/proc/proofs.html"])
def test_a_wrong_request_is_refused_before_the_work(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> None:
        pytest.fail("the proofs began although the request was wrong")

    monkeypatch.setattr(prove, "check", never)
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    assert isinstance(run("--out", str(tmp_path / place)).exception, StorageError)
    assert (tmp_path / "file").read_text() == "mine"
    out = tmp_path / "new" / "proofs.html"
    refused = run("--only", "theorem-9", "--out", str(out)).exception
    assert isinstance(refused, ArgumentError)
    assert "no statement is called 'theorem-9'" in str(refused)
    assert not out.parent.exists()


def test_a_page_without_latex2mathml_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "latex2mathml", None)
    refused = run("--out", str(tmp_path / "proofs.html")).exception
    assert isinstance(refused, ArgumentError)
    assert "latex2mathml" in str(refused)
