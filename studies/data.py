"""The data of the study: the bytes of Python's standard library, whole files held out."""

import random
import sysconfig
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset

Item = dict[str, Tensor]
# Tests hold data of all kinds; idlelib and lib2to3 are not in every installation.
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
HELD_OUT_SHARE = 0.05


class Blocks(Dataset[Item]):
    """Consecutive blocks of a long row of bytes; the target of each byte is the next one."""

    def __init__(self, data: Tensor, context: int) -> None:
        self.data = data
        self.context = context

    def __len__(self) -> int:
        return (len(self.data) - 1) // self.context

    def __getitem__(self, index: int) -> Item:
        start = index * self.context
        block = self.data[start : start + self.context + 1].long()
        return {"input_ids": block[:-1], "labels": block[1:]}


@dataclass(frozen=True)
class Data:
    """Training blocks, and held-out ones in a fixed random order: any first part is a fair sample."""

    train: Blocks
    held_out: Subset[Item]


def load(context: int) -> Data:
    """Return the data in blocks of ``context`` bytes; the split depends on no seed of a run."""
    train, held_out = _bytes()
    blocks = Blocks(held_out, context)
    order = torch.randperm(len(blocks), generator=torch.Generator().manual_seed(0))
    return Data(Blocks(train, context), Subset(blocks, order.tolist()))


def first_batch(data: Data, size: int) -> Tensor:
    """Return the inputs of a batch of training blocks, the same for every run."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(len(data.train), (size,), generator=generator).tolist()
    return torch.stack([data.train[row]["input_ids"] for row in rows])


@lru_cache(maxsize=1)
def _bytes() -> tuple[Tensor, Tensor]:
    """Return the files in a fixed random order, the first twentieth of the bytes held out."""
    root = Path(sysconfig.get_path("stdlib"))
    contents = []
    for file in sorted(root.rglob("*.py")):
        if LEFT_OUT.isdisjoint(file.relative_to(root).parts):
            contents.append(file.read_bytes() + b"\0")
    random.Random(0).shuffle(contents)
    wanted = HELD_OUT_SHARE * sum(map(len, contents))
    held_out = bytearray()
    while len(held_out) < wanted:
        held_out += contents.pop(0)
    train = bytearray(b"".join(contents))
    return torch.frombuffer(train, dtype=torch.uint8), torch.frombuffer(held_out, dtype=torch.uint8)
