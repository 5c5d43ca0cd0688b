"""Formulas as text: what is proven, what is computed and what is shown come from the same tree.

A formula is a Python expression of names, integers, ``+ - * / **`` and the functions of
:data:`ARITIES`. ``x_i`` is the channel that is looked at, ``x_k`` one that a sum runs over; ``gamma``, ``bias``
and the gains ``g``, which are not negative, have channels too, ``delta_ki`` is Kronecker's delta.
Other names are free numbers, or stand for a formula of their own.

=================  =========================================================================
``sum_k(f)``       sum of f over k = 1 ... C; ``sum_l`` likewise over l
``others(f)``      sum of f over all k except i
``d(f)``           derivative with respect to x_i, all other channels held
``diff(f, y)``     derivative with respect to the number y
``limit(f, h)``    limit for h to 0 from above
=================  =========================================================================
"""

import ast
import operator
import re
import tomllib
from functools import lru_cache
from html import escape
from pathlib import Path
from typing import Any

from dynorm.errors import ArgumentError

SUMS = {"sum_k": "k", "sum_l": "l", "others": "k"}
ELEMENTARY = ("sqrt", "log", "exp", "tanh")
ARITIES = {
    **dict.fromkeys((*SUMS, *ELEMENTARY, "d"), 1),
    "diff": 2,
    "limit": 2,
}  # how many arguments

_INDEXED = re.compile(r"(?:(x|gamma|bias|g)_|delta_([ijkl]))([ijkl])")
_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_OPERATORS |= {ast.Pow: operator.pow}
_ALLOWED = (
    ast.BinOp,
    ast.UnaryOp,
    ast.Call,
    ast.Name,
    ast.Constant,
    ast.Load,
    ast.USub,
    *_OPERATORS,
)


@lru_cache(maxsize=4096)
def parse(text: str) -> ast.expr:
    """Return the tree of a formula, or raise ArgumentError; it is shared, so it must not be changed."""
    try:
        tree = ast.parse(text, mode="eval").body
    except SyntaxError as error:
        raise ArgumentError(
            f"a formula must be a Python expression, got {text!r}: {error.msg}"
        ) from error
    for node in ast.walk(tree):
        problem = ""
        if not isinstance(node, _ALLOWED):
            problem = f"{type(node).__name__} cannot stand"
        elif isinstance(node, ast.Constant) and type(node.value) is not int:
            problem = f"numbers must be integers, got {node.value!r}"
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name not in ARITIES:
                problem = f"unknown function {name!r}"
            elif len(node.args) != ARITIES[name]:
                problem = f"wrong number of arguments of {name!r}"
            elif not isinstance(node.args[-1], ast.Name) and len(node.args) == 2:
                problem = f"the second argument of {name!r} must be a name"
        if problem:
            raise ArgumentError(
                f"{problem} in the formula {text!r}: see dynorm.paper.proof.formula"
            )
    return tree


def names(text: str) -> set[str]:
    """Return the names in a formula, those of functions too."""
    return {node.id for node in ast.walk(parse(text)) if isinstance(node, ast.Name)}


def indexed(name: str) -> tuple[str, str] | None:
    """Return vector and index of ``x_i``, both indices of ``delta_ki``; None for other names."""
    match = _INDEXED.fullmatch(name)
    return (match[1] or match[2], match[3]) if match else None


class Reading:
    """A meaning of formulas: Python evaluates them, with names and functions as a subclass defines them.

    A subclass has ``number``, ``name``, a ``library`` of :data:`ELEMENTARY` functions, ``total``
    (of :data:`SUMS`), ``diff`` and ``limit``. The last three get their formula as a function, which
    they call as often as they need.
    """

    def read(self, text: str) -> Any:
        """Return what a formula means."""
        return self._read(parse(text))

    def _read(self: Any, node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=value):
                return self.number(value)
            case ast.Name(id=name):
                return self.name(name)
            case ast.UnaryOp(operand=operand):
                return -self._read(operand)
            case ast.BinOp(left=left, op=op, right=right):
                return _OPERATORS[type(op)](self._read(left), self._read(right))
            case ast.Call(func=ast.Name(id=name), args=[body]) if name in ELEMENTARY:
                return getattr(self.library, name)(self._read(body))
            case ast.Call(func=ast.Name(id=name), args=[body]) if name in SUMS:
                return self.total(name, lambda: self._read(body))
            case ast.Call(func=ast.Name(id=name), args=[body, *variable]):
                of = ast.unparse(variable[0]) if variable else "x_i"
                return (self.limit if name == "limit" else self.diff)(lambda: self._read(body), of)
        raise AssertionError(ast.dump(node))


_SIGNS = tomllib.loads(Path(__file__).with_name("signs.toml").read_text(encoding="utf-8"))
SYMBOLS: dict[str, str] = _SIGNS["symbols"]

# How strongly a construct binds.
_SUM, _PRODUCT, _PREFIX, _POWER, _ATOM = range(1, 6)
_SUPERSCRIPTS = str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻")


def latex(text: str) -> str:
    """Return a formula as LaTeX, in the order in which it was written; sympy would sort and simplify it."""
    return _show(parse(text), True)[0]


def one_line(text: str) -> str:
    """Return a formula as one line of text."""
    return _show(parse(text), False)[0]


def _show(node: ast.expr, tex: bool) -> tuple[str, int]:
    """Return a formula as LaTeX or as text, and how strongly it binds."""
    match node:
        case ast.Constant(value=value):
            return str(value), _ATOM
        case ast.Name(id=name):
            return _symbol(name, tex), _ATOM
        case ast.UnaryOp(operand=operand):
            return f"{'-' if tex else '−'}{_inside(operand, _PRODUCT, tex)}", _SUM
        case ast.BinOp(left=left, op=ast.Div(), right=right):
            if tex:
                return rf"\frac{{{_show(left, tex)[0]}}}{{{_show(right, tex)[0]}}}", _PREFIX
            return f"{_inside(left, _PRODUCT, tex)} / {_inside(right, _POWER, tex)}", _PRODUCT
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            exponent = ast.unparse(right).replace(" ", "")
            high = f"^({exponent})" if "/" in exponent else exponent.translate(_SUPERSCRIPTS)
            return f"{_inside(left, _ATOM, tex)}{f'^{{{exponent}}}' if tex else high}", _POWER
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            # A call such as a sum takes all that follows it.
            is_long = isinstance(left, ast.Call) and ast.unparse(left.func) not in ELEMENTARY
            first = _inside(left, _PREFIX if is_long or _is_fraction(left) else _PRODUCT, tex)
            second = _inside(right, _PRODUCT if tex else _PREFIX, tex)
            return f"{first}{_times(left, right) if tex else '·'}{second}", _PRODUCT
        case ast.BinOp(left=left, op=op, right=right):
            # Nothing that begins with a sign follows a sign.
            minus = isinstance(op, ast.Sub)
            needed = _PRODUCT if minus or isinstance(right, ast.UnaryOp) else _SUM
            sign = "+" if not minus else "-" if tex else "−"
            return f"{_inside(left, _SUM, tex)} {sign} {_inside(right, needed, tex)}", _SUM
        case ast.Call(func=ast.Name(id=name), args=[body, *variable]):
            return _show_call(name, body, [ast.unparse(v) for v in variable], tex)
    raise AssertionError(ast.dump(node))


def _show_call(name: str, body: ast.expr, variable: list[str], tex: bool) -> tuple[str, int]:
    if name == "sqrt":
        under = _show(body, tex)[0]
        if tex:
            return rf"\sqrt{{{under}}}", _ATOM
        return f"√{under if isinstance(body, (ast.Constant, ast.Name)) else f'({under})'}", _ATOM
    if name in SUMS:
        if tex:
            bounds = r"_{k \neq i}" if name == "others" else rf"_{{{SUMS[name]}=1}}^{{C}}"
            return rf"\sum\limits{bounds} {_inside(body, _PRODUCT, tex)}", _PRODUCT
        return (
            f"Σ{'ₖ≠ᵢ' if name == 'others' else _LOW[SUMS[name]]} {_inside(body, _PREFIX, tex)}",
            _PRODUCT,
        )
    to = _symbol(variable[0] if variable else "x_i", tex)
    after = _inside(body, _PREFIX, tex)
    if name in ("d", "diff"):
        if isinstance(body, ast.Name):
            return rf"\frac{{d{after}}}{{d{to}}}" if tex else f"d{after}/d{to}", _PREFIX
        return (rf"\frac{{d}}{{d{to}}} {after}", _PRODUCT) if tex else (f"d/d{to} {after}", _PREFIX)
    if name == "limit":
        return (
            (rf"\lim_{{{to} \to 0}} {after}", _PRODUCT)
            if tex
            else (f"lim[{to}→0] {after}", _PREFIX)
        )
    return (
        rf"\{name}\left({_show(body, tex)[0]}\right)" if tex else f"{name}({_show(body, tex)[0]})",
        _ATOM,
    )


def _inside(node: ast.expr, needed: int, tex: bool) -> str:
    """Return a part, in parentheses where it binds less than needed."""
    text, strength = _show(node, tex)
    return text if strength >= needed else rf"\left({text}\right)" if tex else f"({text})"


def _symbol(name: str, tex: bool) -> str:
    if name in SYMBOLS:
        shown = SYMBOLS[name]
    elif name.startswith("delta_"):
        shown = rf"\delta_{{{name[6:]}}}"
    else:
        vector, _, index = name.partition("_")
        shown = "_".join([SYMBOLS.get(vector, vector), *([index] if index else [])])
    return shown if tex else _text(shown)


def _times(left: ast.expr, right: ast.expr) -> str:
    """Return a dot where two factors would else be read as one."""
    first = right
    while isinstance(first, ast.BinOp) and isinstance(first.op, (ast.Mult, ast.Pow)):
        first = first.left
    dotted = any(
        isinstance(factor, ast.Constant) or _is_fraction(factor) for factor in (right, first)
    )
    return (
        r" \cdot " if dotted or (_is_fraction(left) and not isinstance(right, ast.Name)) else r"\,"
    )


def _is_fraction(node: ast.expr) -> bool:
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div)


_SPACED = ("neq", "geq", "leq", "gg", "to", "log", "Rightarrow", "Leftrightarrow", "in", "|", ",")
_LOW = dict(zip("0123456789ijklnt=+-", "₀₁₂₃₄₅₆₇₈₉ᵢⱼₖₗₙₜ₌₊₋", strict=True)) | {"≠": "≠", " ": ""}
_HIGH = dict(zip("0123456789+-⊤", "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⊤", strict=True)) | {"′": "′"}
_SINGLE = re.compile(r"d?[A-Za-zα-ω\d][ᵢⱼₖₗ₀-₉⁰¹²³⁴-⁹]*|√\w|√\([^()]*(\([^()]*\)[^()]*)*\)")
_COMMAND = re.compile(r"\\(?!frac|sqrt|mathrm|tilde)([a-zA-Z]+|.)( (?=[\w\\(]))?")
_SCRIPT = re.compile(r"\\(?:mathrm|(tilde))\{([^{}]*)\}|([_^])(?:\{([^{}]*)\}|([^{}\\]))")
_FRACTION = re.compile(r"\\(?:sqrt|frac\{([^{}]*)\})\{([^{}]*)\}")


def as_text(sentence: str) -> str:
    r"""Return a sentence, with LaTeX between dollar signs, as plain text.

    Example:
        >>> as_text(r"So $\frac{d}{dx_i} (x_i - \mu) = \frac{C-1}{C}$, not 1.")
        'So d/dxᵢ (xᵢ − μ) = (C−1)/C, not 1.'
    """
    parts = sentence.split("$")
    return "".join(_text(part) if odd % 2 else part for odd, part in enumerate(parts))


def as_html(sentence: str) -> str:
    """Return a sentence as HTML, its formulas as MathML."""
    parts = sentence.split("$")
    return "".join(mathml(part) if odd % 2 else escape(part) for odd, part in enumerate(parts))


def mathml(latex: str, *, display: bool = False) -> str:
    """Return LaTeX as a MathML element, which browsers show without help."""
    from latex2mathml.converter import convert

    element: str = convert(latex, display="block" if display else "inline")
    return element


def _text(latex: str) -> str:
    # The space that ends the name of a command is kept only beside what is set apart anyhow.
    text = _COMMAND.sub(
        lambda m: _SIGNS["commands"][m[1]] + (m[2] or "") * (m[1] in _SPACED), latex
    )

    def script(match: re.Match[str]) -> str:
        tilde, name, mark, group, letter = match.groups(default="")
        inner, table = group or letter, _LOW if mark == "_" else _HIGH
        if not mark:
            return "ỹ" if tilde else name
        if all(sign in table for sign in inner):
            return "".join(table[sign] for sign in inner)
        return f"{mark}{inner}" if len(inner) == 1 or inner.isalpha() else f"{mark}({inner})"

    def fraction(match: re.Match[str]) -> str:
        parts = match.groups(default="")
        above, below = (part if _SINGLE.fullmatch(part) else f"({part.strip()})" for part in parts)
        return f"√{below}" if match[1] is None else f"{above}/{below}"

    previous = ""
    while text != previous:
        previous, text = text, _FRACTION.sub(fraction, _SCRIPT.sub(script, text))
    text = re.sub(r"\s*·\s*", "·", text.replace("-", "−"))
    return re.sub(r" +", " ", text).strip()
