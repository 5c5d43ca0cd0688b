"""The scale channel on small random models of transformers: the edit is exact, and the rest works on."""

from __future__ import annotations

import copy
import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dynorm
from dynorm.batches import call
from dynorm.errors import ModelError
from dynorm.fit import calibrate
from dynorm.fold.check import Wide
from dynorm.outputs import output_tensor
from dynorm.replace.converted import dynorm_layers
from dynorm.scale.edit import choose_basis, rotate_
from dynorm.stream import find_streams

transformers = pytest.importorskip("transformers")

C = 16
SIZES = {
    "vocab_size": 40,
    "hidden_size": C,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
OTHER_SIZES = {"vocab_size": 40, "bos_token_id": 1, "eos_token_id": 2}
GPT2 = OTHER_SIZES | {"n_embd": C, "n_layer": 2, "n_head": 4, "n_positions": 32}
IMAGES = {"image_size": 16, "patch_size": 4, "num_channels": 3}

# The class of the config and of the model, its arguments, and whether it has LayerNorms.
MODELS: dict[str, tuple[str, str, dict[str, Any], bool]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", SIZES, False),
    "llama, tied": (
        "LlamaConfig",
        "LlamaForCausalLM",
        SIZES | {"tie_word_embeddings": True},
        False,
    ),
    "mistral": ("MistralConfig", "MistralForCausalLM", SIZES, False),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", SIZES, False),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", SIZES, False),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", SIZES, False),
    "granite": ("GraniteConfig", "GraniteForCausalLM", SIZES | {"residual_multiplier": 0.3}, False),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", GPT2, True),
    "gpt_neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", SIZES, True),
    "gptj": (
        "GPTJConfig",
        "GPTJForCausalLM",
        OTHER_SIZES | {"n_embd": C, "n_layer": 2, "n_head": 4, "n_positions": 32, "rotary_dim": 4},
        True,
    ),
    "phi": ("PhiConfig", "PhiForCausalLM", SIZES, True),
    "stablelm": ("StableLmConfig", "StableLmForCausalLM", SIZES, True),
    "starcoder2": ("Starcoder2Config", "Starcoder2ForCausalLM", SIZES, True),
    "olmo": ("OlmoConfig", "OlmoForCausalLM", SIZES, True),
    "opt": (
        "OPTConfig",
        "OPTForCausalLM",
        SIZES | {"ffn_dim": 24, "word_embed_proj_dim": C},
        True,
    ),
    "vit": ("ViTConfig", "ViTForImageClassification", SIZES | IMAGES, True),
}


def tiny(name: str) -> tuple[nn.Module, list[dict[str, Tensor]], bool]:
    """Return a model in float64 with random weights, batches, and whether its norms centre."""
    config, kind, arguments, centres = MODELS[name]
    torch.manual_seed(0)
    model = getattr(transformers, kind)(getattr(transformers, config)(**arguments)).double().eval()
    for parameter in model.parameters():
        # Norms with other weights than 1, biases other than 0.
        nn.init.normal_(parameter, 0.3, 0.4)
    batches = []
    for _ in range(6):
        if "image_size" in arguments:
            batches.append({"pixel_values": torch.randn(4, 3, 16, 16).double()})
        else:
            batches.append({"input_ids": torch.randint(3, 40, (4, 12))})
    return model, batches, centres


def logits(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    # Wide, because a norm of transformers computes in float32 also in a float64 model.
    is_wide = next(model.parameters()).dtype == torch.float64
    with torch.no_grad(), Wide() if is_wide else nullcontext():
        return output_tensor(call(model, batch), batch)[1]


@pytest.mark.parametrize("name", MODELS)
def test_the_edit_changes_no_output(name: str) -> None:
    """An RMSNorm's stream is compared before the direction of least energy goes."""
    model, batches, centres = tiny(name)
    before = logits(model, batches[-1])
    if centres:
        report = dynorm.add_scale_channel_(model, batches, fixed=3)
        assert report.refused == {}
        assert report.streams[0].lost_energy == 0
    else:
        dynorm.fold_(model, batches[0], constants=False, add_bias=True, untie=True)
        # Qwen3 also normalizes the heads of queries and keys.
        streams = find_streams(model, batches[0], untie=True)
        stream = max(streams, key=lambda stream: len(stream.sites))
        gram = torch.randn(C, C, dtype=torch.float64)
        rotate_(stream, choose_basis(stream, gram @ gram.T))
    torch.testing.assert_close(logits(model, batches[-1]), before, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["llama, tied", "gemma", "gpt2", "gpt_neox"])
def test_the_rows_keep_the_size_of_each_token(name: str) -> None:
    """With the rows, the error of the sum is a third smaller than without them, on a new batch."""
    model, batches, _ = tiny(name)
    dynorm.add_scale_channel_(model, batches, fixed=3)
    dynorm.convert_(model, dynorm.find_norms(model, batches[0]))
    layers = dynorm_layers(model)
    dynorm.calibrate_(model, batches[:5], lean=0)
    errors = sum_errors(model, batches[5])
    for path, layer in layers.items():
        assert layer.witness_channels == (C - 1, 0, 1, 2), path
    for layer in layers.values():
        layer.log_gain.data[0] = -30.0
    without = sum_errors(model, batches[5])
    assert errors < without * 2 / 3


def sum_errors(model: nn.Module, batch: dict[str, Tensor]) -> float:
    """Return the root mean square of log(estimate / sum) over all layers' tokens."""
    squares = []

    def look(layer: Any, args: tuple[Tensor, ...], output: Tensor) -> None:
        x = args[0]
        rest = x.clone()
        rest[..., C - 1] = 0
        read = x[..., list(layer.witness_channels)].square()
        estimate = layer.beta() + read @ layer.log_gain.exp()
        squares.append((estimate / rest.square().sum(-1)).log().square().mean())

    handles = [layer.register_forward_hook(look) for layer in dynorm_layers(model).values()]
    logits(model, batch)
    for handle in handles:
        handle.remove()
    return float(torch.stack(squares).mean().sqrt())


def test_a_model_that_returns_its_stream_is_refused_and_stays_as_it_was() -> None:
    torch.manual_seed(0)
    config = transformers.ViTConfig(**(SIZES | IMAGES))
    model = transformers.ViTModel(config, add_pooling_layer=False).eval()
    batch = {"pixel_values": torch.randn(2, 3, 16, 16)}
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(dynorm.errors.ModelError, match=r"returns it.*witnesses"):
        dynorm.add_scale_channel_(model, [batch])
    after = model.state_dict()
    assert list(after) == list(before)
    for name, value in before.items():
        assert torch.equal(after[name], value), name


def converted(name: str) -> tuple[nn.Module, list[dict[str, Tensor]]]:
    """Return a calibrated model with a scale channel, in float32, and batches."""
    model, batches, _ = tiny(name)
    model = model.float()
    dynorm.add_scale_channel_(model, batches, fixed=3)
    dynorm.convert_(model, dynorm.find_norms(model, batches[0]))
    dynorm.calibrate_(model, batches, lean=0)
    return model, batches


def test_a_second_calibration_gives_the_same_rows() -> None:
    model, batches = converted("gpt2")
    before = copy.deepcopy(model.state_dict())
    dynorm.calibrate_(model, batches, lean=0)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=1e-4, atol=1e-5, msg=name)


def test_the_layers_give_0_in_the_channel_as_their_norms_do() -> None:
    model, batches = converted("llama, tied")
    layer = next(iter(dynorm_layers(model).values()))
    assert (layer(torch.randn(5, C))[:, C - 1] == 0).all()
    dynorm.measure(model, batches)


def test_an_original_without_the_channel_is_refused() -> None:
    """Its norms see other channels, so that every comparison with them would be wrong."""
    model, batches = converted("llama, tied")
    original = tiny("llama, tied")[0].float()
    with pytest.raises(dynorm.errors.ModelError, match=r"original.*copy.*add_scale"):
        dynorm.measure(model, batches, original=original)
    with pytest.raises(dynorm.errors.ModelError, match=r"teacher.*copy.*add_scale"):
        dynorm.distill_(model, batches, teacher=original, steps=1)


def test_distillation_keeps_the_layers_at_0_in_the_channel() -> None:
    model, batches, _ = tiny("llama, tied")
    model = model.float()
    dynorm.add_scale_channel_(model, batches, fixed=3)
    teacher = copy.deepcopy(model)
    dynorm.convert_(model, dynorm.find_norms(model, batches[0]))
    dynorm.calibrate_(model, batches, lean=0)
    dynorm.distill_(model, batches, teacher=teacher, steps=2)
    for path, layer in dynorm_layers(model).items():
        assert layer.weight[C - 1] == 0, path


def test_restored_norms_leave_the_channel_out() -> None:
    model, batches = converted("gpt2")
    original, _, _ = tiny("gpt2")
    expected = logits(original.float(), batches[0])
    dynorm.restore_(model)
    torch.testing.assert_close(logits(model, batches[0]), expected, rtol=1e-3, atol=1e-3)


def test_a_saved_model_loads_with_its_rows(tmp_path: Path) -> None:
    model, batches = converted("llama, tied")
    expected = logits(model, batches[0])
    dynorm.save(model, tmp_path / "model")
    loaded = dynorm.load(tmp_path / "model")
    torch.testing.assert_close(logits(loaded, batches[0]), expected)


def test_a_fold_takes_what_is_left_of_the_layers() -> None:
    model, batches = converted("llama, tied")
    expected = logits(model, batches[0])
    dynorm.fold_(model, batches[0])
    torch.testing.assert_close(logits(model, batches[0]), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batches": []}, "least.*batch"),
        ({"fixed": -1}, "fixed.*integer"),
        ({"fixed": C}, "cannot be fixed"),
    ],
)
def test_bad_arguments_are_refused_and_the_model_stays(
    arguments: dict[str, Any], message: str
) -> None:
    model, batches, _ = tiny("gpt2")
    before = logits(model, batches[0])
    with pytest.raises(dynorm.errors.DynormError, match=message):
        dynorm.add_scale_channel_(model, **({"batches": batches} | arguments))
    assert torch.equal(logits(model, batches[0]), before)


@pytest.mark.parametrize("name", ["opt", "gpt2", "vit"])
def test_the_layers_see_in_the_fit_the_channel_that_they_see_afterwards(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OPT flattens its tokens before some norms, so that features and tokens differ in shape."""
    model, batches, _ = tiny(name)
    dynorm.add_scale_channel_(model, batches, fixed=3)
    dynorm.convert_(model, dynorm.find_norms(model, batches[0]))
    during: dict[str, Tensor] = {}
    fit_layer = calibrate._Group._fit_layer

    def keep(group: Any, choice: Any, runs: Any, *rest: Any) -> None:
        during[choice.path] = runs[0].call.x.flatten(0, -2)[:, C - 1].clone()
        fit_layer(group, choice, runs, *rest)

    monkeypatch.setattr(calibrate._Group, "_fit_layer", keep)
    dynorm.calibrate_(model, batches[:5], lean=0)
    after: dict[str, Tensor] = {}
    for path, layer in dynorm_layers(model).items():

        def look(layer: Any, args: tuple[Tensor, ...], path: str = path) -> None:
            after[path] = args[0].flatten(0, -2)[:, C - 1].clone()

        layer.register_forward_pre_hook(look)
    logits(model, batches[0])
    assert len(after) == len(during) > 4
    for path, values in during.items():
        torch.testing.assert_close(after[path], values, msg=path)


def test_a_converted_model_is_refused() -> None:
    model, batches = converted("llama, tied")
    with pytest.raises(ModelError, match=r"model\.norm.*before convert_"):
        dynorm.add_scale_channel_(model, batches)


def test_the_norms_are_trained_or_not_as_before() -> None:
    """A frozen embedding does not freeze them."""
    model, batches, _ = tiny("llama")
    model.get_input_embeddings().weight.requires_grad_(False)
    model.model.norm.weight.requires_grad_(False)
    dynorm.add_scale_channel_(model, batches, fixed=3)
    dynorm.convert_(model, dynorm.find_norms(model, batches[0]))
    trained = {}
    for path, layer in dynorm_layers(model).items():
        trained[path] = any(parameter.requires_grad for parameter in layer.parameters())
    assert trained.pop("model.norm") is False
    assert len(trained) == 4
    assert all(trained.values())


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_second_channel_is_refused(name: str) -> None:
    """The rotation would mix the first channel, which the norms leave out, with the others."""
    model, batches, _ = tiny(name)
    dynorm.add_scale_channel_(model, batches, fixed=3)
    before = logits(model, batches[0])
    with pytest.raises(dynorm.errors.ModelError, match="scale channel yet"):
        dynorm.add_scale_channel_(model, batches, fixed=3)
    assert torch.equal(logits(model, batches[0]), before)


def test_annealing_is_refused() -> None:
    """At the start an annealed layer is the norm over all channels, with the scale channel."""
    model, batches, _ = tiny("gpt2")
    dynorm.add_scale_channel_(model, batches, fixed=3)
    before = logits(model, batches[0])
    with pytest.raises(dynorm.errors.ModelError, match="cannot be annealed"):
        dynorm.convert_(model, dynorm.find_norms(model, batches[0]), "annealed")
    assert torch.equal(logits(model, batches[0]), before)


def test_an_edited_model_that_was_loaded_is_not_converted_without_its_rows(tmp_path: Path) -> None:
    """The record of the channel is not saved, and other witnesses would count it as a channel."""
    model, batches, _ = tiny("gpt2")
    dynorm.add_scale_channel_(model, batches, fixed=3)
    expected = logits(model, batches[0])
    dynorm.save(model, tmp_path / "model")
    loaded = dynorm.load(tmp_path / "model")
    torch.testing.assert_close(logits(loaded, batches[0]), expected)
    with pytest.raises(dynorm.errors.ModelError, match=r"record.*not saved"):
        dynorm.convert_(loaded, dynorm.find_norms(loaded, batches[0]))


class FirstToken(nn.Module):
    """Reads only the first token of its stream at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, C)
        self.norm = nn.LayerNorm(C)
        self.up = nn.Linear(C, 24)
        self.down = nn.Linear(24, C)
        self.last_norm = nn.LayerNorm(C)
        self.head = nn.Linear(C, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        x = x + self.down(self.up(self.norm(x)).relu())
        return self.head(self.last_norm(x[:, 0]))


def encoder_of_torch() -> nn.Module:
    """Return a pre-norm encoder of torch, whose attention does not call its ``out_proj``."""
    layer = nn.TransformerEncoderLayer(C, 4, 24, norm_first=True, batch_first=True, dropout=0.0)
    encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(C), enable_nested_tensor=False)
    return nn.Sequential(nn.Embedding(40, C), encoder, nn.Linear(C, 5))


@pytest.mark.parametrize(
    ("make", "path"),
    [(FirstToken, "down"), (encoder_of_torch, r"1\.layers\.0\.self_attn\.out_proj")],
)
def test_a_row_that_cannot_be_fitted_is_named(make: Any, path: str) -> None:
    torch.manual_seed(0)
    model = make().eval()
    batches = [torch.randint(40, (4, 12)) for _ in range(4)]
    dynorm.add_scale_channel_(model, batches, fixed=3)
    dynorm.convert_(model, dynorm.find_norms(model, batches[0]))
    with pytest.warns(dynorm.errors.CalibrationWarning, match=f"rows of {path}.* stay 0"):
        dynorm.calibrate_(model, batches, lean=0)


class Branch(nn.Module):
    """Its stream is linear only for 12 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, C)
        self.norm = nn.RMSNorm(C)
        self.head = nn.Linear(C, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        if x.shape[1] != 12:
            x = x.tanh()
        return self.head(self.norm(x))


def test_another_branch_of_an_rmsnorm_model_is_noticed() -> None:
    """The loss of a direction changes the outputs, so they are compared before."""
    torch.manual_seed(0)
    model = Branch().eval()
    batches = [torch.randint(40, (4, 12)), torch.randint(40, (4, 9))]
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(dynorm.errors.ModelError, match=r"stay.*same"):
        dynorm.add_scale_channel_(model, batches, fixed=3)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_activations_that_are_not_finite_are_refused() -> None:
    model, batches, _ = tiny("gpt2")
    model.transformer.wte.weight.data[batches[0]["input_ids"][0, 0]] = math.nan
    with pytest.raises(dynorm.errors.DataError, match=r"activations.*finite"):
        dynorm.add_scale_channel_(model, batches, fixed=3)


class TwoStreams(nn.Module):
    """The logits are the sum of two streams' heads."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList([nn.Embedding(40, C), nn.Embedding(40, C)])
        self.norms = nn.ModuleList([nn.RMSNorm(C), nn.RMSNorm(C)])
        self.heads = nn.ModuleList([nn.Linear(C, 5), nn.Linear(C, 5)])

    def forward(self, x: Tensor) -> Tensor:
        parts = [self.norms[k](self.embeddings[k](x)) for k in range(2)]
        return self.heads[0](parts[0]) + self.heads[1](parts[1])


def test_each_of_two_streams_is_compared_with_itself() -> None:
    torch.manual_seed(0)
    model = TwoStreams().eval()
    batches = [torch.randint(40, (4, 12)) for _ in range(3)]
    report = dynorm.add_scale_channel_(model, batches, fixed=3)
    assert [stream.norms for stream in report.streams] == [["norms.0"], ["norms.1"]]
    assert all(stream.lost_energy > 0 for stream in report.streams)


def test_two_streams_may_share_a_table() -> None:
    torch.manual_seed(0)
    model = TwoStreams().eval()
    model.norms = nn.ModuleList([nn.LayerNorm(C), nn.LayerNorm(C)]).eval()
    model.embeddings[1].weight = model.embeddings[0].weight
    report = dynorm.add_scale_channel_(model, [torch.randint(40, (4, 12))], fixed=3)
    assert len(report.streams) == 2
    assert report.change < 1e-5


def test_a_fit_that_repairs_layers_before_it_stays_finite() -> None:
    """The target in the scale channel is 0, and least squares gave 0 * infinity for its weight."""
    model, batches, _ = tiny("llama")
    dynorm.add_scale_channel_(model, batches, fixed=3)
    dynorm.convert_(model, dynorm.find_norms(model, batches[0]))
    dynorm.calibrate_(model, batches, lean=0.7)
    for path, layer in dynorm_layers(model).items():
        assert layer.weight[C - 1] == 0, path
        assert layer.weight.isfinite().all(), path


class Blocks(nn.Module):
    """Two blocks on a stream, whose norms may read a copy of it, and whose writers get a keyword."""

    def __init__(self, factor: float | None) -> None:
        super().__init__()
        self.table = nn.Embedding(40, C)
        self.norms = nn.ModuleList(nn.LayerNorm(C) for _ in range(3))
        self.readers = nn.ModuleList(nn.Linear(C, C) for _ in range(2))
        self.writers = nn.ModuleList(nn.Linear(C, C) for _ in range(2))
        self.head = nn.Linear(C, 5)
        self.factor = factor

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for norm, reader, writer in zip(self.norms[:2], self.readers, self.writers, strict=True):
            read = x if self.factor is None else x * self.factor
            x = x + writer(input=reader(norm(read)).tanh())
        y: Tensor = self.head(self.norms[2](x))
        return y


def test_a_norm_that_reads_a_copy_of_the_stream_is_refused() -> None:
    torch.manual_seed(0)
    ids = torch.randint(40, (4, 7))
    with pytest.raises(dynorm.errors.ModelError, match=r"norms\.0 reads.*copy"):
        dynorm.add_scale_channel_(Blocks(1.0).eval(), [ids], fixed=2)


def test_writers_may_be_called_with_a_keyword() -> None:
    torch.manual_seed(0)
    model = Blocks(None).eval()
    batches = [torch.randint(40, (4, 7)) for _ in range(3)]
    dynorm.add_scale_channel_(model, batches, fixed=2)
    dynorm.convert_(model, dynorm.find_norms(model, batches[0]))
    dynorm.calibrate_(model, batches)
    for writer in model.writers:
        assert writer.weight[C - 1].abs().max() > 0
