"""Bytes on the wire of a Llama layer under tensor parallel, counted: ``python -m benchmarks.wire``, half a minute.

The layer has its real shapes, on the meta device and a group of fake processes: DTensor issues
every collective as it would on GPUs, and each is recorded with the size of its tensors. Nothing is
computed and nothing is sent. The bytes of a rank follow from the rings that libraries use: (n - 1) /
n of the whole tensor for a gather or a reduce-scatter, twice that for an all-reduce.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
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
RESULTS, PAGE = ROOT / "benchmarks" / "results" / "wire.json", ROOT / "docs" / "parallel.md"


class Shape(NamedTuple):
    """A Llama: channels, heads, key-value heads, width of the MLP, number of layers."""

    channels: int
    heads: int
    groups: int
    hidden: int
    layers: int


MODELS = {"Llama 8B": Shape(4096, 32, 8, 14336, 32), "Llama 70B": Shape(8192, 64, 8, 28672, 80)}
RANKS = (2, 4, 8)
# (sequences, tokens of each): a training step, and a step of decoding.
PHASES = {"training": (1, 4096), "decoding": (64, 1)}


class RMSNorm(nn.Module):
    """As transformers' Llama has it: statistics in float32."""

    def __init__(self, channels: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(channels)), eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last axis."""
        z = x if x.dtype == torch.float64 else x.float()
        return self.weight * (z * torch.rsqrt(z.pow(2).mean(-1, keepdim=True) + self.eps)).to(
            x.dtype
        )


class ReducedRMSNorm(RMSNorm):
    """The least that an RMSNorm on sharded channels can do: one number per token is summed, and one on the way back."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last axis, sharded."""
        assert isinstance(x, DTensor)
        assert isinstance(self.weight, DTensor)
        local = x.to_local()
        z = local if local.dtype == torch.float64 else local.float()
        squares = DTensor.from_local(
            z.square().sum(-1, keepdim=True), x.device_mesh, [Partial()], run_check=False
        )
        total = squares.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
        y = self.weight.to_local() * (z * torch.rsqrt(total / x.shape[-1] + self.eps)).to(
            local.dtype
        )
        return DTensor.from_local(y, x.device_mesh, x.placements, run_check=False)


class ChannelSharded(ParallelStyle):
    """Shards the weight of a norm with its channels."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        weight = distribute_tensor(module.weight.detach(), device_mesh, [Shard(0)])
        module.weight = nn.Parameter(weight)
        return module


class Attention(nn.Module):
    """Grouped-query attention; each rank has a part of the heads. Rotations would not communicate."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.size = shape.channels // shape.heads
        self.q = nn.Linear(shape.channels, shape.channels, bias=False)
        self.k, self.v = (
            nn.Linear(shape.channels, shape.groups * self.size, bias=False) for _ in range(2)
        )
        self.o = nn.Linear(shape.channels, shape.channels, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Attend causally."""
        q, k, v = (
            each(x).unflatten(-1, (-1, self.size)).transpose(1, 2)
            for each in (self.q, self.k, self.v)
        )
        return self.o(
            scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            .transpose(1, 2)
            .flatten(2)
        )


class MLP(nn.Module):
    """The gated MLP."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(shape.channels, shape.hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.hidden, shape.channels, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map each token."""
        return self.down(silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    """One layer of a Llama."""

    def __init__(self, shape: Shape, norm: type[nn.Module]) -> None:
        super().__init__()
        self.norm1, self.norm2 = norm(shape.channels), norm(shape.channels)
        self.attention, self.mlp = Attention(shape), MLP(shape)

    def forward(self, x: Tensor) -> Tensor:
        """Add attention, then the MLP."""
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Arm(NamedTuple):
    """How the stream between the blocks is sharded, by which norm, and how the norm is named in a plan."""

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
    """The plan of a layer: inputs of attention and MLP are gathered once, their outputs are reduced."""
    found: dict[str, ParallelStyle] = {
        name: ColwiseParallel() for name in ("attention.q", "attention.k", "attention.v")
    }
    found |= {name: ColwiseParallel() for name in ("mlp.gate", "mlp.up")}
    for part, last in (("attention", "o"), ("mlp", "down")):
        found[part] = PrepareModuleInput(
            input_layouts=arm.stream, desired_input_layouts=Replicate()
        )
        found[f"{part}.{last}"] = RowwiseParallel(
            output_layouts=arm.stream, use_local_output=arm.style is None
        )
    return found if arm.style is None else found | {"norm1": arm.style(), "norm2": arm.style()}


class Wire(TorchDispatchMode):
    """Records every functional collective: its name and the bytes of the whole tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int]] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # DTensor comes first, and calls the collectives.
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented
        out = op(*args, **(kwargs or {}))
        name = op.name().split("::")[-1]
        if op.namespace in ("_c10d_functional", "_dtensor") and name not in (
            "wait_tensor",
            "_wrap_tensor_autograd",
        ):
            self.seen.append((name, max(t.numel() * t.element_size() for t in (args[0], out))))
        return out


_SHARES = {"all_reduce": 2, "all_gather_into_tensor": 1, "reduce_scatter_tensor": 1}


def sent(seen: list[tuple[str, int]], ranks: int) -> int:
    """Bytes that each rank sends, by rings."""
    return sum(_SHARES[name] * size * (ranks - 1) // ranks for name, size in seen)


@contextmanager
def fake_ranks(count: int) -> Iterator[DeviceMesh]:
    """A mesh of so many processes, of which only this one is there."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    try:
        yield init_device_mesh("cpu", (count,))
    finally:
        dist.destroy_process_group()


def count(shape: Shape, ranks: int, phase: str, arm: Arm) -> dict[str, Any]:
    """Collectives and bytes of a layer: forward, and backward too in training."""
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
    return {"collectives": dict(sorted(counts.items())), "bytes": sent(wire.seen, ranks)}


# The highest rate of each rank in one direction, in bytes per second, and the cost of a collective before
# its first byte: round figures of data sheets and of common measurements, which the model below
# assumes.
LINKS = {
    "NVLink 4, 450 GB/s": (450e9, 10e-6),
    "PCIe 5, 64 GB/s": (64e9, 15e-6),
    "100 Gb/s, 12.5 GB/s": (12.5e9, 30e-6),
}


def on_paper(row: dict[str, Any], link: str) -> float:
    """Milliseconds that a step's collectives would take one after another, hidden behind nothing: a model."""
    bandwidth, latency = LINKS[link]
    number = sum(row["collectives"].values())
    return 1e3 * MODELS[row["model"]].layers * (row["bytes"] / bandwidth + number * latency)


def rows() -> list[dict[str, Any]]:
    """Every model, number of ranks, phase and arm."""
    return [
        {"model": model, "ranks": ranks, "phase": phase, "arm": name}
        | count(shape, ranks, phase, arm)
        for phase in PHASES
        for model, shape in MODELS.items()
        for ranks in RANKS
        for name, arm in ARMS.items()
        # One token cannot be shared by several ranks.
        if not (phase == "decoding" and arm.stream == Shard(1))
    ]


def wire_table(document: dict[str, Any], phase: str) -> str:
    """MiB that a rank sends for a layer / the number of collectives."""
    mine = [row for row in document["rows"] if row["phase"] == phase]
    arms = list(dict.fromkeys(row["arm"] for row in mine))
    lines = [f"| model | ranks | {' | '.join(arms)} |", "|---|---" + "|---" * len(arms) + "|"]
    for model in MODELS:
        for ranks in RANKS:
            cells = [row for row in mine if (row["model"], row["ranks"]) == (model, ranks)]
            texts = [
                f"{row['bytes'] / 2**20:.2f} / {sum(row['collectives'].values())}" for row in cells
            ]
            lines.append(f"| {model} | {ranks} | {' | '.join(texts)} |")
    return "\n".join(lines)


def paper_table(document: dict[str, Any]) -> str:
    """The model on paper for 8 ranks: milliseconds a step."""
    mine = [row for row in document["rows"] if row["ranks"] == max(RANKS)]
    arms = list(dict.fromkeys(row["arm"] for row in mine))
    lines = [
        f"| model | step | link | {' | '.join(arms)} |",
        "|---|---|---" + "|---" * len(arms) + "|",
    ]
    for model in MODELS:
        for phase in PHASES:
            cells = {
                row["arm"]: row for row in mine if (row["model"], row["phase"]) == (model, phase)
            }
            for link in LINKS:
                texts = [
                    f"{on_paper(cells[arm], link):.1f}" if arm in cells else "" for arm in arms
                ]
                lines.append(f"| {model} | {phase} | {link} | {' | '.join(texts)} |")
    return "\n".join(lines)


def renewed(text: str, document: dict[str, Any]) -> str:
    """Return the page with its tables as the results say."""
    tables = {phase: wire_table(document, phase) for phase in PHASES} | {
        "on paper": paper_table(document)
    }
    for name, table in tables.items():
        start, end = f"<!-- {name}: made by python -m benchmarks.wire -->", "<!-- end -->"
        before, rest = text.split(start)
        text = f"{before}{start}\n{table}\n{end}{rest.split(end, 1)[1]}"
    return text


def main() -> None:
    """Count, and renew the tables."""
    phases = {name: {"sequences": n, "tokens": length} for name, (n, length) in PHASES.items()}
    links = {
        name: {"bytes_per_second": speed, "latency": wait} for name, (speed, wait) in LINKS.items()
    }
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
