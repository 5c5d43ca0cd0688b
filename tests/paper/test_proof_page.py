"""The proofs as a page, on the terminal and on the command line."""

from __future__ import annotations

import io
import json
import re
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console
from sympy import Rational, exp, log, sqrt

import dynorm.cli
from dynorm.errors import ArgumentError, StorageError
from dynorm.paper.proof import prove, show
from dynorm.paper.proof.notation import SYMBOLS, as_html, as_text, latex, one_line
from dynorm.paper.proof.prove import Report
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

VOID = {"meta", "br", "hr", "img", "input", "link", "wbr"}
SENTENCES = [
    text
    for statement in STATEMENTS
    for text in (
        statement.claim,
        statement.assumes,
        *statement.remarks,
        *(step.reason for step in statement.steps),
    )
]
FORMULAS = [
    formula
    for statement in STATEMENTS
    for step in statement.steps
    for formula in (step.left, step.right)
]


class Page(HTMLParser):
    """Checks that every element is closed, and collects what refers to something."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.names: list[str] = []
        self.links: list[str] = []
        self.tags: set[str] = set()
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag not in VOID:
            self.open.append(tag)
        for key, value in attrs:
            assert not key.startswith("on")
            if key == "id":
                self.names.append(str(value))
            if key in ("href", "src"):
                self.links.append(str(value))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def broken() -> Report:
    statement = next(s for s in STATEMENTS if s.name == "appendix-b")
    wrong = replace(statement, definitions={real("beta"): positive("alpha")})
    return Report((prove.check(wrong),), 0, 0.1)


def printed(report: Report, *, brief: bool = False, width: int = 140) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    show.show(report, console, brief=brief)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_page_is_well_formed_and_needs_nothing_else(report: Report) -> None:
    text = show.render(report)
    parsed = Page(text)
    assert len(parsed.names) == len(set(parsed.names))
    assert {statement.name for statement in STATEMENTS} <= set(parsed.names)
    inside = {link[1:] for link in parsed.links if link.startswith("#")}
    assert inside <= set(parsed.names)
    assert {link for link in parsed.links if not link.startswith("#")} == {
        "https://arxiv.org/abs/2503.21708"
    }
    assert parsed.tags.isdisjoint({"script", "link", "img", "iframe", "object"})
    addresses = set(re.findall(r"https?://[^\s\"'<)]+", text))
    assert addresses == {"https://arxiv.org/abs/2503.21708", "http://www.w3.org/1998/Math/MathML"}
    assert "url(" not in text
    assert "@import" not in text


def test_every_formula_of_the_page_is_mathml(report: Report) -> None:
    text = show.render(report)
    elements = re.findall(r"<math.*?</math>", text, flags=re.DOTALL)
    assert len(elements) > sum(len(statement.steps) for statement in STATEMENTS)
    for element in elements:
        root = ElementTree.fromstring(element)
        assert "\\" not in "".join(root.itertext())
        # What latex2mathml does not know it leaves as an empty row or an error.
        assert "".join(root.itertext()).strip()
        assert root.find(".//{*}merror") is None
    assert "$" not in text


def test_the_page_shows_light_dark_and_narrow(report: Report) -> None:
    text = show.render(report)
    assert 'name="viewport" content="width=device-width, initial-scale=1"' in text
    assert "@media (prefers-color-scheme: dark)" in text
    assert "@media (max-width: 46rem)" in text


def test_the_page_of_a_failure_says_what_failed(broken: Report) -> None:
    text = show.render(broken)
    Page(text)
    assert "1 of 1 statements do not hold: appendix-b" in text
    assert "not proven" in text
    assert "numbers contradict; rest of the difference:" in text
    assert 'aria-label="does not hold"' in text


def test_the_terminal_shows_each_step(report: Report) -> None:
    text = printed(report, width=400)
    for statement in STATEMENTS:
        assert statement.title in text
        for step in statement.steps:
            assert one_line(step.right) in text
            assert as_text(step.reason) in text
    assert f"All {len(STATEMENTS)} statements hold" in text
    assert "✗" not in text


def test_brief_is_one_row_per_statement(report: Report) -> None:
    lines = printed(report, brief=True).splitlines()
    assert [line.split()[0] for line in lines[1:-1]] == [statement.name for statement in STATEMENTS]
    assert lines[0].split("  ")[0] == "statement"
    assert all(" proven " in line for line in lines[1:-1])


def test_the_terminal_shows_a_failure(broken: Report) -> None:
    text = printed(broken)
    assert "✗" in text
    assert "not proven" in text
    assert "1 of 1 statements do not hold: appendix-b" in text
    assert "appendix-b: x/(√α·√(1/α + x²)) = √β·x/√(β + x²): false, numbers contradict" in text


def test_every_formula_can_be_shown() -> None:
    for formula in FORMULAS:
        assert latex(formula).count("{") == latex(formula).count("}")
        assert re.search(r"[*_]|sqrt|sum|mu|sigma", one_line(formula)) is None


a = real("a")
b = real("b")
c = real("c")

with as_written():
    NOTATION = [
        ((x_i - mu) / sqrt(sigma**2), r"\frac{x_{i} - \mu}{\sqrt{\sigma^{2}}}", "(xᵢ − μ)/√(σ²)"),
        (a - (b - c), r"a - \left(b - c\right)", "a − (b − c)"),
        (a - (b + c), r"a - \left(b + c\right)", "a − (b + c)"),
        (a + (b + c), r"a + \left(b + c\right)", "a + (b + c)"),
        (a - b - c, "a - b - c", "a − b − c"),
        (C - 1 - y_i**2, "C - 1 - y_{i}^{2}", "C − 1 − yᵢ²"),
        (a / (b * c), r"\frac{a}{b\,c}", "a/(b·c)"),
        (a / b / c, r"\frac{a}{b\,c}", "a/(b·c)"),
        (a / (b / c), r"\frac{a}{\frac{b}{c}}", "a/(b/c)"),
        (a / b * c, r"\frac{a\,c}{b}", "a·c/b"),
        (a * (b + c) / 2, r"\frac{a\,\left(b + c\right)}{2}", "a·(b + c)/2"),
        (1 / (a + b) * (1 / c), r"\frac{1}{\left(a + b\right)\,c}", "1/((a + b)·c)"),
        ((a + b) / c, r"\frac{a + b}{c}", "(a + b)/c"),
        (1 - 1 / C, r"1 - \frac{1}{C}", "1 − 1/C"),
        ((a * b) ** 2, r"\left(a\,b\right)^{2}", "(a·b)²"),
        ((-a) ** 2, r"\left(- a\right)^{2}", "(−a)²"),
        (-(a + b), r"- \left(a + b\right)", "−(a + b)"),
        (-(a / b), r"- \frac{a}{b}", "−a/b"),
        (-a / b, r"- \frac{a}{b}", "−a/b"),
        (a * (-b), r"- a\,b", "−a·b"),
        (a * 0, r"a \cdot 0", "a·0"),
        (a ** Rational(-3, 2), "a^{-3/2}", "a^(−3/2)"),
        ((a + b) ** (-2), r"\frac{1}{\left(a + b\right)^{2}}", "1/(a + b)²"),
        (sqrt(a) * sqrt(b + c), r"\sqrt{a}\,\sqrt{b + c}", "√a·√(b + c)"),
        (exp(a * b), r"e^{a\,b}", "e^(a·b)"),
        (log(a + b), r"\log{\left(a + b \right)}", "log(a + b)"),
        (
            sum_k(x_k + a) * b,
            r"\left(\sum\limits_{k=1}^{C} \left(x_{k} + a\right)\right)\,b",
            "(Σₖ (xₖ + a))·b",
        ),
        (b * others(x_k**2), r"b\,\sum\limits_{k \neq i} x_{k}^{2}", "b·Σₖ≠ᵢ xₖ²"),
        (
            others((x_k - mu) ** 2) / C,
            r"\frac{\sum\limits_{k \neq i} \left(x_{k} - \mu\right)^{2}}{C}",
            "(Σₖ≠ᵢ (xₖ − μ)²)/C",
        ),
        (delta(k, i) - 1 / C, r"\delta_{k i} - \frac{1}{C}", "δₖᵢ − 1/C"),
        (d(y_i), r"\frac{dy_{i}}{dx_{i}}", "dyᵢ/dxᵢ"),
        (d(a * b, a) * c, r"\left(\frac{d}{da} \left(a\,b\right)\right)\,c", "(d/da (a·b))·c"),
        (limit(1 / a, a), r"\lim_{a \to 0} \left(\frac{1}{a}\right)", "lim[a→0] (1/a)"),
        (real("sigma_others") ** 2, r"\sigma_{\neq i}^{2}", "σ≠ᵢ²"),
    ]


@pytest.mark.parametrize(("formula", "as_latex", "as_plain"), NOTATION)
def test_notation_keeps_the_meaning(formula: Expr, as_latex: str, as_plain: str) -> None:
    assert (latex(formula), one_line(formula)) == (as_latex, as_plain)


def test_only_definitions_that_a_proof_uses_are_shown() -> None:
    with as_written():
        statement = Statement(
            "new", "", "ours", "1", "", "", definitions={b: 3 * x_i, a: 2 * b, c: b}
        )
        step = Step(a, "=", 6 * x_i, "")
    statement.steps.append(step)
    page = show.render(Report((prove.check(statement),), 0, 0.1))
    items = re.findall("<li>(<math.*?)</li>", page, flags=re.DOTALL)
    shown = ["".join(ElementTree.fromstring(item).itertext()) for item in items]
    assert shown == ["b=3xi", "a=2b"]


@pytest.mark.parametrize("sentence", SENTENCES)
def test_every_sentence_can_be_shown(sentence: str) -> None:
    assert sentence.count("$") % 2 == 0
    assert re.search(r"[\\{}$]", as_text(sentence)) is None
    for element in re.findall(r"<math.*?</math>", as_html(sentence)):
        assert "\\" not in "".join(ElementTree.fromstring(element).itertext())


def test_greek_letters_are_those_of_unicode() -> None:
    assert as_text(r"$\lambda_i \tau + \Delta x$") == "λᵢ τ + Δx"


def test_an_unknown_command_is_named() -> None:
    with pytest.raises(ArgumentError, match=r"\\perp.*_COMMANDS"):
        as_text(r"$v \perp x$")


def test_symbols_are_not_repeated() -> None:
    symbols = [real(name) for name in SYMBOLS]
    for shown in ([latex(symbol) for symbol in symbols], [one_line(symbol) for symbol in symbols]):
        assert len(shown) == len(set(shown))


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["dynorm", "prove", *arguments])
    with pytest.raises(SystemExit) as stopped:
        dynorm.cli.main()
    return int(stopped.value.code or 0)


Captured = pytest.CaptureFixture[str]


def test_the_command_writes_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    out = tmp_path / "new" / "folder" / "proofs.html"
    assert run(monkeypatch, "--only", "appendix-*", "--out", str(out), "--brief") == 0
    Page(out.read_text(encoding="utf-8"))
    shown = capsys.readouterr().out
    assert "appendix-b" in shown
    assert "The statement holds" in shown
    assert str(out) in shown


def test_the_command_prints_json_alone(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    assert (
        run(monkeypatch, "--only", "appendix-b", "--only", "note-c*", "--seed", "3", "--json") == 0
    )
    shown = capsys.readouterr()
    result = json.loads(shown.out)
    assert shown.err == ""
    assert result["holds"] is True
    assert result["seed"] == 3
    assert [row["name"] for row in result["statements"]] == ["appendix-b", "note-centering"]
    for row in result["statements"]:
        assert row["proven"]
        assert row["digits_error"] < 1e-50
        assert {step["outcome"] for step in row["steps"]} == {"proven"}


@pytest.mark.parametrize("arguments", [["--json"], []])
def test_a_failure_ends_with_1(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    (statement,) = prove.choose(["appendix-b"])
    wrong = replace(statement, definitions={real("beta"): 1 / positive("alpha") + C})
    monkeypatch.setattr(prove, "STATEMENTS", (wrong,))
    assert run(monkeypatch, *arguments) == 1
    out = capsys.readouterr().out
    if arguments:
        assert json.loads(out)["holds"] is False
    else:
        assert "do not hold: appendix-b" in out


def never(*_: object, **__: object) -> None:
    pytest.fail("the proofs began although the request was wrong")


def test_an_unknown_name_ends_with_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setattr(prove, "check", never)
    assert (
        run(monkeypatch, "--only", "theorem-9", "--out", str(tmp_path / "new" / "proofs.html")) == 2
    )
    assert not (tmp_path / "new").exists()
    assert "no statement is called 'theorem-9'" in capsys.readouterr().err


# No file can be made in /proc, not even by root.
@pytest.mark.parametrize("place", ["file/proofs.html", "folder", "/proc/proofs.html"])
def test_a_path_that_cannot_be_written_ends_with_1_before_the_work(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setattr(prove, "check", never)
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    assert run(monkeypatch, "--out", str(tmp_path / place)) == 1
    assert "cannot be written" in capsys.readouterr().err


def test_an_unwritable_path_is_a_storage_error(tmp_path: Path, report: Report) -> None:
    with pytest.raises(StorageError, match="cannot be written"):
        show.save(report, tmp_path)


def test_a_page_without_latex2mathml_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "latex2mathml", None)
    with pytest.raises(ArgumentError, match="latex2mathml"):
        show.prepare(tmp_path / "proofs.html")


def test_help_shows_an_example(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    assert run(monkeypatch, "--help") == 0
    assert "Example: dynorm prove --out proofs.html" in capsys.readouterr().out
