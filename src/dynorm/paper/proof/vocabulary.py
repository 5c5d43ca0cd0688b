"""The symbols and sums that the statements are written with: ordinary sympy objects.

``x_i`` is the channel that the statement looks at and ``x_k`` the channel that a sum runs over. C is
the symbolic number of channels, so a proof holds for every number of channels.

==================  ========================================================================
``sum_k(f)``        sum of f over k = 1 ... C, a ``sympy.Sum``; ``sum_l`` is the same over l
``others(f)``       sum of f over all k except i
``d(f)``            derivative with respect to x_i, with all other channels constant
``d(f, y)``         derivative with respect to the number y, a ``sympy.Derivative``
``limit(f, h)``     limit for h to 0 from above, a ``sympy.Limit``
``delta(k, i)``     Kronecker's delta
``real("a")``       a symbol for any real number; ``positive("a")`` is a positive number
``vector("v")``     a vector with one number per channel, a ``sympy.IndexedBase``: ``v[k]``
``isr_unit(z, b)``  the inverse square root unit, z over the root of b + z**2
==================  ========================================================================

sympy simplifies and sorts as soon as an expression is built, which would turn most steps of a proof
into ``0 = 0``. :func:`as_written` switches that off; the shared definitions below and all
statements are built inside it. Python still computes numbers: write ``Rational(1, 2)`` or ``x / 2``,
not ``1 / 2``.
"""

from contextlib import AbstractContextManager
from typing import Any

import sympy as sp

Expr = Any  # sympy has no types; this is a sympy expression


def as_written() -> AbstractContextManager[None]:
    """Return a context in which sympy keeps every expression as it is written."""
    context: AbstractContextManager[None] = sp.evaluate(False)
    return context


def real(name: str) -> Expr:
    """Return a symbol for any real number."""
    return sp.Symbol(name, real=True)


def positive(name: str) -> Expr:
    """Return a symbol for a positive number."""
    return sp.Symbol(name, positive=True)


def vector(name: str) -> Expr:
    """Return a vector with one real number per channel: ``v[k]`` is its channel k."""
    return sp.IndexedBase(name, real=True)


C = sp.Symbol("C", integer=True, positive=True)
i, j, k, ell = sp.symbols("i j k l", integer=True, positive=True)

# One number per channel: the token, LayerNorm's weight and bias, and the gains of witnesses.
x = vector("x")
gamma = vector("gamma")
bias = vector("bias")
g = sp.IndexedBase("g", nonnegative=True)

x_i = x[i]
x_k = x[k]
x_l = x[ell]
g_k = g[k]

delta = sp.KroneckerDelta


class Others(sp.Function):  # type: ignore[misc]
    """Sum over all channels k except i; sympy has no such sum."""

    def as_sum(self) -> Expr:
        """Return it as a sum over all channels, less the term of channel i."""
        (term,) = self.args
        return sp.Sum(term, (k, 1, C)) - term.subs(k, i)

    def _latex(self, printer: Any) -> str:
        return rf"\sum\limits_{{k \neq i}} {printer.summand(self.args[0])}"


def sum_over(term: Expr, index: Expr) -> Expr:
    """Return the sum of a term over all channels."""
    # Outside of this context sympy multiplies an unevaluated term by 1, and shows it.
    with sp.evaluate(True):
        return sp.Sum(term, (index, 1, C))


def sum_k(term: Expr) -> Expr:
    """Return the sum of a term over k = 1 ... C."""
    return sum_over(term, k)


def sum_l(term: Expr) -> Expr:
    """Return the sum of a term over l = 1 ... C."""
    return sum_over(term, ell)


def others(term: Expr) -> Expr:
    """Return the sum of a term over all k except i."""
    return Others(sp.sympify(term))


def d(formula: Expr, variable: Expr = x_i) -> Expr:
    """Return the derivative with respect to a number, by default ``x_i``."""
    return sp.Derivative(formula, variable)


def limit(formula: Expr, variable: Expr) -> Expr:
    """Return the limit where the variable goes to 0 from above."""
    return sp.Limit(formula, variable, 0, "+")


def isr_unit(z: Expr, beta: Expr) -> Expr:
    """Return the inverse square root unit: z over the root of ``beta + z**2``."""
    return z / sp.sqrt(beta + z**2)


# LayerNorm's quantities, and those that leave channel i out.
mu = real("mu")
sigma = real("sigma")
y_i = real("y_i")
F = real("F")
sigma_others = real("sigma_others")
m_i = real("m_i")
v_i = real("v_i")
beta_i = real("beta_i")

# Any y with 0 < y < sqrt(C - 1), by a number w > 0, and the substitution of appendix A.3.
w = positive("w")
y = real("y")
u = real("u")
dy_du = real("dy_du")

with as_written():
    n = C - 1  # the number of other channels
    R = sp.sqrt(C - 1)  # the bound of LayerNorm
    from_mean = x_i - mu
    from_others = x_i - m_i

    TOKEN = {
        mu: sum_k(x_k) / C,
        sigma: sp.sqrt(sum_k((x_k - mu) ** 2) / C),
        y_i: from_mean / sigma,
        F: 1 / (C * sigma),
        sigma_others: sp.sqrt(others((x_k - mu) ** 2) / n),
        m_i: others(x_k) / n,
        v_i: others((x_k - m_i) ** 2) / n,
        beta_i: n * sigma_others**2 - sigma**2,
    }
    SUBSTITUTED = {
        y: sp.sqrt(n / (w + 1)),
        u: y ** (-2),
        dy_du: 1 / d(y ** (-2), y),
    }
