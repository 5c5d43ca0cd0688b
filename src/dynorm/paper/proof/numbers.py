"""A step as numbers: both sides evaluated on random tokens to 50 digits, by the formulas as they stand.

Sums are added up channel by channel and derivatives are taken by differences; no rule of the algebra is used,
so a mistake there shows here.
"""

from __future__ import annotations

import ast
import operator
import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from mpmath import mp, mpf

from dynorm.paper.proof.formula import SUMS, argument_name, channel, delta, function, parse
from dynorm.paper.proof.statement import Statement, Step

DIGITS = 50
TOLERANCE = 1e-50
CHANNELS = (2, 3, 7, 100)

# What is lost to cancellation, and by derivatives, is carried besides: half the digits are the step's error.
_WORKING = DIGITS + 15
_STEP, _STEP_DIGITS = -(_WORKING // 2 + 5), 3 * _WORKING

_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
}
Number = Any
"""An mpmath number; mpmath is not typed."""


@dataclass
class Token:
    """A token, the channel that is looked at, and the free numbers.

    Args:
        vectors: x, and weight and bias of the norm, by name; each with a number a channel.
        place: The channel i, from 0.
        numbers: Free numbers by name.
        definitions: Names that stand for formulas.
        indices: Where the indices besides i stand.
    """

    vectors: Mapping[str, list[Number]]
    place: int
    numbers: Mapping[str, Number]
    definitions: Mapping[str, str]
    indices: Mapping[str, int] = field(default_factory=dict)
    _known: dict[str, Number] = field(default_factory=dict, repr=False)

    def value(self, text: str) -> Number:
        """Return the value of a formula.

        Example:
            >>> Token({"x": [mpf(1), mpf(5)]}, 0, {}, {"mu": "sum_k(x_k) / C"}).value("x_i - mu")
            mpf('-2.0')
        """
        return self._value(parse(text), dict(self.indices))

    def _value(self, node: ast.expr, at: dict[str, int]) -> Number:
        match node:
            case ast.Constant(value=value):
                return mpf(int(str(value)))
            case ast.Name(id=name):
                return self._name(name, at)
            case ast.UnaryOp(operand=operand):
                return -self._value(operand, at)
            case ast.BinOp(left=left, op=op, right=right):
                return _OPERATORS[type(op)](self._value(left, at), self._value(right, at))
            case ast.Call():
                return self._call(node, at)
        raise AssertionError(ast.dump(node))

    def _name(self, name: str, at: dict[str, int]) -> Number:
        if name == "C":
            return mpf(len(self.vectors["x"]))
        if of := channel(name):
            return self.vectors[of[0]][self._index(of[1], at)]
        if pair := delta(name):
            return mpf(self._index(pair[0], at) == self._index(pair[1], at))
        if name in self.numbers:
            return self.numbers[name]
        if name not in self._known:
            self._known[name] = self._value(parse(self.definitions[name]), dict(self.indices))
        return self._known[name]

    def _index(self, index: str, at: dict[str, int]) -> int:
        return self.place if index == "i" else at[index]

    def _call(self, node: ast.Call, at: dict[str, int]) -> Number:
        name, body = function(node), node.args[0]
        if name in SUMS:
            index = SUMS[name]
            places = [k for k in range(len(self.vectors["x"])) if name != "others" or k != self.place]
            return mp.fsum(self._value(body, at | {index: k}) for k in places)
        if name == "d":
            return _difference(lambda step: self._moved(step)._value(body, at))
        if name == "diff":
            variable = argument_name(node)
            here = self._name(variable, at)
            return _difference(lambda step: self._with(variable, here + step)._value(body, at))
        if name == "limit":
            with mp.workdps(8 * _WORKING):
                return self._with(argument_name(node), mpf(10) ** (-2 * _WORKING))._value(body, at)
        return getattr(mp, name)(self._value(body, at))

    def _moved(self, step: Number) -> Token:
        """Return the token with x_i moved."""
        x = list(self.vectors["x"])
        x[self.place] += step
        return replace(self, vectors={**self.vectors, "x": x}, _known={})

    def _with(self, name: str, value: Number) -> Token:
        return replace(self, numbers={**self.numbers, name: value}, _known={})


def _difference(function_of_step: Any) -> Number:
    """Return a derivative by a central difference, right to all working digits."""
    with mp.workdps(_STEP_DIGITS):
        step = mpf(10) ** _STEP
        return (function_of_step(step) - function_of_step(-step)) / (2 * step)


def random_token(statement: Statement, channels: int, draw: random.Random) -> Token:
    """Return a token whose channels all differ, with free numbers from where the statement has them.

    Args:
        statement: For definitions and numbers.
        channels: C.
        draw: Source of randomness.

    Returns:
        A token of rational numbers, with i and j at random channels.
    """

    def number(low: int = -3000) -> Number:
        return mpf(draw.randint(low, 3000)) / 1009

    offset = number()
    # A grid, shuffled and shaken: random, but never all values alike, so that sigma is not lost to rounding.
    grid = [mpf(2 * k - channels + 1) * 3 / channels + mpf(draw.randint(-900, 900)) / 1009 / channels
            for k in range(channels)]  # fmt: skip
    draw.shuffle(grid)
    vectors = {
        "x": [value + offset for value in grid],
        "gamma": [number() for _ in grid],
        "bias": [number() for _ in grid],
    }
    numbers = {name: number(1) if domain != "real" else number() for name, domain in statement.numbers.items()}
    indices = {"j": draw.randrange(channels), "k": draw.randrange(channels)}
    return Token(vectors, draw.randrange(channels), numbers, statement.definitions, indices)


@dataclass(frozen=True)
class Measured:
    """What numbers say of a step.

    Args:
        holds: Whether it holds for all tokens, to 50 digits; of ``!=``: whether some token tells both sides apart.
        error: Largest difference of both sides, relative to the larger or to 1; None where they need not be equal.
    """

    holds: bool
    error: float | None


def measure(step: Step, tokens: list[Token]) -> Measured:
    """Evaluate both sides of a step on tokens.

    Args:
        step: The step.
        tokens: At least one.

    Returns:
        Whether it holds, and how far the sides are apart. A side that is not finite or not real does not hold.
    """
    errors, signs = [], []
    with mp.workdps(_WORKING):
        for token in tokens:
            try:
                left, right = token.value(step.left), token.value(step.right)
            except ZeroDivisionError:
                return Measured(False, float("inf"))
            size = max(1, abs(left), abs(right))
            real = not isinstance(left - right, mp.mpc) and mp.isfinite(left - right)
            errors.append(float(abs(left - right) / size) if real else float("inf"))
            signs.append(float((left - right) / size) if real else float("-inf"))
    if step.relation == "=":
        return Measured(max(errors) < TOLERANCE, max(errors))
    if step.relation == "!=":
        return Measured(any(1e-6 < error < float("inf") for error in errors), None)
    return Measured(min(signs) > (0 if step.relation == ">" else -TOLERANCE), None)


def tokens_for(statement: Statement, seed: int, channels: tuple[int, ...] = CHANNELS) -> list[Token]:
    """Return one random token for each number of channels."""
    draw = random.Random(f"{seed} {statement.name}")
    with mp.workdps(_WORKING):
        return [random_token(statement, count, draw) for count in channels if count >= statement.least_channels]
