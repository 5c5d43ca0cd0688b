"""Input that every rank must refuse: each case returns or raises the error of this rank, and leaves all in step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

import dynorm
from dynorm.parallel import PointwiseParallel, on_shards, require_equal_ranks
from tests.parallel.block import C
from tests.parallel.data_cases import Net, fitted, net


def rank() -> int:
    return dist.get_rank()


def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2,))


def unchanged(model: nn.Module, call: Callable[[], Any]) -> None:
    """Let the call's error through, once the model is seen to be as it was."""
    before = {name: t.clone() for name, t in model.state_dict().items()}
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    try:
        call()
    finally:
        for name, t in model.state_dict().items():
            assert type(t) is type(before[name])
            whole = [v.full_tensor() if isinstance(v, DTensor) else v for v in (t, before[name])]
            assert torch.equal(*whole), name
        assert hooks == [
            (len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()
        ]


def shard(layer: nn.Module, **options: Any) -> None:
    unchanged(layer, lambda: parallelize_module(layer, mesh(), PointwiseParallel(**options)))


def channels_that_two_do_not_divide(folder: Path) -> Any:
    shard(dynorm.DyISRU(C + 1))


def a_mesh_of_two_dimensions(folder: Path) -> Any:
    layer, style = dynorm.DyISRU(C), PointwiseParallel()
    unchanged(layer, lambda: style._apply(layer, init_device_mesh("cpu", (1, 2))))


def other_constants(folder: Path) -> Any:
    shard(dynorm.DyISRU(C, beta_init=1.0 + rank()))


def other_weights(folder: Path) -> Any:
    model = net()
    with torch.no_grad():
        model.norm.weight[3] += 1e-9 * rank()
    require_equal_ranks(model)


def other_shapes(folder: Path) -> Any:
    shard(dynorm.DyISRU(C if rank() else 2 * C))


def a_norm_on_one_rank(folder: Path) -> Any:
    shard(nn.LayerNorm(C) if rank() else dynorm.DyISRU(C))


def named_twice(folder: Path) -> Any:
    layer = dynorm.DyISRU(C)
    parallelize_module(layer, mesh(), PointwiseParallel())
    shard(layer)


def annealed_over_channels(folder: Path) -> Any:
    shard(dynorm.layers.AnnealedDyISRU(C, t=0.5))


def annealed_over_the_sequence(folder: Path) -> Any:
    """Is no error: the norm of a token is this rank's own."""
    layer, norm = dynorm.layers.AnnealedDyISRU(C), nn.LayerNorm(C)
    parallelize_module(layer, mesh(), PointwiseParallel(input_layouts=Shard(1)))
    x = torch.randn(2, 6, C)
    y = layer(distribute_tensor(x, mesh(), [Shard(1)])).full_tensor()
    return float((y - norm(x)).detach().abs().max())


def annealed_with_a_centre_elsewhere(folder: Path) -> Any:
    """Have as many constants in the same order on both ranks, all zero, but of different layers."""
    layers = [
        dynorm.layers.AnnealedDyISRU(C, per_channel=True, center=place == rank())
        for place in range(2)
    ]
    model = nn.Sequential(*layers)
    with torch.no_grad():
        for layer in layers:
            for constant in layer.constant_parameters():
                constant.zero_()


def annealed_gets_channels(folder: Path) -> Any:
    layer = distribute_module(dynorm.layers.AnnealedDyISRU(C), mesh())
    on_shards(layer, distribute_tensor(torch.randn(2, C), mesh(), [Shard(1)]))


def a_layer_that_is_not_sharded(folder: Path) -> Any:
    on_shards(dynorm.DyISRU(C), distribute_tensor(torch.randn(2, C), mesh(), [Shard(1)]))


def a_sum_that_is_not_made(folder: Path) -> Any:
    """Is no error: f of the sum, not the sum of f."""
    layer = distribute_module(dynorm.DyISRU(C), mesh())
    x = torch.randn(2, C)
    half = DTensor.from_local(x / 2, mesh(), [Partial()])
    y = on_shards(layer, half)
    return float((y.full_tensor() - dynorm.DyISRU(C)(x)).detach().abs().max())


def data(rows: int = 2) -> Tensor:
    return torch.randn(rows, 6, C).double()


def calibrate(model: nn.Module, batches: Any) -> None:
    unchanged(model, lambda: dynorm.calibrate_(model, batches))


def calibrate_fsdp(folder: Path) -> Any:
    calibrate(fully_shard(net(), mesh=mesh()), [data()])


def calibrate_dtensors(folder: Path) -> Any:
    model = net()
    parallelize_module(model, mesh(), {"norm": PointwiseParallel(input_layouts=Shard(1))})
    calibrate(model, [data()])


def convert_dtensors(folder: Path) -> Any:
    model = Net().double()
    sites = dynorm.find_norms(model, data())
    parallelize_module(model, mesh(), {"norm": SequenceParallel()})
    unchanged(model, lambda: dynorm.convert_(model, sites))


def convert_fsdp(folder: Path) -> Any:
    model = Net().double()
    sites = dynorm.find_norms(model, data())
    fully_shard(model, mesh=mesh())
    unchanged(model, lambda: dynorm.convert_(model, sites))


def calibrate_without_batches_on_one(folder: Path) -> Any:
    calibrate(net(), [data()] * (1 - rank()))


def calibrate_with_nan_on_one(folder: Path) -> Any:
    calibrate(net(), [data(), torch.full_like(data(), torch.nan) if rank() else data()])


def calibrate_with_an_iterator_that_breaks(folder: Path) -> Any:
    def batches() -> Iterator[Tensor]:
        yield data()
        if rank():
            raise OSError("the disk is full")
        yield data()

    calibrate(net(), batches())


def calibrate_other_models(folder: Path) -> Any:
    model = net()
    with torch.no_grad():
        model.norm.bias += rank()
    calibrate(model, [data()])


class Routed(nn.Module):
    """Goes by both experts, or by one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.LayerNorm(C), nn.LayerNorm(C)])
        self.way: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.experts if self.way is None else [self.experts[self.way]]
        return torch.stack([expert(x) for expert in chosen]).sum(0)


def calibrate_other_ways(folder: Path) -> Any:
    model = Routed()
    dynorm.convert_(model, dynorm.find_norms(model, torch.randn(2, C)))
    model.way = rank()
    calibrate(model, [torch.randn(2, C)])


def calibrate_one_more(folder: Path) -> Any:
    model = Routed()
    dynorm.convert_(model, dynorm.find_norms(model, torch.randn(2, C)))
    model.way = 0 if rank() else None
    calibrate(model, [torch.randn(2, C)])


def restore_what_is_sharded(folder: Path) -> Any:
    model = net()
    parallelize_module(model, mesh(), {"norm": PointwiseParallel()})
    dynorm.restore_(model)


def initialize_with_nan_on_one(folder: Path) -> Any:
    model = net()
    x = torch.full_like(data(), torch.nan) if rank() else data()
    unchanged(model, lambda: dynorm.init_from_batch_(model, x))


def initialize_with_a_wrong_batch_on_one(folder: Path) -> Any:
    model = net()
    unchanged(model, lambda: dynorm.init_from_batch_(model, data()[..., :-1] if rank() else data()))


def in_step(folder: Path) -> Any:
    """After all this the ranks still understand each other."""
    model = net()
    dynorm.calibrate_(model, [data()])
    return fitted(model)


def annealed_of_rank(place: int) -> dynorm.AnnealStart:
    """A start that has seen a step of a model with one annealed layer, which is at another place on each rank."""
    layers = [nn.Identity(), nn.Identity()]
    layers[place] = dynorm.layers.AnnealedDyISRU(C)
    model = nn.Sequential(*layers)
    start = dynorm.AnnealStart(model)
    model(torch.randn(5, C))
    return start


def annealing_begins_at_other_layers(folder: Path) -> Any:
    annealed_of_rank(rank()).finish_()


def annealing_was_cancelled_on_one_rank(folder: Path) -> Any:
    start = annealed_of_rank(0)
    if rank() == 1:
        start.cancel_()
    start.finish_()
