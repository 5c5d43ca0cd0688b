"""Claims and their proofs as data: statements made of steps. Nothing here computes."""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Relation = Literal[
    "=", "!=", ">=", ">"
]  # misprints use !=: the two sides are not the same function

Domain = Literal["positive", "nonnegative", "real"]


@dataclass(frozen=True)
class Step:
    """One link of a proof: two formulas, as :mod:`dynorm.paper.proof.formula` reads them, and how they are related."""

    reason: str  # why it holds, in words; a formula between dollar signs is LaTeX
    left: str
    right: str
    relation: Relation = "="
    tag: str = ""  # the equation's number in the source, if it has one
    # whether ``left`` is the ``right`` of the step before, so that it need not be shown again
    follows: bool = False
    # Whether sympy's own symbolic sums prove it. All other steps use the rules that these steps
    # prove.
    by_sums: bool = False


@dataclass(frozen=True)
class Statement:
    """A theorem, an equation or an identity, with its proof; the words may hold LaTeX between dollar signs."""

    name: str  # short, for the command line
    title: str
    source: str
    equations: str  # numbers of the equations that it covers, as the source counts them
    claim: str
    assumes: str  # where it holds
    steps: tuple[Step, ...]
    definitions: Mapping[str, str] = field(default_factory=dict)  # names that stand for formulas
    # Free numbers and where they lie; those not named here are real.
    numbers: Mapping[str, Domain] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()  # what a reader should know besides
    misprint: bool = False  # whether it is about a mistake in a text, and shows what was meant
    # Formulas, each with Python code of dynorm's functions that computes it for all channels of a
    # token x.
    compared: Mapping[str, str] = field(default_factory=dict)
    least_channels: int = 2  # the smallest C for which it is meant


_LINE = re.compile(r"(.*?) ?(=|!=|>=|>) (.*?)(?: \[(\d+)\])?(?: +:: (.*))?")


def proof(text: str, short: Mapping[str, str] | None = None, by_sums: int = 0) -> tuple[Step, ...]:
    r"""Read the steps of a proof, one per line: ``left = right [equation] :: reason``.

    A line that begins with a relation goes on from the one before; a line that begins with ``::``
    goes on with the reason. ``short`` has words that stand for longer formulas; the first
    ``by_sums`` steps are proven with sympy's own sums.

    Example:
        >>> steps = proof("a*b/b = a*ONE :: b cancels\n = a [7] :: one\n :: is neutral", {"ONE": "1"})
        >>> [(step.left, step.right, step.tag, step.reason) for step in steps]
        [('a*b/b', 'a*1', '', 'b cancels'), ('a*1', 'a', '7', 'one is neutral')]
    """
    steps: list[Step] = []
    for line in _lines(text):
        match = _LINE.fullmatch(line)
        assert match is not None, line
        left, relation, right, tag, reason = match.groups(default="")
        left, right = (_spelled_out(side, short) for side in (left, right))
        start, first = left or steps[-1].right, len(steps) < by_sums
        step = Step(reason.replace(" :: ", " "), start, right, relation, tag, not left, first)  # type: ignore[arg-type]
        steps.append(step)
    return tuple(steps)


def _lines(text: str) -> list[str]:
    """Return the lines, each with those that go on from it."""
    return [line.strip() for line in re.sub(r"\n\s*:: ", " :: ", text).strip().splitlines()]


def _spelled_out(formula: str, short: Mapping[str, str] | None) -> str:
    for word, longer in (short or {}).items():
        formula = re.sub(rf"\b{word}\b", longer, formula)
    return formula


_DATA = tomllib.loads(Path(__file__).with_name("statements.toml").read_text(encoding="utf-8"))

METHOD: tuple[str, ...] = tuple(" ".join(text.split()) for text in _DATA["method"])
"""How statements are proven, in paragraphs."""


def load() -> tuple[Statement, ...]:
    """Return the statements of ``statements.toml``."""
    statements = []
    for entry in map(dict, _DATA["statement"]):
        tables = [
            *(_DATA["shared"][name] for name in entry.pop("with", ())),
            entry.get("definitions", {}),
        ]
        entry["definitions"] = {
            name: formula for table in tables for name, formula in table.items()
        }
        entry["source"] = _DATA["sources"][entry["source"]]
        short = entry.pop("short", None)
        entry["steps"] = proof(entry.pop("proof"), short, entry.pop("by_sums", 0))
        pairs = (line.split(" :: ") for line in _lines(entry.pop("dynorm")))
        entry["compared"] = {_spelled_out(formula, short): code for formula, code in pairs}
        # Long lines of a sentence are broken in the file.
        entry |= {name: entry[name].replace("\n", " ") for name in ("claim", "assumes")}
        statements.append(Statement(**entry | {"remarks": tuple(entry.get("remarks", ()))}))
    return tuple(statements)
