"""Tensor parallel on 2 and 4 gloo processes: equal to one process, and collectives counted."""

from __future__ import annotations

from pathlib import Path

import pytest

import dynorm
from tests.parallel.launch import launch, values

CASES = (
    "layers",
    "witnesses",
    "other_axes",
    "block",
    "sequence_plan",
    "training",
    "kernel",
    "two_dimensions",
    "with_fsdp",
    "compiled",
    "special_witnesses",
)
GATHER, SCATTER = "all_gather_into_tensor", "reduce_scatter_tensor"


@pytest.mark.slow
def test_four_processes_compute_what_one_does_and_the_norms_say_nothing(tmp_path: Path) -> None:
    found = launch("tensor_cases", 4, tmp_path, *CASES)

    for rank in values(found, "layers"):
        assert len(rank) == 5 * 4 * 2
        for name, each in rank.items():
            assert each["gap"] < 1e-10, name
            # Forward and backward together.
            assert each["collectives"] == {}, name
            assert each["kept"], name

    exchanged = {"allgather_": 1, "allreduce_": 1}
    for rank in values(found, "witnesses"):
        # One number of float64 per token, from one to all channels.
        assert {tuple(each) for each in rank.pop("sent")} == {(1, 8)}
        assert len(rank) == 11 * 4 * 2
        for name, each in rank.items():
            assert each["gap"] < 1e-10, name
            assert each["collectives"] == (exchanged if "channels" in name else {}), name
            assert each["kept"], name

    for rank in values(found, "other_axes"):
        assert len(rank) == 6
        for name, each in rank.items():
            assert each["gap"] < 1e-10, name
            assert each["collectives"] == (exchanged if "witnesses" in name else {}), name

    # What attention and MLP need, whatever the norms: a gather before, a reduction after, the
    # reverse on the way back.
    matrices = {GATHER: 2, SCATTER: 2}
    for rank in values(found, "block"):
        assert all(each["gap"] < 1e-10 for each in rank.values()), rank
        for size in (2, 4):
            ours, rms, layer = (
                rank[f"dyisru {size}"],
                rank[f"rmsnorm {size}"],
                rank[f"layernorm {size}"],
            )
            assert ours["norm"] == [{}, {}]
            assert (ours["forward"], ours["backward"], ours["sums"]) == (matrices, matrices, 1)
            assert rms["norm"] == [{"all_reduce": 1}, {SCATTER: 1}]
            assert rms["forward"] == {**matrices, "all_reduce": 2}
            assert rms["backward"] == {GATHER: 2, SCATTER: 4}
            hand = rank[f"rmsnorm by hand {size}"]
            assert hand["norm"] == [{"all_reduce": 1}, {"all_reduce": 1}]
            assert hand["backward"] == {**matrices, "all_reduce": 2}
            assert layer["norm"] == [{GATHER: 3}, {GATHER: 3}]
            assert layer["forward"] == {GATHER: 6, SCATTER: 2}

    for rank in values(found, "sequence_plan"):
        assert all(each["gap"] < 1e-10 for each in rank.values()), rank
        # One gather for q, k and v, where ColwiseParallel makes one each.
        assert rank["dyisru"]["collectives"] == matrices
        assert rank["layernorm"]["collectives"] == {GATHER: 5, SCATTER: 2}

    for rank in values(found, "training"):
        one = [pytest.approx(step, rel=1e-10) for step in rank["losses"]["one"]]
        assert rank["losses"]["at once"] == one
        assert rank["losses"]["by the optimizer"] == one
        assert rank["sums"] == [{"allreduce_": 1}] * 6

    for rank in values(found, "kernel"):
        assert rank["type"] == "Tensor"
        assert rank["copy"] == 0
        if dynorm.kernels.backend("cpu") != "torch":
            assert rank["seen"] == [[8, pytest.approx(32**0.5), [3, 8]]]

    for rank in values(found, "two_dimensions"):
        assert len(rank) == 2
        for each in rank.values():
            assert each["gap"] < 1e-10
            # log_beta over both dimensions of the mesh, weight and bias over the first: two sums.
            assert (each["sums"], each["partial"]) == (2, False)

    for rank in values(found, "with_fsdp"):
        assert all(each < 1e-10 for each in rank.values()), rank

    for rank in values(found, "special_witnesses"):
        assert all(each < 1e-10 for each in rank.values()), rank

    for rank in values(found, "compiled"):
        assert all(each["gap"] < 1e-10 for each in rank.values()), rank
        assert rank["pure"]["collectives"] == {}
        assert rank["witnesses"]["collectives"] == {"allgather_": 1}
