"""How a model is converted: the options, and their defaults for each kind of model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from dynorm.arguments import check_not_negative, check_positive
from dynorm.errors import ArgumentError
from dynorm.family import layer_class
from dynorm.fit.site_fit import TOLERANCE
from dynorm.layers import AnnealedNorm

PointWise = Literal["dyisru", "dyt", "derf", "linear", "auto"]
"""The layers that a recipe can put in the place of norms."""
# The defaults that depend on the kind of model: an encoder of texts, a model of images, a language
# model, and a model of audio. The last three were measured on DINOv2-small, SmolLM2-135M and
# Whisper tiny.en.
ENCODER = {
    "max_length": 128,
    "batch": 32,
    "calibration": 256,
    "per_channel": True,
    "lean": 0.7,
    "witnesses": 4,
}
IMAGES = {"batch": 8, "calibration": 128, "per_channel": False, "lean": 0.0, "witnesses": 8}
LANGUAGE = {
    "max_length": 256,
    "batch": 4,
    "calibration": 24,
    "per_channel": False,
    "lean": 0.0,
    "witnesses": 8,
}
AUDIO = {"batch": 4, "calibration": 32, "per_channel": False, "lean": 0.0, "witnesses": 8}


def suits(language_model: bool, noun: str) -> dict[str, Any]:
    """Return the defaults for a kind of model; a language model may take "images" as well."""
    if language_model:
        return LANGUAGE
    return {"images": IMAGES, "audio": AUDIO}.get(noun, ENCODER)


@dataclass(frozen=True)
class Recipe:
    """How to convert a model: the options of ``dynorm convert``, described in its help.

    None means the default for the kind of model: an encoder of texts, or a model of language,
    images or audio. Two fields are not on the command line: ``calibration``, the number of samples
    on which the constants are fitted site by site, and ``lean`` of :func:`calibrate_`.
    """

    to: PointWise = "dyisru"
    steps: int | None = None
    minutes: float | None = None
    refine: int = 50
    held_out: int = 512
    max_length: int | None = None
    batch: int | None = None
    only: Sequence[str] = ()
    skip: Sequence[str] = ()
    per_channel: bool | None = None
    witnesses: int | None = None
    tolerance: float = TOLERANCE
    seed: int = 0
    lr: float | None = None
    bf16: bool = False
    accumulate: int = 1
    checkpoints: Path | None = None
    calibration: int | None = None
    lean: float | None = None

    def check(self) -> None:
        """Check every value, or raise ArgumentError."""
        if issubclass(layer_class(self.to), AnnealedNorm):
            raise ArgumentError(
                f"to must be point-wise, but {self.to!r} is a norm until its annealing ends: train "
                "it with AnnealCallback"
            )
        least = {
            "steps": 0,
            "refine": 0,
            "held_out": 2,
            "max_length": 2,
            "batch": 1,
            "witnesses": 0,
            "seed": 0,
            "calibration": 1,
            "accumulate": 1,
        }
        for name, lowest in least.items():
            value = getattr(self, name)
            if value is None:
                continue
            # Not isinstance, because True is an int.
            if type(value) is not int or value < lowest:
                raise ArgumentError(f"{name} must be an integer, at least {lowest}, got {value!r}")
        if self.seed >= 2**32:
            raise ArgumentError(f"seed must be from 0 to 2**32 - 1, got {self.seed}")
        if self.steps is not None and self.minutes is not None:
            raise ArgumentError(
                f"give steps or minutes, not both: got steps={self.steps}, minutes={self.minutes}"
            )
        check_not_negative("minutes", 0 if self.minutes is None else self.minutes)
        check_not_negative("tolerance", self.tolerance)
        if self.lr is not None:
            check_positive("lr", self.lr)
        if self.steps or self.minutes:
            return
        unused = []
        for name in ("lr", "accumulate", "checkpoints"):
            if getattr(self, name) != getattr(Recipe, name):
                unused.append(name)
        if unused:
            raise ArgumentError(
                f"{' and '.join(unused)} must come with steps or minutes: without them nothing is "
                "distilled"
            )

    def filled(self, language_model: bool, noun: str = "texts") -> Recipe:
        """Return the recipe with the defaults for the kind of model in place of None."""
        defaults = suits(language_model, noun)
        missing = {name: value for name, value in defaults.items() if getattr(self, name) is None}
        return replace(self, **missing)
