"""A dry run says what a conversion would do, about how long it takes, and writes nothing."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dynorm.jobs.dry_run import dry_run
from dynorm.recipe import Recipe

QUICK = Recipe(refine=4, held_out=16, max_length=16)


def test_times_grow_with_the_steps(encoder: Path, texts: Path) -> None:
    plan = dry_run(encoder, QUICK.changed(steps=1000), texts=[texts])
    # The mean of the first is folded, as in the conversion: its input is written by embeddings only.
    kinds = [site.kind for site in plan.conversion.converted]
    assert kinds == ["rmsnorm", "layernorm", "layernorm", "layernorm", "layernorm"]
    stages = ["fold_means", "find", "convert", "calibrate", "refine", "distill", "measure"]
    assert list(plan.seconds) == stages
    assert min(plan.seconds.values()) >= 0
    assert plan.steps == 1000
    assert (plan.recipe["witnesses"], plan.recipe["max_length"]) == (None, 16)
    # torch alone takes more than 100 MB.
    assert plan.memory > 1e8
    shown = str(plan)
    assert "nothing was written" in shown
    assert "embeddings.LayerNorm" in shown
    assert "about 1,000 steps" in shown
    assert "Peak memory: about" in shown


def test_the_start_of_the_trainer_is_no_part_of_a_step(
    encoder: Path, texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]

    def slow_start(model: Any, batches: Any, *, steps: int, callbacks: Any, **options: Any) -> None:
        clock[0] += 100.0
        # The time to read a batch counts too, so it must not be read before.
        assert not isinstance(batches, list)
        for _ in range(steps):
            clock[0] += 2.0
            for callback in callbacks:
                callback.on_step_end(None, None, None)

    module = importlib.import_module("dynorm.jobs.dry_run")
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(module, "distill_", slow_start)
    plan = dry_run(encoder, QUICK.changed(steps=1000), texts=[texts])
    assert plan.seconds["distill"] == 2000.0


def test_minutes_are_the_time_of_the_distillation(encoder: Path, texts: Path) -> None:
    plan = dry_run(encoder, QUICK.changed(minutes=2.0, refine=0), texts=[texts])
    assert plan.seconds["distill"] == 120
    assert "refine" not in plan.seconds
    assert plan.steps > 1


@pytest.mark.parametrize("as_json", [False, True])
def test_the_command_writes_nothing(
    encoder: Path,
    texts: Path,
    tmp_path: Path,
    status: Callable[..., int | str | None],
    capsys: pytest.CaptureFixture[str],
    as_json: bool,
) -> None:
    words = ["--texts", texts, "--held-out", 16, "--max-length", 16, "--refine", 2, "--dry-run"]
    if as_json:
        words.append("--json")
    assert status("convert", encoder, tmp_path / "out", *words) == 0
    printed = capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
    if as_json:
        plan = json.loads(printed)
        assert len(plan["conversion"]["converted"]) == 5
        done = {"fold_means", "find", "convert"}
        assert set(plan["seconds"]) == done | {"calibrate", "refine", "measure"}
    else:
        assert "5 norms replaced by dyisru" in printed
