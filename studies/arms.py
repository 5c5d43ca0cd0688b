"""The arms of the study: the layers in place of a transformer's norms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dynorm.errors import ArgumentError
from dynorm.layers.groups import LOG_RATE

Start = Literal["published", "tuned", "batch", "path"]
Layer = Literal["dyisru", "dyt", "derf", "linear", "annealed", "annealed_dyt", "annealed_linear"]


@dataclass(frozen=True)
class Arm:
    """One way to train a model.

    Args:
        name: its name on the command line.
        words: its description.
        norm: the norm it trains with, or that is replaced: "layernorm", "rmsnorm", or "own", the
            model's.
        layer: the name that ``dynorm.convert_`` knows, or None for a norm throughout.
        start: where the constants come from: "published", the papers' defaults (slope 0.5 for all
            sites, no scale); "tuned", the slope that DyT's authors chose for the narrowest language
            models of their table; "batch", closed form 5 on the first batch, scale sqrt(C); "path",
            the activations at its begin.
        embedding_scaled: whether a learned factor, sqrt(C) at first, follows the embedding
            (language models only).
        constants_rate: the rate of the constants over that of the other weights, where a run says
            nothing else.
        witnesses: how many witness channels each layer has, the first ones.
        final_norm: whether the last site keeps its norm.
    """

    name: str
    words: str
    norm: Literal["layernorm", "rmsnorm", "own"] = "own"
    layer: Layer | None = None
    start: Start | None = None
    embedding_scaled: bool = False
    constants_rate: float = 1.0
    witnesses: int = 0
    final_norm: bool = False

    @property
    def annealed(self) -> bool:
        """Whether it begins with the norm and ends without."""
        return self.start == "path"

    @property
    def direct(self) -> bool:
        """Whether it is point-wise from the first step."""
        return self.layer is not None and not self.annealed


ARMS = {
    arm.name: arm
    for arm in (
        Arm("layernorm", "LayerNorm", norm="layernorm"),
        Arm("rmsnorm", "RMSNorm", norm="rmsnorm"),
        Arm(
            "dyt_published",
            "DyT as published",
            layer="dyt",
            start="published",
            embedding_scaled=True,
        ),
        Arm(
            "dyt_tuned",
            "DyT as tuned by its authors",
            layer="dyt",
            start="tuned",
            embedding_scaled=True,
        ),
        Arm("dyisru_published", "DyISRU as published", layer="dyisru", start="published"),
        Arm("dyt", "scaled DyT", layer="dyt", start="batch"),
        Arm("derf", "scaled Derf", layer="derf", start="batch"),
        Arm("dyisru", "DyISRU", layer="dyisru", start="batch", constants_rate=LOG_RATE),
        Arm(
            "dyisru_witnesses",
            "DyISRU, 4 witnesses",
            layer="dyisru",
            start="batch",
            constants_rate=LOG_RATE,
            witnesses=4,
        ),
        Arm(
            "dyisru_final_norm",
            "DyISRU, the final norm kept",
            layer="dyisru",
            start="batch",
            constants_rate=LOG_RATE,
            final_norm=True,
        ),
        Arm("linear", "linear (control)", layer="linear", start="batch", constants_rate=LOG_RATE),
        Arm("dyisru_annealed", "norm, then DyISRU (annealed)", layer="annealed", start="path"),
        Arm("dyt_annealed", "norm, then scaled DyT (annealed)", layer="annealed_dyt", start="path"),
        Arm(
            "dyisru_witnesses_annealed",
            "norm, then DyISRU with 4 witnesses (annealed)",
            layer="annealed",
            start="path",
            witnesses=4,
        ),
        Arm(
            "linear_annealed",
            "norm, then linear (annealed control)",
            layer="annealed_linear",
            start="path",
        ),
    )
}
# The arms whose constants are drawn.
SHOWN = ("dyisru", "dyt", "dyisru_annealed", "dyt_published")


def arm_of(name: str) -> Arm:
    """Return the arm of a name.

    Raises:
        ArgumentError: no arm has that name.
    """
    if name not in ARMS:
        raise ArgumentError(f"the arm must be one of {', '.join(ARMS)}, got {name!r}")
    return ARMS[name]
