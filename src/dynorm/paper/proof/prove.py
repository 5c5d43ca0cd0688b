"""All statements, proven and measured, as one report."""

import fnmatch
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dynorm.errors import ArgumentError, require_library
from dynorm.paper.proof.statement import Statement, Step, load
from dynorm.table import plain

if TYPE_CHECKING:
    from dynorm.paper.proof.exact import Verdict
    from dynorm.paper.proof.numbers import Measured

STATEMENTS: tuple[Statement, ...] = load()  # in the order in which they rest on each other

_ROUNDING = 1e-11


@dataclass(frozen=True)
class CheckedStep:
    """A step, what algebra says of it, and what numbers say of it."""

    step: Step
    verdict: "Verdict"
    measured: "Measured"

    @property
    def holds(self) -> bool:
        """Return whether it is proven, and no number contradicts."""
        return self.verdict.outcome == "proven" and self.measured.holds


@dataclass(frozen=True)
class CheckedStatement:
    """A statement with its checked steps."""

    statement: Statement
    steps: tuple[CheckedStep, ...]
    autograd: (
        float  # largest relative error against dynorm and automatic differentiation, in float64
    )
    seconds: float

    @property
    def proven(self) -> bool:
        """Return whether algebra proves each step."""
        return all(step.verdict.outcome == "proven" for step in self.steps)

    @property
    def digits_hold(self) -> bool:
        """Return whether the numbers agree with each step to 50 digits."""
        return all(step.measured.holds for step in self.steps)

    @property
    def digits(self) -> float:
        """Return the largest relative difference of both sides of an equation, in 50-digit arithmetic."""
        return max(
            (step.measured.error for step in self.steps if step.measured.error is not None),
            default=0.0,
        )

    @property
    def autograd_holds(self) -> bool:
        """Return whether dynorm and automatic differentiation differ by rounding alone."""
        return self.autograd < _ROUNDING

    @property
    def holds(self) -> bool:
        """Return whether it is proven, and no number contradicts."""
        return self.proven and self.digits_hold and self.autograd_holds


@dataclass(frozen=True)
class Report:
    """What became of all statements, with random tokens of a seed."""

    statements: tuple[CheckedStatement, ...]
    seed: int
    seconds: float

    @property
    def holds(self) -> bool:
        """Return whether every statement holds."""
        return all(checked.holds for checked in self.statements)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON can hold it; errors that are not finite are None."""
        rows = []
        for checked in self.statements:
            about = ("name", "title", "source", "equations", "misprint")
            row = {name: getattr(checked.statement, name) for name in about} | {
                "holds": checked.holds,
                "proven": checked.proven,
                "autograd_error": checked.autograd,
                "digits_error": checked.digits,
                "seconds": round(checked.seconds, 3),
                "steps": [
                    {
                        name: getattr(row.step, name)
                        for name in ("left", "relation", "right", "reason")
                    }
                    | {
                        "equation": row.step.tag,
                        "outcome": row.verdict.outcome,
                        "remains": row.verdict.remains,
                    }
                    | {"numbers_hold": row.measured.holds, "digits_error": row.measured.error}
                    for row in checked.steps
                ],
            }
            rows.append(row)
        found = {
            "holds": self.holds,
            "seed": self.seed,
            "seconds": round(self.seconds, 3),
            "statements": rows,
        }
        return {name: plain(value) for name, value in found.items()}


def prove(
    only: Sequence[str] = (),
    *,
    seed: int = 0,
    track: Callable[[Iterable[Statement]], Iterable[Statement]] = lambda statements: statements,
) -> Report:
    """Prove the statements of some names or globs, or all, and confirm them with numbers, on random tokens of a seed.

    A statement that fails is a row of the report, not an error; a name that fits none is one, and
    so is a library that is not installed. ``track`` wraps the statements, for a progress bar.
    """
    chosen = choose(only)
    for library in ("sympy", "mpmath"):
        require_library(library, "the proofs", "paper")
    start = time.perf_counter()
    checked = tuple(check(statement, seed) for statement in track(chosen))
    return Report(checked, seed, time.perf_counter() - start)


def choose(only: Sequence[str]) -> tuple[Statement, ...]:
    """Return the statements of the given names or globs, all when there are none."""
    names = [statement.name for statement in STATEMENTS]
    for pattern in only:
        if not fnmatch.filter(names, pattern):
            raise ArgumentError(
                f"no statement is called {pattern!r}: give one of {', '.join(names)}, or a glob"
            )
    return tuple(
        s for s in STATEMENTS if not only or any(fnmatch.fnmatchcase(s.name, p) for p in only)
    )


def check(statement: Statement, seed: int = 0) -> CheckedStatement:
    """Prove and measure one statement: one of :data:`STATEMENTS`, or an altered copy that keeps its name."""
    from dynorm.paper.proof.exact import decide
    from dynorm.paper.proof.numbers import autograd_error, measure, tokens_for

    start = time.perf_counter()
    tokens = tokens_for(statement, seed)
    steps = tuple(
        CheckedStep(s, decide(s, statement, seed), measure(s, tokens)) for s in statement.steps
    )
    return CheckedStatement(
        statement, steps, autograd_error(statement, tokens), time.perf_counter() - start
    )
