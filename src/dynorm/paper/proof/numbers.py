"""A step as numbers: both sides evaluated on random tokens to 50 digits, by the formulas as they stand.

Sums are added up channel by channel and derivatives are taken by differences; no rule of the
algebra is used, so a mistake there shows here. dynorm's functions and their automatic derivatives
are compared with the same numbers.
"""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from mpmath import mp, mpf
from torch import Tensor

from dynorm import functional, theory
from dynorm.paper.proof.formula import SUMS, Reading, indexed
from dynorm.paper.proof.statement import Statement, Step


def slope_by_integrand(x: Tensor) -> Tensor:
    """Return the derivative of the integral over y, as it is meant, divided by what was integrated."""
    n = len(x) - 1
    y = math.sqrt(n) * torch.sigmoid(x)
    slope: Tensor = torch.func.vmap(torch.func.grad(lambda y: -torch.log(n * y**-2 - 1) / (2 * n)))(
        y
    )
    return slope * (n * y - y**3)


DIGITS = 50
TOLERANCE = 1e-50
CHANNELS = (2, 3, 7, 100)

# What is lost to cancellation, and by derivatives, is carried besides.
_WORKING = DIGITS + 15

Number = Any  # an mpmath number; mpmath is not typed


@dataclass
class Token(Reading):
    """A token, the channel that is looked at, and the free numbers."""

    vectors: Mapping[
        str, Sequence[Number]
    ]  # x, and weight, bias and gains, by name; each with one number per channel
    place: int  # the channel i, from 0
    numbers: Mapping[str, Number]
    definitions: Mapping[str, str]
    indices: Mapping[str, int] = field(default_factory=dict)  # where the indices besides i stand

    library, number = mp, staticmethod(mpf)

    def __post_init__(self) -> None:
        self._at = self._outside = {**self.indices, "i": self.place}
        self._known: dict[str, Number] = {}

    def name(self, name: str) -> Number:
        """Return the value of a name."""
        if name == "C":
            return mpf(len(self.vectors["x"]))
        if pair := indexed(name):
            if name.startswith("delta_"):
                return mpf(self._at[pair[0]] == self._at[pair[1]])
            moved = pair[0] == "x" and self._at[pair[1]] == self.place and "x_i" in self.numbers
            return self.numbers["x_i"] if moved else self.vectors[pair[0]][self._at[pair[1]]]
        if name in self.numbers:
            return self.numbers[name]
        if name not in self._known:
            # A sum's index means nothing in a definition that the sum uses.
            inside, self._at = self._at, self._outside
            self._known[name] = self.read(self.definitions[name])
            self._at = inside
        return self._known[name]

    def total(self, name: str, body: Callable[[], Number]) -> Number:
        """Add up over channels, one by one."""
        outer, terms = self._at, []
        for place in range(len(self.vectors["x"])):
            if name != "others" or place != self.place:
                self._at = {**outer, SUMS[name]: place}
                terms.append(body())
        self._at = outer
        return mp.fsum(terms)

    def diff(self, body: Callable[[], Number], variable: str) -> Number:
        """Differentiate with respect to a number, or x_i, by differences."""
        return mp.diff(lambda value: self._where(variable, value, body), self.name(variable))

    def limit(self, body: Callable[[], Number], variable: str) -> Number:
        """Return the value very near to 0."""
        with mp.workdps(8 * _WORKING):
            return self._where(variable, mpf(10) ** (-2 * _WORKING), body)

    def _where(self, name: str, value: Number, body: Callable[[], Number]) -> Number:
        """Return the value of a formula where a number, or x_i, has another value."""
        before = self.numbers, self._known
        self.numbers, self._known = {**self.numbers, name: value}, {}
        result = body()
        self.numbers, self._known = before
        return result


def tokens_for(
    statement: Statement, seed: int, channels: tuple[int, ...] = CHANNELS
) -> list[Token]:
    """Return one random token of rational numbers for each C that the statement is meant for.

    A token's channels all differ, and i, j and k stand at random ones.
    """
    draw = random.Random(f"{seed} {statement.name}")
    with mp.workdps(_WORKING):
        return [
            _random_token(statement, count, draw)
            for count in channels
            if count >= statement.least_channels
        ]


def _random_token(statement: Statement, channels: int, draw: random.Random) -> Token:
    def number(low: int = -3000) -> Number:
        return mpf(draw.randint(low, 3000)) / 1009

    offset = number()
    # A grid, shuffled and shaken: random, but never all values alike, so that sigma is not lost to
    # rounding.
    grid = [
        mpf(2 * k - channels + 1) * 3 / channels + number() * 3 / 10 / channels
        for k in range(channels)
    ]
    draw.shuffle(grid)
    vectors = {"x": [value + offset for value in grid]} | {
        name: [number() for _ in grid] for name in ("gamma", "bias")
    }
    # A channel without a gain is no witness.
    vectors["g"] = [draw.randint(0, 1) * number(1) for _ in grid]
    numbers = {
        name: number(1) if domain != "real" else number()
        for name, domain in statement.numbers.items()
    }
    indices = {"j": draw.randrange(channels), "k": draw.randrange(channels)}
    place = draw.randrange(channels)
    # The channel itself has a gain: else it would not show that no channel is its own witness.
    vectors["g"][place] = number(1)
    return Token(vectors, place, numbers, statement.definitions, indices)


@dataclass(frozen=True)
class Measured:
    """What numbers say of a step."""

    # whether it holds for all tokens, to 50 digits; of ``!=``: whether some token tells both sides
    # apart
    holds: bool
    # Largest difference of both sides, relative to the larger or to 1; None where they need not be
    # equal.
    error: float | None


def measure(step: Step, tokens: list[Token]) -> Measured:
    """Evaluate both sides of a step on one token or more; a side that is not finite or not real does not hold."""
    differences = []
    with mp.workdps(_WORKING):
        for token in tokens:
            try:
                left, right = token.read(step.left), token.read(step.right)
            except ZeroDivisionError:
                return Measured(False, float("inf"))
            difference = (left - right) / max(1, abs(left), abs(right))
            real = not isinstance(difference, mp.mpc) and mp.isfinite(difference)
            differences.append(float(difference) if real else float("-inf"))
    errors = [abs(difference) for difference in differences]
    if step.relation == "=":
        return Measured(max(errors) < TOLERANCE, max(errors))
    if step.relation == "!=":
        return Measured(any(1e-6 < error < float("inf") for error in errors), None)
    return Measured(min(differences) > (0 if step.relation == ">" else -TOLERANCE), None)


def autograd_error(statement: Statement, tokens: list[Token]) -> float:
    """Return how far dynorm's functions and their automatic derivatives are from a statement's formulas, in float64.

    It is the largest difference of values and derivatives over tokens and channels, relative to the
    larger or to 1.
    """
    errors = []
    for token in tokens:
        vectors = {
            name: torch.tensor(list(map(float, v)), dtype=torch.float64)
            for name, v in token.vectors.items()
        }
        x = vectors.pop("x")
        free = {name: float(value) for name, value in token.numbers.items()}
        known = vars(functional) | vars(theory) | globals() | vectors | free | {"C": len(x)}
        for formula, code in statement.compared.items():

            def function(x: Tensor, code: str = code, known: dict[str, Any] = known) -> Any:
                return eval(code, known, {"x": x}).expand_as(x)

            slopes, values = torch.func.jacrev(function)(x), function(x)
            for place in {0, token.place, len(x) - 1}:
                here = replace(token, place=place)
                for tensor, text in (
                    (values[place], formula),
                    (slopes[place, place], f"d({formula})"),
                ):
                    with mp.workdps(_WORKING):
                        got, want = float(tensor), here.read(text)
                        errors.append(float(abs(got - want) / max(1, abs(got), abs(want))))
    return max(error if math.isfinite(error) else float("inf") for error in errors)
