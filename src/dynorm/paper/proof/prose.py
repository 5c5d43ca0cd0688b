"""Sentences with LaTeX between dollar signs, for the terminal and for a page."""

from __future__ import annotations

import re
from html import escape

_COMMANDS = {
    "mu": "μ", "sigma": "σ", "alpha": "α", "beta": "β", "gamma": "γ", "delta": "δ", "varepsilon": "ε",
    "sum": "Σ", "neq": "≠", "geq": "≥", "leq": "≤", "gg": "≫", "pm": "±", "cdot": "·", "to": "→", "prime": "′",
    "Rightarrow": "⇒", "Leftrightarrow": "⇔", "top": "⊤", "|": "‖", ",": " ", "log": "log", "tanh": "tanh",
    "left": "", "right": "", "lim": "lim",
}  # fmt: skip
_LOW = dict(zip("0123456789ijklnt=+-", "₀₁₂₃₄₅₆₇₈₉ᵢⱼₖₗₙₜ₌₊₋", strict=True)) | {"≠": "≠", " ": ""}
_HIGH = dict(zip("0123456789+-⊤", "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⊤", strict=True)) | {"′": "′"}

_SPACED = ("neq", "geq", "leq", "gg", "to", "log", "Rightarrow", "Leftrightarrow")
_ATOM = re.compile(r"d?[A-Za-zα-ω\d][ᵢⱼₖₗ₀-₉⁰¹²³⁴-⁹]*|√\w|√\([^()]*(\([^()]*\)[^()]*)*\)")
_TOKEN = re.compile(r"\\([a-zA-Z]+|.)|(.)")


def as_text(sentence: str) -> str:
    r"""Return a sentence as plain text.

    Example:
        >>> as_text(r"So $\frac{d}{dx_i} (x_i - \mu) = \frac{C-1}{C}$, not 1.")
        'So d/dxᵢ (xᵢ − μ) = (C−1)/C, not 1.'
    """
    parts = sentence.split("$")
    return "".join(_plain(part) if odd % 2 else part for odd, part in enumerate(parts))


def as_html(sentence: str) -> str:
    """Return a sentence as HTML, its formulas as MathML.

    Raises:
        ArgumentError: If latex2mathml is not installed; see :func:`mathml`.
    """
    parts = sentence.split("$")
    return "".join(mathml(part) if odd % 2 else escape(part) for odd, part in enumerate(parts))


def mathml(latex: str, *, display: bool = False) -> str:
    """Return LaTeX as a MathML element, which browsers show without help."""
    from latex2mathml.converter import convert

    element: str = convert(latex, display="block" if display else "inline")
    return element


def _plain(latex: str) -> str:
    text, _ = _read(latex, 0)
    text = re.sub(r"\s*·\s*", "·", text.replace("-", "−"))
    return re.sub(r" +", " ", text).strip()


def _read(latex: str, start: int) -> tuple[str, int]:
    """Return the text up to the closing brace of the group, or the end, and where it ends."""
    text, at = "", start
    while at < len(latex) and latex[at] != "}":
        piece, at = _piece(latex, at)
        text += piece
    return text, at


def _piece(latex: str, at: int) -> tuple[str, int]:
    """Return the text of one symbol, command or group, and where it ends."""
    if latex[at] == "{":
        text, end = _read(latex, at + 1)
        return text, end + 1
    if latex[at] in "_^":
        script, end = _piece(latex, at + 1)
        return _script(script, latex[at]), end
    match = _TOKEN.match(latex, at)
    assert match is not None
    command, end = match[1], match.end()
    if command is None:
        return match[2], end
    if command in ("frac", "sqrt", "mathrm", "tilde"):
        first, end = _piece(latex, end)
        if command == "frac":
            second, end = _piece(latex, end)
            return f"{_grouped(first)}/{_grouped(second)}", end
        return {"sqrt": f"√{_grouped(first)}", "mathrm": first, "tilde": "ỹ"}[command], end
    # The space that ends the name of a command is shown only before what is set apart anyhow.
    if command.isalpha() and command not in _SPACED and re.match(r" [\w\\(]", latex[end : end + 2]):
        end += 1
    return _COMMANDS[command], end


def _script(text: str, kind: str) -> str:
    table = _LOW if kind == "_" else _HIGH
    if all(letter in table for letter in text):
        return "".join(table[letter] for letter in text)
    return f"{kind}{text}" if len(text) == 1 or text.isalpha() else f"{kind}({text})"


def _grouped(text: str) -> str:
    """Return a part of a fraction or under a root, in parentheses unless it is one number, name or differential."""
    return text if _ATOM.fullmatch(text) else f"({text.strip()})"
