"""Parameters of which every rank has a copy: equal at the start, their gradients summed over the ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from dynorm.errors import ModelError
from dynorm.fit.ranks import Ranks
from dynorm.replace.specs import dynorm_layers

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def require_equal_ranks(model: nn.Module, group: ProcessGroup | None = None) -> None:
    """Check that every rank has the same point-wise layers, with the same constants, weights and biases.

    Ranks that were converted or calibrated apart differ without a sign: each computes with its own constants. Call it
    on every rank; 8 bytes are exchanged. :class:`PointwiseParallel` calls it for each layer that it shards.

    Args:
        model: before it is sharded or wrapped; on the meta device only paths and shapes are compared.
        group: the processes; the default group when None.

    Raises:
        ModelError: on every rank, if one differs; the message names the ranks.

    Example:
        >>> require_equal_ranks(nn.Sequential(dynorm.DyISRU(8)))  # one process, nothing to compare
    """
    ranks = Ranks(group, ModelError)
    with ranks.together():
        ranks.require_alike(dynorm_layers(model).items())


@torch.no_grad()
def reduce_gradients_(model: nn.Module) -> int:
    """Sum the gradients of the point-wise layers' replicated parameters over the ranks, in place, all at once.

    After the backward pass they are ``Partial``: each rank has what its own shard contributed. An optimizer makes the
    sum of each one by itself, every time that it reads it. Call this between ``backward`` and the optimizer (and before
    clipping), after the last batch of an accumulation, and there is one all-reduce of a few numbers for all layers.

    Args:
        model: with layers that :class:`PointwiseParallel` sharded.

    Returns:
        How many all-reduces there were: one for each dtype, device and dimension of a mesh that had sums to make.

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
        # Looked at anew: a gradient may be partial in several dimensions of the mesh, and one is done at a time.
        before: list[Any] = [p.grad for p in members]
        flat = torch.cat([gradient.to_local().reshape(-1) for gradient in before])
        torch.distributed.all_reduce(flat, group=mesh.get_group(position))
        parts = torch.split(flat, [gradient.to_local().numel() for gradient in before])
        for p, part, gradient in zip(members, parts, before, strict=True):
            placements = [Replicate() if k == position else each for k, each in enumerate(gradient.placements)]
            local = part.reshape(gradient.to_local().shape)
            sizes = {"shape": gradient.shape, "stride": gradient.stride()}
            p.grad = DTensor.from_local(local, mesh, placements, run_check=False, **sizes)
    return len(waiting)
