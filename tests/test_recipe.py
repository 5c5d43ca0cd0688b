"""The recipe: its file, its errors, and the defaults that the verbs take from it."""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from transformers import (
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    ViTConfig,
    ViTModel,
)

import dynorm
from dynorm.errors import ArgumentError, StorageError
from dynorm.recipe import (
    ENCODER,
    IMAGES,
    LANGUAGE,
    Defaults,
    ModelFields,
    Recipe,
    defaults_of,
)

SMALL = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}


def llama() -> nn.Module:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=1, **SMALL)).eval()


def bert() -> nn.Module:
    torch.manual_seed(0)
    return BertModel(BertConfig(vocab_size=64, num_hidden_layers=1, **SMALL)).eval()


def vit() -> nn.Module:
    config = ViTConfig(image_size=8, patch_size=4, num_hidden_layers=1, **SMALL)
    return ViTModel(config).eval()


def plain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 16)).eval()


def ids(count: int = 4) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [{"input_ids": torch.randint(0, 64, (4, 16), generator=generator)} for _ in range(count)]


def rows(count: int = 4) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(64, 16, generator=generator) for _ in range(count)]


@pytest.mark.parametrize(
    ("build", "expected"),
    [(plain, ENCODER), (bert, ENCODER), (llama, LANGUAGE), (vit, IMAGES)],
)
def test_the_kind_of_a_model(build: Callable[[], nn.Module], expected: Defaults) -> None:
    assert defaults_of(build()) == expected


@pytest.mark.parametrize(("build", "batches"), [(plain, rows), (bert, ids), (llama, ids)])
def test_verbs_without_options_are_the_recommended_ones(
    build: Callable[[], nn.Module],
    batches: Callable[[], list[Any]],
) -> None:
    one = build()
    explicit = copy.deepcopy(one)
    job = copy.deepcopy(one)
    data = batches()
    for model, options, fit in (
        (one, {}, {}),
        # A third of 16 channels.
        (explicit, {"per_channel": False, "witnesses": 5}, {"lean": 0.0}),
    ):
        first = data[0]
        args, kwargs = ((), first) if isinstance(first, dict) else ((first,), {})
        dynorm.convert_(model, dynorm.find_norms(model, *args, **kwargs), **options)  # type: ignore[arg-type]
        dynorm.calibrate_(model, data, **fit)
    dynorm.convert_model(job, data, held_out=data[:1], refine=0, fold_means=False)
    assert one.state_dict().keys() == explicit.state_dict().keys() == job.state_dict().keys()
    for name, tensor in one.state_dict().items():
        assert_close(tensor, explicit.state_dict()[name], rtol=0, atol=0)
        assert_close(tensor, job.state_dict()[name], rtol=0, atol=0)


def test_an_annealed_layer_has_one_constant_and_no_witnesses() -> None:
    model = plain()
    dynorm.convert_(model, dynorm.find_norms(model, rows()[0]), "annealed")
    dynorm.calibrate_(model, rows())
    layer = model.get_submodule("1")
    assert isinstance(layer, dynorm.layers.AnnealedNorm)
    assert not layer.per_channel
    assert not layer.witness_channels


def test_the_defaults_of_the_verbs_are_those_of_the_recipe() -> None:
    taken = {
        dynorm.convert_: ["to", "only", "skip", "per_channel", "center", "witnesses"],
        dynorm.calibrate_: ["lean", "tolerance"],
        dynorm.refine_: ["bf16"],
        dynorm.distill_: [
            "steps",
            "minutes",
            "lr",
            "seed",
            "bf16",
            "accumulate",
            "checkpoints",
            "report_to",
            "keep_on_interrupt",
        ],
    }
    for verb, names in taken.items():
        parameters = inspect.signature(verb).parameters
        for name in names:
            assert parameters[name].default == getattr(Recipe, name), (verb.__name__, name)
    refine = inspect.signature(dynorm.refine_).parameters
    assert (refine["steps"].default, refine["lr"].default) == (Recipe.refine, Recipe.refine_lr)


def test_convert_model_takes_every_field_but_those_of_samples() -> None:
    of_samples = {"held_out", "max_length", "batch", "calibration"}
    expected = {
        name: hint for name, hint in get_type_hints(Recipe).items() if name not in of_samples
    }
    assert get_type_hints(ModelFields) == expected


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(),
        Recipe(
            to=dynorm.DyT,
            only=["a.*"],
            skip="b",
            sites={"c.*": None, "_default": {"to": dynorm.Derf, "witnesses": 2}},
            per_channel=False,
            steps=4,
            lr=1e-4,
            checkpoints="kept",
        ),
        Recipe().filled(True),
    ],
)
def test_a_recipe_equals_that_of_its_file(recipe: Recipe, tmp_path: Path) -> None:
    recipe.check()
    recipe.save(tmp_path / "recipe.json")
    read = Recipe.load(tmp_path / "recipe.json")
    assert read == recipe
    assert read.to_dict() == recipe.to_dict() == json.loads((tmp_path / "recipe.json").read_text())


def test_a_file_may_have_some_fields() -> None:
    assert Recipe().changed(witnesses=2).witnesses == 2
    with pytest.raises(ArgumentError, match=r"witneses.*witnesses"):
        Recipe().changed(witneses=2)
    with pytest.raises(ArgumentError, match=r"got 'zzzz'.*only"):
        Recipe().changed(zzzz=2)


@pytest.mark.parametrize("text", ["{", "[1]", "4", "\xff"])
def test_a_file_that_is_not_a_recipe(text: str, tmp_path: Path) -> None:
    (tmp_path / "recipe.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(StorageError, match=r"recipe.*JSON"):
        Recipe.load(tmp_path / "recipe.json")
    with pytest.raises(StorageError, match=r"recipe.*JSON"):
        Recipe.load(tmp_path / "missing.json")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("to", "nothing"),
        ("to", 3),
        ("only", 3),
        ("skip", [3]),
        ("sites", {"*": {"lean": 0.5}}),
        ("sites", {"*": "dyt"}),
        ("sites", {"*": {"witnesses": -1}}),
        ("sites", ["*"]),
        ("per_channel", "yes"),
        ("center", None),
        ("center", 1),
        ("witnesses", -1),
        ("witnesses", 2.5),
        ("witnesses", [0, 3]),
        ("witnesses", "4"),
        ("lean", 1.5),
        ("lean", "0"),
        ("tolerance", None),
        ("tolerance", -0.1),
        ("refine", None),
        ("refine", 1.5),
        ("refine_lr", 0.0),
        ("refine_lr", True),
        ("steps", "3"),
        ("minutes", "1"),
        ("lr", "1e-3"),
        ("seed", None),
        ("seed", -1),
        ("bf16", "yes"),
        ("accumulate", 0),
        ("checkpoints", 3),
        ("held_out", 1),
        ("max_length", 1),
        ("batch", 0),
        ("calibration", 0),
    ],
)
def test_wrong_values_are_refused(name: str, value: object) -> None:
    words = {"to": "layer must", "only": "globs must", "skip": "globs must", "sites": "must"}
    with pytest.raises(ArgumentError, match=words.get(name, rf"\b{name} must")):
        Recipe().changed(**{name: value}).check()


def test_convert_model_takes_a_recipe_and_changes_of_it() -> None:
    recipe = Recipe(to="dyt", witnesses=2, refine=0)
    one = plain()
    report = dynorm.convert_model(one, rows(), recipe=recipe, per_channel=False)
    other = plain()
    dynorm.convert_model(other, rows(), to="dyt", witnesses=2, refine=0, per_channel=False)
    assert report.meta["recipe"] == recipe.changed(per_channel=False).filled_for(one).to_dict()
    for ours, theirs in zip(one.parameters(), other.parameters(), strict=True):
        assert_close(ours, theirs, rtol=0, atol=0)
    # The report's recipe is one that can be used again.
    again = plain()
    dynorm.convert_model(again, rows(), recipe=Recipe(**report.meta["recipe"]))
    for ours, theirs in zip(one.parameters(), again.parameters(), strict=True):
        assert_close(ours, theirs, rtol=0, atol=0)


def test_convert_model_refuses_what_is_not_a_recipe() -> None:
    model = plain()
    with pytest.raises(ArgumentError, match=r"recipe.*dynorm\.Recipe"):
        dynorm.convert_model(model, rows(), recipe={"to": "dyt"})  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"you.*witnesses"):
        dynorm.convert_model(model, rows(), witness=2)  # type: ignore[call-arg]
    with pytest.raises(ArgumentError, match=r"lr.*steps"):
        dynorm.convert_model(model, rows(), lr=1e-3)
    assert isinstance(model.get_submodule("1"), nn.LayerNorm)


def test_a_recipe_prints_its_options() -> None:
    lines = str(Recipe(only="a.*").filled(True)).splitlines()
    assert any(line.split() == ["batch", "4"] for line in lines)
    assert not any("minutes" in line for line in lines)


def test_the_sites_of_a_recipe() -> None:
    model = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.LayerNorm(16), nn.LayerNorm(16))
    recipe = Recipe(
        to="derf",
        witnesses=0,
        refine=0,
        sites={"0": None, "2": {"per_channel": True}, "_default": {"to": "dyt"}},
    )
    report = dynorm.convert_model(model, rows(), recipe=recipe)
    assert [type(module).__name__ for module in model] == ["LayerNorm", "Linear", "DyT", "DyT"]
    assert [model[place].per_channel for place in (2, 3)] == [True, False]
    assert report.meta["recipe"]["sites"] == recipe.to_dict()["sites"]


def test_the_layer_of_a_recipe_is_that_of_its_sites_without_one() -> None:
    for sites in ({"0": {"witnesses": 0}}, {"0": {"witnesses": 0}, "_default": None}):
        model = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.LayerNorm(16))
        dynorm.convert_model(model, rows(), to="derf", refine=0, sites=sites)  # type: ignore[arg-type]
        assert type(model[0]) is dynorm.Derf
        assert type(model[2]) is (nn.LayerNorm if "_default" in sites else dynorm.Derf)


def test_a_rate_of_a_refinement_needs_the_refinement() -> None:
    with pytest.raises(ArgumentError, match="refine_lr must come with refine"):
        Recipe(refine=0, refine_lr=1e-4).check()
    Recipe(refine=1, refine_lr=1e-4).check()
