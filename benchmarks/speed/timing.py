"""The clock: rounds in which every contender runs, in random order, and the medians and quartiles over them."""

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
# Seconds that one contender runs in one round; more on a GPU, where the end has to be waited for.
SLICE = {"cpu": 1e-3, "cuda": 1e-2}
MOST_REPETITIONS = 1 << 20


class Measured(NamedTuple):
    """Seconds per call, one for each round, and the calls per round, by contender."""

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

    Each is warmed up and given as many repetitions as fill a millisecond (ten on a GPU). A round
    runs all in an order of its own; the garbage collector waits until the last is done. All rounds
    together take ``seconds`` or less, but there are at least :data:`LEAST_ROUNDS`, or ``rounds`` if
    fewer.
    """
    wait: Call = torch.cuda.synchronize if device == "cuda" else lambda: None
    order, generator = list(calls), random.Random(seed)
    with _uncollected():
        estimates = {
            name: _repetitions(call, SLICE[device], wait, clock) for name, call in calls.items()
        }
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


def _repetitions(
    call: Call, slice_: float, wait: Call, clock: Callable[[], float]
) -> tuple[int, float]:
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
    """Return the median and the quartiles, interpolated between neighbours; all alike for one value."""
    if not values or not all(map(math.isfinite, values)):
        raise ArgumentError(f"a spread needs finite values, at least one, got {list(values)[:4]}")
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    lower, median, upper = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median, lower, upper)


def ratio(above: Sequence[float], below: Sequence[float]) -> Spread:
    """Return the spread of the ratios in each round: what slows a whole round down cancels."""
    if len(above) != len(below):
        raise ArgumentError(
            f"two contenders must have the same rounds, got {len(above)} and {len(below)}"
        )
    return spread([a / b for a, b in zip(above, below, strict=True)])
