"""Folders of transformers: ``from_pretrained``, heads, checkpoints, and the errors for changed files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import dynorm
from dynorm.errors import ArgumentError, ModelError, StorageError
from dynorm.hub import load, save
from dynorm.replace.converted import dynorm_layers
from tests.hub.folders import (
    Damages,
    cut,
    edit_config,
    edit_weights,
    flip,
    fresh,
    full_disk,
    garbage,
    leftovers,
    replace_text,
)
from tests.hub.models import (
    WITNESSES,
    OwnLayer,
    bert,
    build,
    convert,
    converted,
    first,
    gpt2,
    same_state,
    tokens,
    transformers,
    witnessed,
)


def test_loaded_tensors_lie_where_torch_would_put_them(tmp_path: Path) -> None:
    save(bert(), tmp_path / "m")
    model = transformers.AutoModel.from_pretrained(tmp_path / "m")
    assert {tensor.data_ptr() % 64 for tensor in (*model.parameters(), *model.buffers())} == {0}


def test_transformers_in_a_fresh_process(tmp_path: Path) -> None:
    models = {
        "bert": bert(),
        "gpt2": gpt2(),
        "bf16": bert(to="derf").to(torch.bfloat16),
        "fp16": bert(to="dyt").half(),
    }
    for name, model in models.items():
        save(model, tmp_path / name)
    script = """
import sys, torch
from pathlib import Path
from safetensors.torch import load_file, save_file
from dynorm.hub import load
assert "transformers" not in sys.modules
folder, outputs = Path(sys.argv[1]), {}
ids = load_file(folder / "ids.safetensors")["ids"]
with torch.no_grad():
    for name in ("bert", "gpt2", "bf16", "fp16"):
        outputs[name] = load(folder / name)(ids)[0]
save_file(outputs, folder / "outputs.safetensors")
"""
    save_file({"ids": tokens()}, tmp_path / "ids.safetensors")
    fresh(script, tmp_path)
    outputs = load_file(tmp_path / "outputs.safetensors")
    for name, model in models.items():
        assert outputs[name].dtype == model.dtype
        assert torch.equal(outputs[name], first(model)), name
    loaded = load(tmp_path / "gpt2")
    assert loaded.lm_head.weight is loaded.transformer.wte.weight


def test_a_base_model_gets_a_head_and_a_head_is_taken_off(tmp_path: Path) -> None:
    model = bert()
    save(model, tmp_path / "base")
    headed = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "base", num_labels=3
    )
    assert torch.equal(first(headed.bert), first(model))
    headed.save_pretrained(tmp_path / "headed")
    assert torch.equal(first(load(tmp_path / "headed")), first(headed))
    again = transformers.AutoModel.from_pretrained(tmp_path / "headed")
    assert torch.equal(first(again), first(model))


@pytest.mark.parametrize("to", ["dyisru", "dyt"])
def test_norms_in_the_place_of_layers_are_an_error(tmp_path: Path, to: str) -> None:
    model = bert(to=to)
    save(model, tmp_path / "m")
    config = transformers.BertConfig(**model.config.to_dict())
    for cls in (transformers.BertModel, transformers.BertForMaskedLM):
        with pytest.raises(StorageError, match=r"norms.*LayerNorm.*config="):
            cls.from_pretrained(tmp_path / "m", config=config)
    # Any other load is as before.
    transformers.BertModel(config).save_pretrained(tmp_path / "stock")
    loaded, info = transformers.BertModel.from_pretrained(
        tmp_path / "stock", output_loading_info=True
    )
    assert isinstance(loaded, transformers.BertModel)
    assert not info["unexpected_keys"]


def test_the_norm_of_a_head_goes_with_the_head(tmp_path: Path) -> None:
    model = bert("BertForMaskedLM")
    assert "cls.predictions.transform.LayerNorm" in dynorm_layers(model)
    save(model, tmp_path / "m")
    assert torch.equal(first(load(tmp_path / "m")), first(model))
    for name in (
        "BertForSequenceClassification",
        "BertForNextSentencePrediction",
        "BertForPreTraining",
    ):
        other = getattr(transformers, name).from_pretrained(tmp_path / "m")
        assert torch.equal(first(other.bert), first(model.bert))
        assert len(dynorm_layers(other)) == len(dynorm_layers(model)) - (
            name != "BertForPreTraining"
        )


def test_a_model_without_a_place_for_the_layers_is_an_error(tmp_path: Path) -> None:
    save(bert(), tmp_path / "m")
    config = transformers.GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=2, n_positions=32)
    quantization = json.loads((tmp_path / "m" / "config.json").read_text())["quantization_config"]
    config.quantization_config = quantization
    with pytest.raises(ModelError, match="place in GPT2Model"):
        transformers.GPT2Model.from_pretrained(tmp_path / "m", config=config)


def test_saving_leaves_no_trace_on_the_model(tmp_path: Path) -> None:
    model = bert()
    expected, attributes = first(model), set(vars(model)) | set(vars(model.config))
    save(model, tmp_path / "a")
    model.save_pretrained(tmp_path / "b")
    assert set(vars(model)) | set(vars(model.config)) == attributes
    assert torch.equal(first(model), expected)
    assert torch.equal(first(load(tmp_path / "b")), expected)
    dynorm.restore_(model)
    model.save_pretrained(tmp_path / "c")
    assert "quantization_config" not in json.loads((tmp_path / "c" / "config.json").read_text())


def test_a_loaded_model_is_an_ordinary_one(tmp_path: Path) -> None:
    save(bert("BertForSequenceClassification"), tmp_path / "m")
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "m", device_map="cpu"
    )
    assert not model.is_quantized
    assert all(parameter.requires_grad for parameter in model.parameters())
    for move in (
        lambda m: m.half(),
        lambda m: m.to(torch.bfloat16),
        lambda m: m.float(),
        lambda m: m.to("cpu"),
    ):
        move(model)
    narrow = type(model).from_pretrained(tmp_path / "m", dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in narrow.parameters()} == {torch.bfloat16}
    # The config of a loaded model still names the layers, for who loads with it.
    again = type(model).from_pretrained(tmp_path / "m", config=model.config)
    assert len(dynorm_layers(again)) == 5


def test_layers_of_another_dtype_keep_it(tmp_path: Path) -> None:
    model = bert().to(torch.bfloat16)
    model.embeddings.LayerNorm.float()
    save(model, tmp_path / "m")
    loaded = load(tmp_path / "m")
    assert loaded.embeddings.LayerNorm.log_beta.dtype == torch.float32
    assert torch.equal(first(loaded), first(model))
    assert {
        p.dtype for p in type(model).from_pretrained(tmp_path / "m", dtype="float16").parameters()
    } == {torch.float16}


def bfloat16_llama_with_float32_head() -> Any:
    """Return a converted Llama whose last norm and head are in float32, as peft leaves them."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    model = transformers.LlamaForCausalLM(config).bfloat16().eval()
    model.model.norm.float()
    model.lm_head.float()
    # Numbers that bfloat16 does not hold.
    model.lm_head.weight.data.add_(torch.rand_like(model.lm_head.weight))
    return convert(model, {"input_ids": tokens()})


def test_a_head_of_another_dtype_comes_back_bit_for_bit(tmp_path: Path) -> None:
    model = bfloat16_llama_with_float32_head()
    save(model, tmp_path / "m")
    for loaded in (load(tmp_path / "m"), type(model).from_pretrained(tmp_path / "m")):
        assert same_state(loaded, model)
        assert first(loaded).dtype == torch.float32
        assert torch.equal(first(loaded), first(model))
    # Without the head, the float32 norm still finds its place.
    base = transformers.AutoModel.from_pretrained(tmp_path / "m")
    assert base.norm.weight.dtype == torch.float32
    assert torch.equal(first(base), first(model.model))
    # Saved again, with the dtypes of then.
    load(tmp_path / "m").half().save_pretrained(tmp_path / "half")
    again = load(tmp_path / "half")
    assert {parameter.dtype for parameter in again.parameters()} == {torch.float16}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_layers_follow_the_dtype_that_a_load_asks_for(tmp_path: Path, dtype: torch.dtype) -> None:
    model = bfloat16_llama_with_float32_head()
    save(model, tmp_path / "m")
    for asked in (dtype, str(dtype).removeprefix("torch.")):
        loaded = type(model).from_pretrained(tmp_path / "m", dtype=asked)
        assert {parameter.dtype for parameter in loaded.parameters()} == {dtype}
        assert first(loaded).dtype == dtype
    # The next call is not told a dtype.
    assert same_state(load(tmp_path / "m"), model)


@pytest.mark.parametrize("dtypes", [{"lm_head": {"weight": "int9"}}, {"lm_head": "float32"}, [1]])
def test_dtypes_of_a_changed_config_are_refused(tmp_path: Path, dtypes: Any) -> None:
    save(bfloat16_llama_with_float32_head(), tmp_path / "m")
    edit_config(tmp_path / "m", quantization_config__dtypes_outside=dtypes)
    with pytest.raises(StorageError, match=r"dtypes.*path"):
        load(tmp_path / "m")


def test_a_loaded_model_trains_and_its_checkpoints_load(tmp_path: Path) -> None:
    save(bert("BertForSequenceClassification"), tmp_path / "m")
    model = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "m")
    before = model.bert.embeddings.LayerNorm.log_beta.detach().clone()
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "out"),
        max_steps=1,
        save_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    data = [{"input_ids": row, "labels": i % 2} for i, row in enumerate(tokens())]
    transformers.Trainer(model=model, args=arguments, train_dataset=data).train()
    assert not torch.equal(model.bert.embeddings.LayerNorm.log_beta, before)
    assert torch.equal(first(load(tmp_path / "out" / "checkpoint-1")), first(model.eval()))


def test_generation_and_pipelines_work(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    model = gpt2()
    save(model, tmp_path / "m")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    prompt = tokens()[:1]
    assert torch.equal(
        loaded.generate(prompt, max_new_tokens=4, do_sample=False),
        model.generate(prompt, max_new_tokens=4, do_sample=False),
    )
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({f"w{i}": i for i in range(50)}, unk_token="w0")
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="w0", pad_token="w0"
    )
    tokenizer.save_pretrained(tmp_path / "m")
    pipeline = transformers.pipeline("text-generation", model=str(tmp_path / "m"))
    assert pipeline("w1 w2", max_new_tokens=3, do_sample=False)[0]["generated_text"]


class SharedConfig(transformers.PretrainedConfig):  # type: ignore[misc, name-defined]
    model_type = "dynorm-test-shared"


class Shared(transformers.PreTrainedModel):  # type: ignore[misc, name-defined]
    config_class = SharedConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        norm = nn.LayerNorm(8)
        self.linear = nn.Linear(8, 8)
        self.norms = nn.ModuleList([norm, norm])
        self.post_init()

    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = self.norms[1](self.linear(self.norms[0](input)))
        return output


@pytest.mark.parametrize("change", [lambda model: model, witnessed], ids=["pure", "witnesses"])
@pytest.mark.parametrize("to", ["dyisru", "annealed"])
@pytest.mark.parametrize("origin", ["somewhere", "transformers.models.shared"])
def test_a_shared_norm_of_a_transformers_model_stays_shared(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    origin: str,
    to: str,
    change: Callable[[nn.Module], Any],
) -> None:
    # transformers treats the models of others with more care than its own.
    monkeypatch.setitem(sys.modules, origin, sys.modules[__name__])
    monkeypatch.setattr(Shared, "__module__", origin)
    model, x = change(convert(Shared(SharedConfig()), torch.randn(64, 8), to)), torch.randn(3, 8)
    save(model, tmp_path / "m")
    loaded = Shared.from_pretrained(tmp_path / "m")
    assert loaded.norms[0] is loaded.norms[1]
    assert type(loaded.norms[0]) is type(model.norms[0])
    assert torch.equal(loaded(x), model(x))
    assert same_state(loaded, model)
    with pytest.raises(ModelError, match=r"call Shared\.from_pretrained"):
        load(tmp_path / "m")


class Native(Shared):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.norms = nn.ModuleList([OwnLayer(8), OwnLayer(8)])


def test_a_class_with_layers_of_its_own_is_left_alone(tmp_path: Path) -> None:
    model, x = Native(SharedConfig()).eval(), torch.randn(3, 8)
    model.save_pretrained(tmp_path / "m")
    assert "quantization_config" not in json.loads((tmp_path / "m" / "config.json").read_text())
    assert torch.equal(Native.from_pretrained(tmp_path / "m")(x), model(x))


def test_a_model_quantized_by_another_method_is_refused(tmp_path: Path) -> None:
    model = bert()
    model.config.quantization_config = {"quant_method": "awq"}
    for act in (lambda: save(model, tmp_path / "m"), lambda: model.save_pretrained(tmp_path / "m")):
        with pytest.raises(ModelError, match=r"converted.*quantized"):
            act()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("overwrite", [True, False])
def test_a_transformers_save_that_fails_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overwrite: bool
) -> None:
    model = bert()
    if overwrite:
        save(model, tmp_path / "m")
    with monkeypatch.context() as patch:
        patch.setattr("transformers.modeling_utils.safe_save_file", full_disk)
        with pytest.raises(StorageError, match="No space left"):
            save(bert(to="dyt"), tmp_path / "m", overwrite=overwrite)
    assert leftovers(tmp_path) == []
    assert (tmp_path / "m").exists() == overwrite
    if overwrite:
        assert torch.equal(first(load(tmp_path / "m")), first(model))


NORM = "encoder.layer.1.output.LayerNorm"
LAYER = "quantization_config__layers__0"
DAMAGES: Damages = {
    "no json": (lambda d: (d / "config.json").write_text("{"), "config.json must be JSON"),
    "no layers": (lambda d: edit_config(d, quantization_config=None), "name.*dynorm's"),
    "other": (
        lambda d: edit_config(d, quantization_config__quant_method="awq"),
        "name.*dynorm's",
    ),
    "version": (
        lambda d: edit_config(d, quantization_config__format_version=7),
        "must be 1, got 7",
    ),
    "layers": (lambda d: edit_config(d, quantization_config__layers=3), "layers.*list"),
    "kind": (lambda d: edit_config(d, **{f"{LAYER}__layer": "relu"}), "layer 0: .* got 'relu'"),
    "outside": (lambda d: edit_config(d, **{f"{LAYER}__outside": 3}), "outside.*list"),
    "dtype": (
        lambda d: edit_config(d, **{f"{LAYER}__dtypes": {"bias": "int9"}}),
        "dtypes name dtypes",
    ),
    "no class": (lambda d: edit_config(d, architectures=None), "class.*got None"),
    "weights": (
        lambda d: (d / "model.safetensors").unlink(),
        r"hold model\.safetensors",
    ),
    "index": (
        lambda d: (
            (d / "model.safetensors").rename(d / "a")
            and (d / "model.safetensors.index.json").write_text("{}")
        ),
        "the weight_map in",
    ),
    "shard": (
        lambda d: (
            (d / "model.safetensors").rename(d / "a")
            and (d / "model.safetensors.index.json").write_text(
                '{"weight_map": {"x": "model-1.safetensors"}}'
            )
        ),
        r"model-1\.safetensors.*whole",
    ),
    "cut": (cut, r"model\.safetensors.*whole"),
    "garbage": (garbage, r"model\.safetensors.*whole"),
    "missing": (
        lambda d: edit_weights(d, lambda w: w.pop(f"{NORM}.log_beta")),
        f"it lacks {NORM}.log_beta",
    ),
    "missing other": (
        lambda d: edit_weights(d, lambda w: w.pop("pooler.dense.bias")),
        "lack pooler.dense.bias",
    ),
    "unexpected": (
        lambda d: edit_weights(d, lambda w: w.update(extra=torch.ones(1))),
        "beyond.*extra",
    ),
    "shape": (
        lambda d: edit_weights(d, lambda w: w.update({f"{NORM}.center": torch.ones(3)})),
        f"{NORM}.center",
    ),
    "shape of other": (
        lambda d: edit_weights(d, lambda w: w.update({"pooler.dense.bias": torch.ones(3)})),
        "in another shape pooler.dense.bias",
    ),
    "value": (
        lambda d: edit_config(d, hidden_act="unheard-of"),
        "BertModel.*KeyError",
    ),
    "flipped": (flip, "changed since"),
    "other value": (
        lambda d: replace_text(d, "config.json", '"gelu"', '"relu"'),
        "was changed since",
    ),
    "center": (
        lambda d: replace_text(d, "config.json", '"center": true', '"center": false'),
        "were changed",
    ),
    "path": (
        lambda d: replace_text(d, "config.json", '"embeddings.LayerNorm"', '"pooler"'),
        "were changed",
    ),
}


@pytest.mark.parametrize("damage", ["flipped", "center", "path"])
def test_a_plain_from_pretrained_notices_what_was_changed(tmp_path: Path, damage: str) -> None:
    save(bert(), tmp_path / "m")
    act, message = DAMAGES[damage]
    act(tmp_path / "m")
    with pytest.raises(StorageError, match=message):
        transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "m")


def test_a_layer_entry_that_is_removed_is_noticed(tmp_path: Path) -> None:
    save(bert(), tmp_path / "m")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    del config["quantization_config"]["layers"][-1]
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    for way in (load, transformers.AutoModel.from_pretrained):
        with pytest.raises(StorageError, match="were changed"):
            way(tmp_path / "m")


def test_a_directory_of_the_earlier_format_still_loads(tmp_path: Path) -> None:
    model, small = bert(), converted()
    save(model, tmp_path / "m")
    # Without checksums, and without the line that keeps transformers alone from loading it.
    edit_config(tmp_path / "m", quantization_config__weights=None, transformers_weights=None)
    assert torch.equal(first(load(tmp_path / "m")), first(model))
    assert torch.equal(first(transformers.AutoModel.from_pretrained(tmp_path / "m")), first(model))
    save(small, tmp_path / "small")
    edit_config(tmp_path / "small")
    assert same_state(load(tmp_path / "small", build()), small)


@pytest.mark.slow
def test_without_dynorm_nothing_loads_and_the_error_says_what_to_import(tmp_path: Path) -> None:
    save(bert(), tmp_path / "m")
    script = """
import sys, warnings
import transformers
from sentence_transformers import SentenceTransformer
folder = sys.argv[1]
ways = {
    "AutoModel": lambda: transformers.AutoModel.from_pretrained(folder),
    "another head": lambda: transformers.AutoModelForMaskedLM.from_pretrained(folder),
    "a direct class": lambda: transformers.BertModel.from_pretrained(folder),
    "config": lambda: transformers.BertModel.from_pretrained(
        folder, config=transformers.AutoConfig.from_pretrained(folder)
    ),
    "pipeline": lambda: transformers.pipeline("feature-extraction", model=folder),
    "SentenceTransformer": lambda: SentenceTransformer(folder),
}
for name, way in ways.items():
    try:
        way()
        print(name, "loaded")
    except Exception as error:
        print(name, "refused" if "import dynorm before you load this model" in str(error) else repr(error))
assert "dynorm" not in sys.modules
"""
    environment = dict(os.environ, HF_HUB_OFFLINE="1")
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, str(tmp_path / "m")],
        capture_output=True, text=True, check=True, env=environment,
    )  # fmt: skip
    assert [line.rpartition(" ")[2] for line in run.stdout.splitlines()] == ["refused"] * 6, (
        run.stdout
    )


def test_a_model_that_torchao_quantized_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Int8Tensor(Tensor):
        __module__ = "torchao.quantization"

    for model in (converted(), bert()):
        next(m for m in model.modules() if isinstance(m, nn.Linear)).weight = nn.Parameter(
            torch.randn(8, 8).as_subclass(Int8Tensor)
        )
        with pytest.raises(ModelError, match="Int8Tensor: save"):
            save(model, tmp_path / "m")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_transformers_directories_say_what_is_wrong(tmp_path: Path, damage: str) -> None:
    save(bert(), tmp_path / "m")
    act, message = DAMAGES[damage]
    act(tmp_path / "m")
    with pytest.raises(StorageError, match=message):
        load(tmp_path / "m")


@pytest.mark.parametrize("to", ["dyisru", "derf", "annealed"])
def test_witnesses_of_a_transformers_model_come_back(tmp_path: Path, to: str) -> None:
    model: Any = witnessed(bert(to=to))
    dynorm.set_anneal_(model, 0.75) if to == "annealed" else None
    save(model, tmp_path / "m")
    loaded = load(tmp_path / "m")
    assert same_state(loaded, model)
    assert {layer.witness_channels for layer in dynorm_layers(loaded).values()} == {WITNESSES}
    assert torch.equal(first(loaded), first(model))
    headed = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "m", dtype=torch.bfloat16
    )
    assert torch.equal(first(headed.bert), first(model.bfloat16()))
    headed.save_pretrained(tmp_path / "headed")
    assert torch.equal(
        first(transformers.AutoModel.from_pretrained(tmp_path / "headed")), first(model)
    )


INDEX = f"{NORM}.witnesses"
TRANSFORMERS_WITNESS_DAMAGES: Damages = {
    "out of range": (lambda d: edit_config(d, **{f"{LAYER}__config__witnesses": [3, 16]}), "16.*range"),
    "twice": (lambda d: edit_config(d, **{f"{LAYER}__config__witnesses": [3, 3]}), "layer 0: .* named twice"),
    "others": (
        lambda d: edit_config(d, **{f"{LAYER}__config__witnesses": [3, 1]}),
        r"witnesses'.*config\.json.*\[3, 1\], got \[3, 0\]",
    ),
    "fewer": (
        lambda d: edit_config(d, **{f"{LAYER}__config__witnesses": [3]}), "(lacks|shape).*log_gain",
    ),
    "not named": (lambda d: edit_config(d, **{f"{LAYER}__config__witnesses": None}), "have beyond them .*log_gain"),
    "no buffer": (lambda d: edit_weights(d, lambda w: w.pop(INDEX)), f"it lacks {NORM}.witnesses"),
    "no gain": (lambda d: edit_weights(d, lambda w: w.pop(f"{NORM}.log_gain")), f"it lacks {NORM}.log_gain"),
    "buffer": (
        lambda d: edit_weights(d, lambda w: w.update({INDEX: torch.tensor([3, 99])})),
        rf"{NORM}.witnesses'.*\[3, 0\], got \[3, 99\]",
    ),
    "buffer of floats": (
        lambda d: edit_weights(d, lambda w: w.update({INDEX: torch.tensor([2.5, 0.0])})),
        "witnesses'.*checkpoint",
    ),
}  # fmt: skip


@pytest.mark.parametrize("damage", TRANSFORMERS_WITNESS_DAMAGES)
@pytest.mark.parametrize("way", ["load", "from_pretrained"])
def test_witnesses_of_a_transformers_model_that_do_not_fit_are_refused(
    tmp_path: Path, damage: str, way: str
) -> None:
    if damage in ("not named", "fewer") and way == "from_pretrained":
        pytest.skip(
            "transformers itself warns of tensors without a place, and raises for those of another "
            "shape"
        )
    save(witnessed(bert()), tmp_path / "m")
    act, message = TRANSFORMERS_WITNESS_DAMAGES[damage]
    act(tmp_path / "m")
    with pytest.raises(StorageError, match=message):
        load(tmp_path / "m") if way == "load" else transformers.AutoModel.from_pretrained(
            tmp_path / "m"
        )


def test_other_mistakes_with_transformers_directories(tmp_path: Path) -> None:
    save(bert(), tmp_path / "m")
    with pytest.raises(ArgumentError, match=r"not pass.*model"):
        load(tmp_path / "m", build())
    edit_config(tmp_path / "m", **{f"{LAYER}__paths": ["encoder.norm"]})
    with pytest.raises(ModelError, match=r"a norm at 'encoder\.norm'"):
        load(tmp_path / "m")
    edit_config(tmp_path / "m", architectures=["logging"])
    with pytest.raises(ModelError, match="logging is not"):
        load(tmp_path / "m")


def test_a_plain_from_pretrained_refuses_invented_constants(tmp_path: Path) -> None:
    save(bert(), tmp_path / "m")
    edit_weights(tmp_path / "m", lambda w: w.pop(f"{NORM}.log_beta"))
    with pytest.raises(StorageError, match=f"it lacks bert.{NORM}.log_beta"):
        transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "m")
