"""One thought per line: two habits that pack several into one are refused, file by file.

A file that still has one of them is on the list below. A file on the list that has none fails too, so
that the list only gets shorter.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import dynorm

SOURCES = Path(dynorm.__file__).parent
UNPACKED = "a comprehension unpacked into names: give each name a line of its own"
COUNTED = "a condition used as a number: write an if"
# The files that still have them. Take a file off the list when it is clean; add none.
NOT_YET = {}
ARITHMETIC = (ast.Mult, ast.Add, ast.Sub)
COMPREHENSIONS = (ast.GeneratorExp, ast.ListComp, ast.SetComp)
# Python's own functions that give back as many values as they are given.
PASSING_ON = ("tuple", "list", "sorted", "reversed")


def is_comprehension(value: ast.expr) -> bool:
    """Return whether a value is a comprehension or ``map``, itself or handed through ``tuple`` and the like."""
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name):
        if value.func.id == "map":
            return True
        return (
            value.func.id in PASSING_ON and len(value.args) == 1 and is_comprehension(value.args[0])
        )
    return isinstance(value, COMPREHENSIONS)


def unpacks(target: ast.expr, value: ast.expr) -> bool:
    """Return whether an assignment gives a comprehension's values several names, on any level of the target."""
    if not isinstance(target, (ast.Tuple, ast.List)):
        return False
    if is_comprehension(value):
        return True
    if not isinstance(value, (ast.Tuple, ast.List)) or len(value.elts) != len(target.elts):
        return False
    return any(unpacks(*pair) for pair in zip(target.elts, value.elts, strict=True))


def is_condition(node: ast.expr) -> bool:
    """Return whether an expression is a comparison, a negation, or made of such with and, or."""
    if isinstance(node, ast.BoolOp):
        return all(is_condition(value) for value in node.values)
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.Not)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return node.func.id in ("bool", "isinstance", "callable", "hasattr", "any", "all")
    return isinstance(node, ast.Compare) or (
        isinstance(node, ast.Constant) and isinstance(node.value, bool)
    )


def flags_of(function: ast.AST) -> set[str]:
    """Return the names that are true or false in a function: bool arguments, and variables set to a condition."""
    names = set()
    for node in ast.walk(function):
        if isinstance(node, ast.arg) and node.annotation and ast.unparse(node.annotation) == "bool":
            names.add(node.arg)
        if isinstance(node, ast.Assign) and is_condition(node.value):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


def products(tree: ast.AST, flags: set[str]) -> set[int]:
    """Return the lines on which a condition, or one of the ``flags``, is multiplied, added or subtracted."""
    lines = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.BinOp) or not isinstance(node.op, ARITHMETIC):
            continue
        for operand in (node.left, node.right):
            is_flag = isinstance(operand, ast.Name) and operand.id in flags
            if is_flag or is_condition(operand):
                lines.add(node.lineno)
    return lines


def faults(source: str) -> list[str]:
    """Return a line for each place with one of the two habits in a source."""
    tree = ast.parse(source)
    unpacked: set[int] = set()
    counted = products(tree, set())
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            counted |= products(node, flags_of(node))
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                if unpacks(target, node.value):
                    unpacked.add(node.lineno)
    return [f"{line}: {UNPACKED}" for line in sorted(unpacked)] + [
        f"{line}: {COUNTED}" for line in sorted(counted)
    ]


FAULTS = {
    path.relative_to(SOURCES).as_posix(): faults(path.read_text())
    for path in sorted(SOURCES.rglob("*.py"))
}


@pytest.mark.parametrize(
    "source",
    [
        "a, b = (f(x) for x in y)",
        "a, b = [f(x) for x in y]",
        "[a, b] = tuple(f(x) for x in y)",
        "a, b = map(f, y)",
        "a, (b, c) = first, (f(x) for x in y)",
        "a, *b = (f(x) for x in y)",
    ],
)
def test_a_comprehension_unpacked_into_names_is_found(source: str) -> None:
    assert faults(source) == [f"1: {UNPACKED}"]


@pytest.mark.parametrize(
    "source",
    [
        "n * (x > 0)",
        "(x > 0) * n",
        "1 + (x is None)",
        "n - (not x)",
        "[x] * (a in b and c == d)",
        "[x] * isinstance(y, int)",
        "def f(flag: bool): return [x] * flag",
        "def f(x):\n is_long = x > 0; return 2 + is_long",
    ],
)
def test_a_condition_used_as_a_number_is_found(source: str) -> None:
    assert [fault[fault.index(":") + 2 :] for fault in faults(source)] == [COUNTED]


@pytest.mark.parametrize(
    "source",
    [
        "a, b = f(x), g(x)",
        "a, b = pair",
        "a, b = f(x for x in y)",
        "values = [f(x) for x in y]",
        "a, b = f(map(g, y))",
        "for a, b in zip(x, y): pass",
        "n * x",
        "[x] * n",
        "n if x > 0 else 0",
        "(a > b) == (c > d)",
        "(mask > 0) & (mask < 5)",
        "def f(n: int): return [x] * n",
    ],
)
def test_plain_code_passes(source: str) -> None:
    assert faults(source) == []


@pytest.mark.parametrize("file", sorted(FAULTS.keys() - NOT_YET))
def test_one_thought_per_line(file: str) -> None:
    assert FAULTS[file] == []


@pytest.mark.parametrize("file", sorted(NOT_YET))
def test_a_clean_file_leaves_the_list(file: str) -> None:
    assert FAULTS.get(file), f"{file} has neither of the two habits: take it off NOT_YET"
