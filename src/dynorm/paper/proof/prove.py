"""Prove statements, check them with numbers, and collect the results in one report."""

import fnmatch
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from sympy import sstr

from dynorm.errors import ArgumentError
from dynorm.paper.proof.exact import Verdict, decide
from dynorm.paper.proof.numbers import Measured, autograd_error, measure, tokens_for
from dynorm.paper.proof.statement import Statement, Step
from dynorm.paper.proof.statements import STATEMENTS
from dynorm.plain import JsonObject, plain

# Larger differences from dynorm's float64 are not rounding.
_ROUNDING = 1e-11


@dataclass(frozen=True)
class CheckedStep:
    """A step with the result of the algebra and of the numbers."""

    step: Step
    verdict: Verdict
    measured: Measured

    @property
    def holds(self) -> bool:
        """Whether it is proven and no number contradicts it."""
        return self.verdict.proven and self.measured.holds

    def to_dict(self) -> JsonObject:
        """Return the step as JSON can hold it, its formulas as sympy writes them."""
        return {
            "left": sstr(self.step.left, order="none"),
            "relation": self.step.relation,
            "right": sstr(self.step.right, order="none"),
            "reason": self.step.reason,
            "equation": self.step.tag,
            "proven": self.verdict.proven,
            "remains": self.verdict.remains,
            "numbers_hold": self.measured.holds,
            "digits_error": self.measured.error,
        }


@dataclass(frozen=True)
class CheckedStatement:
    """A statement with its checked steps."""

    statement: Statement
    steps: tuple[CheckedStep, ...]
    # The largest relative error of dynorm and of automatic differentiation, in float64.
    autograd: float
    seconds: float

    @property
    def proven(self) -> bool:
        """Whether algebra proves each step."""
        return all(step.verdict.proven for step in self.steps)

    @property
    def digits_hold(self) -> bool:
        """Whether the numbers agree with each step to 50 digits."""
        return all(step.measured.holds for step in self.steps)

    @property
    def digits(self) -> float:
        """The largest relative difference of two equal sides, in 50-digit arithmetic."""
        largest = 0.0
        for step in self.steps:
            if step.measured.error is not None:
                largest = max(largest, step.measured.error)
        return largest

    @property
    def autograd_holds(self) -> bool:
        """Whether dynorm and automatic differentiation are exact up to rounding."""
        return self.autograd < _ROUNDING

    @property
    def holds(self) -> bool:
        """Whether it is proven and no number contradicts it."""
        return self.proven and self.digits_hold and self.autograd_holds

    def to_dict(self) -> JsonObject:
        """Return the statement as JSON can hold it."""
        return {
            "name": self.statement.name,
            "title": self.statement.title,
            "source": self.statement.source,
            "equations": self.statement.equations,
            "holds": self.holds,
            "proven": self.proven,
            "autograd_error": self.autograd,
            "digits_error": self.digits,
            "seconds": round(self.seconds, 3),
            "steps": [step.to_dict() for step in self.steps],
        }


@dataclass(frozen=True)
class Report:
    """The results of all statements, with the seed of the random tokens."""

    statements: tuple[CheckedStatement, ...]
    seed: int
    seconds: float

    @property
    def holds(self) -> bool:
        """Whether every statement holds."""
        return all(checked.holds for checked in self.statements)

    def to_dict(self) -> JsonObject:
        """Return the report as JSON can hold it; errors that are not finite are None."""
        report: JsonObject = plain(
            {
                "holds": self.holds,
                "seed": self.seed,
                "seconds": round(self.seconds, 3),
                "statements": [checked.to_dict() for checked in self.statements],
            }
        )
        return report


def prove(
    only: Sequence[str] = (),
    *,
    seed: int = 0,
    track: Callable[[Iterable[Statement]], Iterable[Statement]] = iter,
) -> Report:
    """Prove the statements with certain names or globs, or all, and check them at random tokens.

    A statement that fails is a row of the report, not an error. A name that fits no statement is an
    error. ``track`` wraps the statements to show a progress bar.
    """
    chosen = choose(only)
    start = time.perf_counter()
    checked = tuple(check(statement, seed) for statement in track(chosen))
    return Report(checked, seed, time.perf_counter() - start)


def choose(only: Sequence[str]) -> tuple[Statement, ...]:
    """Return the statements with the given names or globs, or all if there are none."""
    if not only:
        return STATEMENTS
    names = [statement.name for statement in STATEMENTS]
    chosen: set[str] = set()
    for pattern in only:
        matching = fnmatch.filter(names, pattern)
        if not matching:
            raise ArgumentError(
                f"no statement is called {pattern!r}: give one of {', '.join(names)}, or a glob"
            )
        chosen.update(matching)
    return tuple(statement for statement in STATEMENTS if statement.name in chosen)


def check(statement: Statement, seed: int = 0) -> CheckedStatement:
    """Prove one statement and check it with numbers."""
    start = time.perf_counter()
    tokens = tokens_for(statement, seed)
    steps = []
    for step in statement.steps:
        verdict = decide(step, statement)
        steps.append(CheckedStep(step, verdict, measure(step, tokens)))
    autograd = autograd_error(statement, tokens)
    return CheckedStatement(statement, tuple(steps), autograd, time.perf_counter() - start)
