"""Sizes of models, and of their data."""

from __future__ import annotations

from dataclasses import dataclass

from dynorm.errors import ArgumentError


@dataclass(frozen=True)
class Size:
    """A model's size, and the amount of data per step and measurement.

    Args:
        layers: number of blocks.
        channels: C, the width of the residual stream.
        heads: attention heads.
        context: bytes (or, for digits, patches) that the model sees at once.
        batch: blocks (or images) a step, over all processes.
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
    "text": {
        "tiny": Size(2, 16, 2, 32, 4, 16, 64),
        "small": Size(6, 128, 4, 128, 24, 256, 2048),
        "medium": Size(8, 320, 5, 128, 12, 256, 1024),
        "large": Size(12, 768, 12, 1024, 24, 32, 256),
    },
    "digits": {
        "tiny": Size(2, 16, 2, 16, 16, 64, 64),
        "small": Size(4, 64, 4, 16, 64, 500, 500),
    },
}
MODELS = {"text": ("gpt2", "llama"), "digits": ("vit",)}


def size_of(task: str, name: str) -> Size:
    """Return the size of a name.

    Raises:
        ArgumentError: the task has no such size.
    """
    if name not in SIZES[task]:
        raise ArgumentError(
            f"the size must be one of {', '.join(SIZES[task])} for {task}, got {name!r}"
        )
    return SIZES[task][name]


def weights(size: Size) -> int:
    """Return about how many weights the blocks of a model have: 12 matrices of C x C each."""
    return 12 * size.layers * size.channels**2
