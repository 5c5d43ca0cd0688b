"""Find, convert and restore the norms of tiny random models of transformers."""

import inspect
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dynorm
from dynorm.layers import PointwiseNorm

transformers = pytest.importorskip("transformers")

VOCABULARY = 64
FIRST_TOKEN = 8  # Lower numbers may be special: padding, an image, the end.

# Sizes of configs, and the attributes that have them: a token is 32 wide, with 4 heads of 8, in 2
# layers.
NAMES: list[tuple[Any, str]] = [
    (
        32,
        """
        hidden_size d_model n_embd dim embed_dim emb_dim encoder_embed_dim embedding_size
        word_embed_dim attention_hidden_size word_embed_proj_dim projection_dim text_embed_dim
        lru_width output_dim decoder_hidden_size attn_hidden_size hidden_dim out_hidden_size
        d_embed output_hidden_size image_size max_source_positions
        """,
    ),
    (
        2,
        """
        num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers depth
        num_block_layers num_decoder_layers decoder_num_hidden_layers num_encoder_layers
        encoder_num_hidden_layers num_experts_per_tok moe_topk moe_k num_experts_per_token
        eos_token_id type_vocab_size
        """,
    ),
    (
        4,
        """
        num_attention_heads n_head n_heads num_heads encoder_attention_heads
        decoder_attention_heads num_key_value_heads n_head_kv num_kv_heads
        decoder_num_attention_heads linear_num_key_heads linear_num_value_heads
        decoder_num_key_value_heads encoder_num_attention_heads num_experts num_local_experts
        n_routed_experts moe_num_experts attention_window num_conv_pos_embedding_groups
        time_step_rank
        """,
    ),
    (
        8,
        """
        head_dim attention_head_size d_kv kv_channels rotary_dim linear_key_head_dim
        linear_value_head_dim qk_nope_head_dim qk_rope_head_dim v_head_dim state_size
        mamba_d_state ssm_state_size d_state num_mel_bins patch_size sliding_window
        hidden_size_per_layer_input laurel_rank num_conv_pos_embeddings
        """,
    ),
    (
        48,
        """
        intermediate_size d_ff n_inner ffn_dim encoder_ffn_dim decoder_ffn_dim ffn_hidden_size
        mlp_dim decoder_intermediate_size moe_intermediate_size shared_expert_intermediate_size
        d_inner intermediate_size_mlp encoder_intermediate_size expert_ffn_hidden_size
        """,
    ),
    (
        64,
        """
        max_position_embeddings n_positions n_ctx max_seq_len max_target_positions context_length
        """,
    ),
    (VOCABULARY, "vocab_size decoder_vocab_size vocab_size_per_layer_input"),
    (0, "pad_token_id"),
    (
        1,
        """
        bos_token_id decoder_start_token_id first_k_dense_replace topk_group n_group
        n_shared_experts num_global_layers mamba_n_groups n_groups
        """,
    ),
    (5, "image_token_id image_token_index video_token_id audio_token_id"),
    (16, "q_lora_rank kv_lora_rank"),
    (3, "num_channels in_channels in_chans"),
    ([1, 1, 1, 1], "depths"),
    ([16, 32, 32, 64], "hidden_sizes"),
    ((32, 32), "conv_dim"),
    ((4, 3), "conv_kernel"),
    ((4, 2), "conv_stride"),
]
SIZES = {name: size for size, names in NAMES for name in names.split()}

ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}

# Further settings of some types.
OWN: dict[str, dict[str, Any]] = {
    "bamba": {"mamba_n_heads": 4, "mamba_d_head": 16},
    "granitemoehybrid": {"mamba_n_heads": 4, "mamba_d_head": 16},
    "mamba2": {"head_dim": 16},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "esm": {"vocab_size": VOCABULARY},
    "speech_to_text": {"input_feat_per_channel": 8, "conv_channels": 32},
    "wav2vec2-bert": {"feature_projection_input_dim": 8},
    "swin": {"patch_size": 4, "window_size": 2, "depths": [1, 1], "num_heads": [4, 4]},
    "swinv2": {"patch_size": 4, "window_size": 2, "depths": [1, 1], "num_heads": [4, 4]},
    "swin2sr": {"patch_size": 1, "window_size": 4, "depths": [1, 1], "num_heads": [4, 4]},
    "donut-swin": {"patch_size": 4, "window_size": 2, "depths": [1, 1], "num_heads": [4, 4]},
    "maskformer-swin": {"patch_size": 4, "window_size": 2, "depths": [1, 1], "num_heads": [4, 4]},
    "convnext": {"patch_size": 4, "num_stages": 4, "num_hidden_layers": 4},
    "convnextv2": {"patch_size": 4, "num_stages": 4, "num_hidden_layers": 4},
    "gemma3n_text": {
        "intermediate_size": [48, 48],
        "num_kv_shared_layers": 0,
        "activation_sparsity_pattern": [0.0, 0.0],
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "qwen2_vl_text": {"rope_parameters": ROPE},
    "qwen2_5_vl_text": {"rope_parameters": ROPE},
    "glm4v_text": {"rope_parameters": ROPE},
    "glm_ocr_text": {"rope_parameters": ROPE},
    "xmod": {"default_language": "en_XX"},
    "videomae": {"num_frames": 4},
    "vivit": {"num_frames": 4, "tubelet_size": [2, 8, 8]},
    "audio-spectrogram-transformer": {
        "num_mel_bins": 8,
        "max_length": 64,
        "frequency_stride": 8,
        "time_stride": 8,
    },
    "autoformer": {"prediction_length": 4},
    "zamba": {
        "num_hidden_layers": 2,
        "layers_block_type": ["mamba", "hybrid"],
        "mamba_dt_rank": 4,
        "n_mamba_heads": 2,
    },
    "roc_bert": {"pronunciation_vocab_size": 64, "shape_vocab_size": 64},
    "luke": {"entity_vocab_size": 64},
    "sam_vision_model": {"output_channels": 32},
    "sam_hq_vision_model": {"output_channels": 32},
}


def tiny_config(kind: str) -> Any:
    """A config of a model type with all of its sizes shrunk, those of its parts too."""
    return shrunk(transformers.CONFIG_MAPPING[kind], OWN.get(kind, {}))


def shrunk(cls: type, own: Mapping[str, Any]) -> Any:
    default, parts = cls(), getattr(cls, "sub_configs", {})
    values = {name: fitted(name, size, value_of(default, name)) for name, size in SIZES.items()}
    values = {name: value for name, value in values.items() if value is not None}
    for name in parts:
        if getattr(default, name, None) is not None:
            values[name] = shrunk(type(getattr(default, name)), own.get(name, {})).to_dict()
    return cls(**(values | {name: value for name, value in own.items() if name not in parts}))


def value_of(config: Any, name: str) -> Any:
    if isinstance(getattr(type(config), name, None), property):
        return "computed"
    try:
        return getattr(config, name, "absent")
    except Exception:  # Where layers differ, there is no one value.
        return "several"


def fitted(name: str, size: Any, default: Any) -> Any:
    """The size in the form of the default: a number, or a list with one for each stage; None to leave it."""
    if isinstance(default, bool | str | dict):
        return None
    if isinstance(default, (list, tuple)) and default and isinstance(default[0], int):
        if isinstance(size, tuple):
            return size
        sizes = size if isinstance(size, list) else [size]
        return type(default)((sizes * len(default))[: len(default)])
    if default is None:
        return size if name in ("pad_token_id", "head_dim", "num_key_value_heads") else None
    return size if isinstance(default, int) and isinstance(size, int) else None


def tiny_model(kind: str) -> nn.Module:
    config = tiny_config(kind)
    config.use_cache = False
    model = transformers.AutoModel.from_config(config).eval()
    size = sum(p.numel() for p in model.parameters())
    if size > 2_000_000:
        raise ValueError(f"{size:,} parameters: the config was not shrunk")
    with torch.no_grad():
        # Weights that begin as ones and zeros say little, and from tiny ones nothing would arrive
        # at the end.
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def inputs_for(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Inputs that a model may take, by the names that its forward knows."""
    names = set(inspect.signature(model.forward).parameters)
    generator = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    length = 8
    ids = torch.randint(FIRST_TOKEN, VOCABULARY, (2, length), generator=generator)
    mask = torch.tensor([[1] * length, [1] * (length - 2) + [0] * 2])
    text = (
        {"input_ids": ids, "attention_mask": mask}
        if "attention_mask" in names
        else {"input_ids": ids}
    )
    if "decoder_input_ids" in names:
        text |= {"decoder_input_ids": ids.flip(1)}
    images = {"pixel_values": noise(2, 3, 32, 32)}
    if {"input_ids", "pixel_values"} <= names:
        yield text | images
    if "input_ids" in names:
        yield text
    if "pixel_values" in names:
        yield images
        yield {"pixel_values": noise(2, 4, 3, 32, 32)}
        yield {"pixel_values": noise(2, 1, 32, 32)}
    if "pixel_values_videos" in names:
        yield {"pixel_values_videos": noise(2, 4, 3, 32, 32)}
    decoder = {"decoder_input_ids": ids} if "decoder_input_ids" in names else {}
    if "input_features" in names:
        yield {"input_features": noise(2, 8, 64)} | decoder
        yield {"input_features": noise(2, 64, 8)} | decoder
    if "input_values" in names:
        yield {"input_values": noise(2, 400)} | decoder
        yield {"input_values": noise(2, 1, 400)}
        yield {"input_values": noise(2, 64, 8)}
    if "past_values" in names:
        yield {"past_values": noise(2, 64, 1)}


def inputs_of(model: nn.Module) -> tuple[dict[str, Tensor], list[Tensor]]:
    """The first inputs that a model takes, and its outputs for them."""
    errors = []
    for inputs in inputs_for(model):
        try:
            if outputs := run(model, inputs):
                return inputs, outputs
        except Exception as error:  # Whatever wrong inputs raise: the next ones are tried.
            errors.append(f"{type(error).__name__}: {error}")
    raise ValueError(f"no inputs found: {errors}")


def run(model: nn.Module, inputs: Mapping[str, Tensor]) -> list[Tensor]:
    """All floating point tensors of the output; the same random numbers for models that hide parts of their input."""
    torch.manual_seed(0)
    with torch.no_grad():
        return tensors(model(**inputs))


def tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() else []
    if isinstance(value, Mapping):
        value = list(value.values())
    return (
        [tensor for part in value for tensor in tensors(part)]
        if isinstance(value, (list, tuple))
        else []
    )


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) and all(
        torch.equal(a, b) for a, b in zip(left, right, strict=True)
    )


# What `make test` goes through, and what `make architectures` does beside it: that takes 90 seconds
# more.
ALWAYS = """
    aimv2_vision_model albert apertus arcee aria_text audio-spectrogram-transformer axk1 aya_vision bailing_hybrid
    bamba bart beam beit bert bert-generation big_bird bigbird_pegasus biogpt bitnet blenderbot blenderbot-small
    blip bloom camembert canine chinese_clip chinese_clip_vision_model clip clip_text_model clip_vision_model
    clipseg codegen cohere cohere2 cohere2_moe convbert convnext convnextv2 cosmos3_omni ctrl cwm data2vec-audio
    data2vec-text data2vec-vision deberta-v2 deepseek_v2 deepseek_v3 deepseek_v32 deepseek_vl deit diffllama dinov2
    dinov2_with_registers dinov3_convnext dinov3_vit distilbert doge donut-swin dpr dpt electra
    embedding_gemma2_text ernie ernie4_5 ernie4_5_moe esm esmc eurobert exaone4 exaone4_5 exaone_moe falcon
    falcon_mamba flaubert
    flex_olmo flint fnet fuyu gemma gemma2 gemma3_text gemma3n_text gemma4 gemma4_text gemma4_unified_text glm glm4
    glm4_moe glm4_moe_lite glm4v_text glm_ocr_text glmasr glmasr_encoder gpt-sw3 gpt2 gpt_bigcode gpt_neo gpt_neox
    gpt_neox_japanese gpt_oss gptj granite granite_docling granite_docling_text granite_docling_vision granite_swa
    granitemoe_swa granitemoehybrid granitemoeshared gte helium higgs_audio_v2 hubert hunyuan_v1_dense
    hunyuan_v1_moe hy_v3 hyperclovax idefics3 idefics3_vision ijepa imagegpt internlm3 internvl_vision iquestcoder
    jais2 jetmoe jina_embeddings_v3 laguna layoutlm lfm2 lfm3 llama llama4_text llava llava_next_video
    llava_onevision luke m2m_100 mamba mamba2 marian megatron-bert ministral ministral3 mistral mixtral mlcd
    mlcd_vision_model modernbert modernbert-decoder mpnet mpt mra mt5 nemotron nomic_bert olmo olmo2 olmoe
    openai-gpt openai_privacy_filter opt patchtsmixer pegasus persimmon phi phi3 pixio pixtral prophetnet
    qianfan_ocr_vision qwen2 qwen2_5_vl_text qwen2_audio_encoder qwen2_moe qwen2_vl_text qwen3 qwen3_vl_moe
    qwen3_vl_moe_text qwen3_vl_text recurrent_gemma rembert roberta roc_bert roformer rwkv sam3_lite_text_text_model
    sam_hq_vision_model sam_vision_model sapiens2 seed_oss segformer sew sew-d siglip siglip_vision_model smollm3
    smolvlm smolvlm_vision solar_open speech_to_text splinter squeezebert stablelm starcoder2 swin swin2sr swinv2
    switch_transformers t5 tapas timesformer tipsv2 tipsv2_text_model tipsv2_vision_model ultrabert ultravbert umt5
    unispeech unispeech-sat vaultgemma video_llama_3 video_llava videomae vilt vipllava vision-text-dual-encoder
    visual_bert vit vit_mae vit_msn vitdet vivit voxtral voxtral_encoder voxtral_realtime_encoder wav2vec2
    wav2vec2-bert wav2vec2-conformer wavlm whisper xglm xlm xlm-roberta xlm-roberta-xl xlnet xlstm xmod yolos yoso
    youtu
    """
EXHAUSTIVE = """
    afmoe aimv2 altclip aria audioflamingo3 axk2 canary cohere_asr deberta deepseek_v4 flava florence2 focalnet fsmt
    gemma3 git glm_moe_dsa glpn got_ocr2 granite_speech granite_speech_plus granitemoe groupvit hiera hrm_text hy_v4
    hyperclovax_vision_v2 idefics2 inkling2_text inkling_text internvl jamba kimi_k25 kolibri1 kosmos-2.5 led
    lfm2_vl lighton_ocr llava_next longcat_flash longformer longt5 maskformer-swin mbart mellum metaclip_2 minicpm3
    minimax minimax_m2 minimax_m3_vl_text mistral3 mistral_large4 mistral_large4_text mllama mobilevit modernvbert
    molmo2_text moshi moss_transcribe_diarize moss_transcribe_diarize_audio muse_glimmer_text musicflamingo mvp
    nanochat nemotron3_5_asr nemotron3_5_transcribe_asr_audio nemotron3_diarization_audio nemotron_asr_streaming
    nemotron_asr_streaming_encoder nemotron_h nllb-moe nystromformer olmo3 olmo_hybrid ovis2 owlv2 owlvit paligemma
    parakeet_ctc parakeet_encoder parakeet_rnnt parakeet_tdt pegasus_x phimoe plbart pvt pvt_v2 qianfan_ocr
    qwen2_audio qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next qwen3_vl roberta-prelayernorm sam3_vit_model
    t5gemma t5gemma2
    """

# How many norms each model has: (LayerNorm, RMSNorm, channels first, scaled by 1 + w, refused).
COUNTS = Path(__file__).with_name("norm_counts.txt")


def expected_counts() -> dict[str, tuple[int, ...]]:
    """Return the rows of the table, one per model type."""
    rows = [line.split() for line in COUNTS.read_text("utf-8").splitlines() if line[0] != "#"]
    return {kind: tuple(map(int, numbers)) for kind, *numbers in rows}


EXPECTED = expected_counts()


def converted_and_restored(kind: str) -> tuple[int, ...]:
    """Do it all, and return how many norms were replaced and refused, as EXPECTED has them."""
    torch.manual_seed(0)
    model = tiny_model(kind)
    inputs, exact = inputs_of(model)
    assert all(t.isfinite().all() for t in exact)
    sites = dynorm.find_norms(model, **inputs)
    # The table was made with find_norms; the names of the classes were not.
    assert norms_by_name(model) <= {path for site in sites for path in (site.path, *site.aliases)}
    report = dynorm.convert_(model, sites)
    given = run(model, inputs)
    assert [t.shape for t in given] == [t.shape for t in exact]
    assert not same(given, exact)
    dynorm.restore_(model)
    assert not any(isinstance(module, PointwiseNorm) for module in model.modules())
    assert same(run(model, inputs), exact)
    return (
        sum(site.kind == "layernorm" for site in report.converted),
        sum(site.kind == "rmsnorm" for site in report.converted),
        sum(site.dim == 1 for site in report.converted),
        sum(site.weight_offset == 1.0 for site in report.converted),
        len(report.refused),
    )


def norms_by_name(model: nn.Module) -> set[str]:
    """Return the paths of all modules called LayerNorm or RMSNorm that hold no other module."""
    paths = set()
    for path, module in model.named_modules():
        # A ConvDropoutLayerNorm holds the norm.
        is_leaf = next(module.children(), None) is None
        if is_leaf and type(module).__name__.endswith(("LayerNorm", "RMSNorm")):
            paths.add(path)
    return paths


TESTED = [*ALWAYS.split(), *(EXHAUSTIVE.split() if "DYNORM_EXHAUSTIVE" in os.environ else [])]


@pytest.mark.slow
@pytest.mark.parametrize("kind", TESTED)
def test_architectures(kind: str) -> None:
    assert converted_and_restored(kind) == EXPECTED[kind]


def test_the_table_has_a_row_for_each_tested_model_and_no_other() -> None:
    assert sorted(EXPECTED) == sorted([*ALWAYS.split(), *EXHAUSTIVE.split()])
