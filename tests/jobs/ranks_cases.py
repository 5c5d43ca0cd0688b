"""Calibration, refinement and distillation of a small Llama on several processes, and the same in one."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback

import dynorm
from dynorm.train.distill import output_loss
from tests.ecosystem.models import checkpoint_activations

assert Trainer  # It is imported once, and not by every process.
# Batches of all ranks, refinement steps, distillation steps.
COUNT, REFINED, STEPS = 8, 4, 6
Batch = dict[str, Tensor]


def llama(**options: Any) -> nn.Module:
    """Two layers with tied embeddings, all five norms converted."""
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32, tie_word_embeddings=True,
        attn_implementation="eager", **options,
    )  # fmt: skip
    model = LlamaForCausalLM(config).double().eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.add_((0.3 if "norm" in name else 0.1) * torch.randn_like(p))
    dynorm.convert_(model, dynorm.find_norms(model, **batches()[0]), witnesses=2)
    return model


def batches(count: int = COUNT) -> list[Batch]:
    """Token ids, with more or less padding."""
    generator = torch.Generator().manual_seed(6)
    found = []
    for _ in range(count):
        lengths = torch.randint(3, 8, (3, 1), generator=generator)
        ids = torch.randint(0, 64, (3, 7), generator=generator)
        found.append({"input_ids": ids, "attention_mask": (torch.arange(7) < lengths).long()})
    return found


def share(found: list[Batch]) -> list[Batch]:
    """Those of this rank: every so manieth."""
    return found[dist.get_rank() :: dist.get_world_size()]


def together(found: list[Batch], ranks: int) -> list[Batch]:
    """As calibration sees the shares: those of one turn as one batch."""
    turns = [found[k : k + ranks] for k in range(0, len(found), ranks)]
    return [{key: torch.cat([batch[key] for batch in turn]) for key in turn[0]} for turn in turns]


def whole(model: nn.Module) -> dict[str, list[float]]:
    """The sum, the sum of squares and the first value of each parameter."""
    found = {}
    for name, p in model.named_parameters():
        full = (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().flatten()
        found[name] = [float(full.sum()), float(full.square().sum()), float(full[0])]
    return found


@cache
def stages(ranks: int) -> tuple[nn.Module, dict[str, Any]]:
    """A model that was calibrated and refined on the data of so many ranks, by them or in one process."""
    model, several = llama(), dist.is_initialized()
    dynorm.calibrate_(model, share(batches()) if several else together(batches(), ranks), lean=0.0)
    data, count = (share(batches()), 1) if several else (batches(), ranks)
    return model, dynorm.refine_(model, data, steps=REFINED, accumulate=count).to_dict()


def calibrated(ranks: int | None = None) -> nn.Module:
    return copy.deepcopy(stages(ranks or dist.get_world_size())[0])


def distilled(model: nn.Module, data: Any, **options: Any) -> dict[str, Any]:
    report = dynorm.distill_(model, data, lr=1e-3, quiet=True, **{"steps": STEPS, **options})
    losses = [report.loss_before, report.loss_after, report.losses[-1][1]]
    return {
        "losses": losses,
        "samples": report.samples,
        "steps": report.steps,
        "values": whole(model),
    }


def job(folder: Path) -> Any:
    """All three stages."""
    model, refined = stages(dist.get_world_size())
    return {
        "refined": refined,
        "constants": whole(model),
        **distilled(calibrated(), share(batches())),
    }


class Stop(TrainerCallback):
    """Ends a run early."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert isinstance(kwargs["model"], LlamaForCausalLM)
        control.should_training_stop |= state.global_step == STEPS // 2


def resumed(folder: Path) -> Any:
    """Stopped halfway, and gone on with from the checkpoint by a model that is new."""
    model = calibrated()
    options = {"checkpoints": folder / "checkpoints"}
    half = distilled(copy.deepcopy(model), share(batches()), callbacks=[Stop()], **options)
    assert half["steps"] == STEPS // 2
    return distilled(model, share(batches()), **options)


def shards(folder: Path) -> Any:
    """The model and its teacher sharded by FSDP2; stopped halfway and gone on with, too."""

    def sharded() -> tuple[nn.Module, nn.Module]:
        model = calibrated()
        teacher = dynorm.restore_(copy.deepcopy(model))
        for each in (model, teacher):
            for layer in each.model.layers:
                fully_shard(layer)
            fully_shard(each)
        return model, teacher

    model, teacher = sharded()
    found = distilled(model, share(batches()), teacher=teacher)
    options = {"checkpoints": folder / "sharded"}
    for callbacks in ([Stop()], []):
        model, teacher = sharded()
        again = distilled(model, share(batches()), teacher=teacher, callbacks=callbacks, **options)
    return {**found, "again": again}


def recomputed(folder: Path) -> Any:
    """With gradient checkpointing, and accumulation on each rank."""
    model = calibrated()
    checkpoint_activations(model)
    return distilled(model, share(batches()), accumulate=COUNT // dist.get_world_size(), steps=2)


def uneven(folder: Path) -> Any:
    """Ranks with other numbers of batches, and minutes in the place of steps."""
    model = calibrated()
    data = batches()[: 1 + 3 * dist.get_rank()]
    return distilled(model, data, steps=None, minutes=0.05)


def failing(bad: Any, act: Any) -> Any:
    """Return the error if the data of one rank are bad; the weights must be unchanged."""
    model = calibrated()
    before = copy.deepcopy(model.state_dict())
    data = share(batches())

    def feed() -> Iterator[Batch]:
        yield from data
        yield bad() if dist.get_rank() == 1 else data[0]
        # As many as there are steps: refine_ reads an iterator to its end before the first one.
        yield from data

    try:
        act(model, feed())
    except dynorm.DynormError as error:
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        return [type(error).__name__, str(error)]


def unread() -> Batch:
    raise ValueError("the disk is gone")


def unfit() -> Batch:
    return {"input_ids": torch.full((2, 3), 64)}


def unlearned(ours: Any, theirs: Any, batch: Any) -> Any:
    """A loss that fails on one rank, and only where gradients are wanted."""
    if torch.is_grad_enabled() and dist.get_rank() == 1:
        raise ValueError("mine")
    return output_loss(ours, theirs, batch)


def errors(folder: Path) -> Any:
    """A rank that cannot read a batch, or run it, in each stage."""
    acts = {
        "calibrate": dynorm.calibrate_,
        "refine": lambda model, feed: dynorm.refine_(model, feed, steps=COUNT),
        "distill": lambda model, feed: dynorm.distill_(
            model, feed, steps=COUNT, lr=1e-3, quiet=True
        ),
    }
    found = {}
    for name, act in acts.items():
        found[name] = failing(unfit, act)
        try:
            found[f"{name}, unread"] = failing(unread, act)
        except ValueError as error:
            found[f"{name}, unread"] = [type(error).__name__, str(error)]
    try:
        dynorm.distill_(calibrated(), share(batches()), steps=COUNT, loss=unlearned)
    except (dynorm.DynormError, ValueError) as error:
        found["search"] = [type(error).__name__, str(error)]
    other = llama()
    with torch.no_grad():
        other.model.norm.weight.add_(dist.get_rank())
    try:
        distilled(other, share(batches()))
    except dynorm.DynormError as error:
        found["others"] = [type(error).__name__, str(error)]
    model = TwoPaths()
    before = copy.deepcopy(model.state_dict())
    # The means fold on the first rank only.
    rows = (4, 8)[dist.get_rank()]
    try:
        dynorm.convert_model(model, [torch.randn(rows, 8) for _ in range(4)], refine=0)
    except dynorm.DynormError as error:
        found["means"] = [type(error).__name__, str(error)]
    unchanged = all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    found["means unchanged"] = [str(unchanged), ""]
    return found


class TwoPaths(nn.Module):
    """A LayerNorm that reads a linear layer, or in large batches something else."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if len(x) > 4:
            y = y.exp()
        return self.head(self.norm(y))


def dies(folder: Path) -> Any:
    """A rank that is gone in the middle of the training."""

    class Gone(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2 and dist.get_rank() == 1:
                os._exit(3)

    model = calibrated()
    before = copy.deepcopy(model.state_dict())
    try:
        distilled(model, share(batches()), callbacks=[Gone()])
    # Of torch.distributed's own.
    except RuntimeError as error:
        return [
            str(error),
            all(torch.equal(value, before[name]) for name, value in model.state_dict().items()),
        ]
