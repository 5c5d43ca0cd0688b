"""What four processes do in test_tensor.py: layers and a block on DTensors, beside the same in one process."""

from __future__ import annotations

import copy
import math
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import dynorm
from benchmarks.wire import ReducedRMSNorm, RMSNorm
from dynorm.kernels import _cpu
from dynorm.parallel import PointwiseParallel, on_shards, reduce_gradients_
from tests.parallel.block import Block, C

LAYERS = {
    "dyisru": partial(dynorm.DyISRU, center=True),
    "dyisru per channel": partial(dynorm.DyISRU, per_channel=True, center=True),
    "dyt": dynorm.DyT,
    "derf": partial(dynorm.Derf, shift_init=0.1),
    "linear": partial(dynorm.LinearControl, elementwise_affine=False),
}
# On one rank and on several, the first and the last channel among them; and as many as there are
# channels.
WITNESSED = {
    f"{name} witnesses {len(witnesses)}": partial(make, witnesses=witnesses)
    for name, make in LAYERS.items()
    for witnesses in [(9,), (31, 2, 0), *([tuple(range(C))] if name == "dyisru" else [])]
}
PLACES = {"batch": Shard(0), "sequence": Shard(1), "channels": Shard(-1), "replicated": Replicate()}


def meshes() -> list[DeviceMesh]:
    """Two groups of two, and one of four."""
    return [init_device_mesh("cpu", (4 // n, n), mesh_dim_names=("dp", "tp"))["tp"] for n in (2, 4)]


def whole(t: Tensor | None) -> Tensor:
    assert t is not None
    return (t.full_tensor() if isinstance(t, DTensor) else t).detach()


def gap(ours: Tensor | None, theirs: Tensor | None) -> float:
    return float((whole(ours) - whole(theirs)).abs().max())


def counted(comm: CommDebugMode) -> dict[str, int]:
    """Collectives by name; without those that were never called."""
    return {
        str(op).rsplit(".", 1)[-1].rstrip("')>"): n for op, n in comm.get_comm_counts().items() if n
    }


def randomized(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        for p in module.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return module.double()


def layers(folder: Path, kinds: Any = LAYERS) -> Any:
    """Each layer, each sharding, two and four ranks; a batch and a length that the ranks do not divide."""
    found = {}
    for mesh in meshes():
        for name, make in kinds.items():
            for place, placement in PLACES.items():
                torch.manual_seed(1)
                plain = randomized(make(C))
                x, upstream = (
                    torch.randn(3, 5, C).double().requires_grad_(),
                    torch.randn(3, 5, C).double(),
                )
                y = plain(x)
                y.backward(upstream)
                layer = copy.deepcopy(plain)
                layer.zero_grad()
                parallelize_module(layer, mesh, PointwiseParallel(input_layouts=placement))
                sharded = distribute_tensor(x.detach(), mesh, [placement]).requires_grad_()
                given = distribute_tensor(upstream, mesh, [placement])
                with CommDebugMode() as comm:
                    ours = layer(sharded)
                    ours.backward(given)
                gaps = [gap(ours, y), gap(sharded.grad, x.grad)]
                theirs = dict(plain.named_parameters())
                gaps += [gap(p.grad, theirs[key].grad) for key, p in layer.named_parameters()]
                found[f"{name} {place} {mesh.size()}"] = {
                    "gap": max(gaps),
                    "collectives": counted(comm),
                    "kept": ours.placements == sharded.placements,
                }
    return found


def witnesses(folder: Path) -> Any:
    """The same with witnesses, and the values that a rank sends forward."""
    sent: list[list[int]] = []
    gather = dist.all_gather

    def watched(parts: list[Tensor], x: Tensor, **options: Any) -> Any:
        sent.append([x.numel() // (3 * 5), x.element_size()])
        return gather(parts, x, **options)

    dist.all_gather = watched
    try:
        return layers(folder, WITNESSED) | {"sent": sent}
    finally:
        dist.all_gather = gather


def other_axes(folder: Path) -> Any:
    """Channels that come first, and a normalized shape of two axes."""
    mesh, found = meshes()[1], {}
    for name, layer, shape, dim in (
        ("first", dynorm.DyISRU(8, dim=1, per_channel=True), (3, 8, 5), 1),
        ("last of two", dynorm.DyT((4, 8), center=True), (3, 4, 8), -1),
        ("first of two", dynorm.DyT((4, 8), center=True), (3, 4, 8), -2),
        (
            "first, witnesses",
            dynorm.DyISRU(8, dim=1, per_channel=True, center=True, witnesses=(7, 0)),
            (3, 8, 5),
            1,
        ),
        ("of two, witnesses", dynorm.DyISRU((4, 8), center=True, witnesses=(7, 30)), (3, 4, 8), -1),
        (
            "first of two, witnesses",
            dynorm.DyT((4, 8), per_channel=True, center=True, witnesses=(7, 30)),
            (3, 4, 8),
            -2,
        ),
    ):
        plain = randomized(layer)
        x = torch.randn(shape).double()
        y = plain(x)
        y.backward(y.detach())
        ours = copy.deepcopy(plain)
        ours.zero_grad()
        parallelize_module(ours, mesh, PointwiseParallel(input_layouts=Shard(dim)))
        sharded = distribute_tensor(x, mesh, [Shard(dim)])
        with CommDebugMode() as comm:
            z = ours(sharded)
            z.backward(z.detach())
        theirs = dict(plain.named_parameters())
        gaps = [gap(z, y), *(gap(p.grad, theirs[key].grad) for key, p in ours.named_parameters())]
        found[name] = {"gap": max(gaps), "collectives": counted(comm)}
    return found


class Statistics(ParallelStyle):
    """A norm with statistics whose channels are sharded, its weight with them: DTensor adds the collectives."""

    def __init__(self, output: Any = None) -> None:
        self.output = output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def shard(name: str, norm: nn.Module, mesh: DeviceMesh) -> None:
            for key, p in list(norm._parameters.items()):
                assert p is not None
                norm.register_parameter(
                    key, nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)]))
                )

        def gather(norm: nn.Module, y: Any, mesh: DeviceMesh) -> Any:
            return y if self.output is None else y.redistribute(placements=[self.output])

        return distribute_module(module, device_mesh, shard, None, gather)


def plan(norms: Any) -> dict[str, Any]:
    """The residual stream sharded over channels; one gather for q, k, v, one for gate and up."""
    rows = {"output_layouts": Shard(-1), "use_local_output": False}
    return {
        "norm1": norms(), "attention.q": ColwiseParallel(), "attention.k": ColwiseParallel(),
        "attention.v": ColwiseParallel(), "attention.o": RowwiseParallel(**rows),
        "norm2": norms(), "mlp.gate": ColwiseParallel(), "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(**rows),
    }  # fmt: skip


BLOCKS = {
    "dyisru": (
        partial(dynorm.DyISRU, center=True),
        lambda: PointwiseParallel(output_layouts=Replicate()),
    ),
    "rmsnorm": (RMSNorm, lambda: Statistics(Replicate())),
    "rmsnorm by hand": (ReducedRMSNorm, lambda: Statistics(Replicate())),
    "layernorm": (nn.LayerNorm, lambda: Statistics(Replicate())),
}


def block(folder: Path) -> Any:
    """Forward, gradients and collectives of a block whose residual stream is sharded over channels."""
    found = {}
    for mesh in meshes():
        for name, (norm, style) in BLOCKS.items():
            torch.manual_seed(2)
            plain = randomized(Block(RMSNorm if norm is ReducedRMSNorm else norm))
            x, upstream = (
                torch.randn(2, 6, C).double().requires_grad_(),
                torch.randn(2, 6, C).double(),
            )
            y = plain(x)
            y.backward(upstream)
            model = randomized(Block(norm))
            model.load_state_dict(plain.state_dict())
            parallelize_module(model, mesh, plan(style))
            sharded = distribute_tensor(x.detach(), mesh, [Shard(-1)]).requires_grad_()
            given = distribute_tensor(upstream, mesh, [Shard(-1)])
            with CommDebugMode() as forward:
                ours = model(sharded)
            with CommDebugMode() as backward:
                ours.backward(given)
            sums = reduce_gradients_(model)
            theirs = dict(plain.named_parameters())
            gaps = {"y": gap(ours, y), "x": gap(sharded.grad, x.grad)}
            gaps |= {key: gap(p.grad, theirs[key].grad) for key, p in model.named_parameters()}
            found[f"{name} {mesh.size()}"] = {
                "gap": max(gaps.values()),
                "forward": counted(forward),
                "backward": counted(backward),
                "sums": sums,
                "norm": _norm_alone(norm, mesh),
            }
    return found


def _norm_alone(norm: Any, mesh: DeviceMesh) -> list[dict[str, int]]:
    """Collectives of one norm on sharded channels, forward and backward."""
    layer = norm(C).double()
    style = PointwiseParallel() if isinstance(layer, dynorm.layers.PointwiseNorm) else Statistics()
    parallelize_module(layer, mesh, style)
    x = distribute_tensor(torch.randn(2, 6, C).double(), mesh, [Shard(-1)]).requires_grad_()
    with CommDebugMode() as forward:
        y = layer(x)
    with CommDebugMode() as backward:
        y.backward(y.detach())
    return [counted(forward), counted(backward)]


def sequence_plan(folder: Path) -> Any:
    """Beside SequenceParallel's place in torch's own plan: the stream sharded over the sequence."""
    mesh, rows = meshes()[1], {"output_layouts": Shard(1), "use_local_output": False}
    found = {}
    for name, norm, style in (
        (
            "dyisru",
            dynorm.DyISRU,
            PointwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        ),
        ("layernorm", nn.LayerNorm, SequenceParallel()),
    ):
        torch.manual_seed(2)
        plain = Block(norm).double()
        model = copy.deepcopy(plain)
        columns = {} if name == "dyisru" else {"input_layouts": Shard(1)}
        parallelize_module(
            model, mesh,
            plan(lambda style=style: style)
            | {key: ColwiseParallel(**columns) for key in ("attention.q", "attention.k", "attention.v")}
            | {key: ColwiseParallel(**columns) for key in ("mlp.gate", "mlp.up")}
            | {key: RowwiseParallel(**rows) for key in ("attention.o", "mlp.down")},
        )  # fmt: skip
        x = torch.randn(2, 8, C).double()
        sharded = distribute_tensor(x, mesh, [Shard(1)])
        with CommDebugMode() as comm:
            y = model(sharded)
        found[name] = {"gap": gap(y, plain(x)), "collectives": counted(comm)}
    return found


def training(folder: Path) -> Any:
    """Steps of AdamW with clipping: constants summed once for all, or by the optimizer, or in one process."""
    mesh = meshes()[1]
    losses: dict[str, list[float]] = {"one": [], "at once": [], "by the optimizer": []}
    sums = []
    for kind, seen in losses.items():
        torch.manual_seed(3)
        model: nn.Module = randomized(Block(dynorm.DyISRU))
        if kind != "one":
            parallelize_module(model, mesh, plan(BLOCKS["dyisru"][1]))
        optimizer = torch.optim.AdamW(
            dynorm.param_groups(model, lr=1e-2, weight_decay=0.1, constants_lr=3e-2)
        )
        for _ in range(6):
            x = torch.randn(2, 6, C).double()
            y = model(x if kind == "one" else distribute_tensor(x, mesh, [Shard(-1)]))
            loss = (y - 1).square().mean()
            loss.backward()
            if kind == "at once":
                with CommDebugMode() as comm:
                    reduce_gradients_(model)
                sums.append(counted(comm))
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            seen.append([float(whole(loss)), float(whole(norm))])
    return {"losses": losses, "sums": sums}


def kernel(folder: Path) -> Any:
    """What reaches the kernels: this rank's channels, with the scale of all."""
    seen: list[Any] = []
    serve = _cpu.serve
    layer = dynorm.DyISRU(C)
    parallelize_module(layer, meshes()[1], PointwiseParallel(use_local_output=True))
    x = torch.randn(3, C // 4)

    def watched(
        x: Tensor, parameters: Any, function: int, logarithmic: bool, scale: float, *form: Any
    ) -> Any:
        y = serve(x, parameters, function, logarithmic, scale, *form)
        if isinstance(y, Tensor):
            seen.append([math.prod(form[0]), scale, list(x.shape)])
        return y

    _cpu.serve = watched
    try:
        y = layer(x)
    finally:
        _cpu.serve = serve
    again = copy.deepcopy(layer)(x)
    return {
        "seen": seen,
        "backend": dynorm.kernels.backend("cpu"),
        "type": type(y).__name__,
        "copy": gap(again, y),
    }


def two_dimensions(folder: Path) -> Any:
    """A mesh of two dimensions: the batch over one, the channels over the other; gradients summed over the first."""
    return {name: _two_dimensions(layer) for name, layer in _of_two_dimensions().items()}


def _of_two_dimensions() -> dict[str, nn.Module]:
    return {"pure": dynorm.DyISRU(C), "witnesses": dynorm.DyISRU(C, witnesses=(5, 20))}


def _two_dimensions(layer: nn.Module) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 2))
    torch.manual_seed(4)
    plain = randomized(layer)
    x = torch.randn(4, 6, C).double().requires_grad_()
    expected = plain(x)
    expected.square().sum().backward()
    layer = copy.deepcopy(plain)
    layer.zero_grad()
    for key, p in list(layer._parameters.items()):
        assert p is None or isinstance(p, nn.Parameter)
        if p is not None:
            follow = Shard(0) if p.numel() == C else Replicate()
            layer._parameters[key] = nn.Parameter(
                distribute_tensor(p.detach(), mesh, [Replicate(), follow])
            )
    sharded = distribute_tensor(x.detach(), mesh, [Shard(0), Shard(2)]).requires_grad_()
    y = on_shards(layer, sharded)
    y.backward(2 * y.detach())
    sums = reduce_gradients_(layer)
    partial_left = any(each.is_partial() for p in layer.parameters() for each in p.grad.placements)
    theirs = dict(plain.named_parameters())
    gaps = [gap(p.grad, theirs[key].grad) for key, p in layer.named_parameters()]
    gaps += [gap(y, expected), gap(sharded.grad, x.grad)]
    return {"gap": max(gaps), "sums": sums, "partial": partial_left}


def with_fsdp(folder: Path) -> Any:
    """Channels over two ranks, batches over two: FSDP2 on top of the plan, and a step of AdamW."""
    return _with_fsdp(dynorm.DyISRU) | {
        f"{name}, witnesses": found
        for name, found in _with_fsdp(partial(dynorm.DyISRU, witnesses=(5, 20))).items()
    }


def _with_fsdp(norm: Any) -> dict[str, float]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(6)
    plain = randomized(Block(norm))
    model = copy.deepcopy(plain)
    with torch.device("meta"):
        empty = Block(norm).double()
    for each in (model, empty):
        parallelize_module(each, mesh["tp"], plan(BLOCKS["dyisru"][1]))
        fully_shard(each, mesh=mesh["dp"])
    empty.to_empty(device="cpu")
    empty.load_state_dict(model.state_dict())
    x, rows = (
        torch.randn(4, 6, C).double(),
        slice(2 * mesh["dp"].get_local_rank(), 2 * mesh["dp"].get_local_rank() + 2),
    )
    found = {}
    for each, name in ((plain, "one"), (model, "built"), (empty, "built without memory")):
        optimizer = torch.optim.AdamW(dynorm.param_groups(each, lr=1e-2, weight_decay=0.1))
        for _ in range(2):
            y = each(x if each is plain else distribute_tensor(x[rows], mesh["tp"], [Shard(-1)]))
            (y.square().mean() if each is plain else y.full_tensor().square().mean()).backward()
            reduce_gradients_(each)
            optimizer.step()
            optimizer.zero_grad()
        theirs = dict(plain.named_parameters())
        found[name] = max(gap(p, theirs[key]) for key, p in each.named_parameters())
    return found


def compiled(folder: Path) -> Any:
    """Under torch.compile the definition is traced on DTensors, with no collective either; not so with witnesses."""
    return {
        "pure": _compiled(dynorm.DyISRU(C)),
        "witnesses": _compiled(dynorm.DyISRU(C, witnesses=(5, 20))),
    }


def _compiled(layer: nn.Module) -> dict[str, Any]:
    mesh = meshes()[1]
    layer = randomized(layer)
    plain = copy.deepcopy(layer)
    parallelize_module(layer, mesh, PointwiseParallel())
    x = torch.randn(3, C).double()
    sharded = distribute_tensor(x, mesh, [Shard(-1)])
    with CommDebugMode() as comm:
        y = torch.compile(layer, backend="aot_eager")(sharded)
    return {"gap": gap(y, plain(x)), "collectives": counted(comm)}


def special_witnesses(folder: Path) -> Any:
    """First and second derivatives where a rank's only witness is 0 or infinite."""
    mesh = meshes()[0]
    found = {}
    for value in (0.0, math.inf):
        torch.manual_seed(4)
        plain = dynorm.DyISRU(8, witnesses=(0, 1)).double()
        layer = copy.deepcopy(plain)
        parallelize_module(layer, mesh, PointwiseParallel())
        x = torch.randn(3, 8).double()
        x[0, :2] = value
        derivatives = []
        for module, inputs in (
            (plain, x.clone()),
            (layer, distribute_tensor(x, mesh, [Shard(-1)])),
        ):
            inputs.requires_grad_()
            (first,) = torch.autograd.grad(module(inputs).sum(), inputs, create_graph=True)
            (second,) = torch.autograd.grad(first.square().sum(), inputs)
            derivatives.append((first, second))
        (first, second), (sharded_first, sharded_second) = derivatives
        gaps = [gap(sharded_first, first)]
        if value == 0:
            gaps.append(gap(sharded_second, second))
        found[str(value)] = max(gaps)
    return found
