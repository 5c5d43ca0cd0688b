"""The plan: best rates are found, extended and repeated; finished runs are not repeated; two sweeps share the work."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dynorm.errors import ArgumentError, ModelError
from studies import sweep as module
from studies.arms import ARMS
from studies.plan import ALL, LONG, PLAN, WITNESSES, Part, best, extended, missing, planned, seconds
from studies.runs import RunFiles, read_all
from studies.settings import Settings
from studies.sweep import left, sweep
from tests.studies.synthetic import record, results

TINY: dict[str, Any] = {"size": "tiny", "warmup": 2}
PART = Part(
    "tiny", "Tiny", ("layernorm", "dyisru"), 6, (4e-3, 8e-3), (1e-3, 2e-3), (1,), False, TINY
)


def rates(sweep: list[Settings]) -> list[float]:
    return [settings.lr for settings in sweep]


def sweep_of(*lrs: float) -> list[Settings]:
    return [Settings("dyisru", lr) for lr in lrs]


def test_the_plan_holds_every_arm_once_and_can_be_run() -> None:
    runs = planned({})
    names = [run.settings.name for run in runs]
    assert len(set(names)) == len(names)
    assert (
        {run.settings.arm for run in runs}
        == set(ARMS)
        == {*ALL, *WITNESSES.arms, "dyt_tuned", "dyisru_final_norm"}
    )
    assert len({part.key for part in PLAN}) == len(PLAN)
    assert {run.settings.seed for run in runs if run.certain} == {0}


def test_a_sweep_goes_on_while_its_best_is_at_the_edge() -> None:
    settings = sweep_of(1e-3, 2e-3, 4e-3)
    low = results(*zip(settings, (1.5, 1.6, 1.7), strict=True))
    assert rates(extended(settings, low)) == [5e-4, 1e-3, 2e-3, 4e-3]
    low |= results((Settings("dyisru", 5e-4), 1.55))
    assert rates(extended(settings, low)) == [5e-4, 1e-3, 2e-3, 4e-3]
    low |= results((Settings("dyisru", 5e-4), 1.45))
    assert rates(extended(settings, low)) == [2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3]
    high = results(*zip(settings, (1.7, 1.6, 1.5), strict=True))
    assert rates(extended(settings, high)) == [1e-3, 2e-3, 4e-3, 8e-3]


def test_a_sweep_ends_where_its_best_is_inside() -> None:
    settings = sweep_of(1e-3, 2e-3, 4e-3)
    assert extended(settings, results(*zip(settings, (1.7, 1.5, 1.6), strict=True))) == settings


def test_where_all_diverged_lower_rates_are_tried() -> None:
    settings = sweep_of(1e-3, 2e-3)
    lost = results(*zip(settings, (None, None), strict=True))
    assert rates(extended(settings, lost)) == [5e-4, 1e-3, 2e-3]
    lost |= results((Settings("dyisru", 5e-4), 1.5))
    assert rates(extended(settings, lost)) == [2.5e-4, 5e-4, 1e-3, 2e-3]
    for _ in range(20):
        settings = extended(settings, results(*[(s, None) for s in settings]))
    assert settings[0].lr == 3.125e-5


def test_a_sweep_that_is_not_done_is_not_extended() -> None:
    settings = sweep_of(1e-3, 2e-3, 4e-3)
    assert extended(settings, results((settings[0], 1.5))) == settings


@pytest.mark.parametrize(("sign", "ends"), [(1, (3.125e-5, 2e-3)), (-1, (5e-4, 6.4e-2))])
def test_no_sweep_is_extended_without_end(sign: int, ends: tuple[float, float]) -> None:
    settings = sweep_of(5e-4, 1e-3, 2e-3)
    for _ in range(20):
        settings = extended(settings, results(*[(s, 5 + sign * math.log(s.lr)) for s in settings]))
    assert (settings[0].lr, settings[-1].lr) == ends


def test_the_best_is_chosen_by_what_is_not_reported() -> None:
    settings = sweep_of(1e-3, 2e-3)
    known = results(*zip(settings, (1.6, 1.5), strict=True))
    known[settings[0].name]["parts"] = [*[1.4] * 4, *[1.7] * 4]
    assert best(settings, known) == settings[0]


def test_the_best_is_the_lowest_that_did_not_diverge() -> None:
    settings = sweep_of(1e-3, 2e-3, 4e-3)
    assert (
        best(settings, results((settings[0], 1.6), (settings[1], 1.5), (settings[2], None)))
        == settings[1]
    )
    assert best(settings, results((settings[0], None))) is None


def test_more_seeds_run_at_the_best_rate_once_it_is_known() -> None:
    part = Part("x", "X", ("dyisru",), direct_rates=(1e-3, 2e-3, 4e-3), seeds=(1, 2))
    settings = sweep_of(1e-3, 2e-3, 4e-3)
    waiting = [run for run in missing(results((settings[0], 1.6)), (part,)) if run.settings.seed]
    assert [run.certain for run in waiting] == [False, False]
    known = results(*zip(settings, (1.6, 1.5, 1.7), strict=True))
    ready = missing(known, (part,))
    assert [(run.settings.lr, run.settings.seed, run.certain) for run in ready] == [
        (2e-3, 1, True),
        (2e-3, 2, True),
    ]
    lost = results(*zip(settings, (None, None, None), strict=True))
    assert [run.settings.lr for run in missing(lost, (part,)) if run.certain] == [5e-4]


def test_time_is_estimated_from_what_was_measured() -> None:
    small = Settings("layernorm", 1e-3)
    assert seconds(small, {}) is None
    known = {small.name: record(small, 1.5, step=0.2)}
    assert seconds(Settings("layernorm", 2e-3, steps=3000), known) == pytest.approx(3000 * 0.25)
    # Another arm of the same model takes as long, another size in proportion to its weights;
    # another task nobody knows.
    assert seconds(Settings("dyisru", 2e-3), known) == pytest.approx(600 * 0.25)
    medium = Settings("dyisru", 2e-3, size="medium")
    # Half the blocks a step.
    assert seconds(medium, known) == pytest.approx(600 * 0.25 * (8 * 320**2) / (6 * 128**2) / 2)
    assert seconds(Settings("dyisru", 1e-3, task="digits"), known) is None
    wanted = len(missing(known, (LONG,)))
    rest = f"{wanted} runs left, about {wanted * 3000 * 0.25 / 3600:.1f} h on one core"
    assert left("*", known, plan=(LONG,)) == [f"3,000 steps: {rest}", f"all: {rest}"]
    assert "not known yet" in left("*", {}, plan=(LONG,))[0]


def test_a_sweep_does_what_is_missing_and_only_that(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = {"out": tmp_path / "runs", "checkpoints": tmp_path / "checkpoints", "plan": (PART,)}
    assert sweep(only="*layernorm*seed0", **folders) == []
    assert sorted(read_all(tmp_path / "runs")) == [
        "text-gpt2-tiny-6-layernorm-warmup2-lr0.004-seed0",
        "text-gpt2-tiny-6-layernorm-warmup2-lr0.008-seed0",
    ]
    capsys.readouterr()
    # Two rates of DyISRU, and the second seed of both arms; finished runs are not named again.
    assert sweep(**folders) == []
    said = [
        line for line in capsys.readouterr().out.splitlines() if line.endswith(("seed0", "seed1"))
    ]
    assert len(said) == 4
    assert len(read_all(tmp_path / "runs")) == 6
    assert missing(read_all(tmp_path / "runs"), (PART,)) == []
    assert sweep(**folders) == []
    assert capsys.readouterr().out == ""


def test_no_run_starts_when_the_time_is_over(tmp_path: Path) -> None:
    folders = {"out": tmp_path / "runs", "checkpoints": tmp_path / "checkpoints", "plan": (PART,)}
    assert sweep(minutes=1e-9, **folders) == []
    assert read_all(tmp_path / "runs") == {}


# What RunFiles.lock does, in a process that imports nothing slow.
HOLDER = """
import fcntl, sys, time
with open(sys.argv[1], "w") as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_run_that_another_process_works_on_is_left_to_it(tmp_path: Path) -> None:
    folders: dict[str, Any] = {
        "out": tmp_path / "runs",
        "checkpoints": tmp_path / "checkpoints",
        "plan": (PART,),
    }
    files = RunFiles(
        planned({}, (PART,))[0].settings.name, tmp_path / "runs", tmp_path / "checkpoints"
    )
    files.locked.parent.mkdir(parents=True)
    command = [sys.executable, "-c", HOLDER, str(files.locked)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        assert sweep(only="*layernorm*seed0", **folders) == []
        assert sorted(read_all(tmp_path / "runs")) == [
            "text-gpt2-tiny-6-layernorm-warmup2-lr0.008-seed0"
        ]
        other.kill()
    # The system let go of the run when the process ended.
    assert sweep(only="*layernorm*seed0", **folders) == []
    assert files.name in read_all(tmp_path / "runs")


def test_a_run_that_fails_is_named_and_the_others_are_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = module.run

    def run(settings: Settings, **options: Any) -> Any:
        if settings.arm == "layernorm":
            raise RuntimeError("no more memory")
        return real(settings, **options)

    monkeypatch.setattr(module, "run", run)
    monkeypatch.setattr(module, "PLAN", (PART,))
    folders = {"out": tmp_path / "runs", "checkpoints": tmp_path / "checkpoints", "plan": (PART,)}
    failed = sweep(**folders)
    assert [name.split("-")[4] for name in failed] == ["layernorm", "layernorm"]
    assert "no more memory" in capsys.readouterr().err
    assert {Settings(**r["settings"]).arm for r in read_all(tmp_path / "runs").values()} == {
        "dyisru"
    }


def test_the_command_checks_its_options(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="minutes"):
        module.command(minutes=0.0, out=tmp_path)
    with pytest.raises(ArgumentError, match="matches none"):
        module.command(only="*no-such-run*", out=tmp_path)


def test_the_command_fails_where_a_run_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "sweep", lambda *args, **options: ["one"])
    with pytest.raises(ModelError, match="1 did not: one"):
        module.command(out=tmp_path)
