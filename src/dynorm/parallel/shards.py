"""A point-wise layer on a DTensor: its function on each rank's own shard, by whatever computes it on a plain tensor."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from dynorm.errors import ArgumentError, ModelError
from dynorm.layers import AnnealedNorm, PointwiseNorm
from dynorm.parallel.placements import placed, pointwise_input


def on_shards(layer: PointwiseNorm, x: DTensor) -> DTensor:
    r"""Return a layer's function of a DTensor, with no communication in the forward pass.

    .. math:: y_r = \mathrm{weight}_r \cdot \mathrm{scale} \cdot f(x_r - \mathrm{center}) + \mathrm{bias}_r

    on rank r, with the scale of all channels (:math:`\sqrt C` with the global C), and ``weight`` and ``bias``, and
    constants of one value a channel, sharded as the channels are. The fused kernels serve, as they would for a plain
    tensor. Gradients of parameters that are replicated are left as ``Partial`` where x is sharded; the optimizer, or
    :func:`dynorm.parallel.reduce_gradients_` for all at once, makes the sum.

    Args:
        layer: a point-wise layer whose parameters are DTensors on the mesh of x.
        x: sharded over batch, sequence, channels, or not at all, in any dimension of its mesh; a ``Partial`` one is
            reduced first, which communicates.

    Returns:
        y, of the shape, dtype and placements of x.

    Raises:
        ArgumentError: a parameter is no DTensor on the mesh of x, a placement is unknown, or channels are sharded
            unevenly.
        ModelError: the layer is annealed and not at its end, and the channels are sharded: it needs statistics of them.

    Example:
        >>> from torch.distributed.tensor import distribute_module, distribute_tensor, init_device_mesh
        >>> torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        >>> mesh = init_device_mesh("cpu", (1,))
        >>> layer = distribute_module(dynorm.DyISRU(8), mesh)
        >>> x = distribute_tensor(torch.randn(4, 8), mesh, [Shard(0)])
        >>> on_shards(layer, x).placements
        (Shard(dim=0),)
        >>> torch.distributed.destroy_process_group()

    Reference:
        Eq. 15: no sum over channels stands in it. ``torch.distributed.tensor``'s ``Shard``, ``Replicate``, ``Partial``.
    """
    x = pointwise_input(x)
    axes = tuple(d % x.ndim for d in ((layer.dim,) if isinstance(layer.dim, int) else layer.dim))
    sharded = {each.dim for each in x.placements if isinstance(each, Shard)} & set(axes)
    if sharded:
        require_pointwise(layer)
    own: dict[str, Tensor | None] = {}
    shape = list(layer.normalized_shape)
    for position, each in enumerate(x.placements):
        if isinstance(each, Shard) and each.dim in axes:
            axis = axes.index(each.dim)
            shape[axis] = share(shape[axis], x.device_mesh.size(position), "channels")
    for name, parameter in layer._parameters.items():
        own[name] = None if parameter is None else _local(name, parameter, layer, x, axes)
    y = _twin(layer, tuple(shape), own).pointwise(x.to_local()).contiguous()
    strides = contiguous_strides(tuple(x.shape))
    return DTensor.from_local(y, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=strides)


def require_pointwise(layer: PointwiseNorm) -> None:
    """Check that a layer looks at one channel at a time.

    Raises:
        ModelError: it is annealed and not at the end of its path.
    """
    if isinstance(layer, AnnealedNorm) and layer.position < 1:
        raise ModelError(
            f"a layer whose channels are sharded must be point-wise, but {type(layer).__name__} is a norm until t = 1, "
            f"and stands at t = {layer.position:g}: shard the sequence instead, or call dynorm.finalize_ first"
        )


def share(size: int, ranks: int, what: str) -> int:
    """Return one rank's part of ``size``.

    Raises:
        ArgumentError: the ranks do not divide it.
    """
    if size % ranks:
        raise ArgumentError(
            f"the number of {what} must be divisible by the ranks that share them, got {size} for {ranks} ranks: "
            "shard the sequence, or use another number of ranks"
        )
    return size // ranks


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor.

    Example:
        >>> contiguous_strides((2, 3, 4))
        (12, 4, 1)
    """
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * max(size, 1))
    return tuple(reversed(strides))


def _local(name: str, parameter: Tensor, layer: PointwiseNorm, x: DTensor, axes: tuple[int, ...]) -> Tensor:
    """This rank's part of a parameter; its gradient finds the way back."""
    if not isinstance(parameter, DTensor) or parameter.device_mesh != x.device_mesh:
        got = f"a DTensor on {parameter.device_mesh}" if isinstance(parameter, DTensor) else "a plain tensor"
        raise ArgumentError(
            f"the parameters of a layer must be DTensors on the mesh of its input, {x.device_mesh}, but {name!r} is "
            f"{got}: name the layer in the plan of parallelize_module, with dynorm.parallel.PointwiseParallel"
        )
    where = placed(x.placements, axes, channelwise=tuple(parameter.shape) == layer.normalized_shape)
    if parameter.placements != where.value:
        parameter = parameter.redistribute(placements=where.value)
    local: Tensor = parameter.to_local(grad_placements=where.gradient)
    return local


def _twin(layer: PointwiseNorm, shape: tuple[int, ...], own: dict[str, Tensor | None]) -> PointwiseNorm:
    """The layer with other parameters, of the channels of one rank; the scale stays that of all channels."""
    twin: PointwiseNorm = layer.__class__.__new__(layer.__class__)
    values: dict[str, Any] = {"normalized_shape": shape, "channels": math.prod(shape), "_parameters": own}
    twin.__dict__.update(layer.__dict__, **values)
    # What the style has put there would come back here.
    twin.__dict__.pop("pointwise", None)
    return twin
