"""Decide whether a step is proven: by exact algebra, for every number of channels, never by how close numbers are.

sympy reads a formula with its own symbolic sums and derivatives. Channel i sees of its token only
x_i, C and the sums A and B of the other channels and of their squares; the statement "reduction"
proves so. In their place come C = n + 1, the mean m and the variance v of the others, and e = x_i -
m, which reach every token: n > 0, v >= 0, any m, any e. In these all roots are of positive things,
and two formulas are equal where the numerator of their difference is the zero polynomial.
"""

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import islice
from typing import Any, Literal

import sympy as sp

from dynorm.errors import DynormError
from dynorm.paper.proof.formula import SUMS, Reading, indexed
from dynorm.paper.proof.statement import Statement, Step

Outcome = Literal["proven", "false", "undecided"]
Expr = Any  # a sympy expression; sympy itself is not fully typed

# Values are computed to 50 digits; what is smaller than this may be 0.
_NOISE = sp.Float("1e-30")

# The size of the token, and a channel's place in it.
_C = sp.Symbol("C", integer=True, positive=True)
_PLACES = {name: sp.Symbol(name, integer=True, positive=True) for name in "ijkl"}
_X_I = sp.IndexedBase("x", real=True)[_PLACES["i"]]


def _channel(vector: str, place: Expr) -> Expr:
    return sp.IndexedBase(vector, **{"nonnegative" if vector == "g" else "real": True})[place]


# Dummies, so that no name in a formula can be taken for one of them.
_N = sp.Dummy("n", positive=True)
_M, _E = (sp.Dummy(name, real=True) for name in "me")
_V = sp.Dummy("v", nonnegative=True)
_EVERY_TOKEN = {_X_I: _M + _E, _C: _N + 1}
_OTHERS = (_N, _N * _M, _N * (_V + _M**2))  # sums of 1, of the other channels and of their squares

# The same with gains as weights: their sum, and the weighted mean and variance of the other
# channels.
_G, _VG = (sp.Dummy(name, nonnegative=True) for name in ("g", "w"))
_MG, _X = (sp.Dummy(name, real=True) for name in "qx")
_WEIGHED = (_G, _G * _MG, _G * (_VG + _MG**2))


class NotReducibleError(DynormError):
    """A formula is outside the rules of algebra here; what rests on it stays undecided."""


# sympy gives up with a NotImplementedError, and with a ValueError or TypeError where a value is not
# a number.
_GIVES_UP = (NotReducibleError, NotImplementedError, ValueError, TypeError, ZeroDivisionError)


@dataclass(frozen=True)
class Verdict:
    """What algebra says of a step."""

    # "false" where a token was found for which the step does not hold; "undecided" is no proof
    outcome: Outcome
    difference: Expr = ""  # of both sides; or words, where there is none, and nothing when proven

    @cached_property
    def remains(self) -> str:
        """What is left of the difference, as text; to work it out takes longer than to refute a step."""
        try:
            left = (
                self.difference
                if isinstance(self.difference, str)
                else sp.factor(remainder(self.difference))
            )
        except _GIVES_UP:
            left = self.difference
        # sympy marks the names of dummies by an underscore.
        return re.sub(r"\b_(?=\w)", "", str(left))


def decide(step: Step, statement: Statement, seed: int = 0) -> Verdict:
    """Prove a step of a statement or refute it; what sympy cannot bring to an end is undecided."""
    try:
        reading = _Exact(statement)
        difference = reading.read(step.left) - reading.read(step.right)
        return (
            _by_sums(difference) if step.by_sums else _by_channel(difference, step.relation, seed)
        )
    except _GIVES_UP as error:
        return Verdict("undecided", f"sympy could not decide it: {error or type(error).__name__}")


class _Exact(Reading):
    """Formulas of a statement as sympy expressions, with symbolic sums."""

    library, number = sp, sp.Integer

    def __init__(self, statement: Statement) -> None:
        self.definitions = statement.definitions
        self.numbers = statement.numbers
        self._held: frozenset[str] = frozenset()
        self._known: dict[tuple[str, frozenset[str]], Expr] = {}

    def name(self, name: str) -> Expr:
        if name == "C":
            return _C
        if pair := indexed(name):
            if name.startswith("delta_"):
                return sp.KroneckerDelta(*(_PLACES[place] for place in pair))
            return _channel(pair[0], _PLACES[pair[1]])
        if name not in self.definitions or name in self._held:
            return sp.Symbol(name, **{self.numbers.get(name, "real"): True})
        if (name, self._held) not in self._known:
            self._known[name, self._held] = self.read(self.definitions[name])
        return self._known[name, self._held]

    def total(self, name: str, body: Callable[[], Expr]) -> Expr:
        place, term = _PLACES[SUMS[name]], body()
        return sp.Sum(term, (place, 1, _C)) - (
            term.subs(place, _PLACES["i"]) if name == "others" else 0
        )

    def diff(self, body: Callable[[], Expr], variable: str) -> Expr:
        # What is held changes the meaning of the definitions that use it.
        before, self._held = self._held, self._held | ({variable} & self.definitions.keys())
        free, held = self.name(variable), body()
        self._held = before
        return sp.diff(held, free).subs(free, self.name(variable))

    def limit(self, body: Callable[[], Expr], variable: str) -> Expr:
        return sp.limit(body().subs(_C, _N + 1), self.name(variable), 0, "+")


def reduced(expression: Expr) -> Expr:
    """Return an expression of what channel i sees."""
    return expression.replace(lambda e: isinstance(e, sp.Sum), _reduced_sum).xreplace(_EVERY_TOKEN)


def _reduced_sum(total: Expr) -> Expr:
    body, (place, *_) = total.args
    body, alone = sp.expand(body), sp.Integer(0)
    # A term with Kronecker's delta counts at one channel alone.
    while deltas := [delta for delta in body.atoms(sp.KroneckerDelta) if place in delta.args]:
        (other,) = set(deltas[0].args) - {place}
        elsewhere = body.xreplace({deltas[0]: sp.Integer(0)})
        alone += (body - elsewhere).subs(place, other)
        body = sp.expand(elsewhere)
    x_k, g_k = (_channel(vector, place) for vector in "xg")
    coefficients = []
    for weight, others in ((sp.Integer(1), _OTHERS), (g_k, _WEIGHED)):
        for degree, other in enumerate(others):
            coefficient = body.coeff(g_k, int(weight != 1)).coeff(x_k, degree)
            body = sp.expand(body - coefficient * weight * x_k**degree)
            alone += coefficient * (other + weight.subs(place, _PLACES["i"]) * _X_I**degree)
            coefficients.append(coefficient)
    if body != 0 or any(coefficient.has(place) for coefficient in coefficients):
        raise NotReducibleError(
            f"{total} is no mean or variance: only those are seen by one channel"
        )
    return alone


def _by_channel(difference: Expr, relation: str, seed: int) -> Verdict:
    difference = reduced(difference)
    if difference.has(sp.zoo, sp.nan, sp.oo):
        return Verdict("undecided", f"a side is not finite: {difference}")
    values = _values(difference, seed)
    if relation == "!=":
        differs = any(value.is_real and abs(value) > _NOISE for value in values)
        return (
            Verdict("proven")
            if differs
            else Verdict("undecided", "no token tells both sides apart")
        )
    # One token refutes nearly all that is false, in a fraction of the time of algebra. What is not
    # real is not 0.
    if relation == "=" and any(abs(value) > _NOISE for value in islice(values, 1)):
        return Verdict("false", difference)
    rest = remainder(difference)
    if rest == 0 if relation == "=" else _has_sign(rest, strict=relation == ">"):
        return Verdict("proven")
    for value in values:
        negative = value.is_real and (value < -_NOISE or (relation == ">" and value == 0))
        if abs(value) > _NOISE if relation == "=" else negative:
            return Verdict("false", difference)
    return Verdict("undecided", difference)


def _by_sums(difference: Expr) -> Verdict:
    difference = sp.simplify(sp.expand(sp.refine(difference.doit(), sp.Q.le(_PLACES["i"], _C))))
    if difference == 0:
        return Verdict("proven")
    # One token, of three channels, is enough to refute it.
    values = difference.subs({_C: 3, _PLACES["i"]: 2}).doit()
    values = values.replace(lambda e: e.is_Indexed, lambda e: sp.Integer(2) ** (e.indices[0] + 1))
    values = values.subs(
        {s: 11 + 3 * place for place, s in enumerate(sorted(values.free_symbols, key=str))}
    )
    return Verdict("false" if values.is_number and values != 0 else "undecided", str(difference))


def remainder(expression: Expr) -> Expr:
    """Return what is left of an expression of n, v, e, m and numbers; 0 only where it is 0 identically.

    Roots, logarithms and exponentials become symbols of their own, the squares of roots are put in
    again, and the numerator, over positive denominators, is divided by these relations. An
    expression that is not a quotient of polynomials in such symbols keeps its form, and is 0 only
    if sympy says so.
    """
    expression = _split(expression.rewrite(sp.exp))
    roots: dict[Expr, Expr] = {}
    exponentials: dict[Expr, Expr] = {}

    def name_root(e: Expr) -> Expr:
        return roots.setdefault(e.base, sp.Dummy("r", positive=True)) ** (2 * e.exp)

    def name_exponential(e: Expr) -> Expr:
        # Exponentials of multiples of one argument are powers of one symbol.
        factor, argument = e.args[0].as_coeff_Mul()
        return exponentials.setdefault(argument, sp.Dummy("E", positive=True)) ** factor

    expression = expression.replace(_is_root, name_root)
    expression = expression.replace(lambda e: isinstance(e, sp.exp), name_exponential)
    numerator, denominator = sp.fraction(sp.together(expression))
    numerator = sp.expand(numerator)
    for base, root in roots.items():
        numerator = sp.expand(sp.rem(numerator, root**2 - base, root))
    meant = {r: sp.sqrt(base) for base, r in roots.items()} | {
        e: sp.exp(z) for z, e in exponentials.items()
    }
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


def _has_sign(expression: Expr, *, strict: bool) -> bool:
    """Return whether a quotient is not negative, or positive, wherever its denominator is not 0."""
    parts = sp.fraction(sp.together(expression))
    # The sign may show in the deviation e, or in x_i itself.
    for forms in (
        [sp.factor(p) for p in parts],
        [sp.expand(p.xreplace({_E: _X - _M})) for p in parts],
    ):
        numerator, denominator = (-p for p in forms) if forms[1].is_nonpositive else forms
        if denominator.is_nonnegative and (
            numerator.is_positive if strict else numerator.is_nonnegative
        ):
            return True
    return False


def _values(expression: Expr, seed: int) -> Iterator[Expr]:
    """Yield the values of an expression at a few tokens of rational numbers."""
    draw = random.Random(seed)
    for _ in range(4):
        symbols = expression.atoms(sp.Symbol, sp.Indexed, sp.KroneckerDelta)
        values = {}
        for symbol in sorted(symbols, key=str):
            if isinstance(symbol, sp.KroneckerDelta):
                values[symbol] = sp.Integer(draw.randint(0, 1))
                continue
            number = sp.Rational(draw.randint(1, 40), draw.randint(1, 9))
            values[symbol] = number if symbol.is_nonnegative else number * draw.choice((-1, 1))
        value = sp.N(expression.xreplace(values), 50)
        if value.is_number:
            yield value
