"""Shard the channels of a block over two processes: a norm needs the other's sums, a point-wise layer does not.

The residual stream is sharded over channels. torch counts the collectives of the block, of one of
its layers, and of an RMSNorm. The sharded outputs equal those of one process.
"""

import socket

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import dynorm
from dynorm.parallel import PointwiseParallel, require_equal_ranks

WIDTH, RANKS = 64, 2


class Block(nn.Module):
    """A layer before an MLP and one after: the end of a decoder block and the beginning of the next."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = dynorm.DyISRU(WIDTH), dynorm.DyISRU(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return the input of the next block, of the sizes of ``x``."""
        return self.norm2(x + self.down(self.up(self.norm1(x)).relu()))


def collectives(x: Tensor, mesh: DeviceMesh) -> tuple[int, int]:
    """Count the collectives of a sharded block and of one of its point-wise layers; check the block's output."""
    torch.manual_seed(0)
    block = Block()
    expected = block(x)
    require_equal_ranks(block)
    plan = {
        "norm1": PointwiseParallel(output_layouts=Replicate()),
        "up": ColwiseParallel(),
        "down": RowwiseParallel(output_layouts=Shard(-1), use_local_output=False),
        "norm2": PointwiseParallel(),
    }
    parallelize_module(block, mesh, plan)
    part = DTensor.from_local(
        x.chunk(RANKS, -1)[distributed.get_rank()].contiguous(), mesh, [Shard(-1)]
    )
    with CommDebugMode() as whole:
        y = block(part)
    with CommDebugMode() as layer:
        block.norm2(part)
    torch.testing.assert_close(y.full_tensor(), expected)
    return whole.get_total_counts(), layer.get_total_counts()


def work(rank: int, port: int) -> None:
    """Do the work of one process."""
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS
    )
    mesh = init_device_mesh("cpu", (RANKS,))
    torch.manual_seed(1)
    x = torch.randn(4, WIDTH)
    whole, layer = collectives(x, mesh)
    with CommDebugMode() as norm:
        part = DTensor.from_local(x.chunk(RANKS, -1)[rank].contiguous(), mesh, [Shard(-1)])
        # An RMSNorm cannot do without the sum of squares over all channels.
        part * (
            part.pow(2).mean(-1, keepdim=True).redistribute(placements=[Replicate()]) + 1e-5
        ).rsqrt()
    if rank == 0:
        print(f"the block: {whole} collectives, both of them its matrix products'")
        print(f"a norm on sharded channels: {norm.get_total_counts()} each; a DyISRU: {layer}")
    distributed.destroy_process_group()
    if (whole, layer) != (2, 0) or norm.get_total_counts() < 1:
        raise SystemExit(
            f"a layer should need no collective, got {whole}, {layer}, {norm.get_total_counts()}"
        )


def main() -> None:
    """Start the processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(work, (port,), RANKS)


if __name__ == "__main__":
    main()
