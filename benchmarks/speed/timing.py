"""Time contenders in rounds in which all run in random order; return medians and quartiles over the rounds."""

from __future__ import annotations

import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import repeat
from typing import Any, NamedTuple

import torch

from dynorm.errors import ArgumentError

Call = Callable[[], Any]
LEAST_ROUNDS = 7
# Seconds that one contender runs in one round; more on a GPU, because of the wait for the end.
SLICE = {"cpu": 1e-3, "cuda": 1e-2}
MOST_REPETITIONS = 1 << 20


class Measured(NamedTuple):
    """The seconds per call in each round, and the calls per round, by contender."""

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

    Each is warmed up, and is repeated for a millisecond per round (ten on a GPU). All run in each
    round, in a random order, and the garbage collector is off until the last one has run. All
    rounds together take at most ``seconds``, unless that is fewer rounds than
    :data:`LEAST_ROUNDS` or ``rounds``.
    """
    wait: Call = torch.cuda.synchronize if device == "cuda" else lambda: None
    repetitions: dict[str, int] = {}
    times: dict[str, list[float]] = {name: [] for name in calls}
    order = list(calls)
    generator = random.Random(seed)
    with _uncollected():
        round_seconds = 0.0
        for name, call in calls.items():
            count, call_seconds = _repetitions(call, SLICE[device], wait, clock)
            repetitions[name] = count
            round_seconds += count * call_seconds
        affordable = int(seconds / round_seconds) if round_seconds else rounds
        for _ in range(min(rounds, max(LEAST_ROUNDS, affordable))):
            generator.shuffle(order)
            for name in order:
                if repetitions[name] > 1:
                    # The contender before has left its data in the cache.
                    calls[name]()
                times[name].append(_timed(calls[name], repetitions[name], wait, clock))
    return Measured(times, repetitions)


def _repetitions(
    call: Call,
    slice_: float,
    wait: Call,
    clock: Callable[[], float],
) -> tuple[int, float]:
    """Return the number of calls that fill a slice, and the seconds of one; the tries are the warm-up."""
    call()
    count = 1
    while True:
        call_seconds = _timed(call, count, wait, clock)
        if call_seconds * count >= slice_ or count >= MOST_REPETITIONS:
            return count, call_seconds
        # At most ten times the last number, because the first calls are the slowest.
        most = 10 * count
        estimate = int(1.1 * slice_ / call_seconds) if call_seconds > 0 else most
        count = min(most, max(count + 1, estimate))


def _timed(
    call: Call,
    count: int,
    wait: Call,
    clock: Callable[[], float],
) -> float:
    wait()
    start = clock()
    for _ in repeat(None, count):
        call()
    wait()
    return (clock() - start) / count


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


class Spread(NamedTuple):
    """The middle of some values and the half of them around it."""

    median: float
    lower: float
    upper: float

    def scaled(self, factor: float) -> Spread:
        """Return the same in another unit; the factor is positive."""
        return Spread(*(factor * value for value in self))

    def rounded(self, digits: int = 4) -> list[float]:
        """Return median and quartiles to some significant digits, as they are kept."""
        return [float(f"{value:.{digits}g}") for value in self]


def spread(values: Sequence[float]) -> Spread:
    """Return the median and the quartiles, interpolated between neighbours; of one value, the value."""
    if not values or not all(map(math.isfinite, values)):
        raise ArgumentError(f"a spread needs finite values, at least one, got {list(values)[:4]}")
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    lower, median, upper = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median, lower, upper)


def ratio(above: Sequence[float], below: Sequence[float]) -> Spread:
    """Return the spread of the ratios in each round, in which a slow round cancels."""
    if len(above) != len(below):
        raise ArgumentError(
            f"two contenders must have the same rounds, got {len(above)} and {len(below)}"
        )
    quotients = [a / b for a, b in zip(above, below, strict=True)]
    return spread(quotients)
