"""Point-wise layers on sharded tensors: a style for the plans of ``parallelize_module``.

A layer without witnesses reads one channel at a time. So x may be sharded in any way, over its
channels too, and y is sharded like x, without a collective.
"""

from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Placement,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import ParallelStyle

from dynorm.errors import ArgumentError, ModelError
from dynorm.layers import AnnealedNorm, PointwiseNorm


class PointwiseParallel(ParallelStyle):
    """Shard a point-wise layer like its input: over channels, sequence or batch.

    Forward and backward then need no collective. If the channels are sharded, so are ``weight``,
    ``bias`` and constants with one value per channel. All other parameters are replicated; their
    gradients are sums over the ranks, left as DTensor's ``Partial``, which the optimizer reduces.
    All ranks get the values of rank 0. The scale stays that of all channels.

    Args:
        input_layouts: the placement of the input, ``Shard(-1)``, the channels, by default. A plain
            tensor is taken to be this rank's shard; a DTensor with another placement is
            redistributed.
        output_layouts: the placement of the output; None for that of the input. ``Replicate()``
            gathers once for several ``ColwiseParallel`` that take the same input.
        use_local_output: return this rank's shard as a plain tensor.

    Raises:
        ArgumentError: ``input_layouts`` is ``Partial``. When it is applied: the channels are not
            divisible by the ranks.
        ModelError: when it is applied: the module is not a point-wise layer, is sharded already,
            has witnesses, or is annealed to t < 1 and its channels are sharded.

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

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        layer = _shardable(module)
        layout = self.input_layouts
        channels_are_sharded = isinstance(layout, Shard) and layout.dim == layer.dim
        if channels_are_sharded:
            _require_even(layer, device_mesh.size())
        distribute_module(
            layer,
            device_mesh,
            partial(_shard_parameters, channels_are_sharded, self.src_data_rank),
            partial(_place_input, layout),
            partial(_place_output, self.output_layouts, self.use_local_output),
        )
        # The norm that it replaced is not sharded, so it cannot be restored.
        layer.__dict__.pop("replaced", None)
        return layer


def _shardable(module: nn.Module) -> PointwiseNorm:
    """Return the module if it can be sharded."""
    if not isinstance(module, PointwiseNorm):
        raise ModelError(
            f"PointwiseParallel must be applied to a point-wise layer, got {type(module).__name__}: "
            "convert the model first, or use SequenceParallel for a norm"
        )
    if any(isinstance(p, DTensor) for p in module.parameters()):
        raise ModelError(
            "the layer must not be sharded yet, but its parameters are DTensors: name it once"
        )
    if module.witness_channels:
        raise ModelError(
            "a sharded layer must have no witnesses, which another rank may hold, but has "
            f"{module.witness_channels}: convert with witnesses=0, or shard the sequence with "
            "SequenceParallel"
        )
    return module


def _require_even(layer: PointwiseNorm, ranks: int) -> None:
    """Check that each rank can compute its share of the channels."""
    if isinstance(layer, AnnealedNorm) and layer.position < 1:
        raise ModelError(
            f"a layer whose channels are sharded must be point-wise, but {type(layer).__name__} is "
            f"a norm until t = 1, and is at t = {layer.position:g}: shard the sequence instead, or "
            "call dynorm.finalize_ first"
        )
    if layer.channels % ranks:
        raise ArgumentError(
            f"the number of channels must be divisible by the ranks that share them, got "
            f"{layer.channels} for {ranks} ranks: shard the sequence, or use another number of ranks"
        )


def _shard_parameters(
    channels_are_sharded: bool, source: int | None, name: str, module: nn.Module, mesh: DeviceMesh
) -> None:
    for key, parameter in list(module.named_parameters(recurse=False)):
        placement: Placement = Replicate()
        if channels_are_sharded and parameter.numel() > 1:
            placement = Shard(0)
        value = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=source)
        module.register_parameter(key, nn.Parameter(value, parameter.requires_grad))


def _place_input(layout: Placement, module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
    x = inputs[0]
    if not isinstance(x, Tensor):
        raise ArgumentError(f"x must be a tensor or a DTensor, got {type(x).__name__}")
    if not isinstance(x, DTensor):
        x = DTensor.from_local(x, mesh, [layout], run_check=False)
    return x.redistribute(mesh, [layout])


def _place_output(
    layout: Placement, local: bool, module: nn.Module, y: DTensor, mesh: DeviceMesh
) -> Any:
    y = y.redistribute(mesh, [layout])
    return y.to_local() if local else y
