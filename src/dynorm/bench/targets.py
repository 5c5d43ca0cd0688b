"""What issue 5 asks for, beside what was measured, plainly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import dynorm
from dynorm.bench.groups import COPY, FLOORS, Group, ModelGroup
from dynorm.bench.spread import Spread

__all__ = ["Target", "saves_only_inputs", "targets"]

MODEL = "all-MiniLM-L6-v2"
Find = Callable[[int, int, str, str], Group | None]


@dataclass(frozen=True)
class Target:
    """One row: a ratio that should be high ("times as fast") or low (time over another's, or a share).

    Args:
        what: the ratio.
        unit: "times as fast", "over", "share", or "" for a statement.
        measured: what the run gave; None where it was not measured.
        asked: the least that is asked for; None for a statement.
        aim: what is hoped for.
        note: what else to know, or why it was not measured.
        holds: of a statement, whether it does.
    """

    what: str
    unit: str
    measured: Spread | None
    asked: float | None
    aim: float | None
    note: str = ""
    holds: bool | None = None

    def reaches(self, bound: float | None) -> bool | None:
        """Say whether the median is on the right side of a bound; None where there is nothing to say."""
        if self.measured is None or bound is None:
            return self.holds
        return self.measured.median >= bound if self.unit == "times as fast" else self.measured.median <= bound

    def to_dict(self) -> dict[str, Any]:
        """Return the row as plain values."""
        return {
            "what": self.what,
            "unit": self.unit,
            "measured": None if self.measured is None else self.measured.rounded(),
            "asked": self.asked,
            "aim": self.aim,
            "met": self.reaches(self.asked),
            "aim_met": self.reaches(self.aim),
            "note": self.note,
        }


def targets(
    groups: Sequence[Group], model_groups: Sequence[ModelGroup], threads: int, device: str = "cpu"
) -> list[Target]:
    """Return the table of issue 5 for one number of threads; what was not measured says so.

    Args:
        groups: what was timed of operations.
        model_groups: what was timed of models.
        threads: whose groups count.
        device: where they were timed: a GPU's figures say nothing of what is asked of a CPU, nor the other way round.
    """

    def find(rows: int, channels: int, dtype: str, stage: str) -> Group | None:
        for group in groups:
            if (group.rows, group.channels, group.dtype, group.threads, group.stage) == (
                rows, channels, dtype, threads, stage,
            ):  # fmt: skip
                return group
        return None

    def nothing(rows: int, channels: int, dtype: str, stage: str) -> Group | None:
        return None

    cpu, gpu = (find, nothing) if device == "cpu" else (nothing, find)
    models = _of_models(model_groups if device == "cpu" else (), threads)
    return [*_of_operations(cpu), *models, saves_only_inputs(), *_of_the_gpu(gpu)]


def _of_operations(find: Find) -> list[Target]:
    middle, bf16 = find(512, 768, "float32", "forward"), find(512, 768, "bfloat16", "forward")
    back, both = find(512, 768, "float32", "backward"), find(2048, 1024, "float32", "both")
    large = find(8192, 1024, "float32", "forward")
    small, small_both = find(16, 384, "float32", "forward"), find(16, 384, "float32", "both")
    faster, over = "times as fast", "over"
    # fmt: off
    rows = [
        ("DyISRU forward, float32, 512 x 768, against F.layer_norm", faster, middle, "F.layer_norm", "DyISRU", 1.8, 2.0,
         "the public layer"),
        ("DyT forward, float32, 512 x 768, against DyT eager", faster, middle, "DyT eager", "DyT", 10, 14,
         "the public layer"),
        ("DyISRU forward at 8192 x 1024, output given, over a copy", over, large, "DyISRU, output given", COPY, 1.1,
         1.0, ""),
        ("DyT forward at 8192 x 1024, output given, over a copy", over, large, "DyT, output given", COPY, 1.1, 1.0, ""),
        ("DyISRU backward, 512 x 768, against LayerNorm's", faster, back, "nn.LayerNorm", "DyISRU", 1.5, 2.0,
         "through autograd"),
        ("the same, the kernels alone", faster, back, "LayerNorm, no autograd", "DyISRU, no autograd", 1.5, 2.0, ""),
        ("DyISRU forward + backward, 2048 x 1024, against nn.LayerNorm", faster, both, "nn.LayerNorm", "DyISRU", 1.3,
         1.7, "through autograd"),
        ("DyISRU forward, bfloat16, 512 x 768, against F.layer_norm", faster, bf16, "F.layer_norm", "DyISRU", 1.7, 2.5,
         "the public layer"),
        ("DyISRU forward, 16 x 384, over nn.LayerNorm", over, small, "DyISRU", "nn.LayerNorm", 1.5, 1.0, "no grad"),
        ("DyISRU forward + backward, 16 x 384, over nn.LayerNorm", over, small_both, "DyISRU", "nn.LayerNorm", 2.0, 1.3,
         "through autograd"),
    ]
    # fmt: on
    return [_row(*row) for row in rows]


def _row(
    what: str, unit: str, group: Group | None, above: str, below: str, asked: float, aim: float, note: str
) -> Target:
    if group is None:
        return Target(what, unit, None, asked, aim, "not in this run")
    missing = [name for name in (above, below) if name not in group.times]
    if missing:
        return Target(what, unit, None, asked, aim, f"{missing[0]} not in this run")
    return Target(what, unit, group.ratio(above, below), asked, aim, note)


def _of_models(groups: Sequence[ModelGroup], threads: int) -> list[Target]:
    what = f"{MODEL}, 1 x 32 tokens: the norms' share over identities"
    for group in groups:
        if (group.name, group.batch, group.compiled, group.threads) == (MODEL, "1 x 32 tokens", False, threads):
            note = f"LayerNorm's: {group.share('norms').median:.1%}"
            return [Target(what, "share", group.share("DyISRU"), 0.03, 0.01, note)]
    return [Target(what, "share", None, 0.03, 0.01, "no model of this name in this run")]


def saves_only_inputs() -> Target:
    """Look at what a layer saves for its backward pass: x and its parameters, and nothing else."""
    layer, x = dynorm.DyISRU(64), torch.randn(32, 64, requires_grad=True)
    saved: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layer(x)
    known = {x.data_ptr(), *(p.data_ptr() for p in layer.parameters())}
    others = [tuple(t.shape) for t in saved if t.data_ptr() not in known]
    note = "x and parameters only" if not others else f"also tensors of shapes {others}"
    return Target("saved for backward: x and parameters only", "", None, None, None, note, not others)


def _of_the_gpu(find: Find) -> list[Target]:
    rows = []
    for stage, words, asked, aim in (
        ("forward", "forward, output given", 1.15, 1.05),
        ("both", "forward + backward", 1.3, 1.1),
    ):
        group = find(8192, 4096, "bfloat16", stage)
        name = "DyISRU, output given" if stage == "forward" else "DyISRU"
        what = f"H200, bfloat16 8192 x 4096: {words}, over the copy floor"
        if group is None or name not in group.times:
            rows.append(Target(what, "over", None, asked, aim, "no such GPU in this run"))
        else:
            rows.append(
                Target(what, "over", group.ratio(name, COPY).scaled(1 / FLOORS[stage]), asked, aim, _gpu_name())
            )
    group = find(8192, 4096, "bfloat16", "both")
    what = "H200: DyT forward + backward, against Liger's"
    if group is None or "Liger DyT" not in group.times:
        rows.append(Target(what, "times as fast", None, 2.0, 3.0, "no such GPU in this run, or no Liger"))
    else:
        rows.append(Target(what, "times as fast", group.ratio("Liger DyT", "DyT"), 2.0, 3.0, _gpu_name()))
    what = "H200: GEMM 8192 x 4096 x 4096 bfloat16 with the fused epilogue, over GEMM + residual"
    rows.append(Target(what, "over", None, 1.05, 1.0, "measured by python -m benchmarks.gpu"))
    return rows


def _gpu_name() -> str:
    return torch.cuda.get_device_name()
