"""What each of two processes does in test_processes.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

import dynorm
from dynorm.layers.linear import LinearControl

C = 12


def layers(folder: Path) -> dict[str, Any]:
    """Return how far sharded layers are from plain ones, and their collectives, by kind and sharded axis."""
    mesh = init_device_mesh("cpu", (2,))
    found = {}
    for kind in (dynorm.DyISRU, dynorm.DyT, dynorm.Derf, LinearControl):
        for axis in (-1, 0):
            plain = kind(C, dtype=torch.float64)
            with torch.no_grad():
                for parameter in plain.parameters():
                    parameter.add_(0.1 * torch.randn_like(parameter))
            x = torch.randn(4, 5, C, dtype=torch.float64, requires_grad=True)
            seed = torch.randn(4, 5, C, dtype=torch.float64)
            expected = torch.autograd.grad(plain(x), [x, *plain.parameters()], seed)
            y = plain(x).detach()
            layer = parallelize_module(plain, mesh, SequenceParallel(sequence_dim=axis))
            sharded = distribute_tensor(x.detach(), mesh, [Shard(axis)]).requires_grad_()
            sharded_seed = distribute_tensor(seed, mesh, [Shard(axis)])
            with CommDebugMode() as counted:
                sharded_y = layer(sharded)
                sharded_y.backward(sharded_seed)
            gradients = [each.grad for each in (sharded, *layer.parameters())]
            gap = float((sharded_y.full_tensor() - y).abs().max())
            for gradient, right in zip(gradients, expected, strict=True):
                assert isinstance(gradient, DTensor)
                gap = max(gap, float((gradient.full_tensor() - right).abs().max()))
            found[f"{kind.__name__} {axis}"] = [gap, counted.get_total_counts()]
    return found


def sharded_witnesses(folder: Path) -> Any:
    mesh = init_device_mesh("cpu", (2,))
    layer = parallelize_module(dynorm.DyISRU(C, witnesses=2), mesh, SequenceParallel())
    return layer(torch.ones(4, 5, C))


def converted() -> tuple[nn.Module, list[Tensor]]:
    """Return a model, alike on every rank, and batches of this rank's own."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(C, C), nn.LayerNorm(C), nn.Linear(C, C), nn.RMSNorm(C))
    dynorm.convert_(model, dynorm.find_norms(model, torch.randn(4, C)), witnesses=2)
    torch.manual_seed(1 + distributed.get_rank())
    return model, [3 * torch.randn(80, C) for _ in range(3)]


def state(model: nn.Module) -> dict[str, Any]:
    return {name: value.tolist() for name, value in model.state_dict().items()}


def calibrated(folder: Path) -> dict[str, Any]:
    model, batches = converted()
    report = dynorm.calibrate_(model, batches)
    return {"state": state(model), "report": report.to_dict()}


def _with_nan_on(rank: int, verb: Callable[..., Any]) -> Any:
    model, batches = converted()
    before = state(model)
    if distributed.get_rank() == rank:
        batches[1][0] = float("nan")
    try:
        verb(model, batches)
    finally:
        assert state(model) == before or rank
    return "fine"


def nan_on_the_first(folder: Path) -> Any:
    return _with_nan_on(0, dynorm.calibrate_)


def nan_on_the_second(folder: Path) -> Any:
    """Its batches are not read."""
    return _with_nan_on(1, dynorm.calibrate_)
