"""Runs of tiny models: every arm learns, files are complete, a killed run ends with the bits of one that was not."""

from __future__ import annotations

import errno
import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dynorm
from dynorm.errors import ArgumentError, DataError, StorageError
from dynorm.replace.converted import dynorm_layers
from studies.arms import ARMS
from studies.callbacks import WarmUp, diverged
from studies.data import draw_batch, load
from studies.models import StreamScale, build, constants, embeddings, remeasure_, writers
from studies.muon import MuonAndAdamW
from studies.runs import BusyError, RunFiles, read_all, read_log
from studies.settings import Settings
from studies.sizes import size_of
from studies.train import main, run
from studies.trainer import StudyTrainer, logged_every, losses, make_trainer
from tests.parallel.launch import launch, values

ROOT = Path(__file__).parents[2]
STEPS = 20


def tiny(arm: str, **options: Any) -> Settings:
    return Settings(arm, **{"lr": 1e-2, "steps": STEPS, "size": "tiny", "warmup": 10} | options)


def go(settings: Settings, folder: Path) -> dict[str, Any]:
    return run(settings, out=folder / "runs", checkpoints=folder / "checkpoints")


def timeless(record: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if "seconds" not in key}


@pytest.fixture
def killed_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[int | None], None]:
    """Makes a run end as Ctrl-C would end it, at a step; None lets runs be."""
    original = StudyTrainer.training_step

    def set_(step: int | None) -> None:
        def training_step(self: StudyTrainer, *args: Any, **kwargs: Any) -> Tensor:
            if self.state.global_step == step:
                raise KeyboardInterrupt
            return original(self, *args, **kwargs)

        monkeypatch.setattr(StudyTrainer, "training_step", training_step)

    return set_


@pytest.mark.parametrize("arm", ARMS)
def test_every_arm_learns_and_leaves_its_files(arm: str, tmp_path: Path) -> None:
    settings = tiny(arm)
    record = go(settings, tmp_path)
    assert record == json.loads((tmp_path / "runs" / f"{settings.name}.json").read_text())
    assert record == read_all(tmp_path / "runs")[settings.name]
    assert record["settings"] == settings.to_dict()
    assert not record["diverged"]
    assert record["steps_taken"] == STEPS
    # To guess the 256 bytes at random costs log 256. With torch 2.10, which draws other weights, an
    # annealed line is 0.7 below it.
    assert record["loss"] < math.log(256) - 0.5
    assert sum(record["parts"]) / len(record["parts"]) == pytest.approx(record["loss"], abs=1e-4)
    assert record["seconds_per_step"] > 0
    assert len(record["constants"]) == (
        0 if ARMS[arm].layer is None else 4 if ARMS[arm].final_norm else 5
    )
    assert bool(record["constants"]) == (ARMS[arm].layer is not None)
    log = read_log(settings.name, tmp_path / "runs")
    assert [line["step"] for line in log] == [4, 8, 12, 16, 20]
    assert log[-1]["loss"] < log[0]["loss"]
    assert [line["step"] for line in log if "held_out" in line] == [16, 20]
    assert all(len(line.get("beta", [])) == len(record["constants"]) for line in log)
    assert [line["t"] for line in log if "t" in line][-1:] == ([1.0] if ARMS[arm].annealed else [])
    assert not RunFiles(
        settings.name, tmp_path / "runs", tmp_path / "checkpoints"
    ).checkpoints.exists()


@pytest.mark.parametrize(
    "options",
    [
        {"arm": "dyisru_annealed"},
        {"arm": "dyt", "warmup_constants": True},
        {"arm": "dyisru", "optimizer": "muon", "scale_loss": 0.1},
        {"arm": "dyt_published", "model": "llama"},
        {"arm": "linear_annealed", "task": "digits", "path_length": 0.2},
    ],
    ids=lambda options: options["arm"],
)
def test_a_killed_run_ends_with_the_same_bits(
    options: dict[str, Any], tmp_path: Path, killed_at: Callable[[int | None], None]
) -> None:
    settings = tiny(**options)
    whole = go(settings, tmp_path / "whole")
    # Before the first checkpoint, in the middle of the annealing, and at the last step.
    for step in (3, 15, 19):
        killed_at(step)
        with pytest.raises(KeyboardInterrupt):
            go(settings, tmp_path / "killed")
    killed_at(None)
    assert timeless(go(settings, tmp_path / "killed")) == timeless(whole)
    logs = [read_log(settings.name, tmp_path / folder / "runs") for folder in ("whole", "killed")]
    assert [timeless(line) for line in logs[0]] == [timeless(line) for line in logs[1]]


def test_a_checkpoint_that_was_not_written_to_its_end_is_passed_over(
    tmp_path: Path, killed_at: Callable[[int | None], None]
) -> None:
    settings = tiny("dyisru")
    whole = go(settings, tmp_path / "whole")
    killed_at(13)
    with pytest.raises(KeyboardInterrupt):
        go(settings, tmp_path / "killed")
    killed_at(None)
    files = RunFiles(
        settings.name, tmp_path / "killed" / "runs", tmp_path / "killed" / "checkpoints"
    )
    broken = files.checkpoints / "checkpoint-16"
    broken.mkdir()
    (broken / "trainer_state.json").write_text('{"global_st')
    assert files.checkpoint() == files.checkpoints / "checkpoint-8"
    assert go(settings, tmp_path / "killed")["loss"] == whole["loss"]


def test_a_checkpoint_of_another_run_or_model_is_refused(
    tmp_path: Path, killed_at: Callable[[int | None], None]
) -> None:
    settings = tiny("dyisru")
    killed_at(13)
    with pytest.raises(KeyboardInterrupt):
        go(settings, tmp_path)
    killed_at(None)
    files = RunFiles(settings.name, tmp_path / "runs", tmp_path / "checkpoints")
    with pytest.raises(StorageError, match="another's"):
        files.claim(tiny("dyt"))
    from safetensors.torch import load_file, save_file

    weights = files.checkpoints / "checkpoint-8" / "model.safetensors"
    some = dict(list(load_file(weights).items())[1:])
    save_file(some, weights, metadata={"format": "pt"})
    with pytest.raises(StorageError, match="1 are missing"):
        go(settings, tmp_path)


def test_a_finished_run_is_not_done_again(
    tmp_path: Path, killed_at: Callable[[int | None], None]
) -> None:
    settings = tiny("layernorm")
    record = go(settings, tmp_path)
    killed_at(0)
    assert go(settings, tmp_path) == record


def test_a_run_that_is_done_again_keeps_its_old_result_until_there_is_a_new_one(
    tmp_path: Path, killed_at: Callable[[int | None], None]
) -> None:
    settings, folders = (
        tiny("layernorm"),
        {"out": tmp_path / "runs", "checkpoints": tmp_path / "checkpoints"},
    )
    record = go(settings, tmp_path)
    files = RunFiles(settings.name, folders["out"], folders["checkpoints"])
    before = files.log.read_text("utf-8")
    killed_at(13)
    with pytest.raises(KeyboardInterrupt):
        run(settings, **folders, again=True)
    # The report reads files of one run: there is no result as long as the log is the new one.
    assert read_all(folders["out"]) == {}
    assert json.loads(files.old[0].read_text("utf-8")) == record
    assert files.old[1].read_text("utf-8") == before
    # The same command goes on from the checkpoint; so would the one without --again.
    killed_at(3)
    assert timeless(run(settings, **folders, again=True)) == timeless(record)
    assert not any(file.exists() for file in files.old)
    assert files.read() is not None


def test_a_record_says_what_made_it(tmp_path: Path) -> None:
    record = go(tiny("layernorm", steps=6, warmup=2), tmp_path)
    assert record["size"] == asdict(size_of("text", "tiny"))
    commit = record["versions"]["commit"]
    # The machine may have no git, and an unpacked archive no history.
    git = shutil.which("git")
    head = git and subprocess.run(
        [git, "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    )
    if head and head.returncode == 0:
        assert head.stdout.startswith(commit.removesuffix("-dirty"))
    else:
        assert commit is None


def test_a_record_is_made_without_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    record = go(tiny("layernorm", steps=2, warmup=1), tmp_path)
    assert record["versions"]["commit"] is None


def test_a_folder_that_knows_no_locks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(*args: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", flock)
    with pytest.raises(StorageError, match="must be lockable"):
        go(tiny("layernorm"), tmp_path)


def test_the_warm_up_sets_the_constants_ten_times_from_other_batches() -> None:
    settings = tiny("dyisru", warmup_constants=True, steps=40, warmup=25)
    data = load(settings)
    model, callback = build(settings, data), WarmUp(settings, data)
    assert sorted(callback.steps) == [2, 5, 7, 10, 12, 15, 17, 20, 22, 25]
    before = constants(model)
    seen = []
    for step in range(settings.steps):
        callback.on_step_begin(None, SimpleNamespace(global_step=step), None, model=model)
        if constants(model) != before:
            before = constants(model)
            seen.append(step)
    assert seen == sorted(callback.steps)
    # As from that batch at the beginning, except that the step has another batch.
    fresh = build(settings, data)
    remeasure_(fresh, settings, data, draw=25)
    assert constants(fresh) == constants(model)


@pytest.mark.parametrize(("options", "centred"), [({}, False), ({"center": True}, True)], ids=str)
def test_variants_are_what_they_are_called(options: dict[str, Any], centred: bool) -> None:
    settings = tiny("dyisru", **options)
    for layer in dynorm_layers(build(settings, load(settings))).values():
        assert (layer.center is not None) == centred


@pytest.mark.parametrize("arm", ["linear", "dyisru_annealed"])
def test_a_run_that_diverges_is_stopped_and_says_so(
    arm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = StudyTrainer.compute_loss

    def compute_loss(self: StudyTrainer, *args: Any, **kwargs: Any) -> Tensor:
        loss = original(self, *args, **kwargs)
        return loss * math.nan if self.state.global_step == 6 else loss

    monkeypatch.setattr(StudyTrainer, "compute_loss", compute_loss)
    record = go(tiny(arm), tmp_path)
    assert record["diverged"]
    assert record["loss"] is None
    assert record["steps_taken"] == 8
    # JSON knows no NaN.
    assert read_log(record["name"], tmp_path / "runs")[-1]["loss"] is None


def test_a_loss_above_ten_nats_diverged() -> None:
    assert diverged([{"loss": 9.9}, {"eval_mean": 10.1}])
    assert not diverged([{"loss": 9.9}, {"eval_mean": 10.0, "train_runtime": 1e3}])


def test_a_run_whose_last_measurement_is_lost_diverged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "studies.train._measured", lambda *args: {"loss": math.nan, "parts": [math.nan]}
    )
    record = go(tiny("layernorm"), tmp_path)
    assert (record["diverged"], record["loss"]) == (True, None)


def test_one_process_a_run(tmp_path: Path) -> None:
    settings = tiny("layernorm")
    files = RunFiles(settings.name, tmp_path / "runs", tmp_path / "checkpoints")
    with files.lock(), pytest.raises(BusyError, match="another runs it"):
        go(settings, tmp_path)
    assert go(settings, tmp_path)["loss"] is not None


def test_a_folder_that_cannot_be_written_is_refused_before_the_work(
    tmp_path: Path, killed_at: Callable[[int | None], None]
) -> None:
    (tmp_path / "runs").write_text("a file")
    killed_at(0)
    with pytest.raises(StorageError, match="cannot be made"):
        go(tiny("layernorm"), tmp_path)


def test_a_log_that_is_missing_or_broken_and_a_copied_result_are_errors(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"run's.*log"):
        read_log("a", tmp_path)
    (tmp_path / "a.jsonl").write_text('{"step":')
    with pytest.raises(DataError, match=r"run's.*log"):
        read_log("a", tmp_path)
    record = {"name": "b", "settings": tiny("layernorm").to_dict()}
    (tmp_path / "copy.json").write_text(json.dumps(record))
    with pytest.raises(DataError, match=r"named.*run"):
        read_all(tmp_path)


def test_a_result_that_is_none_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"loss": 1}')
    with pytest.raises(DataError, match=r"run's.*result"):
        read_all(tmp_path)


def test_no_gpu_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ArgumentError, match="CUDA"):
        go(tiny("layernorm", device="cuda"), tmp_path)


@pytest.mark.parametrize("options", [{}, {"model": "llama"}, {"task": "digits"}], ids=str)
@pytest.mark.parametrize("arm", ARMS)
def test_arms_put_their_layers_everywhere(arm: str, options: dict[str, Any]) -> None:
    settings = tiny(arm, **options)
    model = build(settings, load(settings))
    kept = ARMS[arm].final_norm
    found = {path: m for path, m in model.named_modules() if "norm" in type(m).__name__.lower()}
    norms = {path: m for path, m in found.items() if not hasattr(m, "_dynorm_layer")}
    layers = dynorm_layers(model)
    if ARMS[arm].layer is None:
        # Two in each of the two blocks, and one at the end.
        assert len(norms) == 5
        assert not layers
        wanted = {"layernorm": nn.LayerNorm, "rmsnorm": nn.RMSNorm}[arm]
        # Llama's own RMSNorm is transformers'.
        own = options == {"model": "llama"} and arm == "rmsnorm"
        assert all(isinstance(norm, wanted) != own for norm in norms.values())
        return
    # The one at the end is in no block, which would have a number.
    assert [any(part.isdigit() for part in path.split(".")) for path in norms] == [False] * kept
    assert len(layers) == 5 - kept
    scale = (
        1.0
        if ARMS[arm].start in ("published", "tuned")
        else 4.0
        if ARMS[arm].start == "batch"
        else None
    )
    assert all(scale in (None, layer.scale) for layer in layers.values())


def test_published_and_measured_starts() -> None:
    for arm, options, alpha in (
        ("dyt_published", {}, 0.5), ("dyt_tuned", {}, 1.0), ("dyt_tuned", {"task": "digits"}, 0.5),
    ):  # fmt: skip
        settings = tiny(arm, **options)
        layers = dynorm_layers(build(settings, load(settings))).values()
        assert all(float(layer.get_parameter("alpha").detach()) == alpha for layer in layers)
    betas = {
        arm: [
            float(layer.beta().detach())
            for layer in dynorm_layers(build(tiny(arm), load(tiny(arm)))).values()
        ]
        for arm in ("dyisru", "dyt", "derf", "linear")
    }
    # The first site sees the same whatever stands there, so all begin with the same slope.
    assert all(
        values[0] == pytest.approx(betas["dyisru"][0], rel=1e-5) for values in betas.values()
    )
    assert all(0 < value < 1 for values in betas.values() for value in values)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_the_embedding_factor_is_where_dyt_has_it(name: str) -> None:
    settings = tiny("dyt_published", model=name)
    model = build(settings, load(settings))
    factors = [p for path, p in model.named_parameters() if path.endswith("factor")]
    assert [float(p.detach()) for p in factors] == [4.0]
    seen: list[Tensor] = []
    first = next(iter(dynorm_layers(model).values()))
    first.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    ids = torch.arange(8)[None]
    model(ids)
    # The tables themselves, for Llama's hook is on the module.
    expected = 4.0 * model.get_input_embeddings().weight[ids]  # type: ignore[operator]
    if name == "gpt2":
        expected = expected + 4.0 * model.get_parameter("transformer.wpe.weight")[:8]
    torch.testing.assert_close(seen[0], expected)


def test_held_out_files_are_never_seen() -> None:
    from studies.data import _bytes

    train, held_out = _bytes()
    assert 0.05 <= len(held_out) / (len(train) + len(held_out)) < 0.08
    ends = [bytes(part.numpy().tobytes()).split(b"\0")[:-1] for part in (train, held_out)]
    assert not {file for file in ends[0] if len(file) > 1000} & set(ends[1])


def test_losses_are_those_of_each_item() -> None:
    logits, targets = torch.randn(3, 5, 7), torch.randint(7, (3, 5))
    expected = [nn.functional.cross_entropy(logits[i], targets[i]) for i in range(3)]
    torch.testing.assert_close(losses(logits, targets), torch.stack(expected))
    torch.testing.assert_close(
        losses(logits[:, 0], targets[:, 0]).mean(),
        nn.functional.cross_entropy(logits[:, 0], targets[:, 0]),
    )


@pytest.mark.parametrize(
    ("steps", "every"), [(1, 1), (20, 4), (600, 25), (3000, 25), (30_000, 250)]
)
def test_logs_stay_small(steps: int, every: int) -> None:
    assert logged_every(steps) == every
    assert steps / every <= 120


def test_the_constants_have_their_own_rate(tmp_path: Path) -> None:
    moved = {}
    for rate in (1.0, 30.0):
        record = go(tiny("dyisru", constants_rate=rate), tmp_path)
        first, *_, last = read_log(record["name"], tmp_path / "runs")
        moved[rate] = abs(math.log(last["beta"][0] / first["beta"][0]))
    assert moved[30.0] > 3 * moved[1.0]


@pytest.mark.parametrize(("rate", "centers"), [(30.0, 1.0), (15.0, 15.0)])
def test_at_the_librarys_own_rate_a_centre_has_that_of_the_weights(
    rate: float, centers: float, tmp_path: Path
) -> None:
    settings = tiny("dyisru", constants_rate=rate, center=True)
    data = load(settings)
    model = build(settings, data)
    files = RunFiles(settings.name, tmp_path, tmp_path)
    made = make_trainer(model, data, settings, files, quiet=True).create_optimizer()
    rates = {
        id(p): group["lr"] / settings.lr for group in made.param_groups for p in group["params"]
    }
    for layer in dynorm_layers(model).values():
        found = [rates[id(layer.get_parameter(name))] for name in ("log_beta", "center", "weight")]
        assert found == pytest.approx([rate, centers, 1.0])


@pytest.mark.parametrize(
    ("options", "status", "says"),
    [
        (["--arm", "nothing", "--lr", "1e-3"], 2, "arm must be one of"),
        (
            [
                "--arm",
                "dyisru",
                "--lr",
                "1e-2",
                "--steps",
                "6",
                "--warmup",
                "2",
                "--size",
                "tiny",
                "--json",
            ],
            0,
            "",
        ),
    ],
)
def test_the_command(
    options: list[str],
    status: int,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folders = ["--out", str(tmp_path / "runs"), "--checkpoints", str(tmp_path / "checkpoints")]
    monkeypatch.setattr(sys, "argv", ["studies.train", *options, *folders])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr()
    assert ended.value.code == status, said.err
    assert says in said.err
    if status == 0:
        assert json.loads(said.out)["steps_taken"] == 6


def test_muon_has_the_matrices_of_the_blocks_and_resumes_with_its_rates() -> None:
    settings = tiny("dyisru", optimizer="muon")
    model = build(settings, load(settings))
    groups = dynorm.param_groups(model, lr=1e-2, weight_decay=0.1)
    made = MuonAndAdamW(groups, embeddings(model))
    names = {id(p): path for path, p in model.named_parameters()}
    inner = [names[id(p)] for group in made.parts["muon"].param_groups for p in group["params"]]
    # Two in the attention and two in the feed-forward part of each of the two blocks.
    assert len(inner) == 8
    assert all(".h." in path and path.endswith("weight") and "ln" not in path for path in inner)
    assert sorted(id(p) for group in made.param_groups for p in group["params"]) == sorted(names)
    rates = [(len(group["params"]), group["lr"]) for group in groups]
    other = MuonAndAdamW(groups, embeddings(model))
    for group in made.param_groups:
        group["lr"] /= 2
    other.load_state_dict(made.state_dict())
    assert [group["lr"] for group in other.param_groups] == [
        group["lr"] for group in made.param_groups
    ]
    # Later values of a schedule reach the two optimizers that make the steps.
    other.param_groups[0]["lr"] = 0.125
    assert other.parts["muon"].param_groups[0]["lr"] == 0.125
    assert [(len(group["params"]), group["lr"]) for group in groups] == rates


def test_the_bound_holds_the_streams_scale_at_that_of_the_start(tmp_path: Path) -> None:
    settings = tiny("dyisru", scale_loss=1.0)
    data = load(settings)
    model = build(settings, data)
    batch = {"input_ids": draw_batch(data, settings.size_spec.batch)["input_ids"]}
    scale = StreamScale(model)
    model(**batch)
    # That batch set the constants.
    assert float(scale.loss().detach()) == pytest.approx(0, abs=1e-6)
    with torch.no_grad():
        model.get_input_embeddings().weight *= 3  # type: ignore[operator]
        model.get_parameter("transformer.wpe.weight").mul_(3)
    model(**batch)
    # Nearly all of the stream is the embeddings yet.
    assert float(scale.loss().detach()) == pytest.approx(math.log(9) ** 2, rel=0.1)
    grown = {}
    for weight in (0.0, 1.0):
        chosen = tiny("dyisru", scale_loss=weight)
        model = build(chosen, data)
        scale = StreamScale(model)
        files = RunFiles(chosen.name, tmp_path / "runs", tmp_path / "checkpoints")
        files.prepare()
        make_trainer(model, data, chosen, files, quiet=True).train()
        model(**batch)
        grown[weight] = float(scale.loss().detach())
    assert grown[1.0] < 0.25 * grown[0.0]


@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_fixed_writers_keep_their_norms_and_nothing_else_does(model: str, tmp_path: Path) -> None:
    settings = tiny("dyisru", fixed_writers=True, model=model)
    data = load(settings)
    net = build(settings, data)
    files = RunFiles(settings.name, tmp_path / "runs", tmp_path / "checkpoints")
    files.prepare()
    before = {
        name: weight.detach().clone() for name, weight in net.named_parameters() if weight.ndim == 2
    }
    make_trainer(net, data, settings, files, quiet=True).train()
    after = dict(net.named_parameters())
    kept = {
        name
        for name, weight in before.items()
        if torch.isclose(weight.norm(), after[name].norm(), rtol=1e-6)
    }
    # Two in each of the two blocks.
    assert len(kept) == 4
    assert kept == {
        name for name, weight in after.items() if any(weight is writer for writer in writers(net))
    }
    assert not any(torch.equal(before[name], after[name]) for name in kept)


@pytest.mark.slow
def test_two_processes_do_what_one_does(tmp_path: Path) -> None:
    alone = go(tiny("dyisru_annealed"), tmp_path / "one")
    together, other = values(
        launch("tests.studies.process_cases", 2, tmp_path, "command"), "command"
    )
    assert other is None
    assert together["settings"] == alone["settings"]
    assert together["processes"] == 2
    assert together["loss"] == pytest.approx(alone["loss"], abs=1e-4)
    assert together["constants"] == pytest.approx(alone["constants"], rel=1e-3)


def test_a_batch_that_does_not_divide_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.TrainingArguments.world_size", 3)
    with pytest.raises(ArgumentError, match=r"divide.*processes"):
        go(tiny("layernorm"), tmp_path)
