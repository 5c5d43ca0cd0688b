"""Check steps with numbers: both sides evaluated at random tokens, to 50 digits.

Sums are added up channel by channel and derivatives are taken by differences. No rule of the
algebra is used, so a mistake in the algebra shows here. The functions of dynorm and their automatic
derivatives are compared with the same numbers.
"""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import sympy as sp
import torch
from mpmath import mp, mpf
from torch import Tensor

from dynorm.paper.proof.statement import Comparison, Statement, Step, symbols_in
from dynorm.paper.proof.vocabulary import C, Expr, Others, i, j, k, x_i

DIGITS = 50
TOLERANCE = 1e-50
CHANNELS = (2, 3, 7, 20)

# The additional digits are those that cancellation and the differences may lose.
_WORKING = DIGITS + 15

Number = Any  # an mpmath number; mpmath has no types


@dataclass
class Token:
    """A token, the channel i of a statement, and values for its other symbols."""

    # x and the other vectors by name, each with one number per channel.
    vectors: Mapping[str, Sequence[Number]]
    places: Mapping[Expr, int]  # the channel that each index refers to, from 0
    numbers: Mapping[Expr, Number]  # the values of symbols; x_i is added while it varies
    definitions: Mapping[Expr, Expr]
    # Values of definitions, computed so far.
    known: dict[Expr, Number] = field(default_factory=dict)

    @property
    def channels(self) -> int:
        """The number of channels."""
        return len(self.vectors["x"])

    def at(self, index: Expr, place: int) -> "Token":
        """Return the token with an index at another channel."""
        known = {} if index == i else self.known
        return replace(self, places={**self.places, index: place}, known=known)

    def where(self, symbol: Expr, value: Number) -> "Token":
        """Return the token with another value of a symbol, or of ``x_i``."""
        return replace(self, numbers={**self.numbers, symbol: value}, known={})

    def value(self, formula: Expr) -> Number:
        """Return the value of a formula, computed exactly as it is written."""
        match formula:
            case sp.Rational():
                return mpf(int(formula.p)) / int(formula.q)
            case sp.Symbol():
                return self._symbol(formula)
            case sp.Indexed():
                return self._channel(formula)
            case sp.KroneckerDelta():
                first, second = formula.args
                return mpf(1 if self.places[first] == self.places[second] else 0)
            case sp.Add():
                return mp.fsum(self.value(term) for term in formula.args)
            case sp.Mul():
                return mp.fprod(self.value(factor) for factor in formula.args)
            case sp.Pow():
                return self._power(formula)
            case sp.exp() | sp.log() | sp.tanh():
                function: Callable[[Number], Number] = getattr(mp, formula.func.__name__)
                return function(self.value(formula.args[0]))
            case sp.Sum():
                term, (index, *_) = formula.args
                places = range(self.channels)
                return mp.fsum(self.at(index, place).value(term) for place in places)
            case Others():
                others = [place for place in range(self.channels) if place != self.places[i]]
                return mp.fsum(self.at(k, place).value(formula.args[0]) for place in others)
            case sp.Derivative():
                body, (variable, _) = formula.args
                here = self.value(variable)
                return mp.diff(lambda number: self.where(variable, number).value(body), here)
            case sp.Limit():
                body, variable, *_ = formula.args
                with mp.workdps(8 * _WORKING):
                    return self.where(variable, mpf(10) ** (-2 * _WORKING)).value(body)
        raise NotImplementedError(f"numbers.py cannot evaluate {type(formula).__name__}: {formula}")

    def _symbol(self, symbol: Expr) -> Number:
        if symbol == C:
            return mpf(self.channels)
        if symbol in self.numbers:
            return self.numbers[symbol]
        if symbol not in self.known:
            self.known[symbol] = self.value(self.definitions[symbol])
        return self.known[symbol]

    def _channel(self, channel: Expr) -> Number:
        place = self.places[channel.indices[0]]
        vector = channel.base.name
        if vector == "x" and place == self.places[i] and x_i in self.numbers:
            return self.numbers[x_i]
        return self.vectors[vector][place]

    def _power(self, power: Expr) -> Number:
        base = self.value(power.base)
        exponent = power.exp
        if exponent.is_Integer:
            return base ** int(exponent)
        if exponent == sp.S.Half:
            return mp.sqrt(base)
        return mp.power(base, self.value(exponent))


def tokens_for(
    statement: Statement, seed: int, channels: tuple[int, ...] = CHANNELS
) -> list[Token]:
    """Return one random token of rational numbers for each C that the statement covers.

    The channels of a token all differ, and i, j and k are random channels.
    """
    draw = random.Random(f"{seed} {statement.name}")
    tokens = []
    with mp.workdps(_WORKING):
        for count in channels:
            if count >= statement.least_channels:
                tokens.append(_random_token(statement, count, draw))
    return tokens


def _random_token(statement: Statement, channels: int, draw: random.Random) -> Token:
    def number(low: int = -3000) -> Number:
        return mpf(draw.randint(low, 3000)) / 1009

    # A shuffled grid with noise: random, but the values always spread, so that rounding cannot
    # swallow sigma.
    offset = number()
    token = []
    for place in range(channels):
        grid = mpf(2 * place - channels + 1) * 3 / channels
        noise = number() * 3 / 10 / channels
        token.append(offset + grid + noise)
    draw.shuffle(token)
    places = {index: draw.randrange(channels) for index in (i, j, k)}
    # About half of the channels have a gain; a channel without one is not a witness. Channel i has
    # a gain: otherwise a channel that is its own witness would not be noticed.
    gains = [draw.choice((number(1), mpf(0))) for _ in token]
    gains[places[i]] = number(1)
    vectors = {"x": token, "g": gains}
    for name in sorted(vectors_in(statement) - vectors.keys()):
        vectors[name] = [number() for _ in token]
    numbers = {}
    for symbol in sorted(free_numbers(statement), key=str):
        numbers[symbol] = number(1) if symbol.is_nonnegative else number()
    return Token(vectors, places, numbers, statement.definitions)


def free_numbers(statement: Statement) -> set[Expr]:
    """Return the symbols of a statement that may be any number: neither C nor definitions."""
    symbols: set[Expr] = set()
    for formula in statement.formulas:
        symbols |= symbols_in(formula)
    return symbols - statement.definitions.keys() - {C}


def vectors_in(statement: Statement) -> set[str]:
    """Return the names of the vectors of a statement."""
    names = set()
    for formula in statement.formulas:
        for channel in formula.atoms(sp.Indexed):
            names.add(channel.base.name)
    return names


@dataclass(frozen=True)
class Measured:
    """The result of the numbers for one step."""

    # Whether it holds for all tokens, to 50 digits; for "!=", whether the sides differ at a token.
    holds: bool
    # The largest difference of both sides, relative to the larger or to 1; None unless they must be
    # equal.
    error: float | None


def measure(step: Step, tokens: list[Token]) -> Measured:
    """Evaluate both sides of a step at one token or more.

    A step does not hold if a side is not finite or not real.
    """
    differences = []
    with mp.workdps(_WORKING):
        for token in tokens:
            try:
                left = token.value(step.left)
                right = token.value(step.right)
            except ZeroDivisionError:
                return Measured(False, math.inf)
            difference = (left - right) / max(1, abs(left), abs(right))
            is_real = not isinstance(difference, mp.mpc) and mp.isfinite(difference)
            differences.append(float(difference) if is_real else -math.inf)
    errors = [abs(difference) for difference in differences]
    if step.relation == "=":
        return Measured(max(errors) < TOLERANCE, max(errors))
    if step.relation == "!=":
        return Measured(any(1e-6 < error < math.inf for error in errors), None)
    if step.relation == ">":
        return Measured(min(differences) > 0, None)
    return Measured(min(differences) > -TOLERANCE, None)


def autograd_error(statement: Statement, tokens: list[Token]) -> float:
    """Return how far dynorm's functions are from a statement's formulas, in float64.

    The result is the largest difference of values and of automatic derivatives over tokens and
    channels, relative to the larger or to 1; 0 if nothing is compared.
    """
    errors = [0.0]
    for token in tokens:
        vectors = {}
        for name, vector in token.vectors.items():
            numbers = [float(number) for number in vector]
            vectors[name] = torch.tensor(numbers, dtype=torch.float64)
        x = vectors.pop("x")
        named = {symbol.name: float(number) for symbol, number in token.numbers.items()}
        at = SimpleNamespace(C=len(x), **vectors, **named)
        for comparison in statement.compared:
            computed = partial(_computed, comparison=comparison, at=at)
            values = computed(x)
            # torch.func would load the compiler first, which takes seconds.
            slopes = torch.autograd.functional.jacobian(computed, x)  # type: ignore[no-untyped-call]
            for place in {0, token.places[i], len(x) - 1}:
                here = token.at(i, place)
                errors.append(_relative(values[place], here, comparison.formula))
                errors.append(_relative(slopes[place, place], here, comparison.derivative))
    return max(errors)


def _computed(x: Tensor, comparison: Comparison, at: SimpleNamespace) -> Tensor:
    return comparison.computed(x, at).expand_as(x)


def _relative(computed: Tensor, token: Token, formula: Expr) -> float:
    with mp.workdps(_WORKING):
        exact = token.value(formula)
        number = float(computed)
        error = float(abs(number - exact) / max(1, abs(number), abs(exact)))
    return error if math.isfinite(error) else math.inf
