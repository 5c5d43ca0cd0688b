"""The clock: rounds in which every contender runs, in random order, for about a millisecond or more."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import repeat
from typing import Any, NamedTuple

import torch

__all__ = ["LEAST_ROUNDS", "Call", "Measured", "measure"]

Call = Callable[[], Any]
LEAST_ROUNDS = 7
# What one contender runs for in one round; more on a GPU, where the end has to be waited for.
SLICE = {"cpu": 1e-3, "cuda": 1e-2}
MOST_REPETITIONS = 1 << 20


class Measured(NamedTuple):
    """What rounds gave.

    Args:
        times: seconds a call, one a round, by contender.
        repetitions: calls a round, by contender.
    """

    times: dict[str, list[float]]
    repetitions: dict[str, int]


def measure(
    calls: Mapping[str, Call],
    *,
    rounds: int,
    seconds: float,
    seed: int = 0,
    device: str = "cpu",
    clock: Callable[[], float] = time.perf_counter,
) -> Measured:
    """Time contenders side by side.

    Each is warmed up and given as many repetitions as fill a millisecond (ten on a GPU). A round runs all in an order
    of its own; the garbage collector waits until the last is done.

    Args:
        calls: what is timed, by name.
        rounds: the most rounds.
        seconds: what all rounds together may take; there are at least :data:`LEAST_ROUNDS`, or ``rounds`` if fewer.
        seed: of the orders.
        device: where the calls run; on "cuda" their end is waited for.
        clock: seconds since some moment.

    Returns:
        A time a call for each contender and round.

    Example:
        >>> found = measure({"nothing": lambda: None}, rounds=3, seconds=1.0)
        >>> len(found.times["nothing"])
        3
    """
    wait = torch.cuda.synchronize if device == "cuda" else _nothing
    order, generator = list(calls), random.Random(seed)
    with _uncollected():
        estimates = {name: _repetitions(call, SLICE[device], wait, clock) for name, call in calls.items()}
        round_seconds = sum(count * one for count, one in estimates.values())
        affordable = int(seconds / round_seconds) if round_seconds else rounds
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in repeat(None, min(rounds, max(LEAST_ROUNDS, affordable))):
            generator.shuffle(order)
            for name in order:
                count = estimates[name][0]
                if count > 1:
                    # What came before has left its own data in the cache.
                    calls[name]()
                times[name].append(_timed(calls[name], count, wait, clock))
    return Measured(times, {name: count for name, (count, _) in estimates.items()})


def _repetitions(call: Call, slice_: float, wait: Call, clock: Callable[[], float]) -> tuple[int, float]:
    """Return how many calls fill a slice, and the seconds of one; the tries are the warm-up."""
    call()
    count = 1
    while True:
        one = _timed(call, count, wait, clock)
        if one * count >= slice_ or count >= MOST_REPETITIONS:
            return count, one
        # From the last time, but at most tenfold: the first calls are the slowest.
        count = min(10 * count, max(count + 1, int(1.1 * slice_ / one) if one > 0 else 10 * count))


def _timed(call: Call, count: int, wait: Call, clock: Callable[[], float]) -> float:
    wait()
    start = clock()
    for _ in repeat(None, count):
        call()
    wait()
    return (clock() - start) / count


def _nothing() -> None:
    pass


@contextmanager
def _uncollected() -> Iterator[None]:
    """Keep the garbage collector from running in the middle of a time."""
    before = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()
