"""The clock and the statistics, on times that the tests make up."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest

from benchmarks.speed.timing import LEAST_ROUNDS, Spread, measure, ratio, spread
from dynorm.errors import ArgumentError


class Clock:
    """Time that passes only in calls, each of which takes so many seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls: list[str] = []

    def call(self, name: str, seconds: float) -> Callable[[], None]:
        def run() -> None:
            assert not gc.isenabled()
            self.calls.append(name)
            self.now += seconds

        return run

    def __call__(self) -> float:
        return self.now


def test_a_spread_is_the_median_and_the_quartiles() -> None:
    assert spread([4.0, 1.0, 3.0, 2.0]) == Spread(2.5, 1.75, 3.25)
    assert spread([7.0]) == Spread(7.0, 7.0, 7.0)
    assert Spread(2.0, 1.0, 3.0).scaled(10) == Spread(20.0, 10.0, 30.0)
    assert Spread(1.23456e-6, 1.0, 2.0).rounded(3) == [1.23e-6, 1.0, 2.0]
    assert Spread(98765.4, 1.0, 2.0).rounded() == [98770.0, 1.0, 2.0]


def test_an_outlier_moves_neither_median_nor_quartiles() -> None:
    assert spread([1.0, 1.0, 1.0, 1.0, 1e9]) == Spread(1.0, 1.0, 1.0)


def test_ratios_are_taken_round_by_round() -> None:
    # The last rounds were slow for both: the ratio of the medians would be 2.5.
    ours, theirs = [1.0, 2.0, 4.0, 40.0], [2.0, 4.0, 8.0, 80.0]
    assert ratio(theirs, ours) == Spread(2.0, 2.0, 2.0)
    assert ratio([1.0, 10.0, 1.0], [1.0, 1.0, 10.0]).median == 1.0


@pytest.mark.parametrize("values", [[], [1.0, float("nan")], [float("inf")]])
def test_what_is_no_time_is_refused(values: list[float]) -> None:
    with pytest.raises(ArgumentError, match=r"finite.*values"):
        spread(values)


def test_ratios_need_the_same_rounds() -> None:
    with pytest.raises(ArgumentError, match=r"same.*rounds"):
        ratio([1.0, 2.0], [1.0])


def test_each_contender_fills_its_slice_in_each_round() -> None:
    clock = Clock()
    calls = {"fast": clock.call("fast", 1e-5), "slow": clock.call("slow", 2e-3)}
    found = measure(calls, rounds=9, seconds=1.0, clock=clock)
    assert {name: len(times) for name, times in found.times.items()} == {"fast": 9, "slow": 9}
    assert found.times["fast"] == pytest.approx([1e-5] * 9)
    assert found.times["slow"] == pytest.approx([2e-3] * 9)
    assert found.repetitions["slow"] == 1
    # A millisecond, and no more than a tenth above it.
    assert 100 <= found.repetitions["fast"] <= 111


def test_rounds_are_as_many_as_can_be_afforded() -> None:
    for seconds, rounds in ((0.1, 10), (1e-9, LEAST_ROUNDS), (100.0, 31)):
        clock = Clock()
        found = measure({"a": clock.call("a", 1e-2)}, rounds=31, seconds=seconds, clock=clock)
        assert len(found.times["a"]) == rounds


def test_every_round_runs_all_in_an_order_of_its_own() -> None:
    orders = []
    for seed in (0, 0, 1):
        clock = Clock()
        names = ["a", "b", "c", "d"]
        measure(
            {name: clock.call(name, 1.0) for name in names},
            rounds=6,
            seconds=1e9,
            seed=seed,
            clock=clock,
        )
        # Each is called twice to be warmed up and to be estimated.
        assert clock.calls[:8] == [name for name in names for _ in range(2)]
        rounds = [clock.calls[8 + 4 * i : 12 + 4 * i] for i in range(6)]
        assert [sorted(order) for order in rounds] == [names] * 6
        assert len({tuple(order) for order in rounds}) > 2
        orders.append(rounds)
    assert orders[0] == orders[1] != orders[2]


@pytest.mark.parametrize("before", [True, False])
def test_the_garbage_collector_is_as_before_also_after_an_error(before: bool) -> None:
    def fail() -> None:
        raise KeyError("now")

    was = gc.isenabled()
    try:
        (gc.enable if before else gc.disable)()
        with pytest.raises(KeyError, match="now"):
            measure({"a": fail}, rounds=1, seconds=1.0)
        assert gc.isenabled() is before
    finally:
        (gc.enable if was else gc.disable)()
