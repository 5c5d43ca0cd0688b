"""The new values of a model's parameters, all in float64, before any of them is written."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dynorm.fold.site import SiteFold
from dynorm.fold.through import RescaledStream
from dynorm.stream.channels import laid_along
from dynorm.stream.graph import Slot, double
from dynorm.stream.stream import Stream


class NewValues:
    """The new values of all parameters that a fold changes.

    Attributes:
        values: the new value of each parameter.
        added: the biases to add, by the weight of their layer.
    """

    def __init__(self) -> None:
        self.values: dict[Slot, Tensor] = {}
        self.added: dict[Slot, Tensor] = {}

    def value(self, slot: Slot) -> Tensor:
        """Return the value of a parameter so far."""
        return self.values[slot] if slot in self.values else double(slot.tensor)

    def scale(self, slot: Slot, factor: Tensor, axis: int) -> None:
        """Multiply a parameter along an axis, and the bias that is added to its layer."""
        self.values[slot] = self.value(slot) * laid_along(factor, axis, slot.tensor.ndim)
        if slot in self.added:
            self.added[slot] = self.added[slot] * factor

    def shift(self, slot: Slot, amount: Tensor) -> None:
        """Add to a parameter."""
        self.values[slot] = self.value(slot) + amount

    def add_bias(self, slot: Slot, amount: Tensor) -> None:
        """Add to the bias that the layer of a weight is given."""
        self.added[slot] = self.added.get(slot, 0) + amount

    def scale_readers(self, folds: Sequence[SiteFold]) -> None:
        """Put the factors and shifts of norms into their readers."""
        # Norms that share a reader have the same factor and shift, which go in once.
        done = set()
        absorbed = [fold for fold in folds if fold.is_absorbed]
        for fold in absorbed:
            for reader in fold.readers:
                weight = reader.weight
                bias = reader.bias
                if (weight, bias) in done:
                    continue
                done.add((weight, bias))
                # From the old weight, so that one that is read with two biases is scaled once.
                if fold.factor is not None:
                    self.values[weight] = reader.scaled(double(weight.tensor), fold.factor)
                if fold.shift is not None:
                    constant = reader.constant(double(weight.tensor), fold.shift)
                    if bias is None:
                        self.added[weight] = constant
                    else:
                        self.shift(bias, constant)

    def move_learned_centers(self, folds: Sequence[SiteFold]) -> None:
        """Put the learned centres of layers into the biases before them."""
        for fold in folds:
            write = fold.learned_center_into
            if write is None or fold.learned_center is None:
                continue
            if write.is_new:
                self.add_bias(write.slot, -fold.learned_center)
            else:
                center = laid_along(fold.learned_center, write.axis, write.slot.tensor.ndim)
                self.shift(write.slot, -center)

    def remove_means(self, streams: Sequence[Stream]) -> None:
        """Take the means out of everything that writes into some streams."""
        done = set()
        for stream in streams:
            for write in stream.writes:
                if write.slot in done:
                    continue
                done.add(write.slot)
                if write.gain is not None:
                    # The mean to take out is that of the scaled outputs.
                    gain = double(write.gain.tensor)
                    self.scale(write.slot, gain, write.axis)
                    self.values[write.gain] = torch.ones_like(gain)
                value = self.value(write.slot)
                self.values[write.slot] = value - value.mean(write.axis, keepdim=True)
                bias = self.added.get(write.slot)
                if bias is not None:
                    self.added[write.slot] = bias - bias.mean()

    def rescale(self, rescaled: RescaledStream, slots: Mapping[Tensor, Slot]) -> None:
        """Multiply the readers of a stream by its factors, and divide the writers by them."""
        readers = {reader.weight: reader for reader in rescaled.stream.readers}
        for reader in readers.values():
            weight = self.value(reader.weight)
            self.values[reader.weight] = reader.scaled(weight, rescaled.factor)
        writers: dict[Slot, int] = {}
        for write in rescaled.stream.writes:
            if write.gain is None:
                writers[write.slot] = write.axis
            else:
                writers[write.gain] = 0
        for slot, axis in writers.items():
            self.scale(slot, 1 / rescaled.factor, axis)
        for norm in rescaled.writers:
            for part in norm.affine_parts:
                factor = rescaled.factor.view(part.tensor.shape)
                self.values[slots[part.tensor]] = part.value / factor - part.offset


def new_values(
    folds: Sequence[SiteFold], streams_to_rescale: Sequence[RescaledStream], slots: Sequence[Slot]
) -> NewValues:
    """Return the new values of all parameters that a fold changes; ``slots`` are all of the model."""
    new = NewValues()
    # First, because it overwrites.
    new.scale_readers(folds)
    new.move_learned_centers(folds)
    streams: dict[Stream, None] = {}
    for fold in folds:
        if fold.becomes_rms:
            streams.update(dict.fromkeys(fold.streams))
        streams.update(dict.fromkeys(fold.partly_mean_free))
    new.remove_means(list(streams))
    # Last, because the mean to take out is that of the channels before a factor divides each.
    by_tensor = {slot.tensor: slot for slot in slots}
    for rescaled in streams_to_rescale:
        new.rescale(rescaled, by_tensor)
    return new
