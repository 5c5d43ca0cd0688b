"""Plain folders: all values come back bit for bit, also in a new process, or an error names the culprit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import dynorm
from dynorm.errors import ArgumentError, DynormError, ModelError, StorageError
from dynorm.hub import contents, load, save
from dynorm.replace.converted import dynorm_layers
from tests.hub.folders import (
    Damages,
    cut,
    edit_config,
    edit_weights,
    flip,
    fresh,
    garbage,
    replace_text,
)
from tests.hub.models import WITNESSES, OwnLayer, build, convert, converted, same_state, witnessed

KINDS = ("dyisru", "dyt", "derf", "linear")


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("to", KINDS)
def test_every_layer_comes_back_bit_for_bit(tmp_path: Path, to: str, per_channel: bool) -> None:
    model, x = converted(to, per_channel=per_channel), torch.randn(5, 8)
    save(model, tmp_path / "m")
    given = build()
    loaded = load(tmp_path / "m", given)
    assert loaded is given
    assert not loaded.training
    assert type(loaded[1]) is type(model[1])
    assert same_state(loaded, model)
    assert torch.equal(loaded(x), model(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes_are_those_that_were_saved(tmp_path: Path, dtype: torch.dtype) -> None:
    model = converted().to(dtype)
    model[1].float()
    save(model, tmp_path / "m")
    loaded = load(tmp_path / "m", build())
    assert loaded[0].weight.dtype == dtype
    assert loaded[1].log_beta.dtype == torch.float32
    assert same_state(loaded, model)


def test_a_fresh_process_gives_the_same_outputs(tmp_path: Path) -> None:
    def encoder() -> nn.TransformerEncoder:
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        return nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(8), enable_nested_tensor=True)

    x, padding = (
        torch.randn(3, 6, 8),
        torch.tensor([[False] * 6, [False] * 4 + [True] * 2, [False] * 2 + [True] * 4]),
    )
    model = convert(encoder(), {"src": x, "src_key_padding_mask": padding})
    save(model, tmp_path / "encoder")
    save(converted(), tmp_path / "sequential")
    save_file({"x": x, "padding": padding}, tmp_path / "inputs.safetensors")
    script = """
import sys, torch
from pathlib import Path
from safetensors.torch import load_file, save_file
from torch import nn
from dynorm.hub import load
folder = Path(sys.argv[1])
# A product of matrices may be rounded otherwise at the addresses that a mapped file has.
given = {name: tensor.clone() for name, tensor in load_file(folder / "inputs.safetensors").items()}
layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
encoder = load(folder / "encoder", nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(8), enable_nested_tensor=True))
sequential = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.RMSNorm(8))
with torch.no_grad():
    outputs = {
        "encoder": encoder(given["x"], src_key_padding_mask=given["padding"]),
        "sequential": load(folder / "sequential", sequential)(given["x"]),
    }
save_file(outputs, folder / "outputs.safetensors")
"""
    fresh(script, tmp_path)
    outputs = load_file(tmp_path / "outputs.safetensors")
    with torch.no_grad():
        assert torch.equal(outputs["encoder"], model(x, src_key_padding_mask=padding))
        assert torch.equal(outputs["sequential"], load(tmp_path / "sequential", build())(x))


class Tied(nn.Module):
    """A norm in two places, and two weights that may be tied."""

    def __init__(self, *, tied: bool = True) -> None:
        super().__init__()
        norm = nn.LayerNorm(8)
        self.first, self.second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.norms = nn.ModuleList([norm, norm if tied else nn.LayerNorm(8)])
        if tied:
            self.second.weight = self.first.weight
        self.register_buffer("offset", torch.ones(8), persistent=False)

    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = self.norms[1](self.second(self.norms[0](self.first(input)))) + self.offset
        return output


@pytest.mark.parametrize("tied", [True, False])
def test_sharing_stays(tmp_path: Path, tied: bool) -> None:
    model, x = convert(Tied(), torch.randn(64, 8)), torch.randn(3, 8)
    save(model, tmp_path / "m")
    assert len(load_file(tmp_path / "m" / "model.safetensors")) == 5
    loaded = load(tmp_path / "m", Tied(tied=tied))
    assert loaded.norms[0] is loaded.norms[1]
    assert loaded.first.weight is loaded.second.weight
    assert torch.equal(loaded(x), model(x))


def test_what_is_not_shared_does_not_load_into_what_is(tmp_path: Path) -> None:
    save(convert(Tied(tied=False), torch.randn(64, 8)), tmp_path / "m")
    given = Tied()
    with pytest.raises(ModelError, match=r"'first\.weight'.*'second\.weight'.*two"):
        load(tmp_path / "m", given)
    assert not dynorm_layers(given)


def test_views_are_saved_by_value(tmp_path: Path) -> None:
    model, whole = converted(), torch.arange(32.0)
    model.register_buffer("part", whole[8:16])
    model.register_buffer("turned", whole.reshape(4, 8).T)
    model.register_buffer("flat", whole)
    model.register_buffer("shaped", whole.reshape(4, 8))
    model.register_buffer("empty", torch.empty(0))
    save(model, tmp_path / "m")
    given = build()
    for name, buffer in model.named_buffers():
        given.register_buffer(name, torch.zeros_like(buffer))
    assert same_state(load(tmp_path / "m", given), model)


def test_meta_tensors_are_filled(tmp_path: Path) -> None:
    model, x = converted(), torch.randn(3, 8)
    save(model, tmp_path / "m")
    with torch.device("meta"):
        given = build()
    assert torch.equal(load(tmp_path / "m", given)(x), model(x))


def test_a_buffer_on_meta_that_no_checkpoint_holds_is_an_error(tmp_path: Path) -> None:
    save(convert(Tied(), torch.randn(64, 8)), tmp_path / "m")
    with torch.device("meta"):
        given = Tied()
    with pytest.raises(ModelError, match=r"buffer 'offset'.*values"):
        load(tmp_path / "m", given)


def test_parameters_are_trained_as_those_of_the_given_model(tmp_path: Path) -> None:
    save(converted(), tmp_path / "m")
    given = build()
    given[0].requires_grad_(False)
    given[1].requires_grad_(False)
    weight = given[0].weight
    loaded = load(tmp_path / "m", given)
    flags = {name: parameter.requires_grad for name, parameter in loaded.named_parameters()}
    assert {name for name, trained in flags.items() if not trained} == {
        n for n in flags if n.startswith(("0.", "1."))
    }
    # An optimizer that holds the parameter goes on working.
    assert loaded[0].weight is weight


def test_saving_does_not_change_the_model(tmp_path: Path) -> None:
    model = converted().train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    save(model, tmp_path / "m")
    assert model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    dynorm.restore_(model)


class Stateful(nn.Linear):
    def get_extra_state(self) -> object:
        return {"anything": 1}


@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        (lambda: build(), ModelError, "has none: call dynorm.convert_"),
        (lambda: "a model", ArgumentError, r"must be a torch\.nn\.Module"),
        (lambda: dynorm.DyISRU(8), ModelError, "is one itself"),
        (lambda: nn.Sequential(OwnLayer(8)), ModelError, "'0'.*dynorm's.*OwnLayer"),
        (
            lambda: nn.Sequential(dynorm.DyISRU(8), Stateful(8, 8)),
            ModelError,
            r"'1\._extra_state' is a dict",
        ),
        (lambda: nn.Sequential(dynorm.DyISRU(8, device="meta")), ModelError, "meta device"),
    ],
)
def test_models_that_cannot_be_saved(
    tmp_path: Path, model: Callable[[], nn.Module], error: type[DynormError], message: str
) -> None:
    with pytest.raises(error, match=message):
        save(model(), tmp_path / "m")
    assert list(tmp_path.iterdir()) == []


def repeat_layer(folder: Path) -> None:
    layers = json.loads((folder / "dynorm.json").read_text())["layers"]
    edit_config(folder, layers=layers[:1] * 40_000)


PLAIN_DAMAGES: Damages = {
    "directory": (shutil.rmtree, "must be.*directory"),
    "empty": (
        lambda d: [p.unlink() for p in d.iterdir()],
        "has neither dynorm.json nor config.json",
    ),
    "no json": (lambda d: (d / "dynorm.json").write_text("{"), "dynorm.json must be JSON"),
    "binary": (
        lambda d: (d / "dynorm.json").write_bytes(b"\xff\xfe\x00"),
        "dynorm.json must be JSON",
    ),
    "no object": (lambda d: (d / "dynorm.json").write_text("[]"), "hold.*object"),
    "a folder": (
        lambda d: [(d / "dynorm.json").unlink(), (d / "dynorm.json").mkdir()],
        "must be readable",
    ),
    "version": (
        lambda d: edit_config(d, format_version=99),
        "1, got 99, written",
    ),
    "no version": (lambda d: edit_config(d, format_version=None), "1, got None"),
    "no class": (
        lambda d: edit_config(d, model_class=None),
        "model_class .* must be 'module:class'",
    ),
    "no layers": (lambda d: edit_config(d, layers=[]), "layers.*entry"),
    "layers": (lambda d: edit_config(d, layers={"a": 1}), "layers.*list"),
    "layer": (lambda d: edit_config(d, layers__0=7), "layer 0.*paths"),
    "kind": (lambda d: edit_config(d, layers__1__layer="relu"), "layer 1: .* got 'relu'"),
    "config": (
        lambda d: edit_config(d, layers__1__config__unheard=1),
        "layer 1.*built",
    ),
    "config value": (
        lambda d: edit_config(d, layers__1__config__normalized_shape="a"),
        "layer 1: normalized_shape",
    ),
    "config size": (
        lambda d: edit_config(d, layers__1__config__normalized_shape=[2**70]),
        "layer 1: ",
    ),
    "huge": (
        lambda d: edit_config(d, layers__1__config__normalized_shape=[2**40]),
        "layer 1: .* 268,435,456 parameters",
    ),
    "repeated": (repeat_layer, "layer 1.*1.*too"),
    "nested": (
        lambda d: (d / "dynorm.json").write_text("[" * 200_000),
        "dynorm.json.*JSON.*max",
    ),
    "center": (
        lambda d: replace_text(d, "dynorm.json", '"center": true', '"center": false'),
        "was changed since",
    ),
    "scale": (
        lambda d: replace_text(d, "dynorm.json", '"scale": 2', '"scale": 3'),
        "was changed since",
    ),
    "integers": (
        lambda d: edit_weights(
            d, lambda w: w.update({"1.center": torch.ones(1, dtype=torch.int64)})
        ),
        r"'1\.center'.*dtype.*torch\.float32, got torch\.int64",
    ),
    "no path": (lambda d: edit_config(d, layers__0__paths=[]), "layer 0.*path"),
    "weights": (lambda d: (d / "model.safetensors").unlink(), "model.safetensors"),
    "no sum": (lambda d: edit_config(d, weights__sha256=None), "size.*sha256"),
    "cut": (cut, "it is truncated"),
    "flipped": (flip, "changed since"),
    "garbage": (garbage, "readable safetensors"),
    "missing": (lambda d: edit_weights(d, lambda w: w.pop("1.log_beta")), "but lacks 1.log_beta"),
    "unexpected": (
        lambda d: edit_weights(d, lambda w: w.update(extra=torch.ones(1))),
        "beyond them extra",
    ),
    "shape": (
        lambda d: edit_weights(d, lambda w: w.update({"1.center": torch.ones(3)})),
        r"'1\.center' .* shape \(1,\), got \(3,\)",
    ),
    "aliases": (lambda d: edit_config(d, aliases=[]), "aliases.*object"),
    "alias name": (lambda d: edit_config(d, aliases={"a": []}), "'a'.*share.*tensor"),
    "alias": (
        lambda d: edit_config(d, aliases={"a": "b"}),
        "'a'.*share.*tensor.*'b'",
    ),
}


def assert_refused(folder: Path, act: Callable[[Path], object], message: str) -> None:
    act(folder)
    given = build()
    before = {name: tensor.clone() for name, tensor in given.state_dict().items()}
    with pytest.raises(StorageError, match=message):
        load(folder, given)
    assert not dynorm_layers(given)
    assert list(given.state_dict()) == list(before)
    assert all(torch.equal(tensor, before[name]) for name, tensor in given.state_dict().items())


@pytest.mark.parametrize("damage", PLAIN_DAMAGES)
def test_damaged_directories_say_what_is_wrong(tmp_path: Path, damage: str) -> None:
    save(converted(), tmp_path / "m")
    assert_refused(tmp_path / "m", *PLAIN_DAMAGES[damage])


NOT_ITS_OWN = (
    r"1\.witnesses' in .*safetensors must be the channels that dynorm\.json names, \[3, 0\], got "
)


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("to", [*KINDS, "annealed", "annealed_dyt"])
def test_witnesses_come_back(tmp_path: Path, to: str, per_channel: bool) -> None:
    model, x = witnessed(converted(to, per_channel=per_channel)), torch.randn(5, 8)
    dynorm.set_anneal_(model, 0.75) if to.startswith("annealed") else None
    save(model, tmp_path / "m")
    for given in (build(), build().to("meta")):
        loaded = load(tmp_path / "m", given)
        assert same_state(loaded, model)
        assert loaded[1].witness_channels == model[1].witness_channels
        assert torch.equal(loaded(x), model(x))


def test_chosen_witnesses_come_back(tmp_path: Path) -> None:
    """Other channels in each layer, or none."""
    x = torch.randn(256, 8) * (1 + 30 * (torch.arange(256)[:, None] % 3 == 0))
    model = build()
    with torch.no_grad():
        model[0].weight[5] *= 100
    convert(model, x, witnesses=2)
    assert 5 in model[1].witness_channels
    save(model, tmp_path / "m")
    loaded = load(tmp_path / "m", build())
    assert [loaded[i].witness_channels for i in (1, 3)] == [
        model[i].witness_channels for i in (1, 3)
    ]
    assert same_state(loaded, model)
    assert torch.equal(loaded(x), model(x))


WITNESS_DAMAGES: Damages = {
    "out of range": (
        lambda d: edit_config(d, layers__0__config__witnesses=[3, 8]),
        "layer 0.*8.*range",
    ),
    "twice": (
        lambda d: edit_config(d, layers__0__config__witnesses=[3, 3]),
        "layer 0: .* named twice",
    ),
    "a word": (
        lambda d: edit_config(d, layers__0__config__witnesses="all"),
        "layer 0: .* integers, got 'all'",
    ),
    "a share": (
        lambda d: edit_config(d, layers__0__config__witnesses=[0.5]),
        "layer 0: .* integers",
    ),
    "too many": (
        lambda d: edit_config(d, layers__0__config__witnesses=9),
        "layer 0.*8 channels",
    ),
    "others": (
        lambda d: edit_config(d, layers__0__config__witnesses=[3, 1]),
        r"names, \[3, 1\], got \[3, 0\]",
    ),
    "order": (
        lambda d: edit_config(d, layers__0__config__witnesses=[0, 3]),
        r"names, \[0, 3\], got \[3, 0\]",
    ),
    "fewer": (
        lambda d: edit_config(d, layers__0__config__witnesses=[3]),
        r"shape \(1,\), got \(2,\)",
    ),
    "none": (
        lambda d: edit_config(d, layers__0__config__witnesses=[]),
        "beyond them 1.log_gain, 1.witnesses",
    ),
    "not named": (
        lambda d: edit_config(d, layers__0__config__witnesses=None),
        "beyond them 1.log_gain, 1.witnesses",
    ),
    "no buffer": (
        lambda d: edit_weights(d, lambda w: w.pop("1.witnesses")),
        "but lacks 1.witnesses",
    ),
    "no gain": (lambda d: edit_weights(d, lambda w: w.pop("1.log_gain")), "but lacks 1.log_gain"),
    "buffer out of range": (
        lambda d: edit_weights(d, lambda w: w.update({"1.witnesses": torch.tensor([3, 99])})),
        NOT_ITS_OWN + r"\[3, 99\]",
    ),
    "buffer twice": (
        lambda d: edit_weights(d, lambda w: w.update({"1.witnesses": torch.tensor([3, 3])})),
        NOT_ITS_OWN + r"\[3, 3\]",
    ),
    "buffer of floats": (
        lambda d: edit_weights(d, lambda w: w.update({"1.witnesses": torch.tensor([3.0, 0.0])})),
        NOT_ITS_OWN + r"\[3.0, 0.0\]",
    ),
}


@pytest.mark.parametrize("damage", WITNESS_DAMAGES)
def test_witnesses_that_do_not_fit_are_refused(tmp_path: Path, damage: str) -> None:
    save(witnessed(converted()), tmp_path / "m")
    assert load(tmp_path / "m", build())[1].witness_channels == WITNESSES
    assert_refused(tmp_path / "m", *WITNESS_DAMAGES[damage])


def test_a_path_that_is_not_there_is_named(tmp_path: Path) -> None:
    save(converted(), tmp_path / "m")
    edit_config(tmp_path / "m", layers__1__paths=["3.norm"])
    given = build()
    with pytest.raises(ModelError, match=r"a norm at '3\.norm'"):
        load(tmp_path / "m", given)
    assert not dynorm_layers(given)


def test_the_model_must_be_given_and_of_the_same_class(tmp_path: Path) -> None:
    save(converted(), tmp_path / "m")
    with pytest.raises(ArgumentError, match=r"build a torch\.nn\.modules\.container\.Sequential"):
        load(tmp_path / "m")
    with pytest.raises(ArgumentError, match=r"must be a torch\.nn\.Module"):
        load(tmp_path / "m", "a model")  # type: ignore[arg-type]
    with pytest.raises(
        ModelError, match=r"container\.Sequential, got a torch\.nn\.modules\.linear\.Linear"
    ):
        load(tmp_path / "m", nn.Linear(8, 8))
    edit_config(tmp_path / "m", model_class="__main__:Sequential")
    load(tmp_path / "m", build())


def test_many_layers_of_one_kind_are_built_once(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[str] = []
    build_one = contents.LayerSpec.build

    def counted(self: contents.LayerSpec, *arguments: Any) -> Any:
        built.extend(self.paths)
        return build_one(self, *arguments)

    monkeypatch.setattr(contents.LayerSpec, "build", counted)
    entries = [
        {"layer": "dyt", "paths": [str(i)], "config": {"normalized_shape": [8 + i % 2]}}
        for i in range(20)
    ]
    assert len(contents.read_layers(entries, "here")) == 20
    assert built == ["0", "1"]
    monkeypatch.setattr(contents, "_MOST_ELEMENTS", 200)
    with pytest.raises(StorageError, match="200 parameters"):
        contents.read_layers(entries, "here")
