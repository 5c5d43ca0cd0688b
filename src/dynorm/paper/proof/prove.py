"""Prove statements, check them with numbers, and collect the results in one report."""

import fnmatch
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from dynorm.errors import ArgumentError
from dynorm.paper.proof.exact import Verdict, decide
from dynorm.paper.proof.numbers import Measured, autograd_error, measure, tokens_for
from dynorm.paper.proof.statement import Statement, Step
from dynorm.paper.proof.statements import STATEMENTS

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


@dataclass(frozen=True)
class CheckedStatement:
    """A statement with its checked steps."""

    statement: Statement
    steps: tuple[CheckedStep, ...]
    # The largest relative error of dynorm and of automatic differentiation, in float64.
    autograd: float

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


@dataclass(frozen=True)
class Report:
    """The results of all statements."""

    statements: tuple[CheckedStatement, ...]

    @property
    def holds(self) -> bool:
        """Whether every statement holds."""
        return all(checked.holds for checked in self.statements)


def prove(
    only: Sequence[str] = (),
    *,
    track: Callable[[Iterable[Statement]], Iterable[Statement]] = iter,
) -> Report:
    """Prove the statements with certain names or globs, or all, and check them at random tokens.

    A statement that fails is a row of the report, not an error. A name that fits no statement is an
    error. ``track`` wraps the statements to show a progress bar.
    """
    return Report(tuple(map(check, track(choose(only)))))


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
    """Prove one statement and check it with numbers, at tokens that depend on the seed."""
    tokens = tokens_for(statement, seed)
    steps = []
    for step in statement.steps:
        verdict = decide(step, statement)
        steps.append(CheckedStep(step, verdict, measure(step, tokens)))
    return CheckedStatement(statement, tuple(steps), autograd_error(statement, tokens))
