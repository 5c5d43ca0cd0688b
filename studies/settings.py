"""The settings of a run: the arm, the model, and the name made of them."""

from dataclasses import asdict, dataclass
from typing import Any

from dynorm.errors import ArgumentError
from dynorm.layers.groups import LOG_RATE


@dataclass(frozen=True)
class Arm:
    """The layers in place of a transformer's norms.

    Args:
        title: its name in tables and pictures.
        norm: the norm that it trains with, if it has one.
        layer: the layer's name for ``dynorm.convert_``, or None to train with the norm throughout.
        published: whether the constants are those of the papers (slope 0.5, scale 1, and a learned
            factor sqrt(C) after the embedding), not measured on the first batch.
        constants_rate: the learning rate of the constants over that of the other weights.
        witnesses: how many witnesses each layer has, the first channels.
    """

    title: str
    norm: str | None = None
    layer: str | None = None
    published: bool = False
    constants_rate: float = 1.0
    witnesses: int = 0


WARMUP = 100

ARMS = {
    "layernorm": Arm("LayerNorm", norm="layernorm"),
    "rmsnorm": Arm("RMSNorm", norm="rmsnorm"),
    "dyisru": Arm("DyISRU", layer="dyisru", constants_rate=LOG_RATE),
    "dyt": Arm("scaled DyT", layer="dyt"),
    "derf": Arm("scaled Derf", layer="derf"),
    "linear": Arm("linear (control)", layer="linear", constants_rate=LOG_RATE),
    "dyisru_witnesses": Arm(
        "DyISRU, 4 witnesses", layer="dyisru", constants_rate=LOG_RATE, witnesses=4
    ),
    "dyt_published": Arm("DyT as published", layer="dyt", published=True),
}
"""The arms by the name that the command line and the results have."""


@dataclass(frozen=True)
class Size:
    """A model's size, and the amount of data per step and measurement.

    Args:
        layers: number of blocks.
        channels: C, the width of the residual stream.
        heads: attention heads.
        context: bytes that the model sees at once.
        batch: blocks per step.
        watched: held-out blocks for the curve during training.
        final: held-out blocks for the figure at the end.
    """

    layers: int
    channels: int
    heads: int
    context: int
    batch: int
    watched: int
    final: int


SIZES = {
    "tiny": Size(2, 16, 2, 32, 4, 16, 64),
    "small": Size(6, 128, 4, 128, 24, 256, 2048),
    "medium": Size(8, 320, 5, 128, 12, 256, 1024),
}


@dataclass(frozen=True)
class Settings:
    """One run.

    Args:
        arm: a name of ``ARMS``.
        lr: the highest learning rate, after a linear warm-up; it falls to a tenth as a cosine.
        steps: optimizer steps.
        seed: of the first weights and of the order of the data; the split is always the same.
        model: "gpt2" or "llama".
        size: a name of ``SIZES``.

    Raises:
        ArgumentError: a value is outside its domain.
    """

    arm: str
    lr: float
    steps: int = 600
    seed: int = 0
    model: str = "gpt2"
    size: str = "small"

    def __post_init__(self) -> None:
        """Refuse impossible settings, before anything is built."""
        known = {"arm": ARMS, "model": ("gpt2", "llama"), "size": SIZES}
        for name, names in known.items():
            value = getattr(self, name)
            if value not in names:
                raise ArgumentError(f"{name} must be one of {', '.join(names)}, got {value!r}")
        # A negated comparison also refuses NaN.
        if not 0 < self.lr < float("inf"):
            raise ArgumentError(f"lr must be positive and finite, got {self.lr!r}")
        if self.steps < 2:
            raise ArgumentError(f"steps must be at least 2, got {self.steps}")
        if not 0 <= self.seed < 2**32:
            raise ArgumentError(f"seed must be from 0 to 2**32 - 1, got {self.seed}")

    @property
    def group(self) -> str:
        """The name that runs share which differ only in learning rate and seed."""
        return f"{self.model}-{self.size}-{self.steps}-{self.arm}"

    @property
    def name(self) -> str:
        """The run's name; no other settings have it."""
        return f"{self.group}-lr{self.lr:g}-seed{self.seed}"

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as plain values for JSON."""
        return asdict(self)
