"""Data parallel on 4 and 2 gloo processes: calibration and training equal to one process's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import dynorm.parallel
from tests.parallel import data_cases as cases
from tests.parallel.launch import Found, launch, values


def same(found: Any, expected: Any, **tolerance: float) -> None:
    """Compare numbers, lists of them, and dicts of such."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            same(found[name], value, **tolerance)
    else:
        assert found == pytest.approx(expected, **tolerance)


def equal_on_all_ranks(found: Found, case: str) -> Any:
    """The result of the ranks, which is the same to the last bit."""
    first, *others = values(found, case)
    assert all(other == first for other in others), case
    return first


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def four(folder: Path) -> Found:
    return launch(
        "data_cases", 4, folder, "calibrate", "ddp", "fsdp", "fsdp_scaled_dyt", "mixed", "witnesses"
    )


@pytest.mark.slow
def test_calibration_on_shares_of_the_data_is_that_on_all_of_it(four: Found) -> None:
    found = equal_on_all_ranks(four, "calibrate")
    for kind, (numbers, _) in cases.KINDS.items():
        shares = cases.batches(4, numbers)
        one = cases.calibrated(kind, cases.together(shares))
        assert found[kind]["batches"] == sum(numbers)
        assert found[kind]["tokens"] == one["tokens"]
        assert (
            one["tokens"]
            == [sum(int(b["attention_mask"].sum()) for share in shares for b in share)] * 5
        )
        same(found[kind]["values"], one["values"], rel=1e-10, abs=1e-10)
        same(found[kind]["errors"], one["errors"], rel=1e-9)
    one = cases.initialized(cases.together(cases.batches(4, (1, 1, 1, 1)))[0])
    same(found["init"], one, rel=1e-10)


@pytest.mark.slow
def test_twenty_steps_of_ddp_and_fsdp_are_those_of_one_process_and_two_go_on_from_four(
    four: Found, folder: Path
) -> None:
    one = cases.net("dyt")
    losses, optimizer = cases.train(one, range(cases.FEW))
    found = equal_on_all_ranks(four, "fsdp_scaled_dyt")
    assert found["losses"] == pytest.approx(losses, rel=1e-10)
    same(found["values"], cases.whole(one), rel=1e-10, abs=1e-10)
    rest, _ = cases.train(one, range(cases.FEW, cases.STEPS), optimizer=optimizer)
    found = equal_on_all_ranks(four, "ddp")
    assert found["losses"] == pytest.approx(losses + rest, rel=1e-10)
    same(found["values"], cases.whole(one), rel=1e-10, abs=1e-10)

    one = cases.net(witnesses=(3, 17))
    losses, _ = cases.train(one, range(cases.FEW))
    for found in equal_on_all_ranks(four, "witnesses").values():
        assert found["losses"] == pytest.approx(losses, rel=1e-10)
        same(found["values"], cases.whole(one), rel=1e-10, abs=1e-10)
        assert found["witnesses"] == [[3, 17]] * 5

    one = cases.net("dyisru")
    losses, optimizer = cases.train(one, range(cases.STEPS))
    found = equal_on_all_ranks(four, "fsdp")
    assert found["losses"] == pytest.approx(losses, rel=1e-10)
    same(found["values"], cases.whole(one), rel=1e-10, abs=1e-10)
    assert found["losses"][-1] < 0.95 * found["losses"][0]

    # In bfloat16 the ranks' rows are rounded apart; a thousandth was seen.
    with cases.alone():
        halves = cases.mixed(folder)
    found = equal_on_all_ranks(four, "mixed")
    assert found["dtypes"] == halves["dtypes"] == ["torch.float32"]
    assert found["losses"] == pytest.approx(halves["losses"], rel=5e-3)
    assert found["losses"] == pytest.approx(losses[: cases.FEW], rel=2e-2)

    two = equal_on_all_ranks(launch("data_cases", 2, folder, "resumed"), "resumed")
    saved = equal_on_all_ranks(four, "fsdp")
    same(two["loaded"], saved["values"], rel=1e-12, abs=1e-12)
    more, _ = cases.train(one, range(cases.STEPS, cases.STEPS + cases.MORE), optimizer=optimizer)
    assert two["losses"] == pytest.approx(more, rel=1e-10)
    same(two["values"], cases.whole(one), rel=1e-10, abs=1e-10)


def test_one_process_sums_nothing_over_ranks() -> None:
    shares = cases.batches(1, (2,))
    without = cases.calibrated("dyisru", shares[0])
    with cases.alone():
        within = cases.calibrated("dyisru", shares[0])
        dynorm.parallel.require_equal_ranks(cases.net())
    assert within == without
