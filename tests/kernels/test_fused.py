"""Layers inside the products before them: found in models of transformers, with the same outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.testing import assert_close

import dynorm
from benchmarks.gpu_models import Shape, Stack, inputs, norms
from dynorm.kernels.fused import FuseProducts

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
TOKENS = torch.arange(16).reshape(2, 8)
IMAGES = torch.linspace(-1, 1, 384).reshape(2, 3, 8, 8)
OP = torch.ops.dynorm.product.default


def gpt2() -> tuple[nn.Module, dict[str, Tensor]]:
    config = transformers.GPT2Config(
        vocab_size=50,
        n_positions=32,
        n_embd=32,
        n_layer=2,
        n_head=2,
        bos_token_id=1,
        eos_token_id=2,
    )
    return transformers.GPT2Model(config), {"input_ids": TOKENS}


def llama() -> tuple[nn.Module, dict[str, Tensor]]:
    config = transformers.LlamaConfig(vocab_size=50, **SIZES)
    return transformers.LlamaModel(config), {"input_ids": TOKENS}


def bert() -> tuple[nn.Module, dict[str, Tensor]]:
    config = transformers.BertConfig(vocab_size=50, **SIZES)
    return transformers.BertModel(config, add_pooling_layer=False), {"input_ids": TOKENS}


def vit() -> tuple[nn.Module, dict[str, Tensor]]:
    config = transformers.ViTConfig(image_size=8, patch_size=4, **SIZES)
    return transformers.ViTModel(config, add_pooling_layer=False), {"pixel_values": IMAGES}


def dinov2() -> tuple[nn.Module, dict[str, Tensor]]:
    config = transformers.Dinov2Config(image_size=8, patch_size=4, **SIZES)
    return transformers.Dinov2Model(config), {"pixel_values": IMAGES}


def whisper() -> tuple[nn.Module, dict[str, Tensor]]:
    config = transformers.WhisperConfig(
        vocab_size=50,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        num_mel_bins=8,
        max_source_positions=16,
        max_target_positions=16,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    features = torch.linspace(-1, 1, 512).reshape(2, 8, 32)
    inputs = {"input_features": features, "decoder_input_ids": TOKENS}
    return transformers.WhisperModel(config), inputs


class Recorder:
    """A backend of torch.compile that runs a graph after the pass, and keeps its products."""

    def __init__(self) -> None:
        self.products: list[torch.fx.Node] = []

    def __call__(self, module: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        FuseProducts()(module.graph)
        module.graph.lint()
        module.recompile()
        self.products += module.graph.find_nodes(op="call_function", target=OP)
        return module.forward

    @property
    def keep_total(self) -> list[Any]:
        """Whether each product's sum is used by something else than its layer."""
        return [product.args[6] for product in self.products]


def compare(model: nn.Module, *args: Tensor | None, **inputs: Tensor) -> Recorder:
    """Compare a model with itself after the pass."""
    torch._dynamo.reset()
    recorder = Recorder()
    with torch.no_grad():
        expected = model(*args, **inputs)
        found = torch.compile(model, backend=recorder, fullgraph=True)(*args, **inputs)
    # A model returns its last hidden state first; a stack only this.
    assert_close(found[0], expected[0], rtol=1e-5, atol=1e-6)
    return recorder


@pytest.mark.parametrize(
    ("make", "fused", "kept"),
    # Two in each block, three in each of a decoder with cross-attention. A post-norm model needs
    # no sum, and neither does the last norm of an encoder or decoder.
    [
        (gpt2, 4, 3),
        (llama, 4, 3),
        (bert, 4, 0),
        (vit, 4, 3),
        (dinov2, 4, 3),
        (whisper, 10, 8),
    ],
)
def test_products_of_a_model_are_found(
    make: Callable[[], tuple[nn.Module, dict[str, Tensor]]], fused: int, kept: int
) -> None:
    torch.manual_seed(0)
    model, inputs = make()
    model.eval()
    dynorm.convert_(model, dynorm.find_norms(model, inputs))
    recorder = compare(model, **inputs)
    assert len(recorder.products) == fused
    assert sum(recorder.keep_total) == kept


@pytest.mark.parametrize("kind", ["pre", "post", "gated"])
@pytest.mark.parametrize("cached", [0, 3])
def test_products_of_the_benchmark_are_found(kind: str, cached: int) -> None:
    shape = Shape(32, 2, 48, 2, 2, 5, kind, cached)
    stack = Stack(shape, norms(shape)["dyisru"]).eval()
    x, cache = inputs(shape)
    assert len(compare(stack, x, cache).products) == 2 * shape.blocks


class Block(nn.Module):
    """A product, what ``between`` does with it, and a layer."""

    def __init__(self, between: Callable[[Tensor, Tensor], Any], **options: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.layer = dynorm.DyISRU(16, **options)
        self.between = between

    def forward(self, x: Tensor) -> Any:
        """Return the layer's output, and the total where ``between`` returns it."""
        total = self.between(self.linear(x), x)
        return self.layer(total), total


@pytest.mark.parametrize(
    ("between", "options"),
    [
        (lambda y, x: y, {}),
        (lambda y, x: y + x, {"center": True, "per_channel": True}),
        (lambda y, x: torch.add(x, y), {"elementwise_affine": False}),
        (lambda y, x: x + 2 * torch.ones(16) * y, {"weight_offset": 1.0}),
    ],
)
def test_forms_of_a_sum_that_are_fused(
    between: Callable[[Tensor, Tensor], Any], options: dict[str, Any]
) -> None:
    recorder = compare(Block(between, **options), torch.randn(3, 5, 16))
    assert recorder.keep_total == [True]


@pytest.mark.parametrize(
    ("between", "options"),
    [
        (lambda y, x: y + x, {"witnesses": 2}),
        (lambda y, x: y + x, {"dim": 1}),
        # The product is used twice, scaled by a number, or added to a row.
        (lambda y, x: y + x + y, {}),
        (lambda y, x: torch.sub(y, x), {}),
        (lambda y, x: torch.add(y, x, alpha=2), {}),
        (lambda y, x: y + x[:1], {}),
        (lambda y, x: (y + x).relu(), {}),
    ],
)
def test_forms_that_are_left(
    between: Callable[[Tensor, Tensor], Any], options: dict[str, Any]
) -> None:
    recorder = compare(Block(between, **options), torch.randn(3, 16, 16))
    assert recorder.products == []


def test_autocast_is_left() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        recorder = compare(Block(lambda y, x: y + x), torch.randn(3, 16))
    assert recorder.products == []


def test_training_is_left() -> None:
    block = Block(lambda y, x: y + x)
    # Of the layer only: the product's result has no gradient.
    block.linear.requires_grad_(False)
    recorder = Recorder()
    torch._dynamo.reset()
    x = torch.randn(3, 16)
    torch.compile(block, backend=recorder)(x)[0].sum().backward()
    assert block.layer.log_beta.grad is not None
    assert recorder.products == []


def test_without_the_pass_a_compiler_takes_the_layer_apart() -> None:
    graphs = []

    def keep(module: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(str(module.graph))
        return module.forward

    torch._dynamo.reset()
    block, x = Block(lambda y, x: y + x), torch.randn(3, 16)
    with torch.no_grad():
        found = torch.compile(block, backend=aot_autograd(fw_compiler=keep))(x)
        assert_close(found, block(x))
    assert len(graphs) == 1
    assert "dynorm" not in graphs[0]


def test_the_op_is_a_proper_operator() -> None:
    x, weight, constant = torch.randn(3, 8), torch.randn(16, 8), torch.ones(1)
    arguments = (x, weight, False, None, None, None, True, constant, None, None, None, None)
    torch.library.opcheck(OP, (*arguments, 0, True, 2.0))


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
def test_options_of_compile() -> None:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(16, 16), dynorm.DyISRU(16)).requires_grad_(False)
    x = torch.randn(3, 16)
    compiled = torch.compile(model, options=dynorm.compile_options(epilogue_fusion=False))
    assert_close(compiled(x), model(x))
