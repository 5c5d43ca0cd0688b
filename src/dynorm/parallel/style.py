"""``PointwiseParallel``: a style for point-wise layers in a plan of ``parallelize_module``.

Replicated parameters must be equal on all ranks at the start, and their gradients are summed over
the ranks.
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
from dynorm.parallel.shards import (
    channels_per_rank,
    is_channelwise,
    on_shards,
    require_pointwise,
)
from dynorm.ranks import Ranks
from dynorm.replace.converted import dynorm_layers


class PointwiseParallel(ParallelStyle):
    """Shard a point-wise layer like its input: over channels, sequence or batch.

    The layer then needs no collective, except that for a layer with witnesses whose channels are
    sharded each rank sends one number per token to the others: one all-gather forward, and one
    all-reduce backward.

    If the channels are sharded, so are ``weight``, ``bias`` and constants with one value per
    channel. Constants with one value for all channels are replicated; their gradients are sums over
    the ranks, left as ``Partial`` (see :func:`reduce_gradients_`). The scale stays that of all
    channels. The fused kernels compute each rank's shard; ``torch.compile`` traces the definition,
    as it does without shards.

    Args:
        input_layouts: the placement of the input, ``Shard(-1)``, the channels, by default. A plain
            tensor is taken to be this rank's shard; a DTensor with another placement is
            redistributed.
        output_layouts: the placement of the output; None for that of the input. ``Replicate()``
            gathers once for several ``ColwiseParallel`` that take the same input.
        use_local_output: return this rank's shard as a plain tensor.

    Raises:
        ArgumentError: ``input_layouts`` is ``Partial``. When it is applied: the mesh has several
            dimensions, or the channels are not divisible by the ranks.
        ModelError: when it is applied, on every rank: the module is not a point-wise layer, is
            sharded already, is annealed to t < 1 and its channels are sharded, or another rank's
            constants differ.

    Example:
        >>> from torch.distributed.tensor import init_device_mesh
        >>> from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
        >>> from torch.distributed.tensor.parallel import parallelize_module
        >>> store = torch.distributed.HashStore()
        >>> torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
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
        ``torch.distributed.tensor.parallel.SequenceParallel`` shards the sequence and replicates
        all parameters, because the statistics of a norm with sharded channels need a reduction per
        token.
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
            # Every rank has the same numbers, so they stay a plain tensor; distribute_module makes
            # all buffers DTensors.
            module.register_buffer(
                "witnesses", torch.tensor(module.witness_channels, device=device_mesh.device_type)
            )
        # The norm that it replaced is not sharded, so it cannot be restored.
        module.__dict__.pop("replaced", None)
        # On the instance, because saving and folding recognise the layer by its class.
        module.__dict__["pointwise"] = partial(_pointwise, module)
        return module

    def _check(self, module: nn.Module, mesh: DeviceMesh) -> int | None:
        """Return the axis of ``normalized_shape`` that is sharded, or None."""
        if not isinstance(module, PointwiseNorm):
            raise ModelError(
                "PointwiseParallel must be applied to a point-wise layer, got "
                f"{type(module).__name__}: convert the model first, or use SequenceParallel for a "
                "norm"
            )
        if mesh.ndim != 1:
            raise ArgumentError(
                f"the mesh must have one dimension, got {mesh.ndim}: pass one of them, as in "
                "mesh['tp']"
            )
        if any(isinstance(p, DTensor) for p in module.parameters()):
            raise ModelError(
                "the layer must not be sharded yet, but its parameters are DTensors: name it once"
            )
        dims = module.dims
        if not isinstance(self.input_layouts, Shard) or self.input_layouts.dim not in dims:
            return None
        require_pointwise(module)
        axis = dims.index(self.input_layouts.dim)
        # It is an error if the ranks cannot share them.
        channels_per_rank(module.normalized_shape[axis], mesh.size())
        return axis


def _shard_parameters(
    name: str,
    module: nn.Module,
    mesh: DeviceMesh,
    *,
    axis: int | None,
    source: int | None,
) -> None:
    # distribute_module calls this for every submodule, such as a parametrization.
    if not isinstance(module, PointwiseNorm):
        return
    for key, p in list(module._parameters.items()):
        if p is None:
            continue
        placement: Placement = Replicate()
        if axis is not None and is_channelwise(key, p, module):
            placement = Shard(axis)
        value = distribute_tensor(p.detach(), mesh, [placement], src_data_rank=source)
        module.register_parameter(key, nn.Parameter(value, requires_grad=p.requires_grad))


def _placed(x: DTensor, layout: Placement) -> DTensor:
    """Return a tensor with a placement, redistributed if it has another one."""
    if isinstance(layout, Shard):
        # The placements of a tensor count its dimensions from the front.
        layout = Shard(layout.dim % x.ndim)
    if x.placements == (layout,):
        return x
    return x.redistribute(placements=(layout,))


def _prepare_input(layout: Placement, module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
    x = inputs[0]
    if isinstance(x, DTensor):
        return (_placed(x, layout), *inputs[1:])
    if not isinstance(x, Tensor):
        raise ArgumentError(f"x must be a tensor or a DTensor, got {type(x).__name__}")
    return (DTensor.from_local(x, mesh, [layout], run_check=False), *inputs[1:])


def _prepare_output(
    layout: Placement, local: bool, module: nn.Module, y: DTensor, mesh: DeviceMesh
) -> Any:
    y = _placed(y, layout)
    if local:
        return y.to_local()
    return y


def _pointwise(layer: PointwiseNorm, x: Tensor) -> Tensor:
    """Return the layer's function of x: on shards, or by the definition for ``torch.compile``."""
    if isinstance(x, DTensor) and not torch.compiler.is_compiling():
        return on_shards(layer, x)
    if isinstance(x, DTensor) and layer.witness_channels:
        # The definition would gather all channels to read a few; a graph break costs less.
        uncompiled: Any = torch.compiler.disable(on_shards)  # type: ignore[no-untyped-call]
        return cast("Tensor", uncompiled(layer, x))
    return type(layer).pointwise(layer, x)


def require_equal_ranks(model: nn.Module, group: ProcessGroup | None = None) -> None:
    """Check that every rank has the same point-wise layers, with equal constants and parameters.

    Nothing else reports that ranks were converted or calibrated separately: each computes with its
    own constants. Call this function on every rank; 8 bytes are exchanged.
    :class:`PointwiseParallel` makes the same check for each layer that it shards.

    Args:
        model: the model, before it is sharded or wrapped; on the meta device only paths and shapes
            are compared.
        group: the processes; the default group when None.

    Raises:
        ModelError: on every rank, if a rank differs; the message names the ranks.

    Example:
        >>> require_equal_ranks(nn.Sequential(dynorm.DyISRU(8)))  # one process, nothing to compare
    """
    ranks = Ranks(group, ModelError)
    with ranks.sharing_errors():
        require_gathered(model)
        ranks.require_alike(dynorm_layers(model).items())


@torch.no_grad()
def reduce_gradients_(model: nn.Module) -> int:
    """Sum the gradients of the replicated parameters of all point-wise layers over the ranks.

    Call it between ``backward`` and the optimizer (and before clipping), after the last batch of an
    accumulation: there is then one all-reduce of a few numbers for all layers. After the backward
    pass these gradients are ``Partial``: each rank has the contribution of its shard. Without
    this call the optimizer sums each of them separately, every time that it reads it. The gradients
    are replaced in place.

    Args:
        model: a model with layers that :class:`PointwiseParallel` sharded.

    Returns:
        The number of all-reduces: one for each dtype, device and dimension of a mesh that has
        gradients to sum.

    Example:
        >>> reduce_gradients_(nn.Sequential(dynorm.DyISRU(8)))  # nothing is sharded
        0
    """
    # Shared parameters once.
    parameters = {p: None for layer in dynorm_layers(model).values() for p in layer.parameters()}
    # The parameters whose gradients one all-reduce can sum.
    groups: dict[tuple[DeviceMesh, int, torch.dtype, torch.device], list[nn.Parameter]] = {}
    for p in parameters:
        gradient = p.grad
        if not isinstance(gradient, DTensor):
            continue
        for position, placement in enumerate(gradient.placements):
            if isinstance(placement, Partial):
                key = (gradient.device_mesh, position, gradient.dtype, gradient.device)
                groups.setdefault(key, []).append(p)
    for (mesh, position, *_), members in groups.items():
        # Read again: if a gradient is partial in several dimensions of the mesh, the sum over one
        # of them has replaced it.
        gradients = [cast("DTensor", p.grad) for p in members]
        parts = [gradient.to_local() for gradient in gradients]
        flat = torch.cat([local.reshape(-1) for local in parts])
        torch.distributed.all_reduce(flat, group=mesh.get_group(position))
        sums = torch.split(flat, [local.numel() for local in parts])
        for p, gradient, total in zip(members, gradients, sums, strict=True):
            placements = list(gradient.placements)
            placements[position] = Replicate()
            p.grad = DTensor.from_local(
                total.reshape(gradient.to_local().shape),
                mesh,
                placements,
                run_check=False,
                shape=gradient.shape,
                stride=gradient.stride(),
            )
    return len(groups)
