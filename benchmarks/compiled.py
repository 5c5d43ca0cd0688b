"""Count the passes and calls that Inductor generates for tiny transformers, before and after conversion.

``python -m benchmarks.deploy`` writes the figures, and the tests of tests/export check them.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import dynorm

KINDS = ("gpt2", "llama", "bert", "vit")
VOCABULARY = 64
Inputs = Mapping[str, Tensor]


def tiny_model(kind: str, layers: int = 1) -> nn.Module:
    """Return a random model of a kind of KINDS: 32 channels, 2 heads, at most 64 tokens."""
    import transformers

    text = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2}
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "intermediate_size": 48,
    }
    config: Any
    if kind == "gpt2":
        config = transformers.GPT2Config(
            n_embd=32, n_layer=layers, n_head=2, n_positions=64, use_cache=False, **text
        )
    elif kind == "llama":
        config = transformers.LlamaConfig(
            max_position_embeddings=64, use_cache=False, **sizes, **text
        )
    elif kind == "bert":
        config = transformers.BertConfig(max_position_embeddings=64, **sizes, **text)
    else:
        config = transformers.ViTConfig(image_size=32, patch_size=8, **sizes)
    torch.manual_seed(0)
    # A saved program can return tuples without transformers.
    config.return_dict = False
    model: nn.Module = transformers.AutoModel.from_config(config).eval()
    with torch.no_grad():
        # Weights of ones and zeros would hide errors.
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def inputs(kind: str, batch: int, length: int = 0) -> dict[str, Tensor]:
    """Return token ids, or images for a ViT, whose length is that of its positions."""
    generator = torch.Generator().manual_seed(100 * batch + length)
    if kind == "vit":
        return {"pixel_values": torch.randn(batch, 3, 32, 32, generator=generator)}
    return {"input_ids": torch.randint(8, VOCABULARY, (batch, length), generator=generator)}


def converted(model: nn.Module, example: Inputs, to: str = "dyisru") -> nn.Module:
    """Return a copy of a model with all norms replaced, its constants from an example."""
    model = copy.deepcopy(model)
    sites = dynorm.find_norms(model, **example)
    dynorm.convert_(model, sites, to, per_channel=False, witnesses=0)
    dynorm.calibrate_(model, [example])
    return model


@dataclass(frozen=True)
class Generated:
    """What one forward pass of the generated code does.

    Args:
        launches: calls of generated kernels.
        loops: innermost loops in those kernels, each a pass over its tensors.
        reductions: sums over channels or tokens among those loops.
        library: calls of matrix products, attention and the like, which are not generated.
    """

    launches: int
    loops: int
    reductions: int
    library: int

    def to_dict(self) -> dict[str, int]:
        """Return the numbers by name."""
        return asdict(self)


def count(code: str) -> Generated:
    """Count the calls of the generated wrapper, and the contents of the C++ kernels that it calls."""
    kernels = kernels_of(code)
    launches = 0
    loops = 0
    reductions = 0
    for name in re.findall(r"^\s+(\w+)\(", code, re.M):
        if name in kernels:
            launches += 1
            loops += innermost_loops(kernels[name])
            reductions += len(re.findall(r"^\s+\S+ tmp_acc\d+ = ", kernels[name], re.M))
    library = re.findall(r"extern_kernels\.\w+\(|torch\.ops\.aten\.\w+\.\w+\(", code)
    return Generated(launches, loops, reductions, len(library))


def kernels_of(code: str) -> dict[str, str]:
    """Return the source of each generated C++ kernel by its name."""
    definition = r"^(\w+) = async_compile\.cpp_pybinding\(\[.*?\], r'''\n(.*?)'''\)"
    return dict(re.findall(definition, code, re.M | re.S))


@dataclass
class Loop:
    """A loop of a kernel, by the indentation of its first line."""

    depth: int
    is_innermost: bool = True


def innermost_loops(kernel: str) -> int:
    """Count the loops that contain no other loop."""
    count = 0
    # The loops around a line, the outermost one first.
    open_loops: list[Loop] = []
    for line in kernel.splitlines():
        text = line.lstrip()
        depth = len(line) - len(text)
        if text.startswith("for("):
            for loop in open_loops:
                loop.is_innermost = False
            open_loops.append(Loop(depth))
        elif text == "}" and open_loops and open_loops[-1].depth == depth:
            loop = open_loops.pop()
            if loop.is_innermost:
                count += 1
    return count


@contextmanager
def fresh_compiler() -> Iterator[None]:
    """Forget all compiled graphs before and after; inside, recompiling for other sizes is an error."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    with (
        torch._dynamo.config.patch(error_on_recompile=True),
        torch._inductor.config.patch(fx_graph_cache=False),
    ):
        yield
    torch._dynamo.reset()


@contextmanager
def written_code() -> Iterator[list[str]]:
    """Give a list that receives Inductor's code of each graph that is compiled inside."""
    from torch._inductor.graph import GraphLowering

    codes: list[str] = []
    codegen = GraphLowering.codegen

    def recorded(graph: GraphLowering) -> Any:
        code, kernels = codegen(graph)
        codes.append(code.value)
        return code, kernels

    with mock.patch.object(GraphLowering, "codegen", recorded):
        yield codes


def generated_code(model: nn.Module, example: Inputs) -> str:
    """Return the code that Inductor writes for a model of any batch and length, without calling g++."""
    from torch._dynamo.exc import TorchDynamoException
    from torch._inductor.graph import GraphLowering

    def stop(graph: GraphLowering) -> None:
        graph.codegen()
        raise InterruptedError("the code is written: no need to compile it")

    with (
        fresh_compiler(),
        torch.no_grad(),
        written_code() as codes,
        mock.patch.object(GraphLowering, "compile_to_module", stop),
    ):
        try:
            torch.compile(model, fullgraph=True, dynamic=True)(**example)
        except TorchDynamoException:
            if not codes:
                raise
    (code,) = codes
    return code


def first(output: Any) -> Tensor:
    """Return the first tensor of a model's output."""
    tensor: Tensor = output if isinstance(output, Tensor) else output[0]
    return tensor
