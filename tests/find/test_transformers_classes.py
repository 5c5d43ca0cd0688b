"""Every class of transformers with the name of a norm that can be built by itself is recognised, or refused by name."""

import importlib
import inspect
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dynorm.find.probe import find_norms
from dynorm.find.recover import affine_of
from dynorm.site import NormSite

transformers = pytest.importorskip("transformers")

WIDTH = 32
HEADS = 4

# Constructor arguments by name; other required arguments are not given, and the class does not
# stand alone.
WIDTHS = (
    *("hidden_size", "dim", "normalized_shape", "num_channels", "size", "c_in", "n", "feat_size"),
    *("in_channels", "out_channels", "embedding_dim", "cin", "cout"),
)
OTHERS = {
    "num_heads": HEADS,
    "group_size": WIDTH,
    "num_groups": 4,
    "groups": 1,
    "feature_dims": (),
    "kernel_size": 1,
    "stride": 1,
    "num_embeddings": 50,
    "padding_idx": 0,
    "norm_eps": 1e-6,
    "dropout_prob": 0.0,
    "n_bins": 4,
    "n_attractors": 4,
    "layer_id": 1,
}
CONFIG = {
    "hidden_size": WIDTH,
    "d_model": WIDTH,
    "input_size": WIDTH,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "head_dim": WIDTH // HEADS,
    "intermediate_size": WIDTH,
    "num_hidden_layers": 1,
    "conv_dim": [WIDTH, WIDTH],
    "conv_kernel": [1, 1],
    "conv_stride": [1, 1],
    "vocab_size": 50,
    "max_position_embeddings": 40,
    "num_groups": 4,
}

# What must not be taken for a LayerNorm or an RMSNorm, by reason; several of these hold the refused
# layer inside.
REFUSED = {
    "takes another tensor along": """
        BailingHybridRMSNormGated Glm5NextTextRMSNormGated KimiLinearRMSNormGated OlmoHybridRMSNormGated
        Qwen3NextRMSNormGated Qwen3_5MoeRMSNormGated Qwen3_5RMSNormGated Qwen4ExpTextRMSNormGated ZayaQKNorm
        """,
    "batch norm": """
        ConditionalDetrFrozenBatchNorm2d DFineFrozenBatchNorm2d DabDetrFrozenBatchNorm2d
        DeformableDetrFrozenBatchNorm2d Deimv2FrozenBatchNorm2d DetrFrozenBatchNorm2d GroundingDinoFrozenBatchNorm2d
        LwDetrConvNormLayer MMGroundingDinoFrozenBatchNorm2d OmDetTurboConvNormLayer
        PPDocLayoutV2ConvNormLayer PPDocLayoutV2FrozenBatchNorm2d PPDocLayoutV3ConvNormLayer
        PPDocLayoutV3FrozenBatchNorm2d PPDocLayoutV4ConvNormLayer PPDocLayoutV4FrozenBatchNorm2d
        PPOCRV5MobileDetConvBatchnormLayer PPOCRV5ServerDetConvBatchnormLayer PPOCRV6MediumDetConvBatchnormLayer
        PPOCRV6SmallDetConvBatchnormLayer PatchTSMixerBatchNorm PatchTSTBatchNorm RTDetrConvNormLayer
        RTDetrFrozenBatchNorm2d RTDetrV2ConvNormLayer RTDetrV2FrozenBatchNorm2d TableTransformerFrozenBatchNorm2d
        """,
    "group norm": """
        BitGroupNormActivation Emu3VQVAEGroupNorm Emu3VQVAESpatialNorm Gemma3nAudioCumulativeGroupNorm
        HubertGroupNormConvLayer PeAudioMaskedGroupNorm PeAudioVideoMaskedGroupNorm PeVideoMaskedGroupNorm
        PoolFormerGroupNorm SEWDGroupNormConvLayer SEWGroupNormConvLayer SpeechT5GroupNormConvLayer
        UniSpeechGroupNormConvLayer UniSpeechSatGroupNormConvLayer Wav2Vec2ConformerGroupNormConvLayer
        Wav2Vec2GroupNormConvLayer WavLMGroupNormConvLayer
        """,
    # It returns only the factor.
    "another shape": "HYV4UnweightedRMSNorm",
    # Scale and shift without statistics.
    "not a norm": "NoNorm Phi4MultimodalAudioMeanVarianceNormLayer",
    # The one scales before it normalizes, the other divides by the deviation without subtracting
    # the mean.
    "neither LayerNorm nor RMSNorm": "MuseSparkTextInputScaledRMSNorm PocketTTSTimestepNorm",
    # A bottleneck that makes the condition of an adaptive norm.
    "holds matrices, or a scale that differs between positions": "VoxtralRealtimeTextAdaRmsNorm",
}
# Norm in the name of the model, or "no norm" in that of the layer: there is nothing to find.
WITHOUT_NORM = """
    HubertNoLayerNormConvLayer RobertaPreLayerNormClassificationHead RobertaPreLayerNormCrossAttention
    RobertaPreLayerNormOutput RobertaPreLayerNormPooler RobertaPreLayerNormSelfAttention RobertaPreLayerNormSelfOutput
    SEWDNoLayerNormConvLayer SEWNoLayerNormConvLayer SpeechT5NoLayerNormConvLayer UniSpeechNoLayerNormConvLayer
    UniSpeechSatNoLayerNormConvLayer Wav2Vec2ConformerNoLayerNormConvLayer Wav2Vec2NoLayerNormConvLayer
    WavLMNoLayerNormConvLayer
    """


@dataclass(frozen=True)
class Built:
    """A class that stands alone: how it was made, and one input that it takes."""

    cls: type[nn.Module]
    variant: str
    module: nn.Module
    inputs: tuple[Tensor, ...]


class Holder(nn.Module):
    """A model around the module, which is called as the inputs say."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.norm = module

    def forward(self, *inputs: Tensor) -> Any:
        return self.norm(*inputs)


def norm_classes() -> list[type]:
    """Classes at the top level of transformers.models.*.modeling_* with "norm" in their name."""
    found = []
    root = Path(transformers.__file__).parent / "models"
    with warnings.catch_warnings():
        # Modeling files of other people may use what torch deprecates.
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)
        for file in sorted(root.glob("*/modeling_*.py")):
            names = re.findall(
                r"^class (\w*norm\w*)",
                file.read_text(encoding="utf-8"),
                re.MULTILINE | re.IGNORECASE,
            )
            if names:
                module = importlib.import_module(
                    f"transformers.models.{file.parent.name}.{file.stem}"
                )
                found += [getattr(module, name) for name in names]
    return found


def variants(cls: type) -> list[Built]:
    formats = ["channels_last", "channels_first"] if takes_format(cls) else [""]
    return [built for name in formats if (built := build(cls, name)) is not None]


def takes_format(cls: type) -> bool:
    return "data_format" in inspect.signature(cls.__init__).parameters


def build(cls: type, data_format: str) -> Built | None:
    for kwargs in constructor_calls(cls):
        if data_format:
            kwargs["data_format"] = data_format
        try:
            module = cls(**kwargs).eval()
        except Exception:  # Whatever a wrong guess raises: the next one is tried.
            continue
        randomize(module)
        for inputs in candidate_inputs(data_format):
            if runs(module, inputs):
                return Built(cls, data_format, module, inputs)
    return None


def constructor_calls(cls: type) -> Iterator[dict[str, Any]]:
    parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    passes_on = len(named) < len(parameters)
    for width in (WIDTH, (WIDTH,)):
        table = dict.fromkeys(WIDTHS, width) | OTHERS
        kwargs = {p.name: table[p.name] for p in named if p.name in table and chosen(p)}
        for config in configs(cls) if "config" in {p.name for p in named} else [None]:
            call = kwargs if config is None else kwargs | {"config": config}
            if all(p.name in call for p in named if is_required(p)):
                yield dict(call)
                if passes_on:
                    yield dict(call, normalized_shape=width)
                    yield dict(call, num_groups=HEADS, num_channels=WIDTH)


def chosen(parameter: inspect.Parameter) -> bool:
    """Whether an argument gets our value: those without default, and a layer's number, where 0 means the first one."""
    return is_required(parameter) or parameter.default is None or parameter.name == "layer_id"


def is_required(parameter: inspect.Parameter) -> bool:
    return parameter.default is parameter.empty


def configs(cls: type) -> Iterator[Any]:
    """Small configs of the model that the class belongs to."""
    module = importlib.import_module(cls.__module__)
    for name, config_class in vars(module).items():
        if name.endswith("Config") and inspect.isclass(config_class) and name != "PretrainedConfig":
            try:
                known = {
                    key: value for key, value in CONFIG.items() if hasattr(config_class(), key)
                }
                config = config_class(**known)
                config._attn_implementation = "eager"
            except (
                Exception
            ):  # A config that needs more than this is none to build small models from.
                continue
            yield config


def randomize(module: nn.Module) -> None:
    """Noise on ones and zeros, so that scales stay near one and offsets near zero; empty tensors get any values."""
    with torch.no_grad():
        for parameter in module.parameters():
            start = (
                parameter
                if bool(torch.isin(parameter, torch.tensor([0.0, 1.0])).all())
                else torch.zeros_like(parameter)
            )
            parameter.copy_(start + 0.3 * torch.randn(parameter.shape))


def candidate_inputs(data_format: str) -> Iterator[tuple[Tensor, ...]]:
    """Tokens, heads, images, sequences, rows; each alone and with a second tensor; and tokens as numbers."""
    shapes = [(2, 5, WIDTH), (2, HEADS, 5, WIDTH), (2, WIDTH, 5, 4), (2, WIDTH, 6), (3, WIDTH)]
    if data_format == "channels_first":
        shapes = [(2, WIDTH, 5, 4)]
    for shape in shapes:
        yield (torch.randn(shape),)
    for shape in shapes:
        yield (torch.randn(shape), torch.randn(shape))
    heads = torch.randn(2, 5, HEADS, WIDTH // HEADS)
    yield (heads, heads)
    yield (torch.randn(2, 5, WIDTH), torch.randn(2, WIDTH))
    yield (torch.randint(0, 50, (2, 5)),)


def runs(module: nn.Module, inputs: tuple[Tensor, ...]) -> bool:
    try:
        with torch.no_grad():
            module(*inputs)
    except Exception:  # Whatever an input of the wrong shape causes.
        return False
    return True


def formula(x: Tensor, site: NormSite, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """The norm written out, in float64."""
    x = x.double()
    shape = [1] * x.ndim
    shape[site.dim] = x.shape[site.dim]
    if site.kind == "layernorm":
        x = x - x.mean(site.dim, keepdim=True)
    y = x / torch.sqrt((x * x).mean(site.dim, keepdim=True) + site.eps)
    y = y if weight is None else y * weight.double().reshape(shape)
    return y if bias is None else y + bias.double().reshape(shape)


def error_of(module: nn.Module, site: NormSite, dtype: torch.dtype) -> float:
    """The largest relative error of the formula, over fresh inputs small and large, with and without a mean."""
    weight, bias = affine_of(module, site)
    worst = 0.0
    for seed, (scale, mean) in enumerate([(1e-3, 0.0), (1.0, 0.0), (1.0, 8.0), (30.0, -60.0)]):
        generator = torch.Generator().manual_seed(seed)
        x = (torch.randn(site.input_shape, generator=generator) * scale + mean).to(dtype)
        with torch.no_grad():
            given = module(x).double()
        expected = formula(x, site, weight, bias)
        worst = max(worst, float((given - expected).norm() / expected.norm()))
    return worst


@dataclass
class Survey:
    """What became of the classes: found, refused by reason, or without a norm; and wrong formulas."""

    found: set[str]
    refused: dict[str, set[str]]
    empty: set[str]
    wrong: list[str]


def survey(everything: list[Built], dtype: torch.dtype, allowed: float) -> Survey:
    result = Survey(set(), {}, set(), [])
    for built in everything:
        name = built.cls.__name__
        model = Holder(built.module).to(dtype)
        inputs = tuple(x.to(dtype) if x.is_floating_point() else x for x in built.inputs)
        if not runs(model, inputs):  # Some take float32 only.
            continue
        sites = find_norms(model, *inputs)
        found = [site for site in sites if site.refused is None]
        for site in found:
            error = error_of(model.get_submodule(site.path), site, dtype)
            if not error < allowed:
                result.wrong.append(f"{name} {site}: {error:.1e}")
        if found:
            result.found.add(name)
        elif sites:
            reason = str(sites[0].refused).split(":")[0]
            result.refused.setdefault(reason, set()).add(name)
        else:
            result.empty.add(name)
    return result


@pytest.mark.slow
def test_every_class_is_right_or_refused() -> None:
    torch.manual_seed(0)
    classes = [cls for cls in norm_classes() if issubclass(cls, nn.Module)]
    modules = [cls for cls in classes if not issubclass(cls, transformers.PreTrainedModel)]
    everything = [built for cls in modules for built in variants(cls)]
    result = survey(everything, torch.float32, allowed=2e-4)
    assert result.wrong == []
    assert result.refused == {reason: set(names.split()) for reason, names in REFUSED.items()}
    assert result.empty == set(WITHOUT_NORM.split())
    assert len(result.found) > 250
    # Two or three roundings to eight bits each; the most are those of layers that compute in
    # bfloat16 inside.
    halves = survey(everything, torch.bfloat16, allowed=2e-2)
    assert halves.wrong == []
    assert halves.found == result.found - FLOAT32_ONLY
    assert halves.refused == result.refused


# These do not run in bfloat16.
FLOAT32_ONLY = {"EsmFold2LayerNorm", "EsmFold2AdaptiveLayerNorm"}
