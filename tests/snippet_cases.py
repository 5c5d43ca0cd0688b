"""The work of each of two processes in test_snippets.py: the snippets of the pages on several processes."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.distributed.tensor import DTensor

ROOT = Path(__file__).parents[1]

# A block whose channels are sharded, and a model whose weights are.
SHARDED = """
import dynorm, torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from tests.parallel.block import C, Block
mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
example = (torch.randn(2, 4, C),)
share_of_this_rank = [example]
class Model(nn.Module):
    def __init__(self, norms):
        super().__init__()
        self.blocks = nn.ModuleList([Block(norms)])
    def forward(self, x):
        return self.blocks[0](x)
"""
WITHOUT_NORMS = """
model = Model(dynorm.DyISRU)
block = model.blocks[0]
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
class loss:
    def backward():
        sharded = distribute_tensor(example[0], mesh["tp"], [Shard(-1)])
        model(sharded).to_local().square().mean().backward()
"""
WITH_NORMS = "model = Model(nn.LayerNorm)"
LLAMA = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM
config = LlamaConfig(
    vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
)
model = LlamaForCausalLM(config).eval()
batches = [{"input_ids": torch.randint(0, 32, (4, 8))} for _ in range(6)]
"""


def snippets(page: str) -> list[str]:
    """Return the Python of a page, block by block."""
    text = (ROOT / page).read_text("utf-8")
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def outputs(page: str) -> list[str | None]:
    """Return the output that a page shows below each block of Python; None where it shows none."""
    text = (ROOT / page).read_text("utf-8")
    blocks = r"^```python\n.*?^```\n(?:\n(?:[^`\n]+\n\n)?```text\n(.*?)^```)?"
    return [match[1] for match in re.finditer(blocks, text, re.MULTILINE | re.DOTALL)]


def is_shown(shown: str, printed: str) -> bool:
    """Return whether a page shows the output: the same words in order, and figures near the output's.

    Lines of "..." stand for parts that are left out. Spaces and line ends do not count.
    """
    words = parts_of(printed)
    start = 0
    for passage in re.split(r"^\.\.\.\n", shown, flags=re.MULTILINE):
        wanted = parts_of(passage)
        while not alike(wanted, words[start : start + len(wanted)]):
            start += 1
            if start + len(wanted) > len(words):
                return False
        start += len(wanted)
    return True


def parts_of(text: str) -> list[str]:
    """Return the words, numbers and marks of a text."""
    return re.findall(r"[−-]?\d[\d,]*(?:\.\d+)?(?:e-?\d+)?|[^\W\d]+|[^\w\s]", text)


def alike(wanted: list[str], found: list[str]) -> bool:
    """Return whether words are equal, and numbers within a tenth or 0.03 of each other."""
    if len(wanted) != len(found):
        return False
    return all(map(near, wanted, found))


def near(wanted: str, found: str) -> bool:
    """Return whether two words are equal, or two numbers close."""
    values = []
    for word in (wanted, found):
        try:
            values.append(float(word.replace("−", "-").replace(",", "")))
        except ValueError:
            return wanted == found
    return values[0] == pytest.approx(values[1], rel=0.1, abs=0.03)


def leave_the_group() -> None:
    """Leave the group of the launch, and agree on where the page's own may meet."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = [free.getsockname()[1]]
    dist.broadcast_object_list(port)
    dist.destroy_process_group()
    os.environ["MASTER_PORT"] = str(port[0])


def size(t: torch.Tensor) -> float:
    """Return the norm of a tensor, gathered where it is sharded."""
    gathered = t.full_tensor() if isinstance(t, DTensor) else t
    return float(gathered.detach().norm())


def tensor_parallel(folder: Path) -> dict[str, float]:
    """Return the sizes of the constants' gradients, which all ranks have summed."""
    first, second = snippets("docs/parallel.md")
    names: dict[str, Any] = {}
    exec(SHARDED + WITHOUT_NORMS, names)
    exec(compile(first, "docs/parallel.md", "exec"), names)
    gradients = {
        name: size(parameter.grad)
        for name, parameter in names["model"].named_parameters()
        if "log_beta" in name
    }
    exec(WITH_NORMS, names)
    exec(compile(second, "docs/parallel.md", "exec"), names)
    return gradients


def several_processes(folder: Path) -> dict[str, float]:
    """Return the sizes of all weights after the last snippet of the page."""
    leave_the_group()
    names: dict[str, Any] = {}
    exec(LLAMA, names)
    for snippet in snippets("docs/howto/processes.md"):
        quick = re.sub(r"steps=\d+", "steps=2", snippet)
        exec(compile(quick, "docs/howto/processes.md", "exec"), names)
    return {name: size(weight) for name, weight in names["model"].named_parameters()}
