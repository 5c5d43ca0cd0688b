"""A point-wise layer on a DTensor: each rank computes the function of its own shard.

The function reads one element at a time, so x may be sharded in any way, and y is sharded like x.
Parameters with one value per channel are sharded with the channels, and each rank computes the full
gradient of its shard. All other parameters are replicated. If x is sharded, each rank computes one
part of their gradients, which are the sums over the ranks: DTensor's ``Partial``.

A layer with witnesses reads their channels too. If the channels are sharded, each rank sends one
number per token to the others, and in backward the gradients of these numbers are summed.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from dynorm.arguments import clamped, upcast
from dynorm.errors import ArgumentError, ModelError
from dynorm.kernels import Parameters
from dynorm.layers import AnnealedNorm, PointwiseNorm

# Far below every constant of a layer; its root, 1e-12, is a normal number in float32.
_TINY = 1e-24


def on_shards(layer: PointwiseNorm, x: DTensor) -> DTensor:
    r"""Return a layer's function of a DTensor, without communication unless there are witnesses.

    .. math::
        y_r = \mathrm{weight}_r \cdot \mathrm{scale} \cdot f(x_r - \mathrm{center})
            + \mathrm{bias}_r

    on rank r, with the scale of all channels (:math:`\sqrt C` with the global C). The parameters
    are sharded as for :class:`PointwiseParallel`; what witnesses need is sent in float32 (or
    float64). The fused kernels are used as for a plain tensor.

    Args:
        layer: a point-wise layer whose parameters are DTensors on the mesh of x.
        x: sharded over batch, sequence, channels, or not at all, in any dimension of its mesh. A
            ``Partial`` input is reduced first, which communicates.

    Returns:
        y, of the shape, dtype and placements of x.

    Raises:
        ArgumentError: a parameter is not a DTensor on the mesh of x, a placement is unknown, or
            channels are sharded unevenly.
        ModelError: the layer is annealed to t < 1 and the channels are sharded: it needs their
            statistics.

    Example:
        >>> from torch.distributed.tensor import distribute_module, distribute_tensor
        >>> from torch.distributed.tensor import init_device_mesh
        >>> store = torch.distributed.HashStore()
        >>> torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> mesh = init_device_mesh("cpu", (1,))
        >>> layer = distribute_module(dynorm.DyISRU(8), mesh)
        >>> x = distribute_tensor(torch.randn(4, 8), mesh, [Shard(0)])
        >>> on_shards(layer, x).placements
        (Shard(dim=0),)
        >>> torch.distributed.destroy_process_group()

    Reference:
        Eq. 15, which has no sum over channels. ``Shard``, ``Replicate`` and ``Partial`` of
        ``torch.distributed.tensor``.
    """
    x = _reduced(x)
    mesh = x.device_mesh
    dims = layer.dims
    axes = tuple(d % x.ndim for d in dims)
    # The numbers of this rank's channels, cut once for each dimension of the mesh that shards them.
    channels = torch.arange(layer.channels, device="cpu").reshape(layer.normalized_shape)
    groups = []
    for mesh_dim, placement in enumerate(x.placements):
        if isinstance(placement, Shard) and placement.dim in axes:
            require_pointwise(layer)
            axis = axes.index(placement.dim)
            size = channels_per_rank(channels.shape[axis], mesh.size(mesh_dim))
            channels = channels.narrow(axis, size * mesh.get_local_rank(mesh_dim), size)
            groups.append(mesh.get_group(mesh_dim))
    parameters: dict[str, Tensor | None] = {}
    for name, parameter in layer._parameters.items():
        if parameter is None:
            parameters[name] = None
        else:
            parameters[name] = _local(name, parameter, layer, x, axes)
    twin = _twin(layer, tuple(channels.shape), parameters)
    if layer.witness_channels and groups:
        y = _with_witnesses(twin, x.to_local(), channels.flatten().tolist(), groups)
    else:
        y = twin.pointwise(x.to_local())
    # Pass shape and stride explicitly, so that DTensor does not communicate to infer them.
    strides = [math.prod(max(size, 1) for size in x.shape[d + 1 :]) for d in range(x.ndim)]
    return DTensor.from_local(
        y.contiguous(), mesh, x.placements, run_check=False, shape=x.shape, stride=tuple(strides)
    )


def require_pointwise(layer: PointwiseNorm) -> None:
    """Check that a layer reads one channel at a time, so is not annealed to t < 1."""
    if isinstance(layer, AnnealedNorm) and layer.position < 1:
        raise ModelError(
            f"a layer whose channels are sharded must be point-wise, but {type(layer).__name__} is "
            f"a norm until t = 1, and is at t = {layer.position:g}: shard the sequence instead, or "
            "call dynorm.finalize_ first"
        )


def channels_per_rank(size: int, ranks: int) -> int:
    """Return the number of channels of one rank; all ranks must have the same number."""
    if size % ranks:
        raise ArgumentError(
            f"the number of channels must be divisible by the ranks that share them, got {size} "
            f"for {ranks} ranks: shard the sequence, or use another number of ranks"
        )
    return size // ranks


def is_channelwise(name: str, parameter: Tensor, layer: PointwiseNorm) -> bool:
    """Return whether a parameter has one value per channel."""
    # The gains have one value per witness, and there may be as many witnesses as channels.
    return tuple(parameter.shape) == layer.normalized_shape and name != "log_gain"


class _Gathered(torch.autograd.Function):
    """The numbers (..., n) of each of a group's R processes, which all use them: (..., R n)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        ctx.width = x.shape[-1]
        parts = [torch.empty_like(x) for _ in range(group.size())]
        torch.distributed.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        total: Tensor = _Summed.apply(gradients[0], ctx.group)  # type: ignore[no-untyped-call]
        first = ctx.width * ctx.group.rank()
        return total.narrow(-1, first, ctx.width), None


class _Summed(torch.autograd.Function):
    """The sum over a group's processes, each of which uses it for its own part of the result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        total = x.clone()
        torch.distributed.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _Summed.apply(gradients[0], ctx.group), None  # type: ignore[no-untyped-call]


def _with_witnesses(
    twin: PointwiseNorm, x: Tensor, channels: list[int], groups: list[ProcessGroup]
) -> Tensor:
    r"""Return the function of this rank's channels, with witnesses from any rank.

    Each rank sends one number per token, :math:`\sqrt{\sum_k g_k u_k^2}` of its own witnesses. The
    numbers of the others are appended to the channels, as witnesses with a gain of 1, and cut from
    the result. So DyISRU can leave a witness out of the sum for its own channel, which it could not
    do exactly with the sum over all ranks.
    """
    assert twin.log_gain is not None
    dims = twin.dims
    last = tuple(range(-len(dims), 0))
    u = upcast(x).movedim(dims, last).flatten(-len(dims))
    if twin.center is not None:
        u = u - upcast(twin.center).flatten()
    # The places of this rank's witnesses among its channels, and in the list of all witnesses.
    position_of = {channel: position for position, channel in enumerate(channels)}
    positions = []
    ours = []
    for number, witness in enumerate(twin.witness_channels):
        if witness in position_of:
            positions.append(position_of[witness])
            ours.append(number)
    log_gain = twin.log_gain[ours]
    # Squares of float32 do not overflow in float64, but an infinite witness would have a gradient of NaN.
    squares = clamped(u[..., positions]).double().square()
    total = (squares * upcast(log_gain).double().exp()).sum(-1, keepdim=True)
    # A root has no second derivative at 0.
    roots = (total + _TINY).sqrt().to(u.dtype)
    # The place of this rank's number among those gathered so far.
    place = 0
    for group in groups:
        place += group.rank() * roots.shape[-1]
        roots = _Gathered.apply(roots, group)  # type: ignore[no-untyped-call]
    others = torch.cat([roots[..., :place], roots[..., place + 1 :]], -1)
    appended = range(len(channels), len(channels) + others.shape[-1])

    def padded(parameter: Tensor) -> Tensor:
        if tuple(parameter.shape) != twin.normalized_shape:
            return parameter
        return torch.cat([parameter.flatten(), parameter.new_ones(len(appended))])

    second_constant = None
    if len(twin.constants) > 1:
        second_constant = padded(getattr(twin, twin.constants[1]))
    weight = twin.factor()
    # The centre has been subtracted.
    parameters = Parameters(
        padded(twin.first_constant),
        second_constant,
        weight=None if weight is None else padded(weight),
        bias=None if twin.bias is None else padded(twin.bias),
        log_gain=torch.cat([log_gain, log_gain.new_zeros(len(appended))]),
    )
    index = torch.tensor([*positions, *appended], device=x.device)
    form = twin.form(twin.scale)
    y = form.definition(torch.cat([u, others], -1), parameters, -1, index)
    y = y[..., : len(channels)].reshape(*y.shape[:-1], *twin.normalized_shape)
    return y.movedim(last, dims).to(x.dtype)


def _reduced(x: DTensor) -> DTensor:
    """Sum over the ranks where x is ``Partial``: f of a sum is not the sum of f."""
    placements: list[Placement] = []
    for placement in x.placements:
        if placement.is_partial():
            placements.append(Replicate())
        elif type(placement) is Shard or placement.is_replicate():
            placements.append(placement)
        else:
            raise ArgumentError(
                f"x must be placed by Shard, Replicate or Partial, got {placement}: redistribute "
                "it first"
            )
    if tuple(placements) == x.placements:
        return x
    return x.redistribute(placements=placements)


def _local(
    name: str, parameter: Tensor, layer: PointwiseNorm, x: DTensor, axes: tuple[int, ...]
) -> Tensor:
    """Return this rank's part of a parameter; backward gives the DTensor its gradient."""
    if not isinstance(parameter, DTensor) or parameter.device_mesh != x.device_mesh:
        got = "a plain tensor"
        if isinstance(parameter, DTensor):
            got = f"a DTensor on {parameter.device_mesh}"
        raise ArgumentError(
            "the parameters of a layer must be DTensors on the mesh of its input, "
            f"{x.device_mesh}, but {name!r} is {got}: name the layer in the plan of "
            "parallelize_module, with dynorm.parallel.PointwiseParallel"
        )
    value: list[Placement] = []
    gradient: list[Placement] = []
    channelwise = is_channelwise(name, parameter, layer)
    for placement in x.placements:
        if not isinstance(placement, Shard):
            value.append(Replicate())
            gradient.append(Replicate())
        elif channelwise and placement.dim in axes:
            shard = Shard(axes.index(placement.dim))
            value.append(shard)
            gradient.append(shard)
        else:
            value.append(Replicate())
            # Each shard of x contributes to the gradient of a replicated parameter.
            gradient.append(Partial())
    if parameter.placements != tuple(value):
        parameter = parameter.redistribute(placements=value)
    local: Tensor = parameter.to_local(grad_placements=gradient)
    return local


def _twin(
    layer: PointwiseNorm, shape: tuple[int, ...], parameters: dict[str, Tensor | None]
) -> PointwiseNorm:
    """Return the layer for one rank's channels; the scale stays that of all channels."""
    twin: PointwiseNorm = layer.__class__.__new__(layer.__class__)
    values: dict[str, object] = {
        "normalized_shape": shape,
        "channels": math.prod(shape),
        "_parameters": parameters,
    }
    if layer.witnesses is not None:
        index = torch.tensor(layer.witness_channels, device=layer.witnesses.device)
        values["_buffers"] = layer._buffers | {"witnesses": index}
    twin.__dict__.update(layer.__dict__, **values)
    # PointwiseParallel sets this attribute, and it would call `on_shards` again.
    twin.__dict__.pop("pointwise", None)
    return twin
