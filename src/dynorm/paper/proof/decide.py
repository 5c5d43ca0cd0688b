"""Whether a step is proven: exactly, never by how close two numbers are."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import sympy as sp

from dynorm.paper.proof.algebra import COUNT, EVERY_TOKEN, PLACE, Channel, Expr, NotReducibleError, in_sums
from dynorm.paper.proof.statement import Statement, Step

# Values are computed to 50 digits; what is smaller than this may be 0.
_NOISE = sp.Float("1e-30")

Outcome = Literal["proven", "false", "undecided"]


@dataclass(frozen=True)
class Verdict:
    """What algebra says of a step.

    Args:
        outcome: ``"proven"``; ``"false"`` where a token was found for which the step does not hold;
            ``"undecided"`` where neither was reached, which is no proof.
        remains: What is left of the difference of both sides, as text; empty when proven.
    """

    outcome: Outcome
    remains: str = ""


def decide(step: Step, statement: Statement, seed: int = 0) -> Verdict:
    """Prove a step or refute it.

    Args:
        step: The step.
        statement: To which it belongs, for definitions and numbers.
        seed: Seed of the search for a counterexample.

    Returns:
        The verdict. What sympy cannot bring to an end is undecided.

    Example:
        >>> from dynorm.paper.proof.statement import Statement
        >>> step = Step("", "sum_k((x_k - mu)**2)", "sum_k(x_k**2) - C*mu**2")
        >>> decide(step, Statement("", "", "", "", "", "", (step,), {"mu": "sum_k(x_k) / C"})).outcome
        'proven'
    """
    try:
        return _by_sums(step, statement) if step.rules == "sums" else _by_channel(step, statement, seed)
    # sympy gives up with a NotImplementedError, and with a ValueError or TypeError where a value is not a number.
    except (NotReducibleError, NotImplementedError, ValueError, TypeError, ZeroDivisionError) as error:
        return Verdict("undecided", f"sympy could not decide it: {error or type(error).__name__}")


def _by_channel(step: Step, statement: Statement, seed: int) -> Verdict:
    token = Channel(statement)
    difference = (token.read(step.left) - token.read(step.right)).xreplace(EVERY_TOKEN)
    if difference.has(sp.zoo, sp.nan, sp.oo):
        return Verdict("undecided", f"a side is not finite: {difference}")
    rest = remainder(difference)
    if step.relation == "=" and rest == 0:
        return Verdict("proven")
    if step.relation in (">=", ">") and _has_sign(rest, strict=step.relation == ">"):
        return Verdict("proven")
    if step.relation == "!=":
        differs = any(value.is_real and abs(value) > _NOISE for value in _values(difference, seed))
        return Verdict("proven") if differs else Verdict("undecided", "no token tells both sides apart")
    refuted = any(_refutes(value, step.relation) for value in _values(difference, seed))
    return Verdict("false" if refuted else "undecided", _readable(sp.factor(rest)))


def _readable(expression: Expr) -> str:
    """Return an expression as text; sympy marks the names of dummies by an underscore."""
    return re.sub(r"\b_(?=\w)", "", str(expression))


def _by_sums(step: Step, statement: Statement) -> Verdict:
    difference = sp.simplify(sp.expand(in_sums(step.left, statement) - in_sums(step.right, statement)))
    if difference == 0:
        return Verdict("proven")
    # One token, of three channels, is enough to refute it.
    values = difference.subs({COUNT: 3, PLACE: 2}).doit()
    values = values.replace(lambda e: e.is_Indexed, lambda e: sp.Integer(2) ** (e.indices[0] + 1))
    values = values.subs({s: 11 + 3 * place for place, s in enumerate(sorted(values.free_symbols, key=str))})
    return Verdict("false" if values.is_number and values != 0 else "undecided", str(difference))


def remainder(expression: Expr) -> Expr:
    """Return what is left of an expression of n, v, e, m and numbers; 0 only where it is 0 identically.

    Roots, logarithms and exponentials become symbols of their own, the squares of roots are put in again, and
    the numerator, over positive denominators, is divided by these relations. An expression that is not a
    quotient of polynomials in such symbols keeps its form, and is 0 only if sympy says so.
    """
    expression = _split(expression.rewrite(sp.exp))
    roots: dict[Expr, Expr] = {}
    expression = expression.replace(_is_root, lambda e: _root(e.base, roots) ** (2 * e.exp))
    exponentials: dict[Expr, Expr] = {}
    expression = _name_exponentials(expression, exponentials)
    numerator, denominator = sp.fraction(sp.together(expression))
    relations = [*((r, r**2 - base) for base, r in roots.items()), *_idempotents(numerator)]
    numerator = sp.expand(numerator)
    for symbol, relation in relations:
        numerator = sp.expand(sp.rem(numerator, relation, symbol))
    meant = {r: sp.sqrt(base) for base, r in roots.items()} | {e: sp.exp(z) for z, e in exponentials.items()}
    return (numerator / denominator).xreplace(meant)


# The same roots return in step after step.
@lru_cache(maxsize=8192)
def _split(expression: Expr) -> Expr:
    """Bring what is under roots and in logarithms into factors, and take those of known sign out."""
    if not expression.args:
        return expression
    expression = expression.func(*(_split(argument) for argument in expression.args))
    if _is_root(expression):
        return sp.expand_power_base(sp.factor(expression.base) ** expression.exp)
    if isinstance(expression, sp.log):
        return sp.expand_log(sp.log(sp.factor(expression.args[0])))
    if isinstance(expression, sp.exp):
        return sp.expand_power_exp(sp.exp(sp.expand(expression.args[0])))
    return expression


def _is_root(expression: Expr) -> bool:
    return bool(expression.is_Pow and expression.exp.is_Rational and expression.exp.q == 2)


def _root(base: Expr, roots: dict[Expr, Expr]) -> Expr:
    return roots.setdefault(base, sp.Dummy("r", positive=True))


def _name_exponentials(expression: Expr, bases: dict[Expr, Expr]) -> Expr:
    """Put powers of one symbol for exponentials of multiples of one argument."""

    def name(e: Expr) -> Expr:
        factor, argument = e.args[0].as_coeff_Mul()
        return bases.setdefault(argument, sp.Dummy("E", positive=True)) ** factor

    return expression.replace(lambda e: isinstance(e, sp.exp), name)


def _idempotents(expression: Expr) -> list[tuple[Expr, Expr]]:
    """Kronecker's delta is its own square."""
    return [(s, s**2 - s) for s in expression.free_symbols if s.name.startswith("delta_")]


def _has_sign(expression: Expr, *, strict: bool) -> bool:
    """Whether a quotient is not negative, or positive, wherever its denominator is not 0."""
    numerator, denominator = (sp.factor(part) for part in sp.fraction(sp.together(expression)))
    if denominator.is_nonpositive:
        numerator, denominator = -numerator, -denominator
    return bool(denominator.is_nonnegative and (numerator.is_positive if strict else numerator.is_nonnegative))


def _values(expression: Expr, seed: int) -> Iterator[Expr]:
    """Yield the values of an expression at a few tokens of rational numbers."""
    draw = random.Random(seed)
    for _ in range(4):
        values = {s: _sample(s, draw) for s in sorted(expression.free_symbols, key=str)}
        value = sp.N(expression.xreplace(values), 50)
        if value.is_number:
            yield value


def _refutes(value: Expr, relation: str) -> bool:
    """Whether a value that a difference takes breaks its relation to 0; one that is not real is not 0."""
    if relation == "=":
        return bool(abs(value) > _NOISE)
    return bool(value.is_real and (value < -_NOISE or (relation == ">" and value == 0)))


def _sample(symbol: Expr, draw: random.Random) -> Expr:
    if symbol.name.startswith("delta_"):
        return sp.Integer(draw.randint(0, 1))
    value = sp.Rational(draw.randint(1, 40), draw.randint(1, 9))
    return value if symbol.is_nonnegative else value * draw.choice((-1, 1))
