"""Models that load without dynorm: the same outputs, in a process that cannot import it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dynorm
from dynorm.arguments import MOST_CHOSEN
from dynorm.errors import ModelError, StorageError
from dynorm.hub import modeling_dynorm, save
from dynorm.layers.rmsnorm import RMSNorm
from dynorm.replace.converted import LAYER_NAMES, dynorm_layers
from dynorm.replace.edits import edits_of, give_bias_
from tests.hub.folders import fresh
from tests.hub.models import bert, convert, converted, gpt2, tokens, witnessed

transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 50, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}


def llama(kind: str = "LlamaForCausalLM", hidden_size: int = 16, **options: Any) -> Any:
    config = transformers.LlamaConfig(
        hidden_size=hidden_size,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=32,
        **SIZES,
        **options,
    )
    return getattr(transformers, kind)(config).eval()


def with_many_witnesses() -> Any:
    """Return a decoder whose layers have more witnesses than are added one by one."""
    model = llama(hidden_size=32)
    # Tokens of one size need no witnesses, and calibration leaves them out.
    with torch.no_grad():
        embedding = model.model.embed_tokens.weight
        embedding.mul_(torch.linspace(0.5, 50.0, len(embedding))[:, None])
    batches = [{"input_ids": tokens()}]
    dynorm.convert_(model, dynorm.find_norms(model, **batches[0]), witnesses=17)
    dynorm.calibrate_(model, batches)
    assert all(len(layer.witness_channels) == 17 for layer in dynorm_layers(model).values())
    return model


def folded() -> Any:
    """Return a decoder with biases and tables that its class does not make."""
    model = llama(tie_word_embeddings=True)
    convert(model, {"input_ids": tokens()}, "derf")
    with torch.no_grad():
        for layer in dynorm_layers(model).values():
            layer.shift.fill_(0.1)
            layer.weight.uniform_(0.5, 2.0)
    dynorm.fold_(model, tokens(), untie=True)
    # As a fold of LayerNorms with add_bias=True does.
    give_bias_(dict(model.named_modules()), "model.layers.0.mlp.up_proj")
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.bias.uniform_(-1.0, 1.0)
    assert edits_of(model).biases
    assert edits_of(model).untied
    return model


def linear_folded() -> Any:
    model = convert(llama(), {"input_ids": tokens()}, "linear", center=False)
    dynorm.fold_(model, tokens())
    assert not dynorm_layers(model)
    return model


def vision(to: str = "dyisru") -> Any:
    config = transformers.Dinov2Config(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, image_size=16, patch_size=8
    )
    model = transformers.Dinov2Model(config)
    return convert(model, {"pixel_values": images()}, to, per_channel=True)


def shared() -> Any:
    """Return an encoder whose blocks are one module, and so their layers too."""
    config = transformers.AlbertConfig(
        vocab_size=50,
        embedding_size=8,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=32,
    )
    return convert(transformers.AlbertModel(config), {"input_ids": tokens()})


def classifier() -> Any:
    """Return a head that makes its base model by AutoModel."""
    model = llama("LlamaForSequenceClassification", num_labels=3)
    return convert(model, {"input_ids": tokens()})


def half() -> Any:
    return witnessed(gpt2()).bfloat16()


def images() -> Tensor:
    return torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))


CASES: dict[str, tuple[Callable[[], Any], str]] = {
    "encoder, DyT": (lambda: bert(to="dyt"), "AutoModel"),
    "encoder with a head, Derf": (lambda: bert("BertForMaskedLM", "derf"), "AutoModelForMaskedLM"),
    "decoder with witnesses": (lambda: witnessed(gpt2()), "AutoModelForCausalLM"),
    "decoder in bfloat16": (half, "AutoModelForCausalLM"),
    "decoder with many witnesses": (with_many_witnesses, "AutoModelForCausalLM"),
    "folded decoder": (folded, "AutoModelForCausalLM"),
    "decoder without norms": (linear_folded, "AutoModelForCausalLM"),
    "decoder that classifies": (classifier, "AutoModelForSequenceClassification"),
    "encoder of images": (vision, "AutoModel"),
    "encoder with shared layers": (shared, "AutoModel"),
}
# Loads every folder, without dynorm, and prints its largest relative error and its class.
SCRIPT = """
import json, sys
sys.modules["dynorm"] = None
from pathlib import Path
import torch, transformers
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
for folder in sorted(Path(sys.argv[1]).iterdir()):
    expected = torch.load(folder / "expected.pt")
    auto = getattr(transformers, expected["auto"])
    model, info = auto.from_pretrained(
        folder / "model", trust_remote_code=True, output_loading_info=True
    )
    with torch.no_grad():
        output = model(expected["input"])[0]
    error = (output - expected["output"]).abs().max() / expected["output"].abs().max()
    continued = True
    if expected["continued"] is not None:
        new = model.generate(expected["input"], max_new_tokens=4, do_sample=False, use_cache=True)
        continued = torch.equal(new, expected["continued"])
    leftovers = [key for keys in info.values() if keys for key in keys]
    print(json.dumps([folder.name, float(error), type(model).__name__, continued, str(leftovers)]))
    again = folder / "again"
    model.save_pretrained(again)
    other = auto.from_pretrained(again, trust_remote_code=True)
    with torch.no_grad():
        assert torch.equal(other(expected["input"])[0], output), folder.name
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """The error of each model in a process without dynorm, its class, and whether it writes on."""
    root = tmp_path_factory.mktemp("code")
    patch = pytest.MonkeyPatch()
    # transformers copies the code of a model to its cache.
    patch.setenv("HF_MODULES_CACHE", str(tmp_path_factory.mktemp("modules")))
    for name, (build, auto) in CASES.items():
        torch.manual_seed(0)
        model = build().eval()
        folder = root / name
        folder.mkdir()
        save(model, folder / "model", remote_code=True)
        example = images() if "images" in name else tokens()
        continued = None
        if auto == "AutoModelForCausalLM":
            continued = model.generate(example, max_new_tokens=4, do_sample=False)
        with torch.no_grad():
            output = model(example)[0]
        expected = {"auto": auto, "input": example, "output": output, "continued": continued}
        torch.save(expected, folder / "expected.pt")
    run = fresh(SCRIPT, root, check=False)
    patch.undo()
    assert run.returncode == 0, run.stderr
    values = [json.loads(line) for line in run.stdout.splitlines()]
    return {name: rest for name, *rest in values}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_model_computes_the_same_without_dynorm(name: str, results: dict[str, Any]) -> None:
    error, kind, continued, leftovers = results[name]
    # The kernels and the plain definition round differently. In bfloat16 that is one digit.
    assert error < (2e-2 if "bfloat16" in name else 1e-5)
    assert kind.startswith("Dynorm")
    assert continued
    assert leftovers == "[]"


def filled(layer: nn.Module) -> nn.Module:
    """Give every parameter of a layer other values than its defaults."""
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.rand_like(parameter))
    return layer


OPTIONS: list[dict[str, Any]] = [
    {},
    {"per_channel": True, "center": True},
    {"witnesses": (3, 0), "center": True},
    {"witnesses": (3, 0), "per_channel": True, "dim": 1},
    {"normalized_shape": (2, 3), "dim": (-2, -1), "witnesses": (5,), "per_channel": True},
    {"elementwise_affine": False, "scale": -2.0},
    {"bias": False, "weight_offset": 1.0, "output_dtype": "input+weight"},
    {"output_dtype": "float32"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("kind", [dynorm.DyISRU, dynorm.DyT, dynorm.Derf, dynorm.LinearControl])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_layers_in_the_file_are_those_of_dynorm(
    kind: Any, options: dict[str, Any], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    options = dict(options)
    shape = options.pop("normalized_shape", (6,))
    layer = filled(kind(shape, **options))
    code: Any = modeling_dynorm.LAYERS[LAYER_NAMES[kind]](**layer.config())
    state = layer.state_dict()
    state.pop("witnesses", None)
    code.load_state_dict(state)
    if dtype == torch.float64:
        layer, code = layer.double(), code.double()
    x = 3 * torch.randn(2, 6, 2, 3)
    x = x if options.get("dim") == 1 else x.reshape(2, 6, *([6] if len(shape) == 1 else shape))
    x = x.to(dtype).requires_grad_()
    expected = layer(x)
    y = code(x)
    assert y.dtype == expected.dtype
    assert y.shape == expected.shape
    tolerance = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 1e-2}[dtype]
    torch.testing.assert_close(y, expected, rtol=tolerance, atol=tolerance)
    if dtype == torch.float64:
        inputs = (x, *layer.parameters())
        gradients = torch.autograd.grad(expected.sin().sum(), inputs)
        others = torch.autograd.grad(y.sin().sum(), (x, *code.parameters()))
        for one, other in zip(gradients, others, strict=True):
            torch.testing.assert_close(other, one, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("function", ["dyisru", "dyt", "derf", "linear"])
def test_huge_inputs_give_numbers(function: str) -> None:
    config = {"dyt": {"alpha_init": 0.5}, "derf": {"alpha_init": 0.5, "shift_init": 0.0}}
    options = config.get(function, {"beta_init": None})
    code = modeling_dynorm.LAYERS[function](
        normalized_shape=[4],
        elementwise_affine=True,
        bias=True,
        per_channel=False,
        center=False,
        scale=1.0,
        witnesses=[0],
        **options,
    )
    x = torch.tensor([1.0, math.inf, -1e30, 0.0])
    assert code(x).isfinite().all()


@pytest.mark.parametrize("kind", [dynorm.DyISRU, dynorm.DyT, dynorm.Derf, dynorm.LinearControl])
@pytest.mark.parametrize("count", [1, 5, 16, 17, 40])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_any_number_of_infinite_witnesses_gives_what_dynorm_gives(
    kind: Any, count: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    layer = filled(kind(40, witnesses=tuple(range(39, 39 - count, -1))))
    code: Any = modeling_dynorm.LAYERS[LAYER_NAMES[kind]](**layer.config())
    state = layer.state_dict()
    state.pop("witnesses", None)
    code.load_state_dict(state)
    layer, code = layer.to(dtype), code.to(dtype)
    x = torch.randn(4, 40, dtype=dtype)
    x[0, 40 - count :] = math.inf
    x[1, 40 - count :: 2] = -math.inf
    x[2, 39], x[2, 0] = 1e18, 1e12
    if dtype == torch.float64:
        x[3, 39], x[3, 0] = 1e150, 1e140
    torch.testing.assert_close(code(x), layer(x), rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize("options", [{}, {"bias": True}, {"dim": 1}], ids=str)
def test_the_rmsnorm_in_the_file_is_that_of_dynorm(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    layer = filled(RMSNorm(6, **options))
    code: Any = modeling_dynorm.LAYERS["rmsnorm"](**layer.config())
    code.load_state_dict(layer.state_dict())
    x = torch.randn(2, 6, 6)
    torch.testing.assert_close(code(x), layer(x), rtol=1e-6, atol=1e-6)


def test_every_layer_that_can_be_saved_is_in_the_file() -> None:
    names = {name for name in LAYER_NAMES.values() if not name.startswith("annealed")}
    assert names == modeling_dynorm.LAYERS.keys()
    # Programs replace classes with such a name.
    for kind in modeling_dynorm.LAYERS.values():
        assert not kind.__name__.endswith(("RMSNorm", "LayerNorm"))


def test_the_file_adds_as_many_witnesses_one_by_one_as_the_definition() -> None:
    assert modeling_dynorm.MOST_CHOSEN == MOST_CHOSEN


def test_the_folder_does_not_load_as_a_model_with_norms(tmp_path: Path) -> None:
    save(gpt2(), tmp_path / "m", remote_code=True)
    with pytest.raises(ValueError, match="pass trust_remote_code=True"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    with pytest.raises(ValueError, match="pass trust_remote_code=True"):
        transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "m")
    with pytest.raises(StorageError, match="pass trust_remote_code=True"):
        dynorm.load(tmp_path / "m")


def test_the_file_and_the_config_name_the_classes(tmp_path: Path) -> None:
    save(gpt2(), tmp_path / "m", remote_code=True)
    source = (tmp_path / "m" / "modeling_dynorm.py").read_text()
    compile(source, "modeling_dynorm.py", "exec")
    assert "import dynorm" not in source
    assert "from dynorm" not in source
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    assert config["architectures"] == ["DynormGPT2LMHeadModel"]
    assert config["auto_map"]["AutoModel"] == "modeling_dynorm.DynormGPT2Model"
    assert "quantization_config" not in config
    # Written over by a model that needs no code, the folder has none.
    save(gpt2(), tmp_path / "m", overwrite=True)
    assert not (tmp_path / "m" / "modeling_dynorm.py").exists()
    assert dynorm_layers(dynorm.load(tmp_path / "m"))


def annealed() -> Any:
    model = transformers.GPT2LMHeadModel(gpt2().config)
    dynorm.convert_(model, dynorm.find_norms(model, tokens()), to="annealed")
    return model


def of_two_dtypes() -> Any:
    model = gpt2()
    model.lm_head.bfloat16()
    return model


class OwnModel(transformers.GPT2LMHeadModel):
    pass


def of_another_class() -> Any:
    model = gpt2()
    model.__class__ = OwnModel
    return model


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (converted, "one of transformers'"),
        (annealed, "call dynorm.finalize_ first"),
        (of_two_dtypes, "one dtype"),
        (of_another_class, "class.*transformers'"),
    ],
)
def test_models_that_cannot_be_saved_with_code(
    build: Callable[[], Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=words):
        save(build(), tmp_path / "m", remote_code=True)
    assert not (tmp_path / "m").exists()
