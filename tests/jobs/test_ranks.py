"""Calibration, refinement, distillation on 2 and 4 gloo processes: equal to one process's; all stop where one does."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import dynorm
from dynorm.jobs.checkpoint import load_pretrained
from dynorm.jobs.convert import convert_pretrained
from dynorm.recipe import Recipe
from tests.jobs import ranks_cases as cases
from tests.parallel.launch import ROOT, Found, launch
from tests.parallel.test_data import equal_on_all_ranks, same

TIGHT = {"rel": 1e-8, "abs": 1e-8}
CASES = "tests.jobs.ranks_cases"
TORCHRUN = (
    sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d",
    "--rdzv-endpoint", "localhost:0",
)  # fmt: skip


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Found:
    folder = tmp_path_factory.mktemp("two")
    return launch(CASES, 2, folder, "job", "resumed", "recomputed", "shards", "uneven", "errors")


def in_one(ranks: int, **options: Any) -> dict[str, Any]:
    found: dict[str, Any] = cases.distilled(
        cases.calibrated(ranks), cases.batches(), accumulate=ranks, **options
    )
    return found


@pytest.mark.slow
def test_two_processes_find_what_one_finds(two: Found) -> None:
    model, refined = cases.stages(2)
    constants, one = cases.whole(model), in_one(2)
    found = equal_on_all_ranks(two, "job")
    same(found["refined"], refined, **TIGHT)
    same(found["constants"], constants, **TIGHT)
    assert found["samples"] == one["samples"] == 3 * 2 * cases.STEPS
    # The one measures the loss on the batches of a rank, the two on those of both.
    assert found["losses"][2] == pytest.approx(one["losses"][2], rel=1e-8)
    same(found["values"], one["values"], **TIGHT)
    # A sum may stay where its terms move.
    pairs = zip(one["values"].values(), constants.values(), strict=True)
    moved = [max(abs(x - y) for x, y in zip(a, b, strict=True)) for a, b in pairs]
    assert min(moved) > 1e-4
    # Stopped halfway and gone on with; and sharded, at once and likewise.
    sharded = equal_on_all_ranks(two, "shards")
    for again in (equal_on_all_ranks(two, "resumed"), sharded, sharded["again"]):
        same(again["values"], one["values"], **TIGHT)
        assert again["losses"] == pytest.approx(found["losses"], rel=1e-8)


@pytest.mark.slow
def test_four_processes_find_what_one_finds(tmp_path: Path) -> None:
    found = equal_on_all_ranks(launch(CASES, 4, tmp_path, "job"), "job")
    same(found["values"], in_one(4)["values"], **TIGHT)


@pytest.mark.slow
def test_with_recomputed_activations_and_accumulation_the_weights_are_the_same(two: Found) -> None:
    one = in_one(2, steps=2)
    found = equal_on_all_ranks(two, "recomputed")
    assert found["samples"] == 3 * 2 * cases.COUNT
    whole = cases.distilled(cases.calibrated(2), cases.batches(), accumulate=cases.COUNT, steps=2)
    same(found["values"], whole["values"], **TIGHT)
    assert found["values"] != one["values"]


@pytest.mark.slow
def test_ranks_with_other_numbers_of_batches_take_the_same_steps(two: Found) -> None:
    found = equal_on_all_ranks(two, "uneven")
    # Beyond the batches of the first rank, which has 1, and of the second, which has 4.
    assert found["steps"] > 4


@pytest.mark.slow
def test_all_ranks_stop_where_one_fails_and_the_weights_are_as_they_were(two: Found) -> None:
    first, second = ({k: (v[0], v[1]) for k, v in each["errors"].items()} for each in two)
    message = "every rank must get through, but rank 1 raised an error: see its message; the model is as it was"
    for stage in ("calibrate", "refine", "distill"):
        for name in (stage, f"{stage}, unread"):
            assert first[name][0] == "DataError"
            assert first[name][1].startswith(message)
        assert "IndexError" in second[stage][1]
        assert second[f"{stage}, unread"] == ("ValueError", "the disk is gone")
    assert first["search"][0] == "DataError"
    assert first["search"][1].startswith(message)
    assert second["search"] == ("ValueError", "mine")
    for found in (first, second):
        assert found["others"][0] == "ModelError"
        assert "those of rank 1 differ" in found["others"][1]
        assert found["means"][0] == "ModelError"
        assert "means were folded" in found["means"][1]
        assert "fold_means=False" in found["means"][1]
        assert found["means unchanged"][0] == "True"


@pytest.mark.slow
def test_a_rank_that_is_gone_stops_the_others(tmp_path: Path) -> None:
    first, second = launch(CASES, 2, tmp_path, "dies", timeout=120, dead=True)
    message, unchanged = first["dies"]
    # Closed or reset: gloo's own words.
    assert "connection" in message.lower()
    assert unchanged
    assert second == {}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::dynorm.errors.CalibrationWarning")
def test_torchrun_converts_with_two_processes_and_one_of_them_writes(
    encoder: Path, texts: Path, tmp_path: Path
) -> None:
    shape = {"steps": 4, "refine": 4, "held_out": 16, "max_length": 16, "batch": 8}
    given = [
        word
        for name, value in shape.items()
        for word in (f"--{name.replace('_', '-')}", str(value))
    ]
    words = [
        *TORCHRUN,
        "-m",
        "dynorm",
        "convert",
        encoder,
        tmp_path / "two",
        "--texts",
        texts,
        *given,
        "--json",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}"}
    run = subprocess.run(
        list(map(str, words)), env=environment, capture_output=True, text=True, timeout=240
    )
    assert run.returncode == 0, run.stderr[-4000:]
    # Printed once, and so is the warning that four steps are few.
    assert run.stderr.count("steps below 20") == 1
    two = json.loads(run.stdout)
    assert two == json.loads((tmp_path / "two" / "report.json").read_text())
    assert sorted(path.name for path in (tmp_path / "two").iterdir()) == [
        "model",
        "recipe.json",
        "report.html",
        "report.json",
    ]
    recipe = Recipe(**shape, accumulate=2)
    one = convert_pretrained(encoder, tmp_path / "one", recipe, texts=[texts], quiet=True).to_dict()
    assert [site["path"] for site in two["sites"]] == [site["path"] for site in one["sites"]]
    stages, alone = two["meta"]["stages"], one["meta"]["stages"]
    for stage, name in (
        ("calibrate", "batches"),
        ("refine", "steps"),
        ("distill", "steps"),
        ("distill", "samples"),
    ):
        assert stages[stage][name] == alone[stage][name]
    assert two["output"]["cosine_mean"] == pytest.approx(one["output"]["cosine_mean"], abs=0.02)
    assert load_pretrained(tmp_path / "two" / "model").model.config.hidden_size == 32


def test_an_accumulated_step_is_the_mean_of_its_batches() -> None:
    model = cases.calibrated(2)
    twin, data = copy.deepcopy(model), cases.batches(2)
    # Twice the same batch is once that batch.
    once = cases.distilled(model, data, steps=2)
    twice = cases.distilled(twin, [data[0], data[0], data[1], data[1]], steps=2, accumulate=2)
    same(twice["values"], once["values"], **TIGHT)
    assert (once["samples"], twice["samples"]) == (6, 12)
    with pytest.raises(dynorm.errors.ArgumentError, match=r"accumulate.*got 0"):
        cases.distilled(model, data, accumulate=0)
    with pytest.raises(dynorm.errors.ArgumentError, match=r"accumulate.*got 0"):
        dynorm.refine_(model, data, steps=1, accumulate=0)
