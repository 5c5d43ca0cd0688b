"""Two processes: a sharded layer is the plain one, and rank 0 calibrates for all."""

from __future__ import annotations

import pytest

from tests.parallel.launch import Found, errors, launch, values

CASES = ("layers", "sharded_witnesses", "calibrated", "nan_on_the_first", "nan_on_the_second")


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return launch("tests.parallel.cases", 2, tmp_path_factory.mktemp("two"), *CASES)


def test_a_sharded_layer_is_the_plain_one_and_needs_no_collective(two: Found) -> None:
    for found in values(two, "layers"):
        assert len(found) == 8
        for name, (gap, collectives) in found.items():
            assert gap < 1e-12, name
            assert collectives == 0, name


def test_a_sharded_layer_takes_no_witnesses(two: Found) -> None:
    for kind, message in errors(two, "sharded_witnesses"):
        assert kind == "ArgumentError"
        assert "DTensor: leave such layers out" in message


def test_all_ranks_get_the_layers_of_the_first(two: Found) -> None:
    first, second = values(two, "calibrated")
    assert first == second
    assert len(first["state"]["1.witnesses"]) > 0


def test_an_error_of_the_first_rank_ends_all(two: Found) -> None:
    (kind, message), (other_kind, other_message) = errors(two, "nan_on_the_first")
    assert (kind, other_kind) == ("DataError", "DataError")
    assert "must be finite" in message
    assert other_message == f"rank 0 must get through, but failed: {message}"
    assert values(two, "nan_on_the_second") == ["fine", "fine"]
