"""Data parallel: calibration, and training under DDP and FSDP2, on several processes, and the same in one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import dynorm
from benchmarks.wire import RMSNorm
from tests.parallel.block import Block, C

STEPS, FEW, MORE, ROWS = 20, 6, 3, 8


class Net(nn.Module):
    """Two blocks, the first with LayerNorms, the second with RMSNorms, and a last LayerNorm; takes padding."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(nn.LayerNorm), Block(RMSNorm)])
        self.norm, self.head = nn.LayerNorm(C), nn.Linear(C, 3)

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        for block in self.blocks:
            x = block(x)
        # FSDP warns of an output that is a view, as a linear layer's of three dimensions is.
        return self.head(self.norm(x)).clone()


def net(to: str = "dyisru", **options: Any) -> nn.Module:
    torch.manual_seed(5)
    model = Net().double()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.add_((0.3 if "norm" in name else 0.0) * torch.randn_like(p))
    dynorm.convert_(
        model, dynorm.find_norms(model, torch.randn(2, 6, C).double()), to=to, **options
    )
    return model


def batches(ranks: int, numbers: tuple[int, ...]) -> list[list[dict[str, Tensor]]]:
    """For each rank its batches, with padding; the last ranks may have fewer."""
    generator = torch.Generator().manual_seed(6)
    found: list[list[dict[str, Tensor]]] = [[] for _ in range(ranks)]
    for k in range(max(numbers)):
        for rank in range(ranks):
            # No number of rows is as long as these, or the mask would be taken to fit both ways
            # round.
            x = (1 + rank + k) * torch.randn(2, 7, C, generator=generator).double()
            lengths = torch.randint(2, 8, (2, 1), generator=generator)
            if k < numbers[rank]:
                found[rank].append({"x": x, "attention_mask": (torch.arange(7) < lengths).long()})
    return found


def together(shares: list[list[dict[str, Tensor]]]) -> list[dict[str, Tensor]]:
    """The batches of all ranks as those of one process."""
    longest = max(map(len, shares))
    steps = [[share[k] for share in shares if k < len(share)] for k in range(longest)]
    return [{key: torch.cat([batch[key] for batch in step]) for key in step[0]} for step in steps]


KINDS = {
    "dyisru": ((3, 3, 3, 3), {}),
    "dyt": ((3, 1, 2, 3), {"per_channel": True}),
    "derf": ((2, 2, 2, 2), {"center": False}),
    "annealed": ((2, 2, 1, 2), {}),
    "linear": ((3, 2, 3, 3), {"witnesses": (1, 5)}),
    "auto": ((3, 2, 3, 3), {"witnesses": 2}),
}


def fitted(model: nn.Module) -> dict[str, list[float]]:
    """All parameters of the point-wise layers."""
    return {
        f"{path}.{name}": p.detach().flatten().tolist()
        for path, layer in model.named_modules()
        if isinstance(layer, dynorm.layers.PointwiseNorm)
        for name, p in layer.named_parameters()
    }


def calibrated(kind: str, share: list[dict[str, Tensor]]) -> dict[str, Any]:
    model = net(kind, **KINDS[kind][1])
    report = dynorm.calibrate_(model, share)
    tokens = [site.tokens for site in report.sites]
    errors = [site.error for site in report.sites]
    return {"values": fitted(model), "tokens": tokens, "errors": errors, "batches": report.batches}


def initialized(batch: dict[str, Tensor]) -> dict[str, Any]:
    model = net()
    report = dynorm.init_from_batch_(model, batch)
    return {"values": fitted(model), "sigma": report.sigma}


def calibrate(folder: Path) -> Any:
    rank = dist.get_rank()
    found = {
        kind: calibrated(kind, batches(4, numbers)[rank]) for kind, (numbers, _) in KINDS.items()
    }
    return found | {"init": initialized(batches(4, (1, 1, 1, 1))[rank][0])}


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(STEPS + MORE, ROWS, 6, C, generator=generator).double()
    return x, torch.randn(STEPS + MORE, ROWS, 6, 3, generator=generator).double()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        dynorm.param_groups(model, lr=1e-3, weight_decay=0.1, constants_lr=1e-2)
    )


def train(
    model: nn.Module, steps: range, rank: int = 0, ranks: int = 1, optimizer: Any = None
) -> tuple[list[float], torch.optim.Optimizer]:
    """Train on this rank's rows of each batch; return the losses of all rows."""
    optimizer = optimizer or adamw(model)
    inputs, targets = data()
    dtype = next(model.parameters()).dtype
    mine = slice(rank * ROWS // ranks, (rank + 1) * ROWS // ranks)
    losses = []
    for step in steps:
        y = model(inputs[step, mine].to(dtype))
        loss = (y.to(dtype) - targets[step, mine].to(dtype)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / ranks
        if ranks > 1:
            dist.all_reduce(mean)
        losses.append(float(mean))
    return losses, optimizer


def whole(model: nn.Module) -> dict[str, list[float]]:
    """The sums and the squares of all parameters, and the constants."""
    found = {}
    for name, p in model.named_parameters():
        full = p.full_tensor() if hasattr(p, "full_tensor") else p
        full = full.detach().double()
        name = name.replace("_checkpoint_wrapped_module.", "").removeprefix("module.")
        found[name] = (
            full.tolist() if full.numel() == 1 else [float(full.sum()), float(full.square().sum())]
        )
    return found


def sharded(model: nn.Module, **options: Any) -> nn.Module:
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def ddp(folder: Path) -> Any:
    model = DistributedDataParallel(net("dyt"))
    losses, _ = train(model, range(STEPS), dist.get_rank(), dist.get_world_size())
    return {"losses": losses, "values": whole(model)}


def fsdp(folder: Path) -> Any:
    """With activation checkpointing; saved at the end."""
    model = net("dyisru")
    for k, block in enumerate(model.blocks):
        model.blocks[k] = checkpoint_wrapper(block)
    sharded(model)
    losses, optimizer = train(model, range(STEPS), dist.get_rank(), dist.get_world_size())
    state, moments = get_state_dict(model, optimizer)
    dcp.save({"model": state, "optimizer": moments}, checkpoint_id=folder / "checkpoint")
    return {"losses": losses, "values": whole(model)}


def witnesses(folder: Path) -> Any:
    """Two gains per layer over four ranks, with DDP, and FSDP2 built without memory."""
    found = {}
    for name in ("ddp", "fsdp"):
        model = net(witnesses=(3, 17))
        if name == "fsdp":
            state = model.state_dict()
            model.to("meta")
            sharded(model)
            model.to_empty(device="cpu")
            set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True))
        model = model if name == "fsdp" else DistributedDataParallel(model)
        losses, _ = train(model, range(FEW), dist.get_rank(), dist.get_world_size())
        kept = [b.tolist() for key, b in model.named_buffers() if key.endswith("witnesses")]
        found[name] = {"losses": losses, "values": whole(model), "witnesses": kept}
    return found


def fsdp_scaled_dyt(folder: Path) -> Any:
    """DyT, whose rates look at alpha, one number on one of the ranks."""
    model = sharded(net("dyt"))
    losses, _ = train(model, range(FEW), dist.get_rank(), dist.get_world_size())
    return {"losses": losses, "values": whole(model)}


def mixed(folder: Path) -> Any:
    """Computed in bfloat16 beside weights of float32."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = sharded(net("dyisru").float(), mp_policy=policy)
    ranks = dist.get_world_size()
    losses, _ = train(model, range(FEW), dist.get_rank(), ranks)
    return {
        "losses": losses,
        "values": whole(model),
        "dtypes": sorted({str(p.dtype) for p in model.parameters()}),
    }


def resumed(folder: Path) -> Any:
    """Built without memory, sharded, filled from the checkpoint of four processes, and trained on."""
    model = net("dyisru").to("meta")
    sharded(model)
    model.to_empty(device="cpu")
    optimizer = adamw(model)
    state, moments = get_state_dict(model, optimizer)
    held = {"model": state, "optimizer": moments}
    dcp.load(held, checkpoint_id=folder / "checkpoint")
    set_state_dict(
        model, optimizer, model_state_dict=held["model"], optim_state_dict=held["optimizer"]
    )
    loaded = whole(model)
    more = range(STEPS, STEPS + MORE)
    losses, _ = train(model, more, dist.get_rank(), dist.get_world_size(), optimizer)
    return {"loaded": loaded, "losses": losses, "values": whole(model)}


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """A group of this process and no other."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
