"""Formulas as text, read once; what is shown, what is proven and what is computed come from the same tree.

A formula is a Python expression of names, numbers, ``+ - * / **`` and the functions of :data:`FUNCTIONS`.
``x_i`` is the channel that is looked at, ``x_k`` one that a sum runs over; ``gamma`` and ``bias`` have channels
too, ``delta_ki`` is Kronecker's delta. Other names are free numbers, or stand for a formula of their own.

=================  =========================================================================
``sum_k(f)``       sum of f over k = 1 ... C; ``sum_l`` likewise over l
``others(f)``      sum of f over all k except i
``d(f)``           derivative with respect to x_i, all other channels held
``diff(f, y)``     derivative with respect to the number y
``limit(f, h)``    limit for h to 0 from above
=================  =========================================================================
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import lru_cache

from dynorm.errors import ArgumentError

SUMS = {"sum_k": "k", "sum_l": "l", "others": "k"}
ELEMENTARY = ("sqrt", "log", "exp", "tanh")
FUNCTIONS = (*SUMS, *ELEMENTARY, "d", "diff", "limit")

_CHANNEL = re.compile(r"(x|gamma|bias)_([ijkl])")
_DELTA = re.compile(r"delta_([ijkl])([ijkl])")


@lru_cache(maxsize=4096)
def parse(text: str) -> ast.expr:
    """Return the tree of a formula.

    Args:
        text: The formula.

    Returns:
        An expression of the module :mod:`ast`; it is shared, so it must not be changed.

    Raises:
        ArgumentError: If the text is no formula.

    Example:
        >>> ast.dump(parse("C - 1"))
        "BinOp(left=Name(id='C', ctx=Load()), op=Sub(), right=Constant(value=1))"
    """
    try:
        tree = ast.parse(text, mode="eval").body
    except SyntaxError as error:
        raise ArgumentError(f"a formula must be a Python expression, got {text!r}: {error.msg}") from error
    for node in ast.walk(tree):
        _check(node, text)
    return tree


def names(tree: ast.expr) -> set[str]:
    """Return the names in a formula, without those of functions."""
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and id(node) not in called}


def channel(name: str) -> tuple[str, str] | None:
    """Return vector and index of a channel's name, ``("x", "i")`` for ``x_i``; None for other names."""
    match = _CHANNEL.fullmatch(name)
    return (match[1], match[2]) if match else None


def delta(name: str) -> tuple[str, str] | None:
    """Return both indices of Kronecker's delta; None for other names."""
    match = _DELTA.fullmatch(name)
    return (match[1], match[2]) if match else None


def function(node: ast.Call) -> str:
    """Return the name of the function that is called."""
    assert isinstance(node.func, ast.Name)
    return node.func.id


def argument_name(node: ast.Call) -> str:
    """Return the second argument of ``diff`` and ``limit``, a name."""
    variable = node.args[1]
    assert isinstance(variable, ast.Name)
    return variable.id


_ALLOWED = (
    ast.BinOp,
    ast.UnaryOp,
    ast.Call,
    ast.Name,
    ast.Constant,
    ast.Load,
    ast.Add,
    ast.Sub,
    ast.Mult,
    ast.Div,
    ast.Pow,
    ast.USub,
)


def _check(node: ast.AST, text: str) -> None:
    for problem in _problems(node):
        raise ArgumentError(f"{problem} in the formula {text!r}: see dynorm.paper.proof.formula")


def _problems(node: ast.AST) -> Iterator[str]:
    if not isinstance(node, _ALLOWED):
        yield f"{type(node).__name__} cannot stand"
    elif isinstance(node, ast.Constant) and type(node.value) is not int:
        yield f"numbers must be integers, got {node.value!r}"
    elif isinstance(node, ast.Call):
        if not isinstance(node.func, ast.Name) or node.func.id not in FUNCTIONS:
            yield f"unknown function {ast.unparse(node.func)!r}"
        elif len(node.args) != (2 if node.func.id in ("diff", "limit") else 1):
            yield f"wrong number of arguments of {node.func.id!r}"
        elif len(node.args) == 2 and not isinstance(node.args[1], ast.Name):
            yield f"the second argument of {node.func.id!r} must be a name"
