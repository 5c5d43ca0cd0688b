"""Free a channel of the residual stream, by an orthogonal map of its writers and readers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dynorm.replace.channel import RowWriter
from dynorm.replace.edits import write_values_
from dynorm.stream.channels import along
from dynorm.stream.find import ResidualStream, Writer
from dynorm.stream.graph import Slot
from dynorm.stream.operators import Read, Write

# Writers that leave a direction out to this part of their size are centred: the rest is rounding.
_NOTHING = 1e-5
# The number of rows of the first table that the sum with another one is averaged over.
_SAMPLES = 256


@dataclass(frozen=True)
class Basis:
    """An orthogonal basis of the stream, whose last direction becomes the scale channel.

    Args:
        directions: (C, C), one direction per column, with falling energy.
        energy: the part of the tokens' energy in each direction, (C); the rest of the last one is
            lost.
        is_exact: nothing writes along the last direction.
    """

    directions: Tensor
    energy: Tensor
    is_exact: bool


def choose_basis(stream: ResidualStream, gram: Tensor) -> Basis:
    """Return the principal axes of the stream; the last one holds the least energy, or none at all.

    ``gram`` is the sum of x x^T / x^T x over the tokens at all norms. Writers that have no mean over
    the channels, as a folded LayerNorm leaves them, write nothing along 1 / sqrt(C).
    """
    channels = len(gram)
    ones = torch.full((channels,), channels**-0.5, dtype=torch.float64, device="cpu")
    is_exact = all(_leaves_out(writer, ones) for writer in stream.writers)
    if is_exact:
        # The other directions must be orthogonal to it, to the last digit.
        keep = torch.eye(channels, dtype=torch.float64, device="cpu") - torch.outer(ones, ones)
        gram = keep @ gram @ keep - gram.trace() * torch.outer(ones, ones)
    energy, directions = torch.linalg.eigh(gram)
    energy = energy.flip(0)
    directions = directions.flip(1)
    if is_exact:
        energy[-1] = 0.0
        directions[:, -1] = ones
    return Basis(directions, energy / energy.sum(), is_exact)


def _leaves_out(writer: Writer, direction: Tensor) -> bool:
    for write in (writer.weight, writer.bias):
        if write is None:
            continue
        value = _scaled_by_gain(write)
        part = torch.tensordot(value, direction, dims=([write.axis], [0]))
        if part.abs().max() > _NOTHING * value.square().mean().sqrt() * len(direction) ** 0.5:
            return False
    return True


def _scaled_by_gain(write: Write) -> Tensor:
    """Return the value of a parameter, in float64, with the gain that scales it on the way (LayerScale)."""
    value = write.slot.double()
    if write.gain is None:
        return value
    return value * along(write.gain.double(), write.axis, value.ndim)


@torch.no_grad()
def rotate_(stream: ResidualStream, basis: Basis) -> None:
    """Give all writers and readers of a stream the channels of a basis; the outputs stay the same."""
    new: dict[Slot, Tensor] = {}
    for write in _writes(stream):
        if write.slot not in new:
            new[write.slot] = _mapped(_scaled_by_gain(write), write.axis, basis.directions)
        if write.gain is not None:
            new[write.gain] = torch.ones_like(write.gain.double())
    for read in _reads(stream):
        if read.weight not in new:
            new[read.weight] = _mapped(read.weight.double(), read.axis, basis.directions)
    write_values_(stream.slots, new)


@torch.no_grad()
def clear_last_(stream: ResidualStream) -> None:
    """Write nothing into the last channel any more, and let nothing read it."""
    for write in _writes(stream):
        for tensor in _tensors(write.slot):
            tensor.movedim(write.axis, -1)[..., -1] = 0.0
    for read in _reads(stream):
        for tensor in _tensors(read.weight):
            tensor.movedim(read.axis, -1)[..., -1] = 0.0


def _tensors(slot: Slot) -> list[Tensor]:
    """Return the parameters of a slot's owners, as they are after they were untied."""
    return [owner.table[owner.name] for owner in slot.owners]


def _writes(stream: ResidualStream) -> list[Write]:
    writes = []
    for writer in stream.writers:
        writes.append(writer.weight)
        if writer.bias is not None:
            writes.append(writer.bias)
    return writes


def _reads(stream: ResidualStream) -> list[Read]:
    reads = list(stream.direct_reads)
    for readers in stream.readers:
        reads += readers.reads
    return reads


def _mapped(value: Tensor, axis: int, directions: Tensor) -> Tensor:
    """Return a weight in the channels of the basis: each of its vectors along ``axis`` times them."""
    mapped: Tensor = torch.tensordot(value, directions, dims=([axis], [0]))
    return mapped.movedim(-1, axis).clone()


def row_writer(writer: Writer) -> RowWriter | None:
    """Return a writer whose row can be fitted, or None: a linear layer that is called as a module."""
    slot = writer.weight.slot
    module = slot.owners[0].module
    is_one = len(slot.owners) == 1 and len(slot.leaves) == 1 and len(slot.owners[0].paths) == 1
    if writer.is_entry or writer.scale is None or not is_one or not is_linear(module):
        return None
    return RowWriter(slot.owners[0].paths[0], writer.scale)


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is a linear layer, one of transformers' Conv1D among them."""
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


@torch.no_grad()
def fill_tables_(stream: ResidualStream, channel: int, fixed: Sequence[int]) -> None:
    """Write the root of each token's sum, without the fixed channels, into the tables of an entry.

    It is exact for one embedding table. The sum of several is not linear in their rows: a row of the
    first gets the root with the mean row of the others, and a row of the others the mean of what is
    left.
    """
    entries = [writer for writer in stream.writers if writer.is_entry]
    eps = stream.sites[0].eps * (channel + 1)
    tables = [_rows(writer) for writer in entries]

    def root(x: Tensor) -> Tensor:
        rest = x.square().sum(-1) - x[..., list(fixed)].square().sum(-1)
        return (rest + eps).clamp_min(0.0).sqrt()

    means = [table.mean(0) for table in tables]
    # Without the first one, in which a row that no token uses may be infinite.
    mean_of_others = means[0].new_zeros(means[0].shape)
    for mean in means[1:]:
        mean_of_others += mean
    first = root(tables[0] + mean_of_others)
    columns = [first]
    step = math.ceil(len(first) / _SAMPLES)
    for table, mean in zip(tables[1:], means[1:], strict=True):
        others = tables[0][::step] + mean_of_others - mean
        rest = [(root(others + row) - first[::step]).mean() for row in table]
        columns.append(torch.stack(rest))
    for writer, column in zip(entries, columns, strict=True):
        write = writer.weight
        values = column / (writer.scale or 1.0)
        for tensor in _tensors(write.slot):
            last = tensor.movedim(write.axis, -1)
            last[..., channel] = values.view(last.shape[:-1]).to(tensor)


def _rows(writer: Writer) -> Tensor:
    """Return what each row of a table adds to the stream, (rows, C) in float64."""
    write = writer.weight
    table = _tensors(write.slot)[0].double().movedim(write.axis, -1)
    return table.reshape(-1, table.shape[-1]) * (writer.scale or 1.0)
