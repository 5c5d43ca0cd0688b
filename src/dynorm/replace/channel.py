"""The record of a scale channel, which lies on each norm of the stream and then on its layer."""

from dataclasses import dataclass
from typing import cast

from torch import nn


@dataclass(frozen=True)
class RowWriter:
    """A linear layer that adds to the stream, and whose row for the scale channel is fitted.

    Args:
        path: the path of the layer.
        scale: the number that its output is multiplied with before it joins the stream.
    """

    path: str
    scale: float


@dataclass(frozen=True)
class ScaleChannel:
    """The scale channel at one norm of a stream.

    Args:
        channel: its position.
        fixed: the channels whose squares are read from the stream itself.
        writers: the layers that wrote into the stream since the norm before.
    """

    channel: int
    fixed: tuple[int, ...]
    writers: tuple[RowWriter, ...]

    @property
    def witnesses(self) -> tuple[int, ...]:
        """The channels that the layer in the norm's place reads."""
        return (self.channel, *self.fixed)


_NAME = "_dynorm_scale_channel"


def scale_channel_of(norm: nn.Module) -> ScaleChannel | None:
    """Return the scale channel of the stream that a norm reads, or None."""
    return cast("ScaleChannel | None", norm.__dict__.get(_NAME))


def set_scale_channel_(norm: nn.Module, channel: ScaleChannel) -> None:
    """Note the scale channel on a norm; it is copied and pickled with it."""
    norm.__dict__[_NAME] = channel
