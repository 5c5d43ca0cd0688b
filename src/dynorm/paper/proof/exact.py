"""Decide whether a step is proven, by exact algebra and for every number of channels.

A step is never accepted because two numbers are close. sympy works out the symbolic sums and
derivatives; a step that is marked with ``by_sums`` is decided by them.

All other steps may contain only means and variances. Then channel i depends on the other channels
only through two sums, of their values and of their squares; the statement "reduction" proves this.
In place of the sums, and of C and x_i, the algebra uses n = C - 1, the mean m and the variance v of
the other channels, and e = x_i - m. Together they describe every token: n > 0, v >= 0, any m, any
e. In these symbols every root is the root of a quantity that is not negative, and two formulas are
equal if the numerator of their difference is the zero polynomial.
"""

import random
from dataclasses import dataclass
from functools import lru_cache

import sympy as sp

from dynorm.errors import DynormError
from dynorm.paper.proof.statement import Statement, Step
from dynorm.paper.proof.vocabulary import C, Expr, Others, i, k, x, x_i

Definitions = tuple[tuple[Expr, Expr], ...]  # each symbol with its formula

# Values are computed to 50 digits; anything smaller than this may be 0.
_NOISE = sp.Float("1e-30")

# Dummies, so that no name in a formula can be mistaken for one of them.
_N = sp.Dummy("n", positive=True)
_M = sp.Dummy("m", real=True)
_E = sp.Dummy("e", real=True)
_V = sp.Dummy("v", nonnegative=True)
_X = sp.Dummy("x", real=True)
_EVERY_TOKEN = {x_i: _M + _E, C: _N + 1}

# The sums of 1, of the other channels and of their squares.
_OTHERS = (_N, _N * _M, _N * (_V + _M**2))


class NotReducibleError(DynormError):
    """A formula that this algebra has no rules for; steps that contain it stay undecided."""


# sympy raises NotImplementedError if it has no method, and ValueError or TypeError if a value is
# not a number.
_GIVES_UP = (NotReducibleError, NotImplementedError, ValueError, TypeError, ZeroDivisionError)


@dataclass(frozen=True)
class Verdict:
    """The result of the algebra for one step."""

    proven: bool
    # The difference of both sides, or the reason why there is none; nothing if the step is proven.
    difference: object = ""

    @property
    def remains(self) -> str:
        """The difference in words: to print it takes as long as to find it."""
        return str(self.difference)


def decide(step: Step, statement: Statement) -> Verdict:
    """Prove a step of a statement; one that sympy cannot finish is not proven."""
    definitions = tuple(statement.definitions.items())
    try:
        with sp.evaluate(True):
            left = evaluated(step.left, definitions)
            right = evaluated(step.right, definitions)
            if step.by_sums:
                return _decide_by_sums(left - right)
            return _decide_by_channel(left - right, step.relation)
    except _GIVES_UP as error:
        problem = str(error) or type(error).__name__
        return Verdict(False, f"sympy could not decide it: {problem}")


# The parts of a formula return in step after step.
@lru_cache(maxsize=8192)
def evaluated(formula: Expr, definitions: Definitions) -> Expr:
    """Return a formula with its definitions inserted and its derivatives and limits worked out.

    Sums become sums over all channels. This is the point at which sympy may simplify.
    """
    meanings = _meanings(definitions)
    if formula in meanings:
        return meanings[formula]
    if isinstance(formula, sp.Indexed) or not formula.args:
        return formula
    if isinstance(formula, sp.Derivative):
        body, (variable, _) = formula.args
        # The variable itself may be a definition, which must not be inserted before the derivative.
        free = tuple(item for item in definitions if item[0] != variable)
        slope = sp.diff(evaluated(body, free), variable)
        return slope.subs(variable, evaluated(variable, definitions))
    parts = [evaluated(part, definitions) for part in formula.args]
    if isinstance(formula, sp.Limit):
        body, variable, *_ = parts
        return sp.limit(body.subs(C, _N + 1), variable, 0, "+")
    worked_out = formula.func(*parts)
    if isinstance(worked_out, Others):
        return worked_out.as_sum()
    return worked_out


@lru_cache(maxsize=256)
def _meanings(definitions: Definitions) -> dict[Expr, Expr]:
    """Return the evaluated formula of each symbol, which may use the symbols before it."""
    meanings: dict[Expr, Expr] = {}
    for number, (symbol, formula) in enumerate(definitions):
        meanings[symbol] = evaluated(formula, definitions[:number])
    return meanings


def reduced(formula: Expr) -> Expr:
    """Return an evaluated formula in n, m, v and e: without sums, as channel i depends on them."""
    without_sums = formula.replace(lambda part: isinstance(part, sp.Sum), _reduced_sum)
    return without_sums.xreplace(_EVERY_TOKEN)


@lru_cache(maxsize=8192)
def _reduced_sum(total: Expr) -> Expr:
    body, (place, *_) = total.args
    body = sp.expand(body)
    result = sp.Integer(0)
    # A term with Kronecker's delta contributes at one channel only.
    while True:
        deltas = [delta for delta in body.atoms(sp.KroneckerDelta) if place in delta.args]
        if not deltas:
            break
        delta = deltas[0]
        other = delta.args[1] if delta.args[0] == place else delta.args[0]
        elsewhere = body.xreplace({delta: sp.Integer(0)})
        result += (body - elsewhere).subs(place, other)
        body = sp.expand(elsewhere)
    # The rest must be a polynomial of degree 2 in x_k.
    for degree, sum_of_others in enumerate(_OTHERS):
        coefficient = body.coeff(x[place], degree)
        if coefficient.has(place):
            break
        result += coefficient * (sum_of_others + x_i**degree)
        body = sp.expand(body - coefficient * x[place] ** degree)
    if body != 0:
        raise NotReducibleError(
            f"{total} is not a mean or a variance: channel i depends on no other sums"
        )
    return result


def _decide_by_channel(difference: Expr, relation: str) -> Verdict:
    difference = reduced(difference)
    if difference.has(sp.zoo, sp.nan, sp.oo):
        return Verdict(False, f"a side is not finite: {difference}")
    differs = _differs_at_a_token(difference)
    if relation == "!=":
        proven = differs
    elif relation == "=":
        # One token refutes a false equation much faster than algebra.
        proven = not differs and remainder(difference) == 0
    else:
        proven = _has_sign(remainder(difference), strict=relation == ">")
    return Verdict(proven, "" if proven else difference)


def _decide_by_sums(difference: Expr) -> Verdict:
    """Decide with sympy's own derivatives of symbolic sums, and with the linearity of sums."""
    difference = sp.refine(difference.doit(), sp.Q.le(i, C))
    # sympy does not take factors that are sums themselves out of a sum.
    linear = difference.replace(lambda part: isinstance(part, sp.Sum), _expanded_sum)
    remains = sp.expand(sp.numer(sp.together(linear)))
    return Verdict(remains == 0, "" if remains == 0 else remains)


def _differs_at_a_token(difference: Expr) -> bool:
    """Return whether a difference without sums is not 0 at one token of rational numbers."""
    draw = random.Random(0)
    values = {}
    symbols = difference.atoms(sp.Symbol, sp.Indexed, sp.KroneckerDelta)
    for symbol in sorted(symbols, key=str):
        if isinstance(symbol, sp.KroneckerDelta):
            values[symbol] = sp.Integer(0)
            continue
        number = sp.Rational(draw.randint(1, 40), draw.randint(1, 9))
        if not symbol.is_nonnegative:
            number *= draw.choice((-1, 1))
        values[symbol] = number
    value = sp.N(difference.xreplace(values), 50)
    return bool(value.is_number and abs(value) > _NOISE)


def _expanded_sum(total: Expr) -> Expr:
    """Return a sum over the channels as a sum of sums, with all constant factors outside."""
    body, (index, *_) = total.args
    result = sp.Integer(0)
    for term in sp.Add.make_args(sp.expand(body)):
        constant, rest = term.as_independent(index)
        # One name for the index, so that equal sums are found equal.
        name = index if k in rest.free_symbols else k
        result += constant * sp.Sum(rest.subs(index, name), (name, 1, C)).doit()
    return result


def remainder(formula: Expr) -> Expr:
    """Return the simplest form of a formula in n, v, e, m and numbers; 0 only if it is always 0.

    Roots and exponentials become symbols, and the squares of the root symbols are replaced by
    the terms under the roots. Then only the numerator decides, because all denominators are positive.
    A formula that is not a quotient of polynomials in such symbols keeps its form, and is 0 only if
    sympy finds that.
    """
    roots: dict[Expr, Expr] = {}
    exponentials: dict[Expr, Expr] = {}

    def name_root(power: Expr) -> Expr:
        root = roots.setdefault(power.base, sp.Dummy("r", positive=True))
        return root ** (2 * power.exp)

    def name_exponential(exponential: Expr) -> Expr:
        # Exponentials of multiples of one argument are powers of one symbol.
        factor, argument = exponential.args[0].as_coeff_Mul()
        symbol = exponentials.setdefault(argument, sp.Dummy("E", positive=True))
        return symbol**factor

    formula = _split(formula.rewrite(sp.exp))
    formula = formula.replace(_is_root, name_root)
    formula = formula.replace(lambda part: isinstance(part, sp.exp), name_exponential)
    numerator, denominator = sp.fraction(sp.together(formula))
    numerator = sp.expand(numerator)
    for base, root in roots.items():
        numerator = sp.expand(sp.rem(numerator, root**2 - base, root))
    meanings = {root: sp.sqrt(base) for base, root in roots.items()}
    for argument, symbol in exponentials.items():
        meanings[symbol] = sp.exp(argument)
    return (numerator / denominator).xreplace(meanings)


# The same roots return in step after step.
@lru_cache(maxsize=8192)
def _split(formula: Expr) -> Expr:
    """Factor the terms under roots and in logarithms, and move factors of known sign outside."""
    if not formula.args:
        return formula
    formula = formula.func(*(_split(part) for part in formula.args))
    if _is_root(formula):
        return sp.expand_power_base(sp.factor(formula.base) ** formula.exp)
    if isinstance(formula, sp.log):
        return sp.expand_log(sp.log(sp.factor(formula.args[0])))
    if isinstance(formula, sp.exp):
        return sp.expand_power_exp(sp.exp(sp.expand(formula.args[0])))
    return formula


def _is_root(formula: Expr) -> bool:
    return bool(formula.is_Pow and formula.exp.is_Rational and formula.exp.q == 2)


def _has_sign(formula: Expr, *, strict: bool) -> bool:
    """Return whether a quotient is not negative, or positive, wherever its denominator is not 0."""
    numerator, denominator = sp.fraction(sp.together(formula))
    if _is_quotient_positive(sp.factor(numerator), sp.factor(denominator), strict=strict):
        return True
    # The sign may be visible in x_i, and not in the deviation e.
    in_x = {_E: _X - _M}
    numerator = sp.expand(numerator.xreplace(in_x))
    denominator = sp.expand(denominator.xreplace(in_x))
    return _is_quotient_positive(numerator, denominator, strict=strict)


def _is_quotient_positive(numerator: Expr, denominator: Expr, *, strict: bool) -> bool:
    if denominator.is_nonpositive:
        numerator = -numerator
        denominator = -denominator
    if not denominator.is_nonnegative:
        return False
    if strict:
        return bool(numerator.is_positive)
    return bool(numerator.is_nonnegative)
