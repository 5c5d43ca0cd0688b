"""Saving and loading: what is written comes back bit for bit, in a fresh process too, or an error names the culprit."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import dynorm
from dynorm import files
from dynorm.errors import ArgumentError, DynormError, ModelError, StorageError
from dynorm.files import replaced_directory
from dynorm.hub import contents, load, plain, save
from dynorm.hub.after_import import AfterImport, after_import
from dynorm.replace.specs import dynorm_layers

KINDS = ("dyisru", "dyt", "derf", "linear")
WITNESSES = (3, 0)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def build() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.RMSNorm(8))


def convert(model: nn.Module, batch: Any, to: str = "dyisru", **options: Any) -> nn.Module:
    model.eval()
    example = batch if isinstance(batch, dict) else {"input": batch}
    dynorm.convert_(model, dynorm.find_norms(model, **example), to=to, **options)
    dynorm.calibrate_(model, [batch])
    return model


def converted(to: str = "dyisru", **options: Any) -> nn.Module:
    return convert(build(), torch.randn(64, 8), to, **options)


def witnessed(model: nn.Module) -> nn.Module:
    """Name the same witnesses in every layer: calibration leaves out those that tell nothing."""
    for layer in dynorm_layers(model).values():
        layer.set_witnesses_(WITNESSES, (0.5, 2.0))
    return model


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("."))


def same_state(one: nn.Module, other: nn.Module) -> bool:
    a, b = one.state_dict(), other.state_dict()
    return list(a) == list(b) and all(a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a)


def fresh(script: str, *arguments: object, check: bool = True) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-c", script, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=check)


# Plain torch


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

    x, padding = torch.randn(3, 6, 8), torch.tensor([[False] * 6, [False] * 4 + [True] * 2, [False] * 2 + [True] * 4])
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
    with pytest.raises(ModelError, match=r"'first\.weight' and 'second\.weight' must be two tensors"):
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
    with pytest.raises(ModelError, match="the buffer 'offset' must hold values"):
        load(tmp_path / "m", given)


def test_parameters_are_trained_as_those_of_the_given_model(tmp_path: Path) -> None:
    save(converted(), tmp_path / "m")
    given = build()
    given[0].requires_grad_(False)
    given[1].requires_grad_(False)
    weight = given[0].weight
    loaded = load(tmp_path / "m", given)
    flags = {name: parameter.requires_grad for name, parameter in loaded.named_parameters()}
    assert {name for name, trained in flags.items() if not trained} == {n for n in flags if n.startswith(("0.", "1."))}
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


class OwnLayer(dynorm.DyISRU):
    pass


@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        (lambda: build(), ModelError, "has none: call dynorm.convert_"),
        (lambda: "a model", ArgumentError, r"must be a torch\.nn\.Module"),
        (lambda: dynorm.DyISRU(8), ModelError, "is one itself"),
        (lambda: nn.Sequential(OwnLayer(8)), ModelError, "'0' must be one of dynorm's .* OwnLayer"),
        (lambda: nn.Sequential(dynorm.DyISRU(8), Stateful(8, 8)), ModelError, r"'1\._extra_state' is a dict"),
        (lambda: nn.Sequential(dynorm.DyISRU(8, device="meta")), ModelError, "meta device"),
    ],
)
def test_models_that_cannot_be_saved(
    tmp_path: Path, model: Callable[[], nn.Module], error: type[DynormError], message: str
) -> None:
    with pytest.raises(error, match=message):
        save(model(), tmp_path / "m")
    assert list(tmp_path.iterdir()) == []


def edit_config(folder: Path, **values: object) -> None:
    """Change the file, and take its own checksums out, as where someone meant it."""
    path = folder / ("dynorm.json" if (folder / "dynorm.json").exists() else "config.json")
    config = json.loads(path.read_text())
    sealed = config.get("quantization_config", config)
    for key in ("sha256", "layers_sha256"):
        sealed.pop(key, None)
    for key, value in values.items():
        holder = config
        *parents, last = key.split("__")
        for parent in parents:
            holder = holder[int(parent) if parent.isdigit() else parent]
        last = int(last) if last.isdigit() else last
        if value is None:
            del holder[last]
        else:
            holder[last] = value
    path.write_text(json.dumps(config))


def edit_weights(folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    if (folder / "dynorm.json").exists():
        edit_config(folder, weights=contents.weights_entry(folder / "model.safetensors"))
    else:
        edit_config(folder, quantization_config__weights=None)


def replace_text(folder: Path, name: str, old: str, new: str) -> None:
    """Change a file as damage does, its checksums left as they were."""
    text = (folder / name).read_text()
    assert old in text
    (folder / name).write_text(text.replace(old, new, 1))


def repeat_layer(folder: Path) -> None:
    layers = json.loads((folder / "dynorm.json").read_text())["layers"]
    edit_config(folder, layers=layers[:1] * 40_000)


def cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])


def flip(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")


def garbage(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(b"no tensors here")
    if (folder / "dynorm.json").exists():
        edit_config(folder, weights=contents.weights_entry(path))


PLAIN_DAMAGES = {
    "directory": (shutil.rmtree, "must be a directory"),
    "empty": (lambda d: [p.unlink() for p in d.iterdir()], "has neither dynorm.json nor config.json"),
    "no json": (lambda d: (d / "dynorm.json").write_text("{"), "dynorm.json must be JSON"),
    "binary": (lambda d: (d / "dynorm.json").write_bytes(b"\xff\xfe\x00"), "dynorm.json must be JSON"),
    "no object": (lambda d: (d / "dynorm.json").write_text("[]"), "must hold a JSON object"),
    "a folder": (lambda d: [(d / "dynorm.json").unlink(), (d / "dynorm.json").mkdir()], "must be readable"),
    "version": (lambda d: edit_config(d, format_version=99), "must be 1, got 99, written by dynorm"),
    "no version": (lambda d: edit_config(d, format_version=None), "must be 1, got None"),
    "no class": (lambda d: edit_config(d, model_class=None), "model_class .* must be 'module:class'"),
    "no layers": (lambda d: edit_config(d, layers=[]), "at least one entry"),
    "layers": (lambda d: edit_config(d, layers={"a": 1}), "must be a list"),
    "layer": (lambda d: edit_config(d, layers__0=7), "layer 0: .* list of paths"),
    "kind": (lambda d: edit_config(d, layers__1__layer="relu"), "layer 1: .* got 'relu'"),
    "config": (lambda d: edit_config(d, layers__1__config__unheard=1), "layer 1: .* cannot be built"),
    "config value": (lambda d: edit_config(d, layers__1__config__normalized_shape="a"), "layer 1: normalized_shape"),
    "config size": (lambda d: edit_config(d, layers__1__config__normalized_shape=[2**70]), "layer 1: "),
    "huge": (
        lambda d: edit_config(d, layers__1__config__normalized_shape=[2**40]),
        "layer 1: .* 268,435,456 parameters",
    ),
    "repeated": (repeat_layer, "layer 1: .* but 1 stands in another entry too"),
    "nested": (
        lambda d: (d / "dynorm.json").write_text("[" * 200_000),
        "dynorm.json must be JSON, but max",
    ),
    "center": (lambda d: replace_text(d, "dynorm.json", '"center": true', '"center": false'), "was changed since"),
    "scale": (lambda d: replace_text(d, "dynorm.json", '"scale": 2', '"scale": 3'), "was changed since"),
    "integers": (
        lambda d: edit_weights(d, lambda w: w.update({"1.center": torch.ones(1, dtype=torch.int64)})),
        r"'1\.center' .* must be of a dtype like torch\.float32, got torch\.int64",
    ),
    "no path": (lambda d: edit_config(d, layers__0__paths=[]), "layer 0: .* at least one path"),
    "weights": (lambda d: (d / "model.safetensors").unlink(), "model.safetensors"),
    "no sum": (lambda d: edit_config(d, weights__sha256=None), "must have a size and a sha256"),
    "cut": (cut, "it is truncated"),
    "flipped": (flip, "it was changed since"),
    "garbage": (garbage, "must be a readable safetensors file"),
    "missing": (lambda d: edit_weights(d, lambda w: w.pop("1.log_beta")), "but lacks 1.log_beta"),
    "unexpected": (lambda d: edit_weights(d, lambda w: w.update(extra=torch.ones(1))), "beyond them extra"),
    "shape": (
        lambda d: edit_weights(d, lambda w: w.update({"1.center": torch.ones(3)})),
        r"'1\.center' .* shape \(1,\), got \(3,\)",
    ),
    "aliases": (lambda d: edit_config(d, aliases=[]), "aliases .* must be an object"),
    "alias name": (lambda d: edit_config(d, aliases={"a": []}), "'a' must share a tensor"),
    "alias": (lambda d: edit_config(d, aliases={"a": "b"}), "'a' must share a tensor .* 'b' is not there"),
}


@pytest.mark.parametrize("damage", PLAIN_DAMAGES)
def test_damaged_directories_say_what_is_wrong(tmp_path: Path, damage: str) -> None:
    save(converted(), tmp_path / "m")
    act, message = PLAIN_DAMAGES[damage]
    act(tmp_path / "m")  # type: ignore[no-untyped-call]
    given = build()
    before = {name: tensor.clone() for name, tensor in given.state_dict().items()}
    with pytest.raises(StorageError, match=message):
        load(tmp_path / "m", given)
    assert list(given.state_dict()) == list(before)
    assert all(torch.equal(tensor, before[name]) for name, tensor in given.state_dict().items())


# Witnesses

NOT_ITS_OWN = r"1\.witnesses' in .*safetensors must be the channels that dynorm\.json names, \[3, 0\], got "


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
    assert [loaded[i].witness_channels for i in (1, 3)] == [model[i].witness_channels for i in (1, 3)]
    assert same_state(loaded, model)
    assert torch.equal(loaded(x), model(x))


WITNESS_DAMAGES = {
    "out of range": (lambda d: edit_config(d, layers__0__config__witnesses=[3, 8]), "layer 0: .* 8 is out of range"),
    "twice": (lambda d: edit_config(d, layers__0__config__witnesses=[3, 3]), "layer 0: .* named twice"),
    "a word": (lambda d: edit_config(d, layers__0__config__witnesses="all"), "layer 0: .* integers, got 'all'"),
    "a share": (lambda d: edit_config(d, layers__0__config__witnesses=[0.5]), "layer 0: .* integers"),
    "too many": (lambda d: edit_config(d, layers__0__config__witnesses=9), "layer 0: .* from 0 to the 8 channels"),
    "others": (lambda d: edit_config(d, layers__0__config__witnesses=[3, 1]), r"names, \[3, 1\], got \[3, 0\]"),
    "order": (lambda d: edit_config(d, layers__0__config__witnesses=[0, 3]), r"names, \[0, 3\], got \[3, 0\]"),
    "fewer": (lambda d: edit_config(d, layers__0__config__witnesses=[3]), r"shape \(1,\), got \(2,\)"),
    "none": (lambda d: edit_config(d, layers__0__config__witnesses=[]), "beyond them 1.log_gain, 1.witnesses"),
    "not named": (lambda d: edit_config(d, layers__0__config__witnesses=None), "beyond them 1.log_gain, 1.witnesses"),
    "no buffer": (lambda d: edit_weights(d, lambda w: w.pop("1.witnesses")), "but lacks 1.witnesses"),
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
    act, message = WITNESS_DAMAGES[damage]
    act(tmp_path / "m")  # type: ignore[no-untyped-call]
    given = build()
    before = {name: tensor.clone() for name, tensor in given.state_dict().items()}
    with pytest.raises(StorageError, match=message):
        load(tmp_path / "m", given)
    assert not dynorm_layers(given)
    assert all(torch.equal(tensor, before[name]) for name, tensor in given.state_dict().items())


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
    with pytest.raises(ModelError, match=r"container\.Sequential, got a torch\.nn\.modules\.linear\.Linear"):
        load(tmp_path / "m", nn.Linear(8, 8))
    edit_config(tmp_path / "m", model_class="__main__:Sequential")
    load(tmp_path / "m", build())


# Atomicity


def test_an_existing_directory_is_replaced_only_when_told(tmp_path: Path) -> None:
    target = tmp_path / "m"
    save(converted("dyt"), target)
    with pytest.raises(StorageError, match=r"must not exist yet: .* overwrite=True"):
        save(converted(), target)
    assert isinstance(load(target, build())[1], dynorm.DyT)
    (target / "tokenizer.json").write_text("{}")
    (target / "1_Pooling").mkdir()
    (target / "1_Pooling" / "config.json").write_text("{}")
    (target / "model-00001-of-00002.safetensors").write_text("of an older save")
    save(converted(), target, overwrite=True)
    assert isinstance(load(target, build())[1], dynorm.DyISRU)
    names = {str(path.relative_to(target)) for path in target.rglob("*") if path.is_file()}
    assert names == {"dynorm.json", "model.safetensors", "tokenizer.json", "1_Pooling/config.json"}
    assert leftovers(tmp_path) == []


def test_no_other_file_stays_where_the_whole_model_is_written(tmp_path: Path) -> None:
    save(converted(), tmp_path / "m")
    (tmp_path / "m" / "tokenizer.json").write_text("of another model")
    with replaced_directory(tmp_path / "m", overwrite=True, keep_others=False) as new:
        (new / "config.json").write_text("{}")
    assert [path.name for path in (tmp_path / "m").iterdir()] == ["config.json"]


def test_many_layers_of_one_kind_are_built_once(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[str] = []
    build_one = contents.LayerSpec.build

    def counted(self: contents.LayerSpec, *arguments: Any) -> Any:
        built.extend(self.paths)
        return build_one(self, *arguments)

    monkeypatch.setattr(contents.LayerSpec, "build", counted)
    entries = [{"layer": "dyt", "paths": [str(i)], "config": {"normalized_shape": [8 + i % 2]}} for i in range(20)]
    assert len(contents.read_layers(entries, "here")) == 20
    assert built == ["0", "1"]
    monkeypatch.setattr(contents, "_MOST_ELEMENTS", 200)
    with pytest.raises(StorageError, match="may have 200 parameters together"):
        contents.read_layers(entries, "here")


def test_only_a_saved_model_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    save(converted(), tmp_path / "thesis", overwrite=True)
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "1.jpg").write_text("")
    with pytest.raises(StorageError, match="must be a saved model or empty"):
        save(converted(), tmp_path / "photos", overwrite=True)
    (tmp_path / "file").write_text("")
    for target, message in (("file", "is a file"), ("file/m", "the parent of"), ("nowhere/m", "the parent of")):
        with pytest.raises(StorageError, match=message):
            save(converted(), tmp_path / target, overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "photos", "thesis"]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    save(converted("dyt"), tmp_path / "v1")
    (tmp_path / "latest").symlink_to("v1")
    save(converted(), tmp_path / "latest", overwrite=True)
    assert (tmp_path / "latest").is_symlink()
    assert isinstance(load(tmp_path / "v1", build())[1], dynorm.DyISRU)


def test_files_may_be_read_by_whom_the_umask_says(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        save(converted(), tmp_path / "m")
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "m").iterdir()} == {0o640}


def full_disk(*arguments: object, **options: object) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("where", [(plain, "save_file"), (files, "_sync"), (Path, "mkdir")])
@pytest.mark.parametrize("exists", [True, False])
def test_a_full_disk_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: tuple[object, str], exists: bool
) -> None:
    model, target = converted(), tmp_path / "m"
    if exists:
        save(converted("dyt"), target)
    with monkeypatch.context() as patch:
        patch.setattr(*where, full_disk)
        with pytest.raises(StorageError, match="No space left on device"):
            save(model, target, overwrite=True)
    assert leftovers(tmp_path) == []
    assert target.exists() == exists
    if exists:
        assert isinstance(load(target, build())[1], dynorm.DyT)


@pytest.mark.parametrize("full", [False, True])
def test_other_files_are_copied_where_they_cannot_be_linked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: bool
) -> None:
    target = tmp_path / "m"
    save(converted("dyt"), target)
    (target / "notes").write_text("mine")
    with monkeypatch.context() as patch:
        patch.setattr(os, "link", full_disk)
        if full:
            patch.setattr(shutil, "copy2", full_disk)
            with pytest.raises(StorageError, match=r"the other files of .* No space left on device"):
                save(converted(), target, overwrite=True)
        else:
            save(converted(), target, overwrite=True)
    assert (target / "notes").read_text() == "mine"
    assert isinstance(load(target, build())[1], dynorm.DyT if full else dynorm.DyISRU)
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("fails", [False, True])
def test_two_renames_serve_where_directories_cannot_be_exchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    monkeypatch.setattr(sys, "platform", "another")
    target = tmp_path / "m"
    save(converted("dyt"), target)
    if not fails:
        save(converted(), target, overwrite=True)
    else:
        rename = Path.rename

        def second_fails(self: Path, to: Path) -> Path:
            return full_disk() if self.suffix == ".tmp" else rename(self, to)  # type: ignore[func-returns-value]

        monkeypatch.setattr(Path, "rename", second_fails)
        with pytest.raises(StorageError, match="No space left"):
            save(converted(), target, overwrite=True)
    assert isinstance(load(target, build())[1], dynorm.DyT if fails else dynorm.DyISRU)
    assert leftovers(tmp_path) == []


def test_an_interrupt_passes_through_and_cleans_up(tmp_path: Path) -> None:
    def interrupted() -> None:
        with replaced_directory(tmp_path / "m") as folder:
            (folder / "half").write_text("")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list(tmp_path.iterdir()) == []


KILLED = """
import os, shutil, signal, sys
from torch import nn
import dynorm
from dynorm import files
from dynorm.hub import plain, save

def die(*arguments, **options):
    os.kill(os.getpid(), signal.SIGKILL)

def half(tensors, path, metadata):
    path.write_bytes(b"half of the")
    die()

points = {
    "before": (plain, "save_file", die),
    "half-written": (plain, "save_file", half),
    "before the exchange": (files, "_exchange", die),
    "after the exchange": (shutil, "rmtree", die),
}
for point, (module, name, act) in points.items():
    child = os.fork()
    if not child:
        setattr(module, name, act)
        model = nn.Sequential(nn.Linear(8, 8), dynorm.DyISRU(8), nn.Linear(8, 8), dynorm.DyISRU(8))
        save(model, os.path.join(sys.argv[1], point), overwrite=True)
        os._exit(0)
    print(point, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), sep=":")
"""


def test_a_killed_save_leaves_a_whole_directory(tmp_path: Path) -> None:
    points = ("before", "half-written", "before the exchange", "after the exchange")
    model = converted("dyt")
    for point in points:
        save(model, tmp_path / point)
    # One process that has imported everything, of which four are forked.
    run = fresh(KILLED, tmp_path)
    assert run.stdout.split("\n")[:-1] == [f"{point}:{-signal.SIGKILL}" for point in points]
    for point in points[:3]:
        assert same_state(load(tmp_path / point, build()), model)
    whole = load(
        tmp_path / points[3], nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.LayerNorm(8))
    )
    assert isinstance(whole[1], dynorm.DyISRU)


# transformers

transformers = pytest.importorskip("transformers")


@pytest.fixture(autouse=True, scope="module")
def _quiet_transformers() -> Iterator[None]:
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    yield
    transformers.logging.set_verbosity(before)
    transformers.logging.enable_progress_bar()


def tokens() -> Tensor:
    return torch.randint(0, 50, (4, 7), generator=torch.Generator().manual_seed(1))


def bert(name: str = "BertModel", to: str = "dyisru") -> Any:
    config = transformers.BertConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=32,
    )
    return convert(getattr(transformers, name)(config), {"input_ids": tokens()}, to)


def gpt2() -> Any:
    config = transformers.GPT2Config(
        vocab_size=50, n_embd=16, n_layer=2, n_head=2, n_positions=32, bos_token_id=0, eos_token_id=0, pad_token_id=0
    )
    return convert(transformers.GPT2LMHeadModel(config), {"input_ids": tokens()})


def first(model: Any) -> Tensor:
    with torch.no_grad():
        output: Tensor = model(tokens())[0]
    return output


def test_loaded_tensors_lie_where_torch_would_put_them(tmp_path: Path) -> None:
    save(bert(), tmp_path / "m")
    model = transformers.AutoModel.from_pretrained(tmp_path / "m")
    assert {tensor.data_ptr() % 64 for tensor in (*model.parameters(), *model.buffers())} == {0}


def test_transformers_in_a_fresh_process(tmp_path: Path) -> None:
    models = {"bert": bert(), "gpt2": gpt2(), "bf16": bert(to="derf").to(torch.bfloat16), "fp16": bert(to="dyt").half()}
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
    headed = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "base", num_labels=3)
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
        with pytest.raises(StorageError, match=r"leaves norms at .*LayerNorm.* load without config="):
            cls.from_pretrained(tmp_path / "m", config=config)
    # Any other load is as before.
    transformers.BertModel(config).save_pretrained(tmp_path / "stock")
    loaded, info = transformers.BertModel.from_pretrained(tmp_path / "stock", output_loading_info=True)
    assert isinstance(loaded, transformers.BertModel)
    assert not info["unexpected_keys"]


def test_the_norm_of_a_head_goes_with_the_head(tmp_path: Path) -> None:
    model = bert("BertForMaskedLM")
    assert "cls.predictions.transform.LayerNorm" in dynorm_layers(model)
    save(model, tmp_path / "m")
    assert torch.equal(first(load(tmp_path / "m")), first(model))
    for name in ("BertForSequenceClassification", "BertForNextSentencePrediction", "BertForPreTraining"):
        other = getattr(transformers, name).from_pretrained(tmp_path / "m")
        assert torch.equal(first(other.bert), first(model.bert))
        assert len(dynorm_layers(other)) == len(dynorm_layers(model)) - (name != "BertForPreTraining")


def test_a_model_without_a_place_for_the_layers_is_an_error(tmp_path: Path) -> None:
    save(bert(), tmp_path / "m")
    config = transformers.GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=2, n_positions=32)
    quantization = json.loads((tmp_path / "m" / "config.json").read_text())["quantization_config"]
    config.quantization_config = quantization
    with pytest.raises(ModelError, match="have a place in GPT2Model"):
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
    model = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "m", device_map="cpu")
    assert not model.is_quantized
    assert all(parameter.requires_grad for parameter in model.parameters())
    for move in (lambda m: m.half(), lambda m: m.to(torch.bfloat16), lambda m: m.float(), lambda m: m.to("cpu")):
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
    assert {p.dtype for p in type(model).from_pretrained(tmp_path / "m", dtype="float16").parameters()} == {
        torch.float16
    }


def test_a_loaded_model_trains_and_its_checkpoints_load(tmp_path: Path) -> None:
    save(bert("BertForSequenceClassification"), tmp_path / "m")
    model = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "m")
    before = model.bert.embeddings.LayerNorm.log_beta.detach().clone()
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "out"), max_steps=1, save_steps=1, report_to=[], use_cpu=True, disable_tqdm=True
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
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(50)}, unk_token="w0"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", pad_token="w0")
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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, origin: str, to: str, change: Callable[[nn.Module], Any]
) -> None:
    # transformers treats the models of others with more care than its own.
    monkeypatch.setitem(sys.modules, origin, sys.modules[Tied.__module__])
    monkeypatch.setattr(Shared, "__module__", origin)
    model, x = change(convert(Shared(SharedConfig()), torch.randn(64, 8), to)), torch.randn(3, 8)
    save(model, tmp_path / "m")
    loaded = Shared.from_pretrained(tmp_path / "m")
    assert loaded.norms[0] is loaded.norms[1]
    assert type(loaded.norms[0]) is type(model.norms[0])
    assert torch.equal(loaded(x), model(x))
    assert same_state(loaded, model)
    with pytest.raises(ModelError, match=r"Shared is not: call Shared\.from_pretrained"):
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
        with pytest.raises(ModelError, match="converted or quantized, but is both"):
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
        with pytest.raises(StorageError, match="No space left on device"):
            save(bert(to="dyt"), tmp_path / "m", overwrite=overwrite)
    assert leftovers(tmp_path) == []
    assert (tmp_path / "m").exists() == overwrite
    if overwrite:
        assert torch.equal(first(load(tmp_path / "m")), first(model))


NORM = "encoder.layer.1.output.LayerNorm"
LAYER = "quantization_config__layers__0"
DAMAGES = {
    "no json": (lambda d: (d / "config.json").write_text("{"), "config.json must be JSON"),
    "no layers": (lambda d: edit_config(d, quantization_config=None), "must name dynorm's layers"),
    "other": (lambda d: edit_config(d, quantization_config__quant_method="awq"), "must name dynorm's layers"),
    "version": (lambda d: edit_config(d, quantization_config__format_version=7), "must be 1, got 7"),
    "layers": (lambda d: edit_config(d, quantization_config__layers=3), "must be a list"),
    "kind": (lambda d: edit_config(d, **{f"{LAYER}__layer": "relu"}), "layer 0: .* got 'relu'"),
    "outside": (lambda d: edit_config(d, **{f"{LAYER}__outside": 3}), "outside must be a list"),
    "dtype": (lambda d: edit_config(d, **{f"{LAYER}__dtypes": {"bias": "int9"}}), "dtypes name dtypes"),
    "no class": (lambda d: edit_config(d, architectures=None), "must name one class, got None"),
    "weights": (lambda d: (d / "model.safetensors").unlink(), "must hold model.safetensors, but does not"),
    "index": (
        lambda d: (d / "model.safetensors").rename(d / "a") and (d / "model.safetensors.index.json").write_text("{}"),
        "the weight_map in",
    ),
    "shard": (
        lambda d: (
            (d / "model.safetensors").rename(d / "a")
            and (d / "model.safetensors.index.json").write_text('{"weight_map": {"x": "model-1.safetensors"}}')
        ),
        "model-1.safetensors must be a whole",
    ),
    "cut": (cut, "model.safetensors must be a whole safetensors file"),
    "garbage": (garbage, "model.safetensors must be a whole safetensors file"),
    "missing": (lambda d: edit_weights(d, lambda w: w.pop(f"{NORM}.log_beta")), f"it lacks {NORM}.log_beta"),
    "missing other": (lambda d: edit_weights(d, lambda w: w.pop("pooler.dense.bias")), "lack pooler.dense.bias"),
    "unexpected": (lambda d: edit_weights(d, lambda w: w.update(extra=torch.ones(1))), "have beyond them extra"),
    "shape": (lambda d: edit_weights(d, lambda w: w.update({f"{NORM}.center": torch.ones(3)})), f"{NORM}.center"),
    "shape of other": (
        lambda d: edit_weights(d, lambda w: w.update({"pooler.dense.bias": torch.ones(3)})),
        "in another shape pooler.dense.bias",
    ),
    "value": (lambda d: edit_config(d, hidden_act="unheard-of"), "must hold a BertModel, but KeyError"),
    "flipped": (flip, "it was changed since"),
    "other value": (lambda d: replace_text(d, "config.json", '"gelu"', '"relu"'), "was changed since"),
    "center": (lambda d: replace_text(d, "config.json", '"center": true', '"center": false'), "were changed"),
    "path": (lambda d: replace_text(d, "config.json", '"embeddings.LayerNorm"', '"pooler"'), "were changed"),
}


@pytest.mark.parametrize("damage", ["flipped", "center", "path"])
def test_a_plain_from_pretrained_notices_what_was_changed(tmp_path: Path, damage: str) -> None:
    save(bert(), tmp_path / "m")
    act, message = DAMAGES[damage]
    act(tmp_path / "m")  # type: ignore[no-untyped-call]
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
    assert [line.rpartition(" ")[2] for line in run.stdout.splitlines()] == ["refused"] * 6, run.stdout


def test_a_model_that_another_process_puts_there_is_read_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new, read = converted(), converted(), contents.require_weights
    save(old, tmp_path / "m")

    def exchanged(*arguments: Any) -> None:
        monkeypatch.setattr(contents, "require_weights", read)
        save(new, tmp_path / "m", overwrite=True)
        read(*arguments)

    monkeypatch.setattr(contents, "require_weights", exchanged)
    assert same_state(load(tmp_path / "m", build()), new)


def test_a_model_that_torchao_quantized_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Int8Tensor(Tensor):
        __module__ = "torchao.quantization"

    for model in (converted(), bert()):
        next(m for m in model.modules() if isinstance(m, nn.Linear)).weight = nn.Parameter(
            torch.randn(8, 8).as_subclass(Int8Tensor)
        )
        with pytest.raises(ModelError, match="is a Int8Tensor: save it before quantizing"):
            save(model, tmp_path / "m")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_transformers_directories_say_what_is_wrong(tmp_path: Path, damage: str) -> None:
    save(bert(), tmp_path / "m")
    act, message = DAMAGES[damage]
    act(tmp_path / "m")  # type: ignore[no-untyped-call]
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
    headed = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "m", dtype=torch.bfloat16)
    assert torch.equal(first(headed.bert), first(model.bfloat16()))
    headed.save_pretrained(tmp_path / "headed")
    assert torch.equal(first(transformers.AutoModel.from_pretrained(tmp_path / "headed")), first(model))


INDEX = f"{NORM}.witnesses"
TRANSFORMERS_WITNESS_DAMAGES = {
    "out of range": (lambda d: edit_config(d, **{f"{LAYER}__config__witnesses": [3, 16]}), "16 is out of range"),
    "twice": (lambda d: edit_config(d, **{f"{LAYER}__config__witnesses": [3, 3]}), "layer 0: .* named twice"),
    "others": (
        lambda d: edit_config(d, **{f"{LAYER}__config__witnesses": [3, 1]}),
        r"witnesses' in the checkpoint must be .*config\.json names, \[3, 1\], got \[3, 0\]",
    ),
    "fewer": (
        lambda d: edit_config(d, **{f"{LAYER}__config__witnesses": [3]}), "in their shape, but it lacks .*log_gain",
    ),
    "not named": (lambda d: edit_config(d, **{f"{LAYER}__config__witnesses": None}), "have beyond them .*log_gain"),
    "no buffer": (lambda d: edit_weights(d, lambda w: w.pop(INDEX)), f"it lacks {NORM}.witnesses"),
    "no gain": (lambda d: edit_weights(d, lambda w: w.pop(f"{NORM}.log_gain")), f"it lacks {NORM}.log_gain"),
    "buffer": (
        lambda d: edit_weights(d, lambda w: w.update({INDEX: torch.tensor([3, 99])})),
        rf"{NORM}.witnesses' in the checkpoint must be .* \[3, 0\], got \[3, 99\]",
    ),
    "buffer of floats": (
        lambda d: edit_weights(d, lambda w: w.update({INDEX: torch.tensor([2.5, 0.0])})),
        "witnesses' in the checkpoint",
    ),
}  # fmt: skip


@pytest.mark.parametrize("damage", TRANSFORMERS_WITNESS_DAMAGES)
@pytest.mark.parametrize("way", ["load", "from_pretrained"])
def test_witnesses_of_a_transformers_model_that_do_not_fit_are_refused(tmp_path: Path, damage: str, way: str) -> None:
    if damage in ("not named", "fewer") and way == "from_pretrained":
        pytest.skip("transformers itself warns of tensors without a place, and raises for those of another shape")
    save(witnessed(bert()), tmp_path / "m")
    act, message = TRANSFORMERS_WITNESS_DAMAGES[damage]
    act(tmp_path / "m")  # type: ignore[no-untyped-call]
    with pytest.raises(StorageError, match=message):
        load(tmp_path / "m") if way == "load" else transformers.AutoModel.from_pretrained(tmp_path / "m")


def test_other_mistakes_with_transformers_directories(tmp_path: Path) -> None:
    save(bert(), tmp_path / "m")
    with pytest.raises(ArgumentError, match="no model must be given"):
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


# Registration

FIRST_LINES = {
    "transformers first": "import transformers; import dynorm.hub",
    "class first, and reloaded": (
        "from transformers import BertModel; import importlib, transformers, dynorm.hub; importlib.reload(dynorm.hub); "
        "importlib.reload(sys.modules['dynorm.hub.transformers'])"
    ),
    "dynorm first, and reloaded": (
        "import importlib, dynorm.hub; importlib.reload(dynorm.hub); assert 'transformers' not in sys.modules; "
        "import transformers"
    ),
}


ORDERS = """
import json, os, sys, torch
for name, first_lines in json.loads(sys.argv[1]).items():
    child = os.fork()
    if not child:
        exec(first_lines)
        model = transformers.AutoModel.from_pretrained(os.path.join(sys.argv[2], "m"))
        assert type(model.embeddings.LayerNorm).__name__ == "DyISRU"
        model.save_pretrained(os.path.join(sys.argv[2], name))
        assert not [finder for finder in sys.meta_path if type(finder).__name__ == "AfterImport"]
        os._exit(0)
    print(name, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), sep=":", flush=True)
    assert "transformers" not in sys.modules
"""


def test_from_pretrained_works_in_either_order(tmp_path: Path) -> None:
    save(bert(), tmp_path / "m")
    # One process that has imported torch alone, of which three are forked.
    run = fresh(ORDERS, json.dumps(FIRST_LINES), tmp_path)
    assert run.stdout.splitlines() == [f"{order}:0" for order in FIRST_LINES], run.stderr
    for order in FIRST_LINES:
        assert "dynorm" in (tmp_path / order / "config.json").read_text()


def test_another_transformers_can_still_be_imported(tmp_path: Path) -> None:
    (tmp_path / "transformers").mkdir()
    (tmp_path / "transformers" / "__init__.py").write_text("__version__ = '4.0.0'")
    (tmp_path / "transformers" / "modeling_utils.py").write_text("class PreTrainedModel: pass")
    script = """
import sys, warnings
sys.path.insert(0, sys.argv[1])
import dynorm.hub
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import transformers.modeling_utils
print(*[warning.message for warning in caught])
"""
    assert "dynorm is unknown to this transformers" in fresh(script, tmp_path).stdout


def test_without_transformers_its_directories_do_not_load(tmp_path: Path) -> None:
    save(bert(), tmp_path / "m")
    script = """
import sys
sys.modules["transformers"] = None
from dynorm.hub import load
try:
    load(sys.argv[1])
except OSError as error:
    print(type(error).__name__, error)
"""
    assert "StorageError transformers 5 must be installed" in fresh(script, tmp_path / "m").stdout


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(tmp_path)
    before = list(sys.meta_path)
    yield tmp_path / "dynorm_test_waited_for.py"
    sys.meta_path[:] = before
    sys.modules.pop("dynorm_test_waited_for", None)


def test_the_wait_ends_with_an_import_that_succeeds(own_module: Path) -> None:
    seen: list[str] = []
    name = own_module.stem
    after_import(name, lambda: seen.append("once"))
    after_import(name, lambda: seen.append("replaced the first"))
    with pytest.raises(ModuleNotFoundError):
        __import__(name)
    own_module.write_text("raise ValueError('not yet')")
    with pytest.raises(ValueError, match="not yet"):
        __import__(name)
    assert seen == []
    own_module.write_text("value = 7  # of another length")
    assert __import__(name).value == 7
    assert seen == ["replaced the first"]
    assert not any(isinstance(finder, AfterImport) and finder.name == name for finder in sys.meta_path)
    after_import(name, lambda: seen.append("at once"))
    assert seen[-1] == "at once"
