"""Build the models that folding is tried on: small and random, and far from their initial values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import dynorm

VOCABULARY = 96
WIDTH = 32
HEADS = 4
LAYERS = 2
INNER = 48
POSITIONS = 128

_SHORT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": POSITIONS,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GROUPED = _SHORT | {"num_key_value_heads": 2, "head_dim": 8}
_OLD: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "n_positions": POSITIONS,
    "n_embd": WIDTH,
    "n_layer": LAYERS,
    "n_head": HEADS,
}
_SEQ: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": WIDTH,
    "encoder_layers": LAYERS,
    "decoder_layers": LAYERS,
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "encoder_ffn_dim": INNER,
    "decoder_ffn_dim": INNER,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "max_position_embeddings": POSITIONS,
}
_IMAGE: dict[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "image_size": 16,
    "patch_size": 8,
}

_TWO = _SHORT | {"num_key_value_heads": 2}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}
_SPECIAL = {"cls_token_id": 1, "sep_token_id": 2}
_SPEECH = {"num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": POSITIONS}
_CLIP = {
    "text_config": _SHORT | {"max_position_embeddings": 16},
    "vision_config": _IMAGE,
    "projection_dim": 16,
}
_CONVNEXT = {"depths": [1, 1, 1, 1], "hidden_sizes": [8, 16, 16, 32], "image_size": 64}
_MPT = {
    "vocab_size": VOCABULARY,
    "d_model": WIDTH,
    "n_layers": LAYERS,
    "n_heads": HEADS,
    "max_seq_len": POSITIONS,
}
_T5 = {
    "vocab_size": VOCABULARY,
    "d_model": WIDTH,
    "d_ff": INNER,
    "d_kv": 8,
    "num_layers": LAYERS,
    "num_heads": HEADS,
}
_WAVES = {
    "conv_dim": (16, 16),
    "conv_kernel": (4, 3),
    "conv_stride": (4, 2),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4,
    "feat_extract_norm": "layer",
    "do_stable_layer_norm": True,
}

CAUSAL: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", _OLD),
    "opt": ("OPT", _SHORT | {"ffn_dim": INNER, "word_embed_proj_dim": WIDTH}),
    "gpt_neox": ("GPTNeoX", _SHORT),
    "gptj": ("GPTJ", _OLD | {"rotary_dim": 4}),
    "bloom": ("Bloom", _SHORT | {"n_layer": LAYERS, "n_head": HEADS}),
    "falcon": ("Falcon", _SHORT),
    "phi": ("Phi", _SHORT),
    "stablelm": ("StableLm", _TWO),
    "llama": ("Llama", _GROUPED),
    "mistral": ("Mistral", _GROUPED | {"sliding_window": None}),
    "qwen2": ("Qwen2", _TWO),
    "qwen3": ("Qwen3", _GROUPED),
    "gemma2": ("Gemma2", _GROUPED),
    "gemma3": ("Gemma3", _GROUPED),
    "olmo": ("Olmo", _TWO),
    "olmo2": ("Olmo2", _TWO),
    "cohere": ("Cohere", _TWO | {"use_qk_norm": True}),
    "mpt": ("Mpt", _MPT),
    "mixtral": ("Mixtral", _GROUPED | _EXPERTS),
    "mamba": ("Mamba", _SHORT | {"state_size": 4}),
}
"""Causal language models: the class's name before ``Config`` and ``ForCausalLM``, and its sizes."""

OTHERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("BertConfig", "BertModel", _SHORT),
    "roberta": ("RobertaConfig", "RobertaModel", _SHORT),
    "modernbert": ("ModernBertConfig", "ModernBertModel", _SHORT | _SPECIAL),
    "t5": ("T5Config", "T5ForConditionalGeneration", _T5),
    "bart": ("BartConfig", "BartForConditionalGeneration", _SEQ),
    "vit": ("ViTConfig", "ViTForImageClassification", _IMAGE),
    "dinov2": ("Dinov2Config", "Dinov2ForImageClassification", _IMAGE),
    "convnext": ("ConvNextConfig", "ConvNextForImageClassification", _CONVNEXT),
    "clip": ("CLIPConfig", "CLIPModel", _CLIP),
    "whisper": ("WhisperConfig", "WhisperForConditionalGeneration", _SEQ | _SPEECH),
    "wav2vec2": ("Wav2Vec2Config", "Wav2Vec2ForCTC", _SHORT | _WAVES),
}
"""Other models of transformers: config, class and sizes."""

OWN = ("encoder_pre", "encoder_post", "nanogpt")
NAMES = (*CAUSAL, *OTHERS, *OWN)


class NanoGPT(nn.Module):
    """A pre-norm GPT in forty lines, as people write it; the head is tied to the embedding."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, WIDTH)
        self.wpe = nn.Embedding(POSITIONS, WIDTH)
        self.drop = nn.Dropout(0.1)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.ln_f = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.wte.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return the logits of every position."""
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.drop(self.wte(input_ids) + self.wpe(positions))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.ln_f(x))
        return logits


class Block(nn.Module):
    """Attention and an MLP, each after a LayerNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(WIDTH)
        self.ln_2 = nn.LayerNorm(WIDTH)
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH)
        self.c_proj = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, INNER),
            nn.GELU(),
            nn.Linear(INNER, WIDTH),
            nn.Dropout(0.1),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the next value of the residual stream."""
        batch, length, width = x.shape
        by_heads = (batch, length, HEADS, width // HEADS)
        joined = self.c_attn(self.ln_1(x))
        q, k, v = joined.split(width, dim=2)
        q = q.view(by_heads).transpose(1, 2)
        k = k.view(by_heads).transpose(1, 2)
        v = v.view(by_heads).transpose(1, 2)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = y.transpose(1, 2).contiguous()
        x = x + self.c_proj(y.view(batch, length, width))
        after: Tensor = x + self.mlp(self.ln_2(x))
        return after


def build(name: str, seed: int = 0, **config: Any) -> nn.Module:
    """Return a small model of :data:`NAMES`, in eval mode and float32, far from its initial state.

    Args:
        name: the model's name.
        seed: the seed of its weights.
        **config: further keys of a transformers config.
    """
    torch.manual_seed(seed)
    model = _bare(name, config).eval()
    _shake_(model)
    return model


def linear_(model: nn.Module, **example: Tensor) -> nn.Module:
    """Convert the norms of a model to linear layers, in place, with constants far from their defaults."""
    generator = torch.Generator().manual_seed(3)
    dynorm.convert_(model, dynorm.find_norms(model, **example), to="linear")
    with torch.no_grad():
        for layer in model.modules():
            if isinstance(layer, dynorm.LinearControl):
                noise = torch.randn(layer.log_beta.shape, generator=generator)
                layer.log_beta.add_(noise)
    return model


def inputs(name: str, model: nn.Module, seed: int = 1) -> dict[str, Any]:
    """Return the keyword arguments of one call of a model that :func:`build` made."""
    generator = torch.Generator().manual_seed(seed)
    dtype = next(model.parameters()).dtype

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    ids = torch.randint(3, VOCABULARY, (2, 10), generator=generator)
    size = 64 if name == "convnext" else 16
    if name in ("vit", "dinov2", "convnext"):
        return {"pixel_values": noise(2, 3, size, size)}
    if name == "clip":
        return {"input_ids": ids, "pixel_values": noise(2, 3, size, size)}
    if name == "whisper":
        return {"input_features": noise(2, 8, 32), "decoder_input_ids": ids}
    if name == "wav2vec2":
        return {"input_values": noise(2, 400)}
    if name in ("t5", "bart"):
        return {"input_ids": ids, "decoder_input_ids": ids.flip(1)}
    if name in ("encoder_pre", "encoder_post"):
        return {"src": noise(2, 10, WIDTH)}
    return {"input_ids": ids}


def _bare(name: str, config: dict[str, Any]) -> nn.Module:
    if name == "nanogpt":
        return NanoGPT()
    if name in OWN:
        first = name == "encoder_pre"
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, INNER, batch_first=True, norm_first=first)
        norm = nn.LayerNorm(WIDTH) if first else None
        encoder = nn.TransformerEncoder(layer, LAYERS, norm, enable_nested_tensor=False)
        return Classifier(encoder)
    import transformers

    if name in CAUSAL:
        prefix, sizes = CAUSAL[name]
        cls = {"gemma3": "Gemma3TextConfig"}.get(name, f"{prefix}Config")
        head = {"gpt2": "GPT2LMHeadModel"}.get(name, f"{prefix}ForCausalLM")
    else:
        cls, head, sizes = OTHERS[name]
    make_config = getattr(transformers, cls)
    make_model = getattr(transformers, head)
    model: nn.Module = make_model(make_config(**(sizes | config)))
    return model


class Classifier(nn.Module):
    """nn.TransformerEncoder between two linear layers."""

    def __init__(self, encoder: nn.TransformerEncoder) -> None:
        super().__init__()
        self.into = nn.Linear(WIDTH, WIDTH)
        self.encoder = encoder
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, src: Tensor) -> Tensor:
        """Return ten logits per position."""
        logits: Tensor = self.head(self.encoder(self.into(src)))
        return logits


@torch.no_grad()
def _shake_(model: nn.Module) -> None:
    """Add noise to all parameters, so that norms differ, and move the mean of the stream away from 0."""
    for parameter in model.parameters():
        if parameter.ndim <= 1:
            parameter.add_(0.3 * torch.randn_like(parameter) + 0.1)
        else:
            parameter.add_(0.05 * torch.randn_like(parameter))
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.weight.add_(0.3)
