"""What is claimed: statements made of steps. Nothing here computes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Relation = Literal["=", "!=", ">=", ">"]
"""What a step claims; ``!=`` is claimed of a misprint: that the two are not the same function."""

Domain = Literal["positive", "nonnegative", "real"]


@dataclass(frozen=True)
class Step:
    """One link of a proof.

    Args:
        reason: Why it holds, in words; a formula between dollar signs is LaTeX.
        left: Formula; see :mod:`dynorm.paper.proof.formula`.
        right: Formula.
        relation: How the two are related.
        tag: The equation's number in the source, if it has one.
        follows: Whether ``left`` is the ``right`` of the step before, so that it need not be shown again.
        rules: ``"channel"`` reduces each sum to what channel i sees; ``"sums"`` proves those rules themselves.
    """

    reason: str
    left: str
    right: str
    relation: Relation = "="
    tag: str = ""
    follows: bool = False
    rules: Literal["channel", "sums"] = "channel"


@dataclass(frozen=True)
class Statement:
    """A theorem, an equation or an identity, with its proof.

    Args:
        name: Short, for the command line.
        title: For readers.
        source: The text that states it.
        equations: Numbers of the equations that it covers, as the source counts them.
        claim: The formula or sentence that is proven; LaTeX between dollar signs.
        assumes: Where it holds, in words.
        steps: The proof.
        definitions: Names that stand for formulas.
        numbers: Free numbers and where they lie; those not named here are real.
        remarks: What a reader should know besides.
        misprint: Whether it is about a mistake in a text, and shows what was meant.
        least_channels: The smallest C for which it is meant.
    """

    name: str
    title: str
    source: str
    equations: str
    claim: str
    assumes: str
    steps: tuple[Step, ...]
    definitions: Mapping[str, str] = field(default_factory=dict)
    numbers: Mapping[str, Domain] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()
    misprint: bool = False
    least_channels: int = 2


def chain(start: str, *links: tuple[str, str] | tuple[str, str, str]) -> tuple[Step, ...]:
    """Return a step for each link of ``start = a = b = ...``.

    Args:
        start: The first formula.
        links: For each, the next formula, the reason, and the equation's number where there is one.

    Returns:
        The steps, all but the first following the one before.

    Example:
        >>> [step.left for step in chain("a*b/b", ("a*1", "b cancels"), ("a", "one is neutral"))]
        ['a*b/b', 'a*1']
    """
    steps = []
    left = start
    for position, (right, reason, *tag) in enumerate(links):
        steps.append(Step(reason, left, right, tag="".join(tag), follows=position > 0))
        left = right
    return tuple(steps)


PAPER = "The Mathematical Relationship Between Layer Normalization and Dynamic Activation Functions (2503.21708)"
FIRST_TEXT = "Elementwise Layer Normalization, the first version of 2503.21708"
NOTE = "The note: LayerNorm is centring, then RMSNorm, then the bias"
OURS = "dynorm, beyond the sources"

TOKEN: Mapping[str, str] = {
    "mu": "sum_k(x_k) / C",
    "sigma": "sqrt(sum_k((x_k - mu)**2) / C)",
    "y_i": "(x_i - mu) / sigma",
    "F": "1 / (C*sigma)",
    "sigma_others": "sqrt(others((x_k - mu)**2) / (C - 1))",
    "m_i": "others(x_k) / (C - 1)",
    "v_i": "others((x_k - m_i)**2) / (C - 1)",
    "beta_i": "(C - 1)*sigma_others**2 - sigma**2",
}
"""LayerNorm's quantities, and those that leave channel i out."""
