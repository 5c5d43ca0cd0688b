"""The settings of a run, and the name made of them."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from dynorm.errors import ArgumentError
from studies.arms import Arm, arm_of
from studies.sizes import MODELS, Size, size_of

PATH = (0.6, 0.3)
SHARE = 0.1


@dataclass(frozen=True)
class Settings:
    """One run.

    Args:
        arm: a name of ``studies.arms.ARMS``.
        lr: the highest learning rate.
        steps: optimizer steps.
        seed: of the first weights and the order of the data; the split is always the same.
        task: "text" (bytes of the standard library) or "digits".
        model: "gpt2" or "llama" for text, "vit" for digits; None takes the first.
        size: "tiny", "small", "medium" or "large".
        warmup: steps of linear warm-up; afterwards the rate falls to a tenth as a cosine.
        constants_rate: the rate of the constants (log b, alpha, shift, centre) over that of the
            other weights; 30 is the default of ``dynorm.param_groups``, for log b alone; None takes
            the arm's own.
        center: whether a centre is learned; by default only by annealed arms that begin with
            LayerNorm.
        warmup_constants: set the constants anew from a batch at ten steps during the warm-up, as at
            the start.
        share: how much of a token's typical sum the witnesses carry at the start, for direct arms
            that have some.
        optimizer: "adamw", or "muon" for the matrices but the embeddings, with AdamW for the rest.
        scale_loss: a bound on the growth of the stream, for direct arms that are set from a batch:
            so many times the squared logarithm of its mean square at the last site, over that at
            the start, is added to the training loss (the fixed target of TaperNorm, arXiv
            2602.10408); 0 leaves it out.
        fixed_writers: hold the norms of the matrices that write to the stream at those of the
            start, as anGPT does (arXiv 2505.22014); for language models.
        path_start: where the annealing begins, as a share of the steps.
        path_length: how long it is, as a share of the steps.
        device: "cpu" or "cuda".
        bf16: compute in bfloat16 (autocast).

    Raises:
        ArgumentError: a value is outside its domain, does not apply to the arm, or the schedule
            does not fit the run.
    """

    arm: str
    lr: float
    steps: int = 600
    seed: int = 0
    task: str = "text"
    model: str | None = None
    size: str = "small"
    warmup: int = 100
    constants_rate: float | None = None
    center: bool | None = None
    warmup_constants: bool = False
    share: float = SHARE
    path_start: float = PATH[0]
    path_length: float = PATH[1]
    device: str = "cpu"
    bf16: bool = False
    optimizer: str = "adamw"
    scale_loss: float = 0.0
    fixed_writers: bool = False

    def __post_init__(self) -> None:
        """Refuse impossible settings, before anything is built."""
        if self.constants_rate is None:
            object.__setattr__(self, "constants_rate", self.arm_spec.constants_rate)
        self._check_numbers()
        if self.task not in MODELS:
            raise ArgumentError(f"the task must be one of {', '.join(MODELS)}, got {self.task!r}")
        if self.model is None:
            object.__setattr__(self, "model", MODELS[self.task][0])
        if self.model not in MODELS[self.task]:
            raise ArgumentError(
                f"the model must be one of {', '.join(MODELS[self.task])} for {self.task}, got "
                f"{self.model!r}"
            )
        if self.optimizer not in ("adamw", "muon"):
            raise ArgumentError(f"the optimizer must be adamw or muon, got {self.optimizer!r}")
        if self.device not in ("cpu", "cuda"):
            raise ArgumentError(f"the device must be cpu or cuda, got {self.device!r}")
        size_of(self.task, self.size)
        self._check_variant()

    @property
    def arm_spec(self) -> Arm:
        """The arm."""
        return arm_of(self.arm)

    @property
    def size_spec(self) -> Size:
        """The size."""
        return size_of(self.task, self.size)

    @property
    def variant(self) -> str:
        """The arm with the options that differ from its defaults, as the run's name has it."""
        parts = [self.arm]
        if self.constants_rate != self.arm_spec.constants_rate:
            parts.append(f"rate{self.constants_rate:g}")
        if self.center is not None:
            parts.append("center" if self.center else "nocenter")
        if self.warmup_constants:
            parts.append("warm")
        if self.share != SHARE:
            parts.append(f"share{self.share:g}")
        if self.scale_loss:
            parts.append(f"bound{self.scale_loss:g}")
        if self.fixed_writers:
            parts.append("writers")
        if (self.path_start, self.path_length) != PATH:
            parts.append(f"path{self.path_start:g}+{self.path_length:g}")
        return "-".join(parts)

    @property
    def group(self) -> str:
        """What runs share that differ in learning rate and seed only."""
        parts = [self.task, str(self.model), self.size, f"{self.steps}", self.variant]
        parts += [f"warmup{self.warmup}"] if self.warmup != 100 else []
        parts += [self.optimizer] if self.optimizer != "adamw" else []
        parts += [self.device] if self.device != "cpu" else []
        parts += ["bf16"] if self.bf16 else []
        return "-".join(parts)

    @property
    def name(self) -> str:
        """The run's name: the same for the same settings only."""
        return f"{self.group}-lr{self.lr:g}-seed{self.seed}"

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as plain values that JSON knows."""
        return asdict(self)

    def _check_numbers(self) -> None:
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise ArgumentError(f"the learning rate must be positive and finite, got {self.lr!r}")
        for name in ("lr", "constants_rate", "share", "scale_loss", "path_start", "path_length"):
            value = getattr(self, name)
            if math.isfinite(value) and float(f"{value:g}") != value:
                raise ArgumentError(
                    f"{name} must have at most six digits, for the run's name, got {value!r}"
                )
        if self.steps < 1:
            raise ArgumentError(f"steps must be at least 1, got {self.steps}")
        if not 0 <= self.warmup < self.steps:
            raise ArgumentError(
                f"the warm-up must end before the run does, got {self.warmup} of {self.steps} "
                "steps: train longer, or "
                "give a shorter --warmup"
            )
        assert self.constants_rate is not None
        if not (math.isfinite(self.constants_rate) and self.constants_rate > 0):
            raise ArgumentError(
                f"the constants' rate must be positive and finite, got {self.constants_rate!r}"
            )
        if not 0 <= self.seed < 2**32:
            raise ArgumentError(f"the seed must be from 0 to 2^32 - 1, got {self.seed}")

    def _check_variant(self) -> None:
        arm = self.arm_spec
        other_rate = self.constants_rate != arm.constants_rate
        if arm.layer is None and (other_rate or self.center is not None or self.warmup_constants):
            raise ArgumentError(f"{arm.name} has no constants: leave their options out")
        if self.warmup_constants and arm.start != "batch":
            raise ArgumentError(
                f"{arm.name} does not set its constants from a batch: leave --warmup-constants out"
            )
        if self.warmup_constants and self.warmup < 10:
            raise ArgumentError(
                "the warm-up must have 10 steps or more to set the constants ten times, got "
                f"{self.warmup}: give a "
                "longer --warmup, or leave --warmup-constants out"
            )
        if self.share != SHARE and not (arm.witnesses and arm.start == "batch"):
            raise ArgumentError(
                f"{arm.name} has no witnesses that are set from a batch: leave --share out"
            )
        if not (math.isfinite(self.scale_loss) and self.scale_loss >= 0):
            raise ArgumentError(
                f"the weight of the scale's loss must not be negative, got {self.scale_loss!r}"
            )
        if self.scale_loss and (arm.start != "batch" or arm.final_norm):
            raise ArgumentError(
                f"{arm.name} does not set its last constant from a batch: leave --scale-loss out"
            )
        if self.fixed_writers and (arm.layer is None or self.task != "text"):
            raise ArgumentError(
                "fixed writers are for point-wise language models: leave --fixed-writers out"
            )
        if not 0 < self.share < 1:
            raise ArgumentError(f"the witnesses' share must be between 0 and 1, got {self.share!r}")
        if not arm.annealed:
            if (self.path_start, self.path_length) != PATH:
                raise ArgumentError(f"{arm.name} is not annealed: leave the options --path-... out")
            return
        start, length = round(self.path_start * self.steps), round(self.path_length * self.steps)
        if start < 1 or length < 1 or start + length >= self.steps:
            raise ArgumentError(
                "the annealing must begin after the first step and end before the last, but it "
                "starts at "
                f"{self.path_start:g} and takes {self.path_length:g} of {self.steps} steps: change "
                "these, or train on"
            )
