"""Every statement is proven; each one broken on purpose fails, in algebra and, independently, in numbers."""

from __future__ import annotations

import ast
import copy
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest

from dynorm.errors import ArgumentError
from dynorm.paper.proof import numbers, prove
from dynorm.paper.proof.exact import decide
from dynorm.paper.proof.formula import parse
from dynorm.paper.proof.numbers import autograd_error, measure, tokens_for
from dynorm.paper.proof.prove import STATEMENTS, Report, check, choose
from dynorm.paper.proof.statement import Statement, Step

BY_NAME = {statement.name: statement for statement in STATEMENTS}
names = pytest.mark.parametrize("name", BY_NAME)


@names
def test_every_statement_holds(name: str, report: Report) -> None:
    (checked,) = [checked for checked in report.statements if checked.statement.name == name]
    assert [step.verdict.remains for step in checked.steps if not step.holds] == []
    assert checked.holds
    assert checked.digits < 1e-50
    assert checked.autograd < 1e-12


@names
def test_every_statement_holds_on_other_tokens(name: str) -> None:
    statement, tokens = BY_NAME[name], tokens_for(BY_NAME[name], 1)
    for step in statement.steps:
        found = measure(step, tokens)
        assert found.holds
        assert found.error is None or found.error < 1e-50
        # Algebra looks at tokens to tell two sides apart, and nowhere else in what holds.
        assert step.relation != "!=" or decide(step, statement, 1).outcome == "proven"
    assert autograd_error(statement, tokens) < 1e-12


def test_what_must_be_covered_is() -> None:
    assert len(BY_NAME) == len(STATEMENTS)
    expected = (
        {f"theorem-{n}" for n in range(1, 5)}
        | {f"closed-form-{n}" for n in range(1, 6)}
        | {"appendix-b"}
    )
    assert expected <= BY_NAME.keys()
    assert all(statement.compared for statement in STATEMENTS)
    tags = {step.tag for statement in STATEMENTS for step in statement.steps}
    # 1 to 3, 6, 20 to 22 and 30 are definitions, 16 to 19 belong to the simulation.
    assert {str(n) for n in (4, 5, *range(7, 16), *range(23, 30), 31, 32)} <= tags


# Each of these yields formulas that are broken in one place.


def nodes(text: str) -> Iterator[tuple[ast.expr, ast.AST]]:
    """Yield a fresh tree of the formula for each of its nodes, and that node."""
    count = len(list(ast.walk(parse(text))))
    for position in range(count):
        tree = copy.deepcopy(parse(text))
        yield tree, list(ast.walk(tree))[position]


def put(tree: ast.expr, node: ast.AST, text: str) -> str:
    """Return the tree as text, with a formula in the place of a node."""

    class Put(ast.NodeTransformer):
        def visit(self, visited: ast.AST) -> ast.AST:
            return ast.parse(text, mode="eval").body if visited is node else super().visit(visited)

    return ast.unparse(Put().visit(tree))


def is_less_one(node: ast.AST) -> bool:
    return isinstance(node, ast.expr) and ast.unparse(node) == "C - 1"


def wrong_counts(text: str) -> Iterator[str]:
    """C for C - 1, and C - 1 for C."""
    for tree, node in nodes(text):
        within = {
            id(part) for whole in ast.walk(tree) if is_less_one(whole) for part in ast.walk(whole)
        }
        if is_less_one(node):
            yield put(tree, node, "C")
        elif isinstance(node, ast.Name) and node.id == "C" and id(node) not in within:
            yield put(tree, node, "C - 1")


def wrong_signs(text: str) -> Iterator[str]:
    """Plus for minus and minus for plus, at each place, and of the whole."""
    for tree, node in nodes(text):
        if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub)):
            node.op = ast.Sub() if isinstance(node.op, ast.Add) else ast.Add()
            yield ast.unparse(tree)
    if text != "0":
        yield f"-({text})"


def lost_factors(text: str) -> Iterator[str]:
    """A factor (C - 1)/C lost where it belongs, and one too many."""
    yield f"({text})*C/(C - 1)" if text != "0" else "C/(C - 1)"
    yield f"({text})*(C - 1)/C" if text != "0" else "(C - 1)/C"


BREAKERS = {"count": wrong_counts, "sign": wrong_signs, "factor": lost_factors}

# Broken at a term that is 0 or at a constant of integration, these formulas still hold.
STILL_TRUE = {
    "1 / (C * sqrt(sigma ** 2)) * (x_i - mu + 1 / C * sum_k(x_k - mu))",
    "1 / (C * sqrt(sigma ** 2)) * (x_i - mu - 1 / (C - 1) * sum_k(x_k - mu))",
    "1 / (C * sqrt(sigma ** 2)) * (x_i - mu + 1 / C * (C * mu - C * mu))",
    "1 / (C * sqrt(sigma ** 2)) * (x_i - mu - 1 / (C - 1) * (C * mu - C * mu))",
    "d(1 / (C - 1) * (log((x_i - mu) ** 2) / 2) + log(c_lhs) / C)",
    "d(1 / (C - 1) * (log((x_i - mu) ** 2) / 2) + log(c_lhs) / (C + 1))",
    "d(1 / (C - 1) * (log((x_i - mu) ** 2) / 2) - log(c_lhs) / (C - 1))",
}


@names
@pytest.mark.parametrize("kind", BREAKERS)
@pytest.mark.slow
def test_every_step_broken_on_purpose_fails_in_algebra_and_in_numbers(name: str, kind: str) -> None:
    statement = BY_NAME[name]
    tokens = tokens_for(statement, 0, (3, 7))
    equations = [step for step in statement.steps if step.relation == "="]
    broken = [
        replace(step, right=wrong) for step in equations for wrong in BREAKERS[kind](step.right)
    ]
    assert len(broken) >= len(equations) or kind == "count"
    for step in broken:
        outcome, holds = decide(step, statement).outcome, measure(step, tokens).holds
        expected = ("proven", True) if step.right in STILL_TRUE else ("false", False)
        assert (outcome, holds) == expected, step.right


@names
def test_every_comparison_turned_around_fails_in_algebra_and_in_numbers(name: str) -> None:
    statement = BY_NAME[name]
    tokens = tokens_for(statement, 0, (3, 7))
    for step in statement.steps:
        if step.relation in (">", ">="):
            turned = replace(step, left=step.right, right=step.left)
            assert decide(turned, statement).outcome == "false"
            assert not measure(turned, tokens).holds
        # A misprint that is taken for what was meant, and an approximation for an identity.
        if step.relation == "!=":
            equal = replace(step, relation="=")
            assert decide(equal, statement).outcome == "false"
            assert not measure(equal, tokens).holds


def test_what_was_meant_is_no_misprint() -> None:
    """A pair of sides that are equal cannot be shown to differ."""
    for statement in STATEMENTS:
        for step in statement.steps[:3]:
            if step.relation == "=" and not step.by_sums:
                differs = replace(step, relation="!=")
                assert decide(differs, statement).outcome == "undecided"
                assert not measure(differs, tokens_for(statement, 0, (3, 7))).holds


@pytest.mark.parametrize(
    ("name", "symbol", "wrong"),
    [
        ("reduction", "m_i", "others(x_k) / C"),
        ("theorem-1", "mu", "sum_k(x_k) / (C - 1)"),
        ("theorem-1", "sigma", "sqrt(sum_k((x_k - mu)**2) / (C - 1))"),
        ("theorem-1", "F", "1 / sigma"),
        ("equation-7", "y_i", "(x_i + mu) / sigma"),
        ("equation-8", "F", "1 / ((C - 1)*sigma)"),
        ("theorem-2", "alpha", "F"),
        ("theorem-2", "Dy", "F*(C - y**2)"),
        ("theorem-2", "Q", "(sqrt(C - 1) - y) / (sqrt(C - 1) + y)"),
        ("theorem-3", "Y", "(x_i - mu) / sqrt(beta + (x_i - mu)**2)"),
        ("theorem-3", "Y", "sqrt(C - 1)*(x_i - mu) / sqrt(beta - (x_i - mu)**2)"),
        ("theorem-3", "c", "z*((C - 1)*y**(-2) - 1)"),
        ("theorem-3", "beta_i", "(C - 1)*sigma_others**2 + sigma**2"),
        ("theorem-4", "beta_i", "C*sigma_others**2 - sigma**2"),
        ("theorem-4", "sigma_others", "sqrt(others((x_k - mu)**2) / C)"),
        ("appendix-b", "beta", "alpha"),
        ("note-centering", "mu", "sum_k(x_k) / (C - 1)"),
        ("note-variance", "Var", "sum_k((x_k - mu)**2) / (C - 1)"),
        ("note-rmsnorm", "c_i", "sum_k(x_k*(delta_ki + 1/C))"),
        ("note-matrix", "mu", "0*x_i"),
        ("closed-form-1", "m_i", "sum_k(x_k) / C"),
        ("closed-form-2", "v_i", "others((x_k - mu)**2) / (C - 1)"),
        ("closed-form-3", "s_i", "sum_k(x_k**2)"),
        ("closed-form-4", "v_i", "others((x_k - m_i)**2) / C"),
        ("witness-all", "MS", "sum_k(x_k**2) / (C - 1)"),
        ("witness-derivative", "beta_i", "beta + sum_k(g_k*(x_k - p)**2)"),
        ("misprint-first-version", "dy_du", "diff(y**(-2), y)"),
        ("misprint-note", "mu", "sum_k(x_k) / (C - 1)"),
    ],
)
def test_a_wrong_definition_fails_in_algebra_and_in_numbers(
    name: str, symbol: str, wrong: str
) -> None:
    statement = BY_NAME[name]
    assert symbol in statement.definitions
    checked = check(replace(statement, definitions={**statement.definitions, symbol: wrong}))
    assert not checked.proven
    assert not checked.digits_hold
    assert not checked.holds


@pytest.mark.parametrize("name", ["theorem-1", "theorem-3"])
def test_a_mean_that_does_not_move_fails(name: str) -> None:
    """With d(x - mu)/dx = 1 the factor (C - 1)/C of eq. 24 is lost."""
    statement = BY_NAME[name]
    (step,) = [step for step in statement.steps if step.tag == "24"]
    mean_held = replace(step, right="1")
    assert decide(mean_held, statement).outcome == "false"
    assert not measure(mean_held, tokens_for(statement, 0)).holds


def test_what_remains_is_told() -> None:
    step = Step("", "d(y_i)", "F*(C - y_i**2)")
    verdict = decide(step, replace(BY_NAME["theorem-1"], steps=(step,)))
    assert verdict.outcome == "false"
    assert verdict.remains == "-1/(sqrt(n)*sqrt(e**2 + n*v + v))"


def statement_of(step: Step) -> Statement:
    return replace(BY_NAME["theorem-1"], steps=(step,))


@pytest.mark.parametrize(
    ("left", "right"),
    [
        # Both are true, but outside of what the algebra treats.
        ("sum_k(x_k**3)", "sum_l(x_l**3)"),
        ("sqrt(3 + 2*sqrt(2))", "1 + sqrt(2)"),
    ],
)
def test_what_sympy_cannot_decide_is_not_proven(left: str, right: str) -> None:
    statement = statement_of(Step("", left, right))
    checked = check(statement)
    assert checked.steps[0].verdict.outcome == "undecided"
    assert checked.steps[0].verdict.remains
    assert checked.digits_hold
    assert not checked.proven
    assert not checked.holds


def test_a_side_that_divides_by_zero_does_not_hold() -> None:
    checked = check(statement_of(Step("", "1 / (C - C)", "1 / (C - C)")))
    assert checked.steps[0].verdict.outcome == "undecided"
    assert not checked.digits_hold


def test_roots_are_not_taken_out_with_the_wrong_sign() -> None:
    step = Step("", "sqrt((x_i - mu)**2)", "x_i - mu")
    statement = statement_of(step)
    assert decide(step, statement).outcome == "false"
    assert not all(measure(step, tokens_for(statement, seed)).holds for seed in range(8))


def test_a_wrong_function_of_dynorm_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    right = numbers.theory.layer_norm_derivative
    monkeypatch.setattr(numbers.theory, "layer_norm_derivative", lambda x: right(x) * (1 + 1e-9))
    checked = check(BY_NAME["theorem-1"])
    assert checked.proven
    assert not checked.autograd_holds
    assert not checked.holds


def test_the_report_is_the_same_every_time_and_depends_on_the_seed() -> None:
    first, second, other = (prove.prove(["note-c*"], seed=seed) for seed in (5, 5, 6))
    assert first.statements[0].digits == second.statements[0].digits != other.statements[0].digits
    assert [checked.statement.name for checked in first.statements] == ["note-centering"]


def test_choosing_statements() -> None:
    assert choose([]) == STATEMENTS
    assert [s.name for s in choose(["theorem-4", "theorem-1", "note-r*"])] == [
        "theorem-1",
        "theorem-4",
        "note-rmsnorm",
    ]
    with pytest.raises(ArgumentError, match="no statement is called 'theorem-5'"):
        choose(["theorem-1", "theorem-5"])


@pytest.mark.parametrize("missing", ["sympy", "mpmath"])
def test_a_missing_library_is_named(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ArgumentError, match=f"{missing} must be installed.*dynorm\\[paper\\]"):
        prove.prove(["theorem-1"])


@pytest.mark.parametrize(
    "text",
    [
        "C -",
        "C; C",
        "sin(C)",
        "x.y",
        "0.5*C",
        "sqrt(C, C)",
        "diff(C, 1)",
        "C if C else C",
        "sum_k()",
        "[C]",
    ],
)
def test_what_is_no_formula_is_refused(text: str) -> None:
    with pytest.raises(ArgumentError, match="formula"):
        parse(text)
