"""DTensor's rules for ``torch.ops.dynorm.pointwise`` and its backward pass: each rank computes its own shard.

Registered when ``dynorm.parallel`` is imported. The channels may be sharded where they are one axis of x.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from dynorm.errors import ArgumentError
from dynorm.parallel.placements import placed, pointwise_input
from dynorm.parallel.shards import contiguous_strides, share


class _Call(NamedTuple):
    """A call on this rank's shards.

    Args:
        x: the input, placed so that the op can take its shards.
        axis: its channel axis; None where the channels are several axes.
        args: the local arguments from x to ``logarithmic``.
    """

    x: DTensor
    axis: int | None
    args: tuple[Any, ...]


def _forward_rule(cls: Any, op: Any, types: Any, args: tuple[Any, ...], kwargs: Any = None) -> Any:
    function, *rest = args
    call = _shards(*rest)
    return _wrapped(op(function, *call.args), call.x, tuple(call.x.shape), call.x.placements)


def _backward_rule(cls: Any, op: Any, types: Any, args: tuple[Any, ...], kwargs: Any = None) -> Any:
    grad, function, *rest = args
    call = _shards(*rest)
    channels: int = rest[7]
    local = _require_dtensor("grad", grad, call.x).redistribute(placements=call.x.placements).to_local()
    grad_x, sums = op(local, function, *call.args)
    rows = [_of_sums(each, call.axis) for each in call.x.placements]
    shape = tuple(call.x.shape)
    return _wrapped(grad_x, call.x, shape, call.x.placements), _wrapped(sums, call.x, (5, channels), tuple(rows))


def _of_sums(placement: Placement, axis: int | None) -> Placement:
    """Where the sums over tokens of each channel lie, (5, C)."""
    if not isinstance(placement, Shard):
        return Replicate()
    return Shard(1) if placement.dim == axis else Partial()


def _shards(
    x: Any, constant: Any, shift: Any, center: Any, weight: Any, bias: Any,
    scale: float, channels: int, inner: int, logarithmic: bool,
) -> _Call:  # fmt: skip
    parameters = {"constant": constant, "shift": shift, "center": center, "weight": weight, "bias": bias}
    like = next(t for t in (x, *parameters.values()) if isinstance(t, DTensor))
    x = pointwise_input(_require_dtensor("x", x, like))
    axis = _channel_axis(tuple(x.shape), channels, inner)
    if axis is None:
        x = _sharded_outside(x, channels * inner)
    for position, each in enumerate(x.placements):
        if isinstance(each, Shard) and each.dim == axis:
            share(channels, x.device_mesh.size(position), "channels")
    local = x.to_local()
    given = [None if p is None else _local(name, p, x, axis, channels) for name, p in parameters.items()]
    if axis is not None:
        channels, inner = local.shape[axis], math.prod(local.shape[axis + 1 :])
    return _Call(x, axis, (local, *given, scale, channels, inner, logarithmic))


def _channel_axis(shape: tuple[int, ...], channels: int, inner: int) -> int | None:
    """The axis of ``channels`` with ``inner`` elements after it."""
    return next((d for d, size in enumerate(shape) if size == channels and math.prod(shape[d + 1 :]) == inner), None)


def _sharded_outside(x: DTensor, size: int) -> DTensor:
    """Gather x along the axes of a token's ``size`` elements, of which a shard would be no (outer, channels, inner)."""
    outer = next((d for d in range(x.ndim + 1) if math.prod(x.shape[d:]) == size), 0)
    keep = tuple(p if isinstance(p, Shard) and p.dim < outer else Replicate() for p in x.placements)
    return x if x.placements == keep else x.redistribute(placements=keep)


def _local(name: str, p: Any, x: DTensor, axis: int | None, channels: int) -> Tensor:
    """This rank's part of a parameter, flat."""
    flat = _require_dtensor(name, p, x).reshape(-1)
    assert isinstance(flat, DTensor)
    where = placed(x.placements, () if axis is None else (axis,), channelwise=p.numel() == channels and channels > 1)
    local: Tensor = flat.redistribute(placements=where.value).to_local()
    return local


def _require_dtensor(name: str, value: Any, like: DTensor) -> DTensor:
    if not isinstance(value, DTensor) or value.device_mesh != like.device_mesh:
        raise ArgumentError(
            f"all tensors of the op must be DTensors on one mesh, {like.device_mesh}, but {name} is not: "
            "call torch.distributed.tensor.distribute_tensor first"
        )
    return value


def _wrapped(local: Tensor, x: DTensor, shape: tuple[int, ...], placements: tuple[Placement, ...]) -> DTensor:
    strides = contiguous_strides(shape)
    return DTensor.from_local(
        local, x.device_mesh, placements, run_check=False, shape=torch.Size(shape), stride=strides
    )


torch.library.register_torch_dispatch("dynorm::pointwise", DTensor, _forward_rule)
torch.library.register_torch_dispatch("dynorm::pointwise_backward", DTensor, _backward_rule)
