"""The sharding rule: where the parameters of a point-wise function lie, given where its input does.

The function looks at one element at a time, so any sharding of x will do and y is sharded alike. What has a value a
channel follows the channels, and its gradient is whole on each rank. Everything else is replicated; where x is sharded
each rank has its own part of that gradient, and the whole is their sum: DTensor's ``Partial``.
"""

from __future__ import annotations

from typing import NamedTuple

from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from dynorm.errors import ArgumentError


class Placed(NamedTuple):
    """Placements of a parameter and of its gradient, one for each dimension of the mesh.

    Args:
        value: of the parameter.
        gradient: of its gradient.
    """

    value: tuple[Placement, ...]
    gradient: tuple[Placement, ...]


def placed(x: tuple[Placement, ...], axes: tuple[int, ...], *, channelwise: bool) -> Placed:
    """Return where a parameter lies beside an input.

    Args:
        x: the input's placements: Shard or Replicate.
        axes: the input's channel axes, counted from the front, in the order of the parameter's axes.
        channelwise: the parameter has one value a channel, not one for all.

    Example:
        >>> placed((Shard(2),), (2,), channelwise=True)
        Placed(value=(Shard(dim=0),), gradient=(Shard(dim=0),))
        >>> placed((Shard(2),), (2,), channelwise=False).gradient
        (Partial(sum),)
    """
    value: list[Placement] = []
    gradient: list[Placement] = []
    for each in x:
        if isinstance(each, Shard) and channelwise and each.dim in axes:
            value.append(Shard(axes.index(each.dim)))
            gradient.append(value[-1])
        else:
            value.append(Replicate())
            gradient.append(Partial() if isinstance(each, Shard) else Replicate())
    return Placed(tuple(value), tuple(gradient))


def pointwise_input(x: DTensor) -> DTensor:
    """Return x with whole values: sums that are still to be made are made, for f of a sum is not the sum of f.

    Raises:
        ArgumentError: a placement is neither Shard, Replicate nor Partial.
    """
    odd = [each for each in x.placements if type(each) is not Shard and not (each.is_replicate() or each.is_partial())]
    if odd:
        raise ArgumentError(f"x must be placed by Shard, Replicate or Partial, got {odd[0]}: redistribute it first")
    if not any(each.is_partial() for each in x.placements):
        return x
    return x.redistribute(placements=[Replicate() if each.is_partial() else each for each in x.placements])
