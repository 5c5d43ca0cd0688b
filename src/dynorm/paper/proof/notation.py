"""Formulas and sentences as people read them: LaTeX by sympy, MathML, and one line of text."""

import re
import unicodedata
from html import escape

import sympy as sp
from sympy.printing.latex import LatexPrinter

from dynorm.paper.proof.vocabulary import Expr, Others

# Names whose LaTeX sympy cannot guess.
SYMBOLS = {
    "sigma_others": r"\sigma_{\neq i}",
    "eps": r"\varepsilon",
    "bias": r"\mathrm{bias}",
    "Y": r"\tilde{y}",
    "Y_i": r"\tilde{y}_i",
    "c_i": "c(x)_i",
    "c_lhs": r"c^{\mathrm{LHS}}",
    "c_rhs": r"c^{\mathrm{RHS}}",
    "Dy": r"\frac{dy}{dx}",
    "dy_du": r"\frac{dy}{du}",
    "MS": r"\mathrm{MS}",
    "MS_c": r"\mathrm{MS}(c(x))",
    "Var": r"\mathrm{Var}",
    "RMS_i": r"\mathrm{RMS}(x)_i",
}

RELATIONS = {"=": "=", "!=": r"\neq", ">=": r"\geq", ">": ">"}

# LaTeX's commands, as they are shown in a terminal.
_AS_TEXT = (
    (r"\\(left|right|limits|mathrm)", ""),
    (r"\\,", " "),
    (r"\\frac\{([^{}]*)\}\{([^{}]*)\}", r"(\1)/(\2)"),
    (r"\\sqrt\{([^{}]*)\}", r"√(\1)"),
    (r"\\tilde\{(\w)\}", r"\1~"),
    (r"\\(varepsilon|epsilon)", "ε"),
    (r"\\neq", "≠"),
    (r"\\geq", "≥"),
    (r"\\leq", "≤"),
    (r"\\pm", "±"),
    (r"\\cdot", "·"),
    (r"\\to", "→"),
    (r"\\in\b", "∈"),
    (r"\\sum", "Σ"),
    (r"\\prime", "′"),
    (r"\\top", "⊤"),
)
_GREEK = re.compile(r"\\(alpha|beta|gamma|delta|mu|sigma|tau)(?![a-z])")


class Printer(LatexPrinter):  # type: ignore[misc]
    """sympy's LaTeX printer, with terms in the order in which they were written."""

    def __init__(self, times: str) -> None:
        super().__init__({"order": "none", "fold_frac_powers": True, "mul_symbol": times})

    def summand(self, term: Expr) -> str:
        """Return a term to follow a sum or derivative sign, in parentheses if it is long."""
        latex: str = self._print(term)
        if term.is_Symbol or term.is_Indexed:
            return latex
        if term.is_Pow and term.exp.is_Integer and term.exp.is_positive:
            return latex
        return rf"\left({latex}\right)"

    def _print_Symbol(self, symbol: Expr, style: str = "plain") -> str:
        if symbol.name in SYMBOLS:
            return SYMBOLS[symbol.name]
        latex: str = super()._print_Symbol(symbol, style)
        return latex

    def _print_Indexed(self, channel: Expr) -> str:
        return f"{self._print(channel.base.label)}_{{{channel.indices[0]}}}"

    def _print_Add(self, formula: Expr, order: str | None = None) -> str:
        # a + b + c is (a + b) + c to Python.
        terms = list(formula.args)
        while terms[0].is_Add:
            terms[:1] = terms[0].args
        latex: str = super()._print_Add(sp.Add(*terms, evaluate=False), order)
        return latex

    def _print_Mul(self, product: Expr) -> str:
        # Division by b is multiplication with b**-1 to sympy.
        sign = ""
        above = []
        below = []
        for factor in _factors(product):
            if factor == -1:
                sign = "" if sign else "- "
            elif factor.is_Rational and not factor.is_Integer:
                above.append(sp.Integer(factor.p))
                below.append(sp.Integer(factor.q))
            elif factor.is_Pow and factor.exp.is_negative:
                below.append(_inverse(factor))
            else:
                above.append(factor)
        if not below:
            if sign and len(above) == 1 and above[0].is_Add:
                return rf"- \left({self._print(above[0])}\right)"
            return sign + self._product(above)
        # A numerator shows 1 only if it has no other factor.
        above = [factor for factor in above if factor != 1]
        return rf"{sign}\frac{{{self._product(above)}}}{{{self._product(below)}}}"

    def _product(self, factors: list[Expr]) -> str:
        if not factors:
            return "1"
        if len(factors) == 1:
            only: str = self._print(factors[0])
            return only
        text = ""
        for place, factor in enumerate(factors):
            if place:
                text += r" \cdot " if factor.is_Number else self._settings["mul_symbol_latex"]
            is_last = place == len(factors) - 1
            if factor.is_Add or factor.is_Mul or (_is_open(factor) and not is_last):
                text += rf"\left({self._print(factor)}\right)"
            else:
                text += self._print(factor)
        return text

    def _print_Sum(self, formula: Expr) -> str:
        term, (index, *_) = formula.args
        return rf"\sum\limits_{{{index}=1}}^{{C}} {self.summand(term)}"

    def _print_Derivative(self, formula: Expr) -> str:
        body, (variable, _) = formula.args
        over = rf"d{self._print(variable)}"
        if body.is_Symbol:
            return rf"\frac{{d{self._print(body)}}}{{{over}}}"
        return rf"\frac{{d}}{{{over}}} {self.summand(body)}"

    def _print_Limit(self, formula: Expr) -> str:
        body, variable, *_ = formula.args
        return rf"\lim_{{{self._print(variable)} \to 0}} {self.summand(body)}"


def _is_open(factor: Expr) -> bool:
    """Return whether a reader would take the next factor as a part of this one."""
    if isinstance(factor, sp.Derivative):
        return not factor.args[0].is_Symbol
    return isinstance(factor, sp.Sum | Others | sp.Limit)


def _inverse(power: Expr) -> Expr:
    """Return one over a power with a negative exponent."""
    if power.exp == -1:
        return power.base
    return sp.Pow(power.base, -power.exp, evaluate=False)


def _factors(product: Expr) -> list[Expr]:
    """Return the factors of a product, and of the products among them."""
    if not product.is_Mul:
        return [product]
    factors = []
    for factor in product.args:
        factors += _factors(factor)
    return factors


def latex(formula: Expr) -> str:
    """Return a formula as LaTeX, in the order in which it was written."""
    text: str = Printer(times=r"\,").doprint(formula)
    return text


def one_line(formula: Expr) -> str:
    """Return a formula as one line of text, as sympy writes it."""
    return str(sp.sstr(formula, order="none")).replace("**", "^")


def as_text(sentence: str) -> str:
    r"""Return a sentence, with LaTeX between dollar signs, as plain text for a terminal.

    Example:
        >>> as_text(r"So $\frac{C-1}{C} \geq \mu$, not 1.")
        'So (C-1)/(C) ≥ μ, not 1.'
    """
    parts = sentence.split("$")
    for place in range(1, len(parts), 2):
        text = parts[place]
        for pattern, shown in _AS_TEXT:
            text = re.sub(pattern, shown, text)
        text = _GREEK.sub(_greek, text)
        parts[place] = re.sub(r"[{}\\]", "", text)
    return "".join(parts)


def _greek(command: re.Match[str]) -> str:
    return unicodedata.lookup(f"GREEK SMALL LETTER {command[1].upper()}")


def as_html(sentence: str) -> str:
    """Return a sentence as HTML, its formulas as MathML."""
    parts = sentence.split("$")
    parts[::2] = map(escape, parts[::2])
    parts[1::2] = map(mathml, parts[1::2])
    return "".join(parts)


def mathml(latex: str, *, display: bool = False) -> str:
    """Return LaTeX as a MathML element, which browsers show without help."""
    from latex2mathml.converter import convert

    element: str = convert(latex, display="block" if display else "inline")
    return element
