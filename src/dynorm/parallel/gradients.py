"""The gradients of replicated parameters: many small sums over ranks as one."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from dynorm.replace.specs import dynorm_layers


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
        _reduce_(members, mesh, position)
    return len(waiting)


def _reduce_(parameters: list[nn.Parameter], mesh: DeviceMesh, position: int) -> None:
    """Sum gradients over one dimension of a mesh."""
    locals_ = [_gradient(p).to_local() for p in parameters]
    flat = torch.cat([each.reshape(-1) for each in locals_])
    torch.distributed.all_reduce(flat, group=mesh.get_group(position))
    parts = torch.split(flat, [each.numel() for each in locals_])
    for p, part, like in zip(parameters, parts, locals_, strict=True):
        before = _gradient(p)
        placements = [Replicate() if k == position else each for k, each in enumerate(before.placements)]
        p.grad = DTensor.from_local(
            part.reshape(like.shape), mesh, placements, run_check=False, shape=before.shape, stride=before.stride()
        )


def _gradient(p: nn.Parameter) -> DTensor:
    assert isinstance(p.grad, DTensor)
    return p.grad
