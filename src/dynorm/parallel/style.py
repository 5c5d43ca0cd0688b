"""``PointwiseParallel``: a point-wise layer in a plan of ``parallelize_module``, beside torch's own styles.

Parameters of which every rank has a copy must be equal at the start, and their gradients are summed
over the ranks.
"""

from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import ParallelStyle

from dynorm.arguments import require_gathered
from dynorm.errors import ArgumentError, ModelError
from dynorm.layers import PointwiseNorm
from dynorm.parallel.shards import is_channelwise, on_shards, require_pointwise, share
from dynorm.ranks import Ranks
from dynorm.replace.specs import dynorm_layers


class PointwiseParallel(ParallelStyle):
    """Shard a point-wise layer as its input is: over channels, sequence or batch, with no collective of its own.

    A layer with witnesses whose channels are sharded has one all-reduce each way, of a number per
    witness and token.

    With the channels sharded, ``weight``, ``bias`` and constants of one value per channel are
    sharded too; constants of one value for all are replicated, and their gradients are sums over
    the ranks, left as ``Partial`` (see :func:`reduce_gradients_`). The scale stays that of all
    channels. The fused kernels compute each rank's shard; under ``torch.compile`` the definition is
    traced as ever.

    Args:
        input_layouts: how the input is sharded: a plain tensor is taken to be this rank's shard of
            it, a DTensor is redistributed to it where it is not. ``Shard(-1)``, the channels, by
            default.
        output_layouts: how the output shall be; as the input when None. ``Replicate()`` gathers
            once for several ``ColwiseParallel`` that take the same input.
        use_local_output: return this rank's shard as a plain tensor.

    Raises:
        ArgumentError: when it is applied: to a mesh of several dimensions, or the ranks do not
            divide the channels.
        ModelError: when it is applied, on every rank: the module is no point-wise layer, is sharded
            already, is annealed where the channels are sharded, or another rank's constants differ.

    Example:
        >>> from torch.distributed.tensor import init_device_mesh
        >>> from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
        >>> torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        >>> plan = {
        ...     "0": PointwiseParallel(output_layouts=Replicate()),
        ...     "1": ColwiseParallel(),
        ...     "3": RowwiseParallel(output_layouts=Shard(-1)),
        ... }
        >>> model = nn.Sequential(dynorm.DyISRU(8), nn.Linear(8, 32), nn.SiLU(), nn.Linear(32, 8))
        >>> _ = parallelize_module(model, init_device_mesh("cpu", (1,)), plan)
        >>> model[0].weight.placements, model[0].log_beta.placements
        ((Shard(dim=0),), (Replicate(),))
        >>> model(torch.randn(4, 8)).shape  # this rank's channels in, this rank's channels out
        torch.Size([4, 8])
        >>> torch.distributed.destroy_process_group()

    Reference:
        Beside ``torch.distributed.tensor.parallel.SequenceParallel``, which shards the sequence and
        replicates all parameters: a norm with statistics cannot have its channels sharded without a
        reduction per token.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = False,
    ) -> None:
        super().__init__()
        self.input_layouts = Shard(-1) if input_layouts is None else input_layouts
        self.output_layouts = self.input_layouts if output_layouts is None else output_layouts
        self.use_local_output = use_local_output
        if self.input_layouts.is_partial():
            raise ArgumentError(
                "input_layouts must be Shard or Replicate, got Partial: f of a sum is not the sum "
                "of f"
            )

    def __repr__(self) -> str:
        layouts = f"input_layouts={self.input_layouts}, output_layouts={self.output_layouts}"
        return f"{type(self).__name__}({layouts}, use_local_output={self.use_local_output})"

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        ranks = Ranks(device_mesh.get_group() if device_mesh.ndim == 1 else None, ModelError)
        with ranks.sharing_errors():
            axis = self._check(module, device_mesh)
            assert isinstance(module, PointwiseNorm)
            ranks.require_alike([("", module)])
        distribute_module(
            module,
            device_mesh,
            partial(_shard_parameters, axis=axis, source=self.src_data_rank),
            partial(_prepare_input, self.input_layouts),
            partial(_prepare_output, self.output_layouts, self.use_local_output),
        )
        if module.witness_channels:
            # The same everywhere: a plain tensor, where distribute_module makes DTensors of all
            # buffers.
            module.register_buffer(
                "witnesses", torch.tensor(module.witness_channels, device=device_mesh.device_type)
            )
        # Its norm is whole and cannot come back.
        module.__dict__.pop("replaced", None)
        # On the instance: the class is what saving and folding know the layer by.
        module.__dict__["pointwise"] = partial(_pointwise, module)
        return module

    def _check(self, module: nn.Module, mesh: DeviceMesh) -> int | None:
        """Return the axis of ``normalized_shape`` that is sharded, if one is."""
        if not isinstance(module, PointwiseNorm):
            raise ModelError(
                f"PointwiseParallel must stand at a point-wise layer, got {type(module).__name__}: "
                "convert the model "
                "first, or use SequenceParallel for a norm"
            )
        if mesh.ndim != 1:
            raise ArgumentError(
                f"the mesh must have one dimension, got {mesh.ndim}: pass mesh['tp'], say"
            )
        if any(isinstance(p, DTensor) for p in module.parameters()):
            raise ModelError(
                "the layer must not be sharded yet, but its parameters are DTensors: name it once"
            )
        dims = (module.dim,) if isinstance(module.dim, int) else module.dim
        if not isinstance(self.input_layouts, Shard) or self.input_layouts.dim not in dims:
            return None
        require_pointwise(module)
        axis = dims.index(self.input_layouts.dim)
        share(module.normalized_shape[axis], mesh.size())
        return axis


def _shard_parameters(
    name: str, module: nn.Module, mesh: DeviceMesh, *, axis: int | None, source: int | None
) -> None:
    # distribute_module comes by every submodule; a parametrization would be one.
    if not isinstance(module, PointwiseNorm):
        return
    for key, p in list(module._parameters.items()):
        if p is None:
            continue
        placement = (
            Shard(axis) if axis is not None and is_channelwise(key, p, module) else Replicate()
        )
        whole = distribute_tensor(p.detach(), mesh, [placement], src_data_rank=source)
        module.register_parameter(key, nn.Parameter(whole, requires_grad=p.requires_grad))


def _prepare_input(layout: Placement, module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
    x = inputs[0]
    if not isinstance(x, DTensor):
        if not isinstance(x, Tensor):
            raise ArgumentError(f"x must be a tensor or a DTensor, got {type(x).__name__}")
        return (DTensor.from_local(x, mesh, [layout], run_check=False), *inputs[1:])
    wanted = (Shard(layout.dim % x.ndim),) if isinstance(layout, Shard) else (layout,)
    return (x if x.placements == wanted else x.redistribute(placements=wanted), *inputs[1:])


def _prepare_output(
    layout: Placement, local: bool, module: nn.Module, y: Any, mesh: DeviceMesh
) -> Any:
    wanted = (Shard(layout.dim % y.ndim),) if isinstance(layout, Shard) else (layout,)
    y = y if y.placements == wanted else y.redistribute(placements=wanted)
    return y.to_local() if local else y


def _pointwise(layer: PointwiseNorm, x: Tensor) -> Tensor:
    """Return the function of the layer: on shards, or the definition where the compiler must see it."""
    if isinstance(x, DTensor) and not torch.compiler.is_compiling():
        return on_shards(layer, x)
    if isinstance(x, DTensor) and layer.witness_channels:
        # The definition would send whole activations for a few channels: the graph breaks here
        # instead.
        uncompiled: Any = torch.compiler.disable(on_shards)  # type: ignore[no-untyped-call]
        return cast("Tensor", uncompiled(layer, x))
    return type(layer).pointwise(layer, x)


def require_equal_ranks(model: nn.Module, group: ProcessGroup | None = None) -> None:
    """Check that every rank has the same point-wise layers, with the same constants, weights and biases.

    Ranks that were converted or calibrated apart differ without a sign: each computes with its own
    constants. Call it on every rank; 8 bytes are exchanged. :class:`PointwiseParallel` calls it for
    each layer that it shards.

    Args:
        model: before it is sharded or wrapped; on the meta device only paths and shapes are
            compared.
        group: the processes; the default group when None.

    Raises:
        ModelError: on every rank, if one differs; the message names the ranks.

    Example:
        >>> require_equal_ranks(nn.Sequential(dynorm.DyISRU(8)))  # one process, nothing to compare
    """
    ranks = Ranks(group, ModelError)
    with ranks.sharing_errors():
        require_gathered(model)
        ranks.require_alike(dynorm_layers(model).items())


@torch.no_grad()
def reduce_gradients_(model: nn.Module) -> int:
    """Sum the gradients of the point-wise layers' replicated parameters over the ranks, in place, all at once.

    After the backward pass they are ``Partial``: each rank has what its own shard contributed. An
    optimizer makes the sum of each one by itself, every time that it reads it. Call this between
    ``backward`` and the optimizer (and before clipping), after the last batch of an accumulation,
    and there is one all-reduce of a few numbers for all layers.

    Args:
        model: with layers that :class:`PointwiseParallel` sharded.

    Returns:
        How many all-reduces there were: one for each dtype, device and dimension of a mesh that had
        sums to make.

    Example:
        >>> reduce_gradients_(nn.Sequential(dynorm.DyISRU(8)))  # nothing is sharded
        0
    """
    parameters = {p: None for layer in dynorm_layers(model).values() for p in layer.parameters()}
    waiting: dict[tuple[DeviceMesh, int, torch.dtype, torch.device], list[nn.Parameter]] = {}
    for p in parameters:
        gradient = p.grad
        if not isinstance(gradient, DTensor):
            continue
        for position, placement in enumerate(gradient.placements):
            if isinstance(placement, Partial):
                key = (gradient.device_mesh, position, gradient.dtype, gradient.device)
                waiting.setdefault(key, []).append(p)
    for (mesh, position, *_), members in waiting.items():
        # Looked at anew: a gradient may be partial in several dimensions of the mesh, and one is
        # done at a time.
        before: list[Any] = [p.grad for p in members]
        flat = torch.cat([gradient.to_local().reshape(-1) for gradient in before])
        torch.distributed.all_reduce(flat, group=mesh.get_group(position))
        parts = torch.split(flat, [gradient.to_local().numel() for gradient in before])
        for p, part, gradient in zip(members, parts, before, strict=True):
            placements = [
                Replicate() if k == position else each for k, each in enumerate(gradient.placements)
            ]
            local = part.reshape(gradient.to_local().shape)
            sizes = {"shape": gradient.shape, "stride": gradient.stride()}
            p.grad = DTensor.from_local(local, mesh, placements, run_check=False, **sizes)
    return len(waiting)
