"""The model of a run, with the arm's layers in place and their constants set."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

import dynorm
from dynorm.replace.converted import dynorm_layers
from dynorm.replace.swap import swap_
from studies.data import Data, draw_batch
from studies.settings import Settings
from studies.sizes import Size

# DyT's and DyISRU's published start: slope 0.5 at 0 for every site, which is b = 1 / 0.5^2.
PUBLISHED_BETA = 4.0
# The authors of DyT choose alpha for LLaMA by width and place (attention / feed-forward / final):
# 0.8 / 0.2 / 0.2 at 4,096 (7B), 0.6 / 0.15 / 0.15 at 5,120, 0.2 / 0.05 / 0.05 at 8,192, and the
# narrower the larger: 1.0 everywhere at 1,024, the narrowest that they list. Ours are narrower
# still and take that, as no further is known; for images they keep 0.5.
# https://github.com/jiachenzhu/DyT, other_tasks/LLaMA, and arXiv 2503.10622.
TUNED_BETA = 1.0


def build(settings: Settings, data: Data) -> nn.Module:
    """Return a fresh model with the arm's layers; the same for the same settings."""
    from transformers import set_seed

    set_seed(settings.seed)
    model = _plain(settings)
    install_(model, settings, data)
    return model


def install_(model: nn.Module, settings: Settings, data: Data) -> None:
    """Put the arm's layers where the model has its norms, and set their constants."""
    arm = settings.arm_spec
    batch = inputs_of(draw_batch(data, settings.size_spec.batch))
    # Two items show the norms as well as all.
    sites = dynorm.find_norms(model, **{key: value[:2] for key, value in batch.items()})
    if arm.layer is None:
        _replace_norms_(model, sites, arm.norm)
        return
    if arm.final_norm:
        sites = sites[:-1]
    # An RMSNorm knows no centre; annealing a LayerNorm goes from the token's mean to a learned one.
    center = settings.center
    if center is None:
        center = arm.annealed and all(site.kind == "layernorm" for site in sites)
    dynorm.convert_(
        model,
        sites,
        to=arm.layer,
        per_channel=False,
        center=center,
        witnesses=tuple(range(arm.witnesses)),
    )
    if arm.embedding_scaled and settings.task == "text":
        _scale_embedding_(model)
    _start_(model, settings, batch)


def remeasure_(model: nn.Module, settings: Settings, data: Data, draw: int) -> None:
    """Set the constants anew by closed form 5, from another batch."""
    device = next(model.parameters()).device
    batch = inputs_of(draw_batch(data, settings.size_spec.batch, draw))
    batch = {key: value.to(device) for key, value in batch.items()}
    dynorm.init_from_batch_(model, batch, share=settings.share)


def inputs_of(batch: dict[str, Tensor]) -> dict[str, Any]:
    """Return a batch without its targets."""
    return {key: value for key, value in batch.items() if key != "labels"}


def constants(model: nn.Module) -> dict[str, float]:
    """Return each point-wise layer's constant as DyISRU's beta (the median of the channels'), by its path."""
    return {
        path: float(layer.beta().detach().median()) for path, layer in dynorm_layers(model).items()
    }


def embeddings(model: nn.Module) -> set[Tensor]:
    """Return the tables of a model, which the last layer may share."""
    return {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}


def writers(model: nn.Module) -> list[Tensor]:
    """Return the matrices of a language model whose products are added to the stream."""
    names = ("c_proj.weight", "o_proj.weight", "down_proj.weight")
    return [weight for name, weight in model.named_parameters() if name.endswith(names)]


class StreamScale:
    """Sees the stream at the last site, and says how far its scale is from that of the start.

    Args:
        model: with layers whose constants were just set from a batch: the last one's beta is then C
            times the mean square of the stream there.
    """

    def __init__(self, model: nn.Module) -> None:
        *_, layer = dynorm_layers(model).values()
        self.target = layer.beta().detach().mean() / layer.channels
        self._stream: Tensor | None = None
        layer.register_forward_pre_hook(self._see)

    def loss(self) -> Tensor:
        """Return the square of the logarithm of the last forward's mean square over that of the start."""
        assert self._stream is not None
        return (
            (self._stream.float().square().mean() / self.target.to(self._stream.device))
            .log()
            .square()
        )

    def _see(self, layer: nn.Module, args: tuple[Tensor, ...]) -> None:
        self._stream = args[0]


def _start_(model: nn.Module, settings: Settings, batch: dict[str, Any]) -> None:
    arm = settings.arm_spec
    layers = dynorm_layers(model).values()
    if arm.start in ("published", "tuned"):
        for layer in layers:
            layer.scale = 1.0
            layer.set_slope_(
                TUNED_BETA if arm.start == "tuned" and settings.task == "text" else PUBLISHED_BETA
            )
    elif arm.annealed and any(layer.relative_constants for layer in layers):
        # Its rate goes with its size, and that should be near the one at which the annealing
        # begins.
        dynorm.init_from_batch_(model, batch)
    elif arm.start == "batch":
        for layer in layers:
            layer.scale = math.sqrt(layer.channels)
        dynorm.init_from_batch_(model, batch, share=settings.share)


def _replace_norms_(model: nn.Module, sites: list[dynorm.site.NormSite], norm: str) -> None:
    """Change LayerNorm into RMSNorm or the other way round, where the model has not the one that is wanted."""
    kinds: dict[str, type[nn.LayerNorm | nn.RMSNorm]] = {
        "layernorm": nn.LayerNorm,
        "rmsnorm": nn.RMSNorm,
    }
    new = {
        model.get_submodule(site.path): kinds[norm](site.normalized_shape, eps=site.eps)
        for site in sites
        if site.kind != norm
    }
    swap_(model, new)


def _scale_embedding_(model: nn.Module) -> None:
    """Multiply what enters the first block by a learned factor, sqrt(C) at first, as DyT's language models do."""
    # GPT-2 adds two embeddings, and a dropout of 0 follows; Llama has nothing between its one and
    # the first block.
    last = model.get_submodule(
        "transformer.drop" if hasattr(model, "transformer") else "model.embed_tokens"
    )
    channels = model.get_input_embeddings().weight.shape[1]  # type: ignore[operator]
    last.register_parameter("factor", nn.Parameter(torch.full((1,), math.sqrt(channels))))
    last.register_forward_hook(_times_factor)


def _times_factor(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
    factor: Tensor = module.get_parameter("factor")
    return output * factor


def _plain(settings: Settings) -> nn.Module:
    make = {"gpt2": _gpt2, "llama": _llama, "vit": _vit}[str(settings.model)]
    return make(settings.size_spec)


def _gpt2(size: Size) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    # The same function as GPT-2's own gelu_new, in one kernel: a tenth of a step less on a CPU.
    model: nn.Module = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=256, n_embd=size.channels, n_layer=size.layers, n_head=size.heads, n_positions=size.context,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0, use_cache=False,
            activation_function="gelu_pytorch_tanh",
        )
    )  # fmt: skip
    return model


def _llama(size: Size) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    model: nn.Module = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256, hidden_size=size.channels, intermediate_size=8 * math.ceil(size.channels / 3),
            num_hidden_layers=size.layers, num_attention_heads=size.heads, num_key_value_heads=size.heads,
            max_position_embeddings=size.context, bos_token_id=0, eos_token_id=0, tie_word_embeddings=True,
            use_cache=False,
        )
    )  # fmt: skip
    return model


def _vit(size: Size) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    model: nn.Module = ViTForImageClassification(
        ViTConfig(
            hidden_size=size.channels, num_hidden_layers=size.layers, num_attention_heads=size.heads,
            intermediate_size=4 * size.channels, image_size=8, patch_size=2, num_channels=1, num_labels=10,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip
    return model
