"""Whole models of known shapes with random weights: with norms, with DyISRU, and with nothing in their place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import dynorm

Norm = Callable[[int], nn.Module]


class Shape(NamedTuple):
    """A stack of transformer blocks and its input; a decoder reads ``cached`` keys of earlier tokens."""

    width: int
    blocks: int
    hidden: int
    heads: int
    sequences: int
    tokens: int
    # "pre" as in ViT, "post" as in BERT, "gated" as in Llama.
    kind: str
    cached: int = 0


SHAPES = {
    "ViT-B, 128 images": Shape(768, 12, 3072, 12, 128, 197, "pre"),
    "Llama, 8 blocks of 2,048, 8,192 tokens": Shape(2048, 8, 5632, 16, 4, 2048, "gated"),
    "Llama, decoding 1": Shape(2048, 8, 5632, 16, 1, 1, "gated", 1024),
    "Llama, decoding 16": Shape(2048, 8, 5632, 16, 16, 1, "gated", 1024),
    "BERT-base, 8,192 tokens": Shape(768, 12, 3072, 12, 64, 128, "post"),
    "MiniLM-L6, 8,192 tokens": Shape(384, 6, 1536, 12, 64, 128, "post"),
}
TRAINED = ("ViT-B, 128 images", "Llama, 8 blocks of 2,048, 8,192 tokens")
# Inductor tries out many products of its own, which takes long: for one model.
TUNED = ("MiniLM-L6, 8,192 tokens",)


class Block(nn.Module):
    """Attention and a perceptron, each with its norm and residual."""

    def __init__(self, shape: Shape, norm: Norm) -> None:
        super().__init__()
        width, hidden, bias = shape.width, shape.hidden, shape.kind != "gated"
        self.shape = shape
        self.norms = nn.ModuleList([norm(width), norm(width)])
        self.qkv = nn.Linear(width, 3 * width, bias)
        self.out = nn.Linear(width, width, bias)
        self.up = nn.Linear(width, hidden * (1 if bias else 2), bias)
        self.down = nn.Linear(hidden, width, bias)

    def attention(self, x: Tensor, cache: Tensor | None) -> Tensor:
        """Return what attention reads, before its last product."""
        batch, tokens, width = x.shape
        heads = self.qkv(x).view(batch, tokens, 3, self.shape.heads, -1).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind()
        if cache is not None:
            key, value = torch.cat((cache, key), 2), torch.cat((cache, value), 2)
        causal = self.shape.kind == "gated" and cache is None
        y = F.scaled_dot_product_attention(query, key, value, is_causal=causal)
        return y.transpose(1, 2).reshape(batch, tokens, width)

    def perceptron(self, x: Tensor) -> Tensor:
        """Return the hidden values, before the last product."""
        if self.shape.kind == "gated":
            gate, up = self.up(x).chunk(2, -1)
            return F.silu(gate) * up
        return F.gelu(self.up(x))

    def forward(self, x: Tensor, cache: Tensor | None) -> Tensor:
        """Return the residual stream behind the block."""
        first, second = self.norms
        if self.shape.kind == "post":
            x = first(x + self.out(self.attention(x, cache)))
            return second(x + self.down(self.perceptron(x)))
        x = x + self.out(self.attention(first(x), cache))
        return x + self.down(self.perceptron(second(x)))


class Stack(nn.Module):
    """Blocks, and the last norm of a pre-norm model."""

    def __init__(self, shape: Shape, norm: Norm) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(shape, norm) for _ in range(shape.blocks)])
        self.norm = nn.Identity() if shape.kind == "post" else norm(shape.width)

    def forward(self, x: Tensor, cache: Tensor | None = None) -> Tensor:
        """Return the last residual stream, after its norm."""
        for block in self.blocks:
            x = block(x, cache)
        return self.norm(x)


def norms(shape: Shape) -> dict[str, Norm]:
    """Return the makers of the norm, of DyISRU, and of nothing."""
    if shape.kind == "gated":
        norm: Norm = partial(nn.RMSNorm, eps=1e-6)
        return {"norm": norm, "dyisru": partial(dynorm.DyISRU, bias=False), "identity": _nothing}
    return {"norm": nn.LayerNorm, "dyisru": dynorm.DyISRU, "identity": _nothing}


def _nothing(width: int) -> nn.Module:
    return nn.Identity()


def inputs(shape: Shape, **options: Any) -> tuple[Tensor, Tensor | None]:
    """Return the embedded tokens, and the keys and values of earlier ones."""
    x = torch.randn(shape.sequences, shape.tokens, shape.width, **options)
    if not shape.cached:
        return x, None
    size = (shape.sequences, shape.heads, shape.cached, shape.width // shape.heads)
    return x, torch.randn(size, **options)


INDUCTORS: dict[str, Any] = {
    "max_autotune_gemm": True,
    "max_autotune_gemm_backends": "TRITON",
    "epilogue_fusion": True,
}


def passes() -> Iterator[tuple[str, bool]]:
    """Yield each model, and whether the pass is a training step."""
    for name in SHAPES:
        if name in TRAINED:
            yield name, True
        yield name, False


def plans() -> list[tuple[str, str, dict[str, Any] | None]]:
    """Return each contender, what stands in the place of its norms, and its options of torch.compile."""
    return [
        ("norm compiled", "norm", {}),
        ("dyisru fused", "dyisru", dynorm.compile_options()),
        ("dyisru compiled", "dyisru", {}),
        ("identity compiled", "identity", {}),
        ("norm", "norm", None),
        ("dyisru", "dyisru", None),
        ("identity", "identity", None),
    ]


def made(
    shape: Shape, kind: str, compile_options: dict[str, Any] | None, **options: Any
) -> tuple[nn.Module, Any]:
    """Return a model, whose weights are the same in every call, and the same for calling it, compiled."""
    torch.manual_seed(0)
    model = Stack(shape, norms(shape)[kind]).to(**options)
    if compile_options is None:
        return model, model
    return model, torch.compile(model, options=compile_options, dynamic=False)


def forwards(name: str, **options: Any) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Yield each contender and its forward pass, made when it is asked for, the most important first."""
    shape = SHAPES[name]
    call_inputs = inputs(shape, **options)
    contenders = plans()
    if name in TUNED:
        # Inductor's own epilogues of its own products.
        contenders.append(("dyisru in Inductor's products", "dyisru", INDUCTORS))
    for contender, kind, compile_options in contenders:
        model, called = made(shape, kind, compile_options, **options)
        model.eval()
        yield contender, partial(_forward, called, call_inputs)


def _forward(model: Any, call_inputs: tuple[Any, ...]) -> Tensor:
    with torch.no_grad():
        result: Tensor = model(*call_inputs)
    return result


def steps(name: str, **options: Any) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Yield each contender and one training step of it, made when it is asked for."""
    shape = SHAPES[name]
    call_inputs = inputs(shape, **options)
    for contender, kind, compile_options in plans():
        model, called = made(shape, kind, compile_options, **options)
        # A graph can have its steps.
        optimizer = torch.optim.AdamW(model.parameters(), 1e-5, fused=True, capturable=True)
        yield contender, partial(_step, called, call_inputs, optimizer)


def _step(model: Any, call_inputs: tuple[Any, ...], optimizer: torch.optim.Optimizer) -> Tensor:
    loss: Tensor = model(*call_inputs).square().mean()
    torch.autograd.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()
