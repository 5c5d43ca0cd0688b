"""The new values of all parameters that a fold changes, in float64, from the old ones: nothing is swapped here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from dynorm.fold.affine import AffineFold, new_bias_owner
from dynorm.fold.constants import CenterFold
from dynorm.fold.readers import Read, as_double
from dynorm.fold.slots import Slot, Slots
from dynorm.fold.stream import Stream, slots_of


@dataclass(eq=False)
class Change:
    """What happens to one parameter, in this order.

    Args:
        read: how it reads a norm, and what multiplied that norm's channels.
        shifts: the weights that read a norm, how, and the norm's constant; for a bias.
        gain: what multiplies its outputs (LayerScale).
        offset: what is subtracted.
        gain_axis: the axis of ``gain``.
        center: the axis along which its mean is taken out, or None.
        fill: the number that it becomes, whatever else; or None.
    """

    read: tuple[Read, Tensor] | None = None
    shifts: dict[Slot, tuple[Read, Tensor]] = field(default_factory=dict)
    gain: Tensor | None = None
    offset: Tensor | None = None
    gain_axis: int = 0
    center: int | None = None
    fill: float | None = None

    def applied(self, old: Tensor) -> Tensor:
        """Return the new value, in float64, on the old one's device."""
        if self.fill is not None:
            return torch.full_like(old, self.fill, dtype=torch.float64)
        new = as_double(old)
        if self.read is not None:
            found, factor = self.read
            new = found.scaled(new, factor.to(new.device))
        for slot, (found, shift) in self.shifts.items():
            new = new + found.constant(as_double(slot.tensor).to(new.device), shift.to(new.device))
        if self.gain is not None:
            view = [1] * new.ndim
            view[self.gain_axis] = -1
            new = new * self.gain.to(new.device, torch.float64).view(view)
        if self.offset is not None:
            new = new - self.offset.to(new.device)
        if self.center is not None:
            new = new - new.mean(self.center, keepdim=True)
        return new


class Edits:
    """The changes of a fold, by parameter, and the biases that it adds.

    Args:
        slots: the parameters.
    """

    def __init__(self, slots: Slots) -> None:
        self.slots = slots
        self.changes: dict[Slot, Change] = {}
        self.added: dict[nn.Module, tuple[Slot, Change]] = {}

    def affine(self, fold: AffineFold) -> None:
        """Take over a norm's weight and bias into its readers."""
        for found in fold.reads:
            weight = self.slots.of(found.leaf, found.weight)
            if fold.factor is not None:
                self._change(weight).read = (found, fold.factor)
            if fold.shift is not None:
                self._bias(found, weight).shifts[weight] = (found, fold.shift)

    def center(self, stream: Stream) -> None:
        """Take the mean out of everything that writes into a stream."""
        for write in stream.writes:
            for slot in slots_of(self.slots, write):
                change = self._change(slot)
                change.center = write.axis
                if write.gain is None:
                    continue
                gain = self.slots.of(*write.gain)
                change.gain, change.gain_axis = gain.tensor.detach(), write.axis
                self._change(gain).fill = 1.0

    def offset(self, fold: CenterFold) -> None:
        """Subtract the centre of a point-wise layer from the bias before it."""
        assert fold.bias is not None
        self._change(fold.bias).offset = fold.center

    def values(self) -> Iterator[tuple[Slot, Tensor]]:
        """Yield each changed parameter with its new value."""
        for slot, change in self.changes.items():
            yield slot, change.applied(slot.tensor)

    def biases(self) -> Iterator[tuple[nn.Module, Tensor]]:
        """Yield each module that gets a bias, with the bias; what centres or scales its outputs does so with it too."""
        for owner, (weight, change) in self.added.items():
            of_weight = self.changes.get(weight, Change())
            found = next(iter(change.shifts.values()))[0]
            assert found.out is not None
            if of_weight.center is not None and of_weight.center == found.out:
                change.center = 0
            if of_weight.gain is not None:
                change.gain, change.gain_axis = of_weight.gain, 0
            zeros = weight.tensor.new_zeros(weight.tensor.shape[found.out])
            yield owner, change.applied(zeros)

    def _bias(self, found: Read, weight: Slot) -> Change:
        if found.bias is not None:
            return self._change(self.slots.of(*found.bias))
        owner = new_bias_owner(self.slots, found)
        assert owner is not None
        return self.added.setdefault(owner, (weight, Change()))[1]

    def _change(self, slot: Slot) -> Change:
        return self.changes.setdefault(slot, Change())
