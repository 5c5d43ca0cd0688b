"""A step as numbers: both sides evaluated on random tokens to 50 digits, by the formulas as they stand.

Sums are added up channel by channel and derivatives are taken by differences; no rule of the algebra is used,
so a mistake there shows here. dynorm's functions and their automatic derivatives are compared with the same numbers.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch
from mpmath import mp, mpf
from torch import Tensor

from dynorm import functional, theory
from dynorm.paper.proof.formula import SUMS, Reading, indexed
from dynorm.paper.proof.statement import Statement, Step

Function = Callable[[Tensor, Any], Tensor]
"""Computes a formula for all channels of a token x; the second argument has the free numbers, gamma and bias."""

# Centre and constant of the annealed function.
_MIDDLE, _CONSTANT = "((1 - t)*m_i + t*p)", "exp((1 - t)*log(C*v_i) + t*log(beta))"


def _centering(x: Tensor) -> Tensor:
    return functional.centering_matrix(len(x), dtype=x.dtype)


def _slope_by_integrand(x: Tensor) -> Tensor:
    """Return the derivative of the integral over y, as it is meant, divided by what was integrated."""
    n = len(x) - 1
    y = math.sqrt(n) * torch.sigmoid(x)
    slope: Tensor = torch.func.vmap(torch.func.grad(lambda y: -torch.log(n * y**-2 - 1) / (2 * n)))(y)
    return slope * (n * y - y**3)


def _norm(x: Tensor) -> Tensor:
    return functional.layer_norm(x, eps=0.0)


COMPARED: dict[str, Mapping[str, Function]] = {
    "reduction": {
        "x_i - mu": lambda x, n: functional.center(x),
        "sigma**2": lambda x, n: x.var(correction=0),
        "m_i": lambda x, n: theory.leave_one_out_mean(x),
        "v_i": lambda x, n: theory.leave_one_out_variance(x),
    },
    "theorem-1": {
        "y_i": lambda x, n: _norm(x),
        "F*(C - 1 - y_i**2)": lambda x, n: theory.layer_norm_derivative(x),
        "sigma": lambda x, n: x.std(correction=0),
    },
    "equation-7": {
        "sqrt(C - 1)": lambda x, n: _norm(torch.diag(x.abs() + 1)).diagonal(),
        "-sqrt(C - 1)": lambda x, n: _norm(-torch.diag(x.abs() + 1)).diagonal(),
    },
    "equation-8": {"F": lambda x, n: theory.layer_norm_slope_factor(x)},
    "theorem-2": {
        "sqrt(C - 1)*tanh(alpha*x_i/C)": lambda x, n: functional.scaled_dyt(x, math.sqrt(len(x) - 1) * n.F / len(x)),
        "tanh(alpha*x_i/C)": lambda x, n: functional.dyt(x, math.sqrt(len(x) - 1) * n.F / len(x)),
    },
    "theorem-3": {"Y": lambda x, n: functional.dyisru_general(x, n.beta, x.mean())},
    "theorem-4": {
        "beta_i": lambda x, n: theory.channel_beta(x),
        "y_i": lambda x, n: functional.dyisru_general(x, theory.channel_beta(x).clamp(min=1e-300), x.mean()),
    },
    "equation-15": {
        "sqrt(C - 1)*(x_i - mu)/sqrt(beta + (x_i - mu)**2)": lambda x, n: functional.dyisru_general(x, n.beta, n.mu),
        "sqrt(C - 1)*x_i/sqrt(beta + x_i**2)": lambda x, n: functional.dyisru(x, n.beta),
    },
    "appendix-b": {
        "x_i/sqrt(1 + alpha*x_i**2)": lambda x, n: functional.isru(x, n.alpha),
        "sqrt(beta)*x_i/sqrt(beta + x_i**2)": lambda x, n: functional.dyisru(x, 1 / n.alpha, scale=n.alpha**-0.5),
    },
    "note-centering": {
        "x_i - mu": lambda x, n: functional.center(x),
        "c_i": lambda x, n: x @ _centering(x),
        "x_i - sum_k(x_k)/C": lambda x, n: x @ _centering(x) @ _centering(x),
    },
    "note-variance": {
        "Var": lambda x, n: x.var(correction=0),
        "MS - mu**2": lambda x, n: functional.mean_square(functional.center(x)),
        "sqrt(MS)": lambda x, n: functional.rms(x),
    },
    "note-rmsnorm": {
        "(x_i - mu)/sqrt(Var + eps)*gamma_i + bias_i": lambda x, n: torch.nn.functional.layer_norm(
            x, x.shape, n.gamma, n.bias, n.eps
        ),
        "c_i/sqrt(Var + eps)*gamma_i + bias_i": lambda x, n: (
            functional.rms_norm(functional.center(x), n.gamma, None, n.eps) + n.bias
        ),
    },
    "note-matrix": {
        "(x_i - mu)/sqrt(Var + eps)*gamma_i + bias_i": lambda x, n: functional.layer_norm(x, n.gamma, n.bias, n.eps),
        "c_i/sqrt(Var + eps)*gamma_i + bias_i": lambda x, n: (
            x / (x.var(correction=0) + n.eps).sqrt() @ (_centering(x) * n.gamma) + n.bias
        ),
    },
    "closed-form-1": {
        "beta_i": lambda x, n: theory.channel_beta(x),
        "v_i": lambda x, n: theory.leave_one_out_variance(x),
    },
    "closed-form-2": {
        "y_i": lambda x, n: theory.layer_norm_as_dyisru(x),
        "(x_i - mu)/sqrt(sigma**2 + eps)": lambda x, n: theory.layer_norm_as_dyisru(x, n.eps),
        "(x_i - mu)/sqrt(eps + sigma**2)": lambda x, n: functional.dyisru_general(
            x, theory.leave_one_out_beta(x, eps=n.eps).detach(), theory.leave_one_out_mean(x).detach()
        ),
    },
    "closed-form-3": {
        "RMS_i": lambda x, n: theory.rms_norm_as_dyisru(x),
        "x_i/sqrt(MS)": lambda x, n: functional.rms_norm(x, eps=0.0),
        "x_i/sqrt(MS + eps)": lambda x, n: theory.rms_norm_as_dyisru(x, n.eps),
    },
    "closed-form-4": {
        f"sqrt(C - 1)*((x_i - {_MIDDLE})/sqrt({_CONSTANT} + (x_i - {_MIDDLE})**2))": lambda x, n: (
            functional.dyisru_general(
                x,
                theory.leave_one_out_beta(x) ** (1 - n.t) * n.beta**n.t,
                (1 - n.t) * theory.leave_one_out_mean(x) + n.t * n.p,
            )
        )
    },
    "closed-form-5": {
        "sqrt(C)*x_i/sqrt(C*sigma**2 + x_i**2)": lambda x, n: functional.dyisru(
            x, theory.closed_form_beta(n.sigma**2, len(x)), scale=math.sqrt(len(x))
        )
    },
    "witness-none": {
        "sqrt(C - 1)*((x_i - p)/sqrt(beta + (x_i - p)**2))": lambda x, n: functional.dyisru_general(
            x, n.beta, n.p, witnesses=torch.arange(0)
        ),
        "sqrt(C - 1)*(x_i/sqrt(beta + x_i**2))": lambda x, n: functional.dyisru(x, n.beta, witnesses=torch.arange(0)),
    },
    "witness-all": {
        "x_i/sqrt(MS + eps)": lambda x, n: theory.rms_norm_by_witnesses(x, n.eps),
        "(x_i - mu)/sqrt(sigma**2 + eps)": lambda x, n: theory.rms_norm_by_witnesses(functional.center(x), n.eps),
    },
    "witness-derivative": {
        "y_i": lambda x, n: functional.dyisru_general(
            x,
            n.beta,
            n.p,
            scale=n.s,
            witnesses=(chosen := n.g.nonzero().flatten()),
            gain=n.g[chosen] if len(chosen) else None,
        )
    },
    "misprint-first-version": {"1": lambda x, n: _slope_by_integrand(x)},
    "misprint-note": {"x_i - mu": lambda x, n: x @ (torch.eye(len(x)).double() - 1 / len(x))},
}
"""For each statement, what to compare: values and automatic derivatives."""


DIGITS = 50
TOLERANCE = 1e-50
CHANNELS = (2, 3, 7, 100)

# What is lost to cancellation, and by derivatives, is carried besides.
_WORKING = DIGITS + 15

Number = Any
"""An mpmath number; mpmath is not typed."""


@dataclass
class Token(Reading):
    """A token, the channel that is looked at, and the free numbers.

    Example:
        >>> Token({"x": [mpf(1), mpf(5)]}, 0, {}, {"mu": "sum_k(x_k) / C"}).read("x_i - mu")
        mpf('-2.0')
    """

    vectors: Mapping[str, Sequence[Number]]
    """x, and weight, bias and gains, by name; each with one number per channel."""
    place: int
    """The channel i, from 0."""
    numbers: Mapping[str, Number]
    definitions: Mapping[str, str]
    indices: Mapping[str, int] = field(default_factory=dict)
    """Where the indices besides i stand."""

    number = staticmethod(mpf)

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

    def function(self, name: str, value: Number) -> Number:
        """Return the value of an elementary function."""
        return getattr(mp, name)(value)

    def total(self, name: str, body: Callable[[], Number]) -> Number:
        """Add up over channels, one by one."""
        outer, terms = self._at, []
        for place in range(len(self.vectors["x"])):
            if name != "others" or place != self.place:
                self._at = {**outer, SUMS[name]: place}
                terms.append(body())
        self._at = outer
        return mp.fsum(terms)

    def d(self, body: Callable[[], Number]) -> Number:
        """Differentiate with respect to x_i, by differences."""
        return self.diff(body, "x_i")

    def diff(self, body: Callable[[], Number], variable: str) -> Number:
        """Differentiate with respect to a number, by differences."""
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


def tokens_for(statement: Statement, seed: int, channels: tuple[int, ...] = CHANNELS) -> list[Token]:
    """Return one random token of rational numbers for each C that the statement is meant for.

    A token's channels all differ, and i, j and k stand at random ones.
    """
    draw = random.Random(f"{seed} {statement.name}")
    with mp.workdps(_WORKING):
        return [_random_token(statement, count, draw) for count in channels if count >= statement.least_channels]


def _random_token(statement: Statement, channels: int, draw: random.Random) -> Token:
    def number(low: int = -3000) -> Number:
        return mpf(draw.randint(low, 3000)) / 1009

    offset = number()
    # A grid, shuffled and shaken: random, but never all values alike, so that sigma is not lost to rounding.
    grid = [mpf(2 * k - channels + 1) * 3 / channels + number() * 3 / 10 / channels for k in range(channels)]
    draw.shuffle(grid)
    vectors = {"x": [value + offset for value in grid]} | {name: [number() for _ in grid] for name in ("gamma", "bias")}
    # A channel without a gain is no witness.
    vectors["g"] = [draw.randint(0, 1) * number(1) for _ in grid]
    numbers = {name: number(1) if domain != "real" else number() for name, domain in statement.numbers.items()}
    indices = {"j": draw.randrange(channels), "k": draw.randrange(channels)}
    place = draw.randrange(channels)
    # The channel itself has a gain: else it would not show that no channel is its own witness.
    vectors["g"][place] = number(1)
    return Token(vectors, place, numbers, statement.definitions, indices)


@dataclass(frozen=True)
class Measured:
    """What numbers say of a step."""

    holds: bool
    """Whether it holds for all tokens, to 50 digits; of ``!=``: whether some token tells both sides apart."""
    error: float | None
    """Largest difference of both sides, relative to the larger or to 1; None where they need not be equal."""


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

    It is the largest difference of values and derivatives over tokens and channels, relative to the larger or to 1.
    """
    errors = []
    for token in tokens:
        vectors = {name: torch.tensor(list(map(float, v)), dtype=torch.float64) for name, v in token.vectors.items()}
        x = vectors.pop("x")
        free = SimpleNamespace(**vectors, **{name: float(value) for name, value in token.numbers.items()})
        for formula, function in COMPARED[statement.name].items():

            def twice(x: Tensor, function: Function = function, free: Any = free) -> tuple[Tensor, Tensor]:
                return (y := function(x, free).expand_as(x)), y

            slopes, values = torch.func.jacrev(twice, has_aux=True)(x)
            for place in {0, token.place, len(x) - 1}:
                here = replace(token, place=place)
                for tensor, text in ((values[place], formula), (slopes[place, place], f"d({formula})")):
                    with mp.workdps(_WORKING):
                        got, want = float(tensor), here.read(text)
                        errors.append(float(abs(got - want) / max(1, abs(got), abs(want))))
    return max(error if math.isfinite(error) else float("inf") for error in errors)
