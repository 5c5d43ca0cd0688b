"""Count the bytes that a tensor-parallel Llama layer sends: ``python -m benchmarks.wire``, half a minute.

The layer has its real shapes, on the meta device and a group of fake processes. DTensor issues
every collective as it would on GPUs, and each is recorded with the size of its tensors. Nothing is
computed and nothing is sent. The bytes of a rank follow from the rings that libraries use: (n - 1) /
n of the full tensor for a gather or a reduce-scatter, twice that for an all-reduce.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.functional import scaled_dot_product_attention, silu
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import dynorm
from dynorm.parallel import PointwiseParallel

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "wire.json"
PAGE = ROOT / "docs" / "parallel.md"
Row = dict[str, Any]


class Shape(NamedTuple):
    """The shape of a Llama.

    Args:
        channels: channels of the residual stream.
        heads: heads of queries.
        groups: heads of keys and values.
        hidden: width of the MLP.
        layers: number of layers.
    """

    channels: int
    heads: int
    groups: int
    hidden: int
    layers: int


MODELS = {
    "Llama 8B": Shape(
        channels=4096,
        heads=32,
        groups=8,
        hidden=14336,
        layers=32,
    ),
    "Llama 70B": Shape(
        channels=8192,
        heads=64,
        groups=8,
        hidden=28672,
        layers=80,
    ),
}
RANKS = (2, 4, 8)
# The sequences and the tokens of each: a training step, and a step of decoding.
PHASES = {"training": (1, 4096), "decoding": (64, 1)}


class RMSNorm(nn.Module):
    """The norm of transformers' Llama, with statistics in float32."""

    def __init__(self, channels: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last axis."""
        z = x if x.dtype == torch.float64 else x.float()
        mean_square = z.pow(2).mean(-1, keepdim=True)
        normalized = z * torch.rsqrt(mean_square + self.eps)
        return self.weight * normalized.to(x.dtype)


class ReducedRMSNorm(RMSNorm):
    """An RMSNorm on sharded channels with the least communication: one number per token and direction."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last axis, which is sharded."""
        assert isinstance(x, DTensor)
        assert isinstance(self.weight, DTensor)
        local = x.to_local()
        z = local if local.dtype == torch.float64 else local.float()
        local_sum = z.square().sum(-1, keepdim=True)
        partial_sum = DTensor.from_local(local_sum, x.device_mesh, [Partial()], run_check=False)
        replicated = partial_sum.redistribute(placements=[Replicate()])
        total = replicated.to_local(grad_placements=[Partial()])
        normalized = z * torch.rsqrt(total / x.shape[-1] + self.eps)
        y = self.weight.to_local() * normalized.to(local.dtype)
        return DTensor.from_local(y, x.device_mesh, x.placements, run_check=False)


class ChannelSharded(ParallelStyle):
    """Shard the weight of a norm with its channels."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        weight = distribute_tensor(module.weight.detach(), device_mesh, [Shard(0)])
        module.weight = nn.Parameter(weight)
        return module


class Attention(nn.Module):
    """Grouped-query attention without rotations, which do not communicate; each rank has some heads."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_size = shape.channels // shape.heads
        width = shape.groups * self.head_size
        self.q = nn.Linear(shape.channels, shape.channels, bias=False)
        self.k = nn.Linear(shape.channels, width, bias=False)
        self.v = nn.Linear(shape.channels, width, bias=False)
        self.o = nn.Linear(shape.channels, shape.channels, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Attend causally."""
        q = self._by_heads(self.q(x))
        k = self._by_heads(self.k(x))
        v = self._by_heads(self.v(x))
        y = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(y.transpose(1, 2).flatten(2))

    def _by_heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_size)).transpose(1, 2)


class MLP(nn.Module):
    """The gated MLP."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.channels, shape.hidden, bias=False)
        self.up = nn.Linear(shape.channels, shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.channels, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map each token."""
        gate = silu(self.gate(x))
        return self.down(gate * self.up(x))


class Layer(nn.Module):
    """One layer of a Llama."""

    def __init__(self, shape: Shape, norm: type[nn.Module]) -> None:
        super().__init__()
        self.norm1 = norm(shape.channels)
        self.norm2 = norm(shape.channels)
        self.attention = Attention(shape)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor) -> Tensor:
        """Add attention, then the MLP."""
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Arm(NamedTuple):
    """One way to shard a layer.

    Args:
        stream: the placement of the residual stream between the blocks.
        norm: the norm's class.
        style: the norm's parallel style; None if it is not parallel.
    """

    stream: Placement
    norm: type[nn.Module]
    style: type[ParallelStyle] | None


ARMS = {
    "whole stream, RMSNorm": Arm(Replicate(), RMSNorm, None),
    "over the sequence, RMSNorm": Arm(Shard(1), RMSNorm, SequenceParallel),
    "over channels, RMSNorm by DTensor": Arm(Shard(-1), RMSNorm, ChannelSharded),
    "over channels, RMSNorm by hand": Arm(Shard(-1), ReducedRMSNorm, ChannelSharded),
    "over channels, DyISRU": Arm(Shard(-1), dynorm.DyISRU, PointwiseParallel),
}


def plan(arm: Arm) -> dict[str, ParallelStyle]:
    """Return the plan of a layer: inputs of attention and MLP are gathered once, outputs are reduced."""
    styles: dict[str, ParallelStyle] = {}
    for name in ("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up"):
        styles[name] = ColwiseParallel()
    for part, last in (("attention", "o"), ("mlp", "down")):
        styles[part] = PrepareModuleInput(
            input_layouts=arm.stream, desired_input_layouts=Replicate()
        )
        styles[f"{part}.{last}"] = RowwiseParallel(
            output_layouts=arm.stream, use_local_output=arm.style is None
        )
    if arm.style is not None:
        styles["norm1"] = arm.style()
        styles["norm2"] = arm.style()
    return styles


# Operators of the namespaces below that send nothing.
_SILENT = ("wait_tensor", "_wrap_tensor_autograd")


class Wire(TorchDispatchMode):
    """Record the name of every functional collective and the bytes of the full tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int]] = []

    def __torch_dispatch__(
        self,
        op: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        # DTensor's own dispatch comes first, and calls the collectives.
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        out = op(*args, **(kwargs or {}))
        name = op.name().split("::")[-1]
        is_collective = op.namespace in ("_c10d_functional", "_dtensor")
        if is_collective and name not in _SILENT:
            # The input of a reduce-scatter is the full tensor, and the output of a gather.
            size = max(args[0].nbytes, out.nbytes)
            self.seen.append((name, size))
        return out


# How often a ring sends the full tensor, but for one rank's part.
_PASSES = {"all_reduce": 2, "all_gather_into_tensor": 1, "reduce_scatter_tensor": 1}


def sent(seen: list[tuple[str, int]], ranks: int) -> int:
    """Return the bytes that each rank sends, by rings."""
    total = 0
    for name, size in seen:
        total += _PASSES[name] * size * (ranks - 1) // ranks
    return total


@contextmanager
def fake_ranks(count: int) -> Iterator[DeviceMesh]:
    """Give a mesh of processes that do not exist, except this one."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    try:
        yield init_device_mesh("cpu", (count,))
    finally:
        dist.destroy_process_group()


def count(shape: Shape, ranks: int, phase: str, arm: Arm) -> Row:
    """Return the collectives and bytes of a layer: forward, and in training backward too."""
    with fake_ranks(ranks) as mesh, torch.device("meta"):
        layer = Layer(shape, arm.norm).bfloat16()
        parallelize_module(layer, mesh, plan(arm))
        x = torch.empty(*PHASES[phase], shape.channels, dtype=torch.bfloat16)
        if arm.style is not None:
            x = distribute_tensor(x, mesh, [arm.stream])
        x.requires_grad_()
        with Wire() as wire:
            y = layer(x)
            if phase == "training":
                y.backward(y.detach())
    counts = Counter(name for name, _ in wire.seen)
    return {
        "collectives": dict(sorted(counts.items())),
        "bytes": sent(wire.seen, ranks),
    }


# The highest rate of each rank in one direction, in bytes per second, and the latency of a
# collective in seconds: round figures of data sheets and common measurements.
LINKS = {
    "NVLink 4, 450 GB/s": (450e9, 10e-6),
    "PCIe 5, 64 GB/s": (64e9, 15e-6),
    "100 Gb/s, 12.5 GB/s": (12.5e9, 30e-6),
}


def on_paper(row: Row, link: str) -> float:
    """Return the milliseconds of a step's collectives, if none overlaps with anything."""
    bandwidth, latency = LINKS[link]
    collectives = sum(row["collectives"].values())
    layer_seconds = row["bytes"] / bandwidth + collectives * latency
    return 1e3 * MODELS[row["model"]].layers * layer_seconds


def rows() -> list[Row]:
    """Return a row for each phase, model, number of ranks and arm."""
    counted = []
    for phase, (model, shape), ranks in product(PHASES, MODELS.items(), RANKS):
        for name, arm in ARMS.items():
            if phase == "decoding" and arm.stream == Shard(1):
                # Several ranks cannot share one token.
                continue
            row: Row = {"model": model, "ranks": ranks, "phase": phase, "arm": name}
            counted.append(row | count(shape, ranks, phase, arm))
    return counted


def by_arm(
    document: dict[str, Any],
    model: str,
    ranks: int,
    phase: str,
) -> dict[str, Row]:
    """Return the rows of a model, a number of ranks and a phase by their arms."""
    key = (model, ranks, phase)
    chosen = {}
    for row in document["rows"]:
        if (row["model"], row["ranks"], row["phase"]) == key:
            chosen[row["arm"]] = row
    return chosen


def wire_table(document: dict[str, Any], phase: str) -> str:
    """Return the MiB that a rank sends for a layer, and the number of collectives."""
    first_model = next(iter(MODELS))
    arms = list(by_arm(document, first_model, max(RANKS), phase))
    lines = [f"| model | ranks | {' | '.join(arms)} |", "|---|---" + "|---" * len(arms) + "|"]
    for model, ranks in product(MODELS, RANKS):
        cells = [model, str(ranks)]
        for row in by_arm(document, model, ranks, phase).values():
            collectives = sum(row["collectives"].values())
            cells.append(f"{row['bytes'] / 2**20:.2f} / {collectives}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def paper_table(document: dict[str, Any]) -> str:
    """Return the milliseconds per step that are computed for the most ranks."""
    lines = [
        f"| model | step | link | {' | '.join(ARMS)} |",
        "|---|---|---" + "|---" * len(ARMS) + "|",
    ]
    for model, phase in product(MODELS, PHASES):
        counted = by_arm(document, model, max(RANKS), phase)
        for link in LINKS:
            cells = [model, phase, link]
            for arm in ARMS:
                cells.append(f"{on_paper(counted[arm], link):.1f}" if arm in counted else "")
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def renewed(text: str, document: dict[str, Any]) -> str:
    """Return the page with its tables made from the results."""
    tables = {phase: wire_table(document, phase) for phase in PHASES}
    tables["on paper"] = paper_table(document)
    end = "<!-- end -->"
    for name, table in tables.items():
        start = f"<!-- {name}: made by python -m benchmarks.wire -->"
        before, rest = text.split(start)
        _, after = rest.split(end, 1)
        text = f"{before}{start}\n{table}\n{end}{after}"
    return text


def main() -> None:
    """Count, and renew the tables."""
    phases = {}
    for name, (sequences, tokens) in PHASES.items():
        phases[name] = {"sequences": sequences, "tokens": tokens}
    links = {}
    for name, (bandwidth, latency) in LINKS.items():
        links[name] = {"bytes_per_second": bandwidth, "latency": latency}
    document = {
        "torch": torch.__version__,
        "dtype": "bfloat16",
        "phases": phases,
        "links": links,
        "rows": rows(),
    }
    RESULTS.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
    PAGE.write_text(renewed(PAGE.read_text("utf-8"), document), "utf-8")


if __name__ == "__main__":
    main()
