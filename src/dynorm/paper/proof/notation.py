"""Formulas and sentences as people read them: LaTeX by sympy, MathML, and one line of text."""

from html import escape

import sympy as sp
from sympy.printing.latex import LatexPrinter

from dynorm.paper.proof.vocabulary import Expr

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


class Printer(LatexPrinter):  # type: ignore[misc]
    """sympy's LaTeX printer, with terms in the order in which they were written."""

    def __init__(self) -> None:
        super().__init__({"order": "none", "fold_frac_powers": True, "mul_symbol": r"\,"})

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


def latex(formula: Expr) -> str:
    """Return a formula as LaTeX, in the order in which it was written."""
    text: str = Printer().doprint(formula)
    return text


def one_line(formula: Expr) -> str:
    """Return a formula as one line of text, as sympy writes it."""
    return str(sp.sstr(formula, order="none")).replace("**", "^")


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
