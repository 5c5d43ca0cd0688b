"""A point-wise layer on a DTensor: its function on each rank's own shard, by whatever computes it on a plain tensor.

The function looks at one element at a time, so any sharding of x will do and y is sharded alike.
What has one value per channel follows the channels, and its gradient is whole on each rank.
Everything else is replicated; where x is sharded each rank has its own part of that gradient, and
the whole is their sum: DTensor's ``Partial``.

A layer with witnesses looks at these few channels too. Where the channels are sharded, one
all-reduce of a number per witness and token brings them to every rank, and another one takes their
gradients back.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from dynorm.arguments import upcast
from dynorm.errors import ArgumentError, ModelError
from dynorm.kernels import Parameters
from dynorm.layers import AnnealedNorm, PointwiseNorm


def on_shards(layer: PointwiseNorm, x: DTensor) -> DTensor:
    r"""Return a layer's function of a DTensor; without witnesses there is no communication in the forward pass.

    .. math:: y_r = \mathrm{weight}_r \cdot \mathrm{scale} \cdot f(x_r - \mathrm{center}) + \mathrm{bias}_r

    on rank r, with the scale of all channels (:math:`\sqrt C` with the global C). What is sharded
    with x, and what is sent for witnesses, is as for :class:`PointwiseParallel`; their values are
    sent in float32 (or float64). The fused kernels serve, as they would for a plain tensor.

    Args:
        layer: a point-wise layer whose parameters are DTensors on the mesh of x.
        x: sharded over batch, sequence, channels, or not at all, in any dimension of its mesh; a
            ``Partial`` one is reduced first, which communicates.

    Returns:
        y, of the shape, dtype and placements of x.

    Raises:
        ArgumentError: a parameter is no DTensor on the mesh of x, a placement is unknown, or
            channels are sharded unevenly.
        ModelError: the layer is annealed and not at its end, and the channels are sharded: it needs
            statistics of them.

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
        Eq. 15: no sum over channels stands in it. ``torch.distributed.tensor``'s ``Shard``,
        ``Replicate``, ``Partial``.
    """
    x = _whole_values(x)
    axes = tuple(d % x.ndim for d in ((layer.dim,) if isinstance(layer.dim, int) else layer.dim))
    shape, held = (
        list(layer.normalized_shape),
        torch.arange(layer.channels, device="cpu").reshape(layer.normalized_shape),
    )
    groups = []
    for position, each in enumerate(x.placements):
        if isinstance(each, Shard) and each.dim in axes:
            require_pointwise(layer)
            axis = axes.index(each.dim)
            shape[axis] = share(shape[axis], x.device_mesh.size(position))
            held = held.narrow(
                axis, shape[axis] * x.device_mesh.get_local_rank(position), shape[axis]
            )
            groups.append(x.device_mesh.get_group(position))
    own = {
        name: None if p is None else _local(name, p, layer, x, axes)
        for name, p in layer._parameters.items()
    }
    twin = _twin(layer, tuple(shape), own)
    if layer.witness_channels and groups:
        y = _with_witnesses(twin, x.to_local(), held.flatten().tolist(), groups).contiguous()
    else:
        y = twin.pointwise(x.to_local()).contiguous()
    # Said rather than asked of the other ranks: y has the whole shape of x, and is contiguous.
    strides = [math.prod(max(size, 1) for size in x.shape[d + 1 :]) for d in range(x.ndim)]
    return DTensor.from_local(
        y, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=tuple(strides)
    )


def require_pointwise(layer: PointwiseNorm) -> None:
    """Check that a layer looks at one channel at a time: none that is annealed and not at its end."""
    if isinstance(layer, AnnealedNorm) and layer.position < 1:
        raise ModelError(
            f"a layer whose channels are sharded must be point-wise, but {type(layer).__name__} is "
            "a norm until t = 1, "
            f"and stands at t = {layer.position:g}: shard the sequence instead, or call "
            "dynorm.finalize_ first"
        )


def share(size: int, ranks: int) -> int:
    """Return one rank's part of the channels, which the ranks must divide."""
    if size % ranks:
        raise ArgumentError(
            f"the number of channels must be divisible by the ranks that share them, got {size} "
            f"for {ranks} ranks: "
            "shard the sequence, or use another number of ranks"
        )
    return size // ranks


def is_channelwise(name: str, parameter: Tensor, layer: PointwiseNorm) -> bool:
    """Tell whether a parameter has one value per channel; gains have one per witness, however many these are."""
    return tuple(parameter.shape) == layer.normalized_shape and name != "log_gain"


class _Summed(torch.autograd.Function):
    """The sum over a group's processes, each of which uses it for its own part of the result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group, total = group, x.clone()
        torch.distributed.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _Summed.apply(gradients[0], ctx.group), None  # type: ignore[no-untyped-call]


def _with_witnesses(twin: PointwiseNorm, x: Tensor, held: list[int], groups: list[Any]) -> Tensor:
    """Return the function on the channels ``held`` here, by witnesses that may lie elsewhere.

    Those stand behind the channels as further ones, which have no output. A witness that is held
    here is read in its place, so that DyISRU leaves it out of its own sum.
    """
    dims = (twin.dim,) if isinstance(twin.dim, int) else twin.dim
    last, count = tuple(range(-len(dims), 0)), len(held)
    u = upcast(x).movedim(dims, last).flatten(-len(dims))
    if twin.center is not None:
        u = u - upcast(twin.center).flatten()
    places = [held.index(k) if k in held else None for k in twin.witness_channels]
    # A function of u on every rank: one that holds no witness must come to the sum of the gradients
    # too.
    nothing = u[..., 0].masked_fill(torch.ones_like(u[..., 0], dtype=torch.bool), 0.0)
    sent = torch.stack([nothing if p is None else u[..., p] for p in places], -1)
    for group in groups:
        sent = _Summed.apply(sent, group)  # type: ignore[no-untyped-call]

    def padded(p: Tensor | None) -> Any:
        if p is None or tuple(p.shape) != twin.normalized_shape:
            return p
        return torch.cat([p.flatten(), p.new_ones(len(places))])

    constant, shift = (*(getattr(twin, name) for name in twin.constants), None)[:2]
    parameters = Parameters(
        padded(constant),
        padded(shift),
        weight=padded(twin.factor()),
        bias=padded(twin.bias),
        log_gain=twin.log_gain,
    )
    index = torch.tensor(
        [count + j if p is None else p for j, p in enumerate(places)], device=x.device
    )
    y = twin.form(twin.scale).definition(torch.cat([u, sent], -1), parameters, -1, index)
    y = y[..., :count].reshape(*y.shape[:-1], *twin.normalized_shape)
    return y.movedim(last, dims).to(x.dtype)


def _whole_values(x: DTensor) -> DTensor:
    """Make the sums that x still waits for: f of a sum is not the sum of f."""
    odd = [
        each
        for each in x.placements
        if type(each) is not Shard and not (each.is_replicate() or each.is_partial())
    ]
    if odd:
        raise ArgumentError(
            f"x must be placed by Shard, Replicate or Partial, got {odd[0]}: redistribute it first"
        )
    if not any(each.is_partial() for each in x.placements):
        return x
    return x.redistribute(
        placements=[Replicate() if each.is_partial() else each for each in x.placements]
    )


def _local(
    name: str, parameter: Tensor, layer: PointwiseNorm, x: DTensor, axes: tuple[int, ...]
) -> Tensor:
    """Return this rank's part of a parameter; its gradient finds the way back."""
    if not isinstance(parameter, DTensor) or parameter.device_mesh != x.device_mesh:
        got = (
            f"a DTensor on {parameter.device_mesh}"
            if isinstance(parameter, DTensor)
            else "a plain tensor"
        )
        raise ArgumentError(
            "the parameters of a layer must be DTensors on the mesh of its input, "
            f"{x.device_mesh}, but {name!r} is "
            f"{got}: name the layer in the plan of parallelize_module, with "
            "dynorm.parallel.PointwiseParallel"
        )
    value: list[Placement] = []
    gradient: list[Placement] = []
    channelwise = is_channelwise(name, parameter, layer)
    for each in x.placements:
        if channelwise and isinstance(each, Shard) and each.dim in axes:
            value.append(Shard(axes.index(each.dim)))
            gradient.append(value[-1])
        else:
            value.append(Replicate())
            # Of a parameter that is whole, each shard of x gives a part of the gradient.
            gradient.append(Partial() if isinstance(each, Shard) else Replicate())
    if parameter.placements != tuple(value):
        parameter = parameter.redistribute(placements=value)
    local: Tensor = parameter.to_local(grad_placements=gradient)
    return local


def _twin(
    layer: PointwiseNorm, shape: tuple[int, ...], own: dict[str, Tensor | None]
) -> PointwiseNorm:
    """Return the layer with other parameters, of the channels of one rank; the scale stays that of all channels."""
    twin: PointwiseNorm = layer.__class__.__new__(layer.__class__)
    values: dict[str, Any] = {
        "normalized_shape": shape,
        "channels": math.prod(shape),
        "_parameters": own,
    }
    if layer.witnesses is not None:
        index = torch.tensor(layer.witness_channels, device=layer.witnesses.device)
        values["_buffers"] = layer._buffers | {"witnesses": index}
    twin.__dict__.update(layer.__dict__, **values)
    # What the style has put there would come back here.
    twin.__dict__.pop("pointwise", None)
    return twin
