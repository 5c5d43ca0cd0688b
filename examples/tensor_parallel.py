"""Shard the channels of a block over two processes: a norm has to communicate, a point-wise layer does not.

The residual stream is sharded over channels. A norm sums over all of them, so each process needs the
others' sums. torch counts the collectives of the block, of one of its point-wise layers, and of an
RMSNorm. The sharded outputs equal those of one process.
"""

import socket

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import dynorm

WIDTH = 64
RANKS = 2


class Block(nn.Module):
    """An MLP between two layers: the end of one decoder block and the beginning of the next."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = dynorm.DyISRU(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.norm2 = dynorm.DyISRU(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return the input of the next block, of the shape of ``x``."""
        hidden = self.up(self.norm1(x)).relu()
        return self.norm2(x + self.down(hidden))


def shard_channels(x: Tensor, mesh: DeviceMesh) -> DTensor:
    """Return ``x`` with its channels sharded over the processes."""
    part = x.chunk(RANKS, -1)[distributed.get_rank()]
    return DTensor.from_local(part.contiguous(), mesh, [Shard(-1)])


def count_in_block(x: Tensor, mesh: DeviceMesh) -> tuple[int, int]:
    """Return how many collectives a sharded block needs, and one of its point-wise layers; check its output."""
    torch.manual_seed(0)
    block = Block()
    expected = block(x)
    plan = {
        "norm1": SequenceParallel(sequence_dim=-1),
        "up": ColwiseParallel(input_layouts=Shard(-1)),
        "down": RowwiseParallel(output_layouts=Shard(-1), use_local_output=False),
        "norm2": SequenceParallel(sequence_dim=-1),
    }
    parallelize_module(block, mesh, plan)

    sharded = shard_channels(x, mesh)
    with CommDebugMode() as in_block:
        y = block(sharded)
    with CommDebugMode() as in_layer:
        block.norm2(sharded)
    torch.testing.assert_close(y.full_tensor(), expected)
    return in_block.get_total_counts(), in_layer.get_total_counts()


def count_in_rmsnorm(x: Tensor, mesh: DeviceMesh) -> int:
    """Return how many collectives an RMSNorm on sharded channels needs."""
    sharded = shard_channels(x, mesh)
    with CommDebugMode() as in_norm:
        mean_square = sharded.pow(2).mean(-1, keepdim=True)
        # An RMSNorm needs the sum of squares over all channels.
        mean_square = mean_square.redistribute(placements=[Replicate()])
        sharded * (mean_square + 1e-5).rsqrt()
    return in_norm.get_total_counts()


def work(rank: int, port: int) -> None:
    """Do the work of one process."""
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=RANKS,
    )
    mesh = init_device_mesh("cpu", (RANKS,))
    torch.manual_seed(1)
    x = torch.randn(4, WIDTH)
    in_block, in_layer = count_in_block(x, mesh)
    in_norm = count_in_rmsnorm(x, mesh)
    if rank == 0:
        print(f"the block: {in_block} collectives, both of them its matrix products'")
        print(f"a norm on sharded channels: {in_norm} each; a DyISRU: {in_layer}")
    distributed.destroy_process_group()
    if in_block != 2 or in_layer != 0 or in_norm < 1:
        raise SystemExit(
            "a block should need 2 collectives, a layer none and a norm at least 1, "
            f"got {in_block}, {in_layer} and {in_norm}"
        )


def main() -> None:
    """Start the processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(work, (port,), RANKS)


if __name__ == "__main__":
    main()
