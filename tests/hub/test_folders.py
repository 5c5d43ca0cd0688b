"""Saved folders: all comes back, damage is refused, and a failed save leaves the old folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

import dynorm
from dynorm.errors import ArgumentError, ModelError, StorageError
from dynorm.hub import load, plain, save
from tests.ecosystem.models import bert, first, gpt2
from tests.hub.models import build, converted, same_state, witnessed


@pytest.mark.parametrize(
    ("to", "has_witnesses"),
    [
        ("dyisru", False),
        ("dyisru", True),
        ("dyt", False),
        ("derf", False),
        ("linear", False),
        ("annealed", True),
    ],
)
def test_a_plain_model_comes_back_bit_for_bit(tmp_path: Path, to: str, has_witnesses: bool) -> None:
    model = converted(to)
    if has_witnesses:
        witnessed(model)
    if to == "annealed":
        dynorm.set_anneal_(model, 0.3)
    save(model, tmp_path / "m")
    loaded: Any = load(tmp_path / "m", build())
    assert same_state(loaded, model)
    if to == "annealed":
        dynorm.set_anneal_(loaded, 1.0)
        assert type(dynorm.finalize_(loaded)[1]) is dynorm.DyISRU


def test_dtypes_sharing_and_frozen_parameters_come_back(tmp_path: Path) -> None:
    model = converted()
    model[2].weight = model[0].weight
    model[1].double()
    save(model, tmp_path / "m")
    other = build()
    other[0].bias.requires_grad_(False)
    loaded = load(tmp_path / "m", other)
    assert same_state(loaded, model)
    assert loaded[0].weight is loaded[2].weight
    assert not loaded[0].bias.requires_grad


def test_a_model_that_is_converted_already_gets_the_saved_layers(tmp_path: Path) -> None:
    model = converted("dyisru")
    save(model, tmp_path / "m")
    assert same_state(load(tmp_path / "m", converted("dyt")), model)


def cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])


def without(name: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        del tensors[name]
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return damage


def edited(name: str, key: str, value: object) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        config = json.loads((folder / name).read_text())
        config.get("quantization_config", config)[key] = value
        (folder / name).write_text(json.dumps(config))

    return damage


HUGE = {"layer": "dyisru", "paths": ["1"], "config": {"normalized_shape": 2**40}}
PLAIN = {
    "cut": (cut, "cut or damaged"),
    "missing": (without("1.log_beta"), r"Missing.*1\.log_beta"),
    "json": (lambda folder: (folder / "dynorm.json").write_text("{"), "readable JSON"),
    "version": (edited("dynorm.json", "format_version", 99), "format_version"),
    "layers": (edited("dynorm.json", "layers", 3), "layers.*list"),
    "huge": (edited("dynorm.json", "layers", [HUGE]), "elements"),
    "alias": (edited("dynorm.json", "aliases", {"a": "b"}), "alias"),
}


@pytest.mark.parametrize("damage", PLAIN)
def test_a_damaged_plain_folder_is_refused_and_the_model_unchanged(
    tmp_path: Path, damage: str
) -> None:
    act, words = PLAIN[damage]
    save(converted(), tmp_path / "m")
    act(tmp_path / "m")
    model = build()
    modules = list(model)
    with pytest.raises(StorageError, match=f"(?s){words}"):
        load(tmp_path / "m", model)
    assert all(a is b for a, b in zip(model, modules, strict=True))


def test_the_model_must_be_as_the_saved_one_was(tmp_path: Path) -> None:
    save(converted(), tmp_path / "m")
    with pytest.raises(ArgumentError, match=r"loaded into a model.*torch\.nn.*Sequential"):
        load(tmp_path / "m")
    with pytest.raises(ModelError, match="class of model that was saved"):
        load(tmp_path / "m", nn.Linear(2, 2))
    other = nn.Sequential(*build(), nn.Linear(8, 8))
    with pytest.raises(StorageError, match=r"(?s)Missing.*4\.weight"):
        load(tmp_path / "m", other)
    assert isinstance(other[1], nn.LayerNorm)


@pytest.mark.parametrize("make", [bert, gpt2])
def test_a_transformers_model_comes_back(tmp_path: Path, make: Any) -> None:
    model = make()
    save(model, tmp_path / "m")
    loaded = load(tmp_path / "m")
    torch.testing.assert_close(first(loaded), first(model))


def test_the_config_in_memory_is_the_stock_one(tmp_path: Path) -> None:
    """The keys of a saved config.json do not go into the config of a loaded or restored model."""
    model = bert()
    save(model, tmp_path / "m")
    trusted = transformers.AutoModel.from_pretrained(tmp_path / "m", trust_remote_code=True)
    assert type(trusted.config) is transformers.BertConfig
    for config in (model.config, trusted.config):
        assert not {"auto_map", "transformers_weights"} & vars(config).keys()
    dynorm.restore_(model)
    model.save_pretrained(tmp_path / "stock")
    assert {path.name for path in (tmp_path / "stock").iterdir()} == {
        "config.json",
        "model.safetensors",
    }
    assert "dynorm" not in (tmp_path / "stock" / "config.json").read_text()


def test_other_heads_and_one_dtype(tmp_path: Path) -> None:
    model = bert()
    model.pooler.double()
    save(model, tmp_path / "m")
    model.pooler.float()
    auto = transformers.AutoModelForSequenceClassification
    headed = auto.from_pretrained(tmp_path / "m")
    assert {parameter.dtype for parameter in headed.parameters()} == {torch.float32}
    torch.testing.assert_close(first(headed.bert), first(model))
    headed.save_pretrained(tmp_path / "headed")
    base = transformers.AutoModel.from_pretrained(tmp_path / "headed")
    torch.testing.assert_close(first(base), first(model))


def test_a_layer_at_two_paths_is_refused(tmp_path: Path) -> None:
    model = bert()
    first_block, second_block = model.encoder.layer
    second_block.output.LayerNorm = first_block.output.LayerNorm
    with pytest.raises(ModelError, match=r"one path.*layer\.0.*layer\.1"):
        save(model, tmp_path / "m")
    assert not (tmp_path / "m").exists()


def test_norms_in_the_place_of_layers_are_refused(tmp_path: Path) -> None:
    model = bert()
    save(model, tmp_path / "m")
    plain_config = transformers.BertConfig(**(model.config.to_dict() | {"architectures": None}))
    with pytest.raises(StorageError, match="leaves norms"):
        transformers.BertModel.from_pretrained(tmp_path / "m", config=plain_config)


TRANSFORMERS = {
    "cut": (cut, "cut or damaged"),
    "missing": (without("embeddings.LayerNorm.log_beta"), "lacks.*log_beta"),
    "version": (edited("config.json", "format_version", 99), "format_version"),
    "layers": (edited("config.json", "layers", 3), "layers.*list"),
}


@pytest.mark.parametrize("damage", TRANSFORMERS)
def test_a_damaged_transformers_folder_is_refused(tmp_path: Path, damage: str) -> None:
    act, words = TRANSFORMERS[damage]
    save(bert(), tmp_path / "m")
    act(tmp_path / "m")
    with pytest.raises(StorageError, match=f"(?s){words}"):
        load(tmp_path / "m")


def test_a_failed_save_leaves_the_old_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = converted()
    save(model, tmp_path / "m")
    (tmp_path / "m" / "tokenizer.json").write_text("{}")
    with pytest.raises(StorageError, match="overwrite"):
        save(model, tmp_path / "m")

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(plain, "save_file", full)
        with pytest.raises(StorageError, match="No space"):
            save(converted("dyt"), tmp_path / "m", overwrite=True)
    assert same_state(load(tmp_path / "m", build()), model)
    other = converted("dyt")
    save(other, tmp_path / "m", overwrite=True)
    assert same_state(load(tmp_path / "m", build()), other)
    assert (tmp_path / "m" / "tokenizer.json").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_only_a_saved_model_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years")
    wrong: Any = None
    with pytest.raises(ArgumentError, match=r"directory must be a path.*None"):
        save(converted(), wrong)
    with pytest.raises(StorageError, match="empty to be overwritten"):
        save(converted(), tmp_path / "mine", overwrite=True)
