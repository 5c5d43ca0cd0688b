"""A step as algebra: decided by exact simplification, for every number of channels at once.

Channel i sees of its token only x_i, C and the sums A and B of the other channels and of their squares; the
statement "reduction" proves so. In their place come C = n + 1, the mean m and the variance v of the others,
and e = x_i - m, which reach every token: n > 0, v >= 0, any m, any e. In these all roots are of positive
things, and two formulas are equal where the numerator of their difference is the zero polynomial.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

import sympy as sp

from dynorm.errors import DynormError
from dynorm.paper.proof.formula import SUMS, argument_name, channel, delta, function, parse
from dynorm.paper.proof.statement import Statement

Expr = Any
"""A sympy expression; sympy itself is not fully typed."""

# Dummies, so that no name in a formula can be taken for one of them.
C, N = (sp.Dummy(name, positive=True) for name in "Cn")
X, A, B, M, E = (sp.Dummy(name, real=True) for name in ("x_i", "A", "B", "m", "e"))
V = sp.Dummy("v", nonnegative=True)
EVERY_TOKEN = {X: M + E, A: N * M, B: N * (V + M**2), C: N + 1}


class NotReducibleError(DynormError):
    """A formula is outside what the rules of algebra here can treat; what rests on it stays undecided."""


class Channel:
    """Formulas of a statement as sympy expressions of what channel i sees.

    Args:
        statement: Whose definitions and numbers are meant.

    Example:
        >>> from dynorm.paper.proof.statement import Statement
        >>> token = Channel(Statement("", "", "", "", "", "", (), {"mu": "sum_k(x_k) / C"}))
        >>> token.read("d(mu)") == 1 / C
        True
    """

    def __init__(self, statement: Statement) -> None:
        self.definitions = statement.definitions
        self.numbers = statement.numbers
        self._defined: dict[str, Expr] = {}

    def read(self, text: str) -> Expr:
        """Return a formula in x_i, A, B, C and free numbers.

        Raises:
            NotReducibleError: If a sum is not of a polynomial of at most degree 2 in the channels.
        """
        return self._read(parse(text), frozenset())

    def _read(self, node: ast.expr, kept: frozenset[str]) -> Expr:
        match node:
            case ast.Constant(value=value):
                return sp.Integer(int(str(value)))
            case ast.Name(id=name):
                return self._name(name, kept)
            case ast.UnaryOp(operand=operand):
                return -self._read(operand, kept)
            case ast.BinOp(left=left, op=op, right=right):
                return _operate(op, self._read(left, kept), self._read(right, kept))
            case ast.Call():
                return self._call(node, kept)
        raise AssertionError(ast.dump(node))

    def _name(self, name: str, kept: frozenset[str]) -> Expr:
        if name in ("C", "x_i"):
            return C if name == "C" else X
        if name not in self.definitions or name in kept:
            return _number(name, self.numbers)
        # What is kept changes the meaning of the definitions that use it.
        if kept:
            return self._read(parse(self.definitions[name]), kept)
        if name not in self._defined:
            self._defined[name] = self._read(parse(self.definitions[name]), kept)
        return self._defined[name]

    def _call(self, node: ast.Call, kept: frozenset[str]) -> Expr:
        name, body = function(node), node.args[0]
        if name in SUMS:
            return _sum(self._read(body, kept), SUMS[name], without_i=name == "others")
        if name == "d":
            return _derivative(self._read(body, kept))
        if name == "diff":
            variable = argument_name(node)
            held = self._read(body, kept | {variable})
            derivative = sp.diff(held, _number(variable, self.numbers))
            return derivative.subs(_number(variable, self.numbers), self._name(variable, kept))
        if name == "limit":
            variable = argument_name(node)
            return sp.limit(self._read(body, kept).subs(C, N + 1), _number(variable, self.numbers), 0, "+")
        return getattr(sp, name)(self._read(body, kept))


def in_sums(text: str, statement: Statement) -> Expr:
    """Return a formula with sympy's own sums and derivatives over symbolic bounds, by no rule of ours."""
    return _in_sums(parse(text), statement)


# The channel's place in the token, and the size of the token, as integers.
COUNT, PLACE, BOUND = (sp.Symbol(name, integer=True, positive=True) for name in "Cik")
_VECTOR = sp.IndexedBase("x", real=True)


def _in_sums(node: ast.expr, statement: Statement) -> Expr:
    match node:
        case ast.Constant(value=value):
            return sp.Integer(int(str(value)))
        case ast.Name(id=name):
            if name in statement.definitions:
                return _in_sums(parse(statement.definitions[name]), statement)
            return {"C": COUNT, "x_i": _VECTOR[PLACE], "x_k": _VECTOR[BOUND]}.get(
                name, _number(name, statement.numbers)
            )
        case ast.UnaryOp(operand=operand):
            return -_in_sums(operand, statement)
        case ast.BinOp(left=left, op=op, right=right):
            return _operate(op, _in_sums(left, statement), _in_sums(right, statement))
        case ast.Call() if function(node) == "d":
            derivative = sp.diff(_in_sums(node.args[0], statement), _VECTOR[PLACE]).doit()
            return sp.refine(derivative, sp.Q.le(PLACE, COUNT))
        case ast.Call() if function(node) in ("sum_k", "others"):
            body = _in_sums(node.args[0], statement)
            missing = body.subs(BOUND, PLACE) if function(node) == "others" else 0
            return sp.Sum(body, (BOUND, 1, COUNT)) - missing
    raise NotReducibleError(f"{ast.unparse(node)!r} is no sum of channels: prove it by the rules of one channel")


def _operate(op: ast.operator, left: Expr, right: Expr) -> Expr:
    match op:
        case ast.Add():
            return left + right
        case ast.Sub():
            return left - right
        case ast.Mult():
            return left * right
        case ast.Div():
            if right == 0:
                raise NotReducibleError("a formula divides by zero: look for a mistake in it")
            return left / right
        case ast.Pow():
            return left**right
    raise AssertionError(op)


def _number(name: str, numbers: Mapping[str, str]) -> Expr:
    if indices := delta(name):
        return _delta(*indices)
    return sp.Symbol(name, **{numbers.get(name, "real"): True})


def _delta(first: str, second: str) -> Expr:
    return sp.Integer(1) if first == second else sp.Symbol(f"delta_{min(first, second)}{max(first, second)}", real=True)


def _derivative(expression: Expr) -> Expr:
    """Differentiate with respect to x_i; x_k is x_i where k = i."""
    result = sp.diff(expression, X)
    for symbol in expression.free_symbols:
        of = channel(symbol.name)
        if of is not None and of[0] == "x" and of[1] != "i":
            result += sp.diff(expression, symbol) * _delta(of[1], "i")
    return result


def _sum(expression: Expr, index: str, *, without_i: bool) -> Expr:
    """Sum over an index, term by term."""
    running = {s: s.name for s in expression.free_symbols if index in _indices(s.name)}
    total = sp.Integer(0)
    for term in sp.Add.make_args(sp.expand(expression)):
        factor, rest = term.as_independent(*running, as_Add=False)
        total += factor * _sum_of_product(rest, index)
    return total - _at(expression, index, "i") if without_i else total


def _sum_of_product(term: Expr, index: str) -> Expr:
    powers = term.as_powers_dict() if term != 1 else {}
    for symbol in powers:
        indices = delta(symbol.name) if symbol.is_Symbol else None
        if indices is not None and powers[symbol].is_positive:
            (other,) = set(indices) - {index}
            return _at(term, index, other)
    moments = {0: C, 1: X + A, 2: X**2 + B}
    degree = powers.get(sp.Symbol(f"x_{index}", real=True), 0)
    if len(powers) > (degree != 0) or degree not in moments:
        raise NotReducibleError(f"the sum of {term} is no mean or variance: only those are seen by one channel")
    return moments[degree]


def _indices(name: str) -> tuple[str, ...]:
    of = channel(name)
    return of[1:] if of else delta(name) or ()


def _at(expression: Expr, index: str, place: str) -> Expr:
    """Put a fixed index in the place of the one that runs."""
    values = {}
    for symbol in expression.free_symbols:
        if index in _indices(symbol.name):
            of, pair = channel(symbol.name), delta(symbol.name)
            if pair:
                values[symbol] = _delta(*(place if n == index else n for n in pair))
            elif of:
                values[symbol] = X if (of[0], place) == ("x", "i") else sp.Symbol(f"{of[0]}_{place}", real=True)
    return expression.subs(values, simultaneous=True)
