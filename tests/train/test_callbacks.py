"""The path with the Trainer: t step by step, constants where it begins, a resumed run, and two processes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

import dynorm
from dynorm.replace.converted import dynorm_layers
from dynorm.train.anneal import annealed_layers
from dynorm.train.callbacks import AnnealCallback
from tests.parallel.launch import Found, launch, values

STEPS = 12


def model(to: str = "annealed", dropout: float = 0.1) -> nn.Module:
    set_seed(0)
    config = GPT2Config(
        vocab_size=32, n_embd=16, n_layer=2, n_head=2, n_positions=16, bos_token_id=0, eos_token_id=0,
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
    )  # fmt: skip
    net = GPT2LMHeadModel(config)
    dynorm.convert_(net, dynorm.find_norms(net, torch.zeros(1, 4, dtype=torch.long)), to=to)
    return net


def rows(count: int = 64) -> list[dict[str, Tensor]]:
    ids = torch.randint(0, 32, (count, 16), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in ids]


class Losses(TrainerCallback):
    """Every loss, and t at every step."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.path: list[float] = []
        self.constants: list[float] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "loss" in logs:
            self.losses.append(logs["loss"])
            self.path.append(logs.get("t"))

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
        for layer in list(dynorm_layers(model).values())[:1]:
            self.constants.append(float(layer.beta().detach()))


def trainer(
    net: nn.Module, folder: Path, callback: AnnealCallback | None, stop: int = STEPS, **options: Any
) -> Any:
    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = state.global_step >= stop

    settings = {
        "output_dir": str(folder), "max_steps": STEPS, "per_device_train_batch_size": 4, "learning_rate": 1e-2,
        "logging_steps": 1, "save_strategy": "steps", "save_steps": 1, "report_to": [], "use_cpu": True,
        "disable_tqdm": True, "dataloader_pin_memory": False, "seed": 0, "logging_nan_inf_filter": False,
    }  # fmt: skip
    seen = Losses()
    callbacks = [each for each in (callback, seen, Stop()) if each is not None]
    made = Trainer(
        net, TrainingArguments(**(settings | options)), train_dataset=rows(), callbacks=callbacks
    )
    made.seen = seen
    return made


def test_t_follows_the_schedule_and_the_end_is_point_wise(tmp_path: Path) -> None:
    net = model()
    run = trainer(
        net, tmp_path, AnnealCallback(start=4 / STEPS, length=4 / STEPS), save_strategy="no"
    )
    run.train()
    assert run.seen.path == pytest.approx([0, 0, 0, 0, 0, 0.25, 0.5, 0.75, 1, 1, 1, 1], abs=1e-4)
    # Untouched before the annealing begins, set by the activations of its first step, then learned.
    assert run.seen.constants[:4] == pytest.approx([16.0] * 4)
    assert run.seen.constants[4] != pytest.approx(16.0, rel=1e-2)
    assert run.seen.constants[-1] != run.seen.constants[4]
    dynorm.finalize_(net)
    # An evaluation logs too.
    assert run.evaluate(rows(4))["eval_loss"] > 0
    assert {type(layer) for layer in dynorm_layers(net).values()} == {dynorm.DyISRU}


@pytest.mark.parametrize("stop", [3, 5, 10])
def test_a_stopped_and_resumed_run_is_bit_equal(tmp_path: Path, stop: int) -> None:
    whole = trainer(
        model(),
        tmp_path / "whole",
        AnnealCallback(start=4 / STEPS, length=4 / STEPS),
        save_strategy="no",
    )
    whole.train()
    trainer(
        model(), tmp_path / "parts", AnnealCallback(start=4 / STEPS, length=4 / STEPS), stop=stop
    ).train()
    rest = trainer(model(), tmp_path / "parts", AnnealCallback(start=4 / STEPS, length=4 / STEPS))
    rest.train(resume_from_checkpoint=True)
    assert rest.seen.losses == whole.seen.losses[stop:]
    for (name, ours), theirs in zip(
        rest.model.state_dict().items(), whole.model.state_dict().values(), strict=True
    ):
        assert torch.equal(ours, theirs), name


def test_a_start_that_an_error_broke_off_is_forgotten(tmp_path: Path) -> None:
    class Break(TrainerCallback):
        broken = False

        def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 4 and not self.broken:
                self.broken = True
                raise RuntimeError("broken off")

    net = model()
    callback = AnnealCallback(start=4 / STEPS, length=4 / STEPS)
    run = trainer(net, tmp_path, callback, save_strategy="no", gradient_accumulation_steps=2)
    run.add_callback(Break())
    with pytest.raises(RuntimeError, match="broken off"):
        run.train()
    run.train()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())
    # Nothing was set before the annealing began anew.
    assert run.seen.constants[4:8] == pytest.approx([16.0] * 4)
    assert run.seen.constants[8] != pytest.approx(16.0, rel=1e-2)


def test_a_schedule_that_does_not_fit_and_a_model_without_a_path(tmp_path: Path) -> None:
    with pytest.raises(dynorm.errors.ArgumentError, match=r"end.*before"):
        trainer(model(), tmp_path, AnnealCallback(start=8 / STEPS, length=4 / STEPS)).train()
    with pytest.raises(dynorm.errors.ModelError, match=r"annealed.*layers"):
        trainer(model("dyisru"), tmp_path, AnnealCallback()).train()
    with pytest.raises(dynorm.errors.ArgumentError):
        AnnealCallback(start=-1)


# The cases of two processes.


def ddp(folder: Path) -> dict[str, Any]:
    # As torchrun sets it for accelerate.
    os.environ["ACCELERATE_USE_CPU"] = "true"
    os.environ["LOCAL_WORLD_SIZE"] = str(torch.distributed.get_world_size())
    os.environ["MASTER_PORT"] = "0"
    return by_the_trainer(4, folder)


def fsdp(folder: Path) -> dict[str, Any]:
    return by_hand(4, torch.distributed.get_rank(), 2)


def by_the_trainer(size: int, folder: Path) -> dict[str, Any]:
    callback = AnnealCallback(start=4 / STEPS, length=4 / STEPS)
    net = model(dropout=0.0)
    run = trainer(net, folder, callback, save_strategy="no", per_device_train_batch_size=size)
    run.train()
    return {"losses": run.seen.losses, "path": run.seen.path, "values": values_of(net)}


def by_hand(size: int, rank: int, ranks: int) -> dict[str, Any]:
    """The same in a loop of one's own, with FSDP2 if there are several ranks."""
    net = model(dropout=0.0)
    if ranks > 1:
        mesh = torch.distributed.init_device_mesh("cpu", (ranks,))
        for block in (*net.transformer.h, net):
            torch.distributed.fsdp.fully_shard(block, mesh=mesh)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    schedule = dynorm.AnnealSchedule(start=4 / STEPS, length=4 / STEPS)
    losses = []
    path = []
    data = torch.stack([row["input_ids"] for row in rows()])
    for step in range(STEPS):
        batch = data[(8 * step + torch.arange(size) + size * rank) % len(data)]
        dynorm.set_anneal_(net, schedule.at(step, STEPS))
        start = dynorm.AnnealStart(net) if step == 4 else None
        loss = net(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if start is not None:
            start.finish_()
        mean = loss.detach().clone()
        if ranks > 1:
            torch.distributed.all_reduce(mean)
        losses.append(float(mean) / ranks)
        path.append(annealed_layers(net)["transformer.ln_f"].position)
    if ranks > 1:
        with pytest.raises(dynorm.errors.ModelError, match="plain module, but is sharded"):
            dynorm.finalize_(net)
    return {"losses": losses, "path": path, "values": values_of(net)}


def values_of(net: nn.Module) -> dict[str, list[float]]:
    """The constants and one weight, whole."""
    found = {}
    for name, parameter in net.named_parameters():
        if name.endswith(("log_beta", "ln_f.weight")):
            whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
            found[name] = whole.detach().double().flatten().tolist()
    return found


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Both cases in one launch, because each import of torch and transformers takes seconds."""
    return launch("tests.train.test_callbacks", 2, tmp_path_factory.mktemp("two"), "ddp", "fsdp")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_two_processes_do_what_one_does(two: Found, mode: str, tmp_path: Path) -> None:
    """By the Trainer with DDP, and by hand with FSDP2."""
    whole = by_the_trainer(8, tmp_path) if mode == "ddp" else by_hand(8, 0, 1)
    for shared in values(two, mode):
        assert shared["path"] == whole["path"]
        assert shared["losses"] == pytest.approx(whole["losses"], rel=1e-4)
        for name, value in whole["values"].items():
            assert shared["values"][name] == pytest.approx(value, rel=1e-3, abs=1e-4), name
