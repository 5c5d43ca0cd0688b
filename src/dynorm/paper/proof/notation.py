"""Formulas for readers: as LaTeX, and as one line of text for the terminal."""

from __future__ import annotations

import ast
from collections.abc import Callable

from dynorm.paper.proof.formula import SUMS, argument_name, channel, delta, function, parse

# Name in a formula: LaTeX, text.
SYMBOLS = {
    "mu": (r"\mu", "μ"),
    "sigma": (r"\sigma", "σ"),
    "sigma_others": (r"\sigma_{\neq i}", "σ≠ᵢ"),
    "alpha": (r"\alpha", "α"),
    "beta": (r"\beta", "β"),
    "beta_0": (r"\beta_0", "β₀"),
    "beta_t": (r"\beta_t", "βₜ"),
    "beta_i": (r"\beta_i", "βᵢ"),
    "eps": (r"\varepsilon", "ε"),
    "Y": (r"\tilde{y}", "ỹ"),
    "Y_i": (r"\tilde{y}_i", "ỹᵢ"),
    "x_i": ("x_i", "xᵢ"),
    "y_i": ("y_i", "yᵢ"),
    "m_i": ("m_i", "mᵢ"),
    "v_i": ("v_i", "vᵢ"),
    "s_i": ("s_i", "sᵢ"),
    "c_i": ("c(x)_i", "c(x)ᵢ"),
    "f": ("f", "f"),
    "Dy": (r"\frac{dy}{dx}", "dy/dx"),
    "dy_du": (r"\frac{dy}{du}", "dy/du"),
    "y_0": ("y_0", "y₀"),
    "c_lhs": (r"c^{\mathrm{LHS}}", "c_LHS"),
    "c_rhs": (r"c^{\mathrm{RHS}}", "c_RHS"),
    "MS": (r"\mathrm{MS}", "MS"),
    "MS_c": (r"\mathrm{MS}(c(x))", "MS(c(x))"),
    "Var": (r"\mathrm{Var}", "Var"),
    "LN_i": (r"\mathrm{LN}(x)_i", "LN(x)ᵢ"),
    "RMS_i": (r"\mathrm{RMS}(x)_i", "RMS(x)ᵢ"),
}
_SUBSCRIPTS = {"i": "ᵢ", "j": "ⱼ", "k": "ₖ", "l": "ₗ"}
_VECTORS = {"x": ("x", "x"), "gamma": (r"\gamma", "γ"), "bias": (r"\mathrm{bias}", "bias")}
_SUPERSCRIPTS = str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻")

# How strongly a construct binds.
_SUM, _PRODUCT, _PREFIX, _POWER, _ATOM = range(1, 6)


def latex(text: str) -> str:
    r"""Return a formula as LaTeX, in the order in which it was written.

    Example:
        >>> latex("(x_i - mu) / sqrt(sigma**2)")
        '\\frac{x_i - \\mu}{\\sqrt{\\sigma^{2}}}'
    """
    return _latex(parse(text))[0]


def plain(text: str) -> str:
    """Return a formula as one line of text.

    Example:
        >>> plain("(x_i - mu) / sqrt(sigma**2)")
        '(xᵢ − μ) / √(σ²)'
    """
    return _plain(parse(text))[0]


_Shown = tuple[str, int]


def _latex(node: ast.expr) -> _Shown:
    match node:
        case ast.Constant(value=value):
            return str(value), _ATOM
        case ast.Name(id=name):
            return symbol(name, 0), _ATOM
        case ast.UnaryOp(operand=operand):
            return f"-{_inside(_latex, operand, _PRODUCT)}", _SUM
        case ast.BinOp(left=left, op=ast.Div(), right=right):
            return rf"\frac{{{_latex(left)[0]}}}{{{_latex(right)[0]}}}", _PREFIX
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return f"{_inside(_latex, left, _ATOM)}^{{{_latex_exponent(right)}}}", _POWER
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            first, second = _inside(_latex, left, _PREFIX if _is_sum(left) else _PRODUCT), _factor(_latex, right)
            return f"{first}{_latex_times(left, right)}{second}", _PRODUCT
        case ast.BinOp(left=left, op=op, right=right):
            return _sum(_latex, left, op, right, "-")
        case ast.Call():
            return _latex_call(node)
    raise AssertionError(ast.dump(node))


def _latex_exponent(node: ast.expr) -> str:
    match node:
        case ast.BinOp(left=left, op=ast.Div(), right=right):
            return f"{_latex(left)[0]}/{_latex(right)[0]}"
    return _latex(node)[0]


def _latex_times(left: ast.expr, right: ast.expr) -> str:
    """A dot where two factors would else be read as one."""
    dotted = any(isinstance(n, ast.Constant) or _is_fraction(n) for n in (right, _leftmost(right)))
    return r" \cdot " if dotted or (_is_fraction(left) and not isinstance(right, ast.Name)) else r"\,"


def _is_fraction(node: ast.expr) -> bool:
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div)


def _leftmost(node: ast.expr) -> ast.expr:
    while isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Mult, ast.Pow)):
        node = node.left
    return node


def _is_sum(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and function(node) in (*SUMS, "d", "diff", "limit")


def _latex_call(node: ast.Call) -> _Shown:
    name, body = function(node), node.args[0]
    if name == "sqrt":
        return rf"\sqrt{{{_latex(body)[0]}}}", _ATOM
    if name in SUMS:
        bounds = rf"{SUMS[name]} \neq i" if name == "others" else rf"{SUMS[name]}=1"
        top = "" if name == "others" else "^{C}"
        return rf"\sum\limits_{{{bounds}}}{top} {_inside(_latex, body, _PRODUCT)}", _PRODUCT
    if name in ("d", "diff"):
        variable = "x_i" if name == "d" else symbol(argument_name(node), 0)
        if isinstance(body, ast.Name):
            return rf"\frac{{d{symbol(body.id, 0)}}}{{d{variable}}}", _PREFIX
        return rf"\frac{{d}}{{d{variable}}} {_tight(_latex, body)}", _PRODUCT
    if name == "limit":
        return rf"\lim_{{{symbol(argument_name(node), 0)} \to 0}} {_tight(_latex, body)}", _PRODUCT
    return rf"\{name}\left({_latex(body)[0]}\right)", _ATOM


def _plain(node: ast.expr) -> _Shown:
    match node:
        case ast.Constant(value=value):
            return str(value), _ATOM
        case ast.Name(id=name):
            return symbol(name, 1), _ATOM
        case ast.UnaryOp(operand=operand):
            return f"−{_inside(_plain, operand, _PRODUCT)}", _SUM
        case ast.BinOp(left=left, op=ast.Div(), right=right):
            return f"{_inside(_plain, left, _PRODUCT)} / {_inside(_plain, right, _POWER)}", _PRODUCT
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            exponent = _plain_exponent(ast.unparse(right).replace(" ", ""))
            return f"{_inside(_plain, left, _ATOM)}{exponent}", _POWER
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            first = _inside(_plain, left, _PREFIX if _is_sum(left) or _is_fraction(left) else _PRODUCT)
            return f"{first}·{_inside(_plain, right, _PREFIX)}", _PRODUCT
        case ast.BinOp(left=left, op=op, right=right):
            return _sum(_plain, left, op, right, "−")
        case ast.Call():
            return _plain_call(node)
    raise AssertionError(ast.dump(node))


def _plain_exponent(text: str) -> str:
    return f"^({text})" if "/" in text else text.translate(_SUPERSCRIPTS)


def _plain_call(node: ast.Call) -> _Shown:
    name, body = function(node), node.args[0]
    if name == "sqrt":
        return f"√{_atom(_plain, body)}", _ATOM
    if name in SUMS:
        return f"Σ{'ₖ≠ᵢ' if name == 'others' else _SUBSCRIPTS[SUMS[name]]} {_tight(_plain, body)}", _PRODUCT
    if name in ("d", "diff"):
        variable = "xᵢ" if name == "d" else symbol(argument_name(node), 1)
        if isinstance(body, ast.Name):
            return f"d{symbol(body.id, 1)}/d{variable}", _PREFIX
        return f"d/d{variable} {_tight(_plain, body)}", _PREFIX
    if name == "limit":
        return f"lim[{symbol(argument_name(node), 1)}→0] {_tight(_plain, body)}", _PREFIX
    return f"{name}({_plain(body)[0]})", _ATOM


def symbol(name: str, style: int) -> str:
    """Return how a name is shown: style 0 is LaTeX, 1 is text."""
    if name in SYMBOLS:
        return SYMBOLS[name][style]
    if indices := delta(name):
        return rf"\delta_{{{''.join(indices)}}}" if style == 0 else "δ" + "".join(_SUBSCRIPTS[n] for n in indices)
    if of := channel(name):
        return f"{_VECTORS[of[0]][style]}{'_' + of[1] if style == 0 else _SUBSCRIPTS[of[1]]}"
    return name


def _sum(show: Callable[[ast.expr], _Shown], left: ast.expr, op: ast.operator, right: ast.expr, minus: str) -> _Shown:
    sign, needed = (minus, _PRODUCT) if isinstance(op, ast.Sub) else ("+", _SUM)
    # What follows a sign must not start with another.
    if isinstance(right, ast.UnaryOp):
        needed = _PRODUCT
    return f"{_inside(show, left, _SUM)} {sign} {_inside(show, right, needed)}", _SUM


def _inside(show: Callable[[ast.expr], _Shown], node: ast.expr, needed: int) -> str:
    """Return a part, in parentheses where it binds less than needed."""
    text, strength = show(node)
    return text if strength >= needed else _parentheses(text, show)


def _factor(show: Callable[[ast.expr], _Shown], node: ast.expr) -> str:
    return _inside(show, node, _PRODUCT)


def _tight(show: Callable[[ast.expr], _Shown], node: ast.expr) -> str:
    """Return what an operator acts on: in parentheses unless it is one symbol, a power, a root or a fraction."""
    return _inside(show, node, _PREFIX)


def _atom(show: Callable[[ast.expr], _Shown], node: ast.expr) -> str:
    """Return a part in parentheses unless it is a number or a name."""
    text, _ = show(node)
    return text if isinstance(node, (ast.Constant, ast.Name)) else _parentheses(text, show)


def _parentheses(text: str, show: Callable[[ast.expr], _Shown]) -> str:
    return rf"\left({text}\right)" if show is _latex else f"({text})"
