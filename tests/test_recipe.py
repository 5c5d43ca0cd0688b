"""The recipe: its file, its errors, and the defaults that the verbs take from it."""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dynorm
from benchmarks import fold_models
from dynorm.errors import ArgumentError, StorageError
from dynorm.recipe import ENCODER, IMAGES, LANGUAGE, Defaults, Recipe, defaults_of


def plain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 16)).eval()


def rows(count: int = 4) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(64, 16, generator=generator) for _ in range(count)]


@pytest.mark.parametrize(
    ("name", "kind"),
    [("encoder_pre", ENCODER), ("bert", ENCODER), ("llama", LANGUAGE), ("vit", IMAGES)],
)
def test_a_distillation_has_the_rate_of_the_kind(name: str, kind: Defaults) -> None:
    model = fold_models.build(name)
    assert defaults_of(model) == kind
    teacher = copy.deepcopy(model)
    data = [fold_models.inputs(name, model)] * 4
    dynorm.convert_(model, dynorm.find_norms(model, **data[0]))
    dynorm.calibrate_(model, data)
    assert dynorm.distill_(model, data, teacher=teacher, steps=4).lr == kind.lr


def test_the_job_has_the_defaults_of_the_verbs() -> None:
    one, job, data = plain(), plain(), rows()
    dynorm.convert_(one, dynorm.find_norms(one, data[0]))
    dynorm.calibrate_(one, data)
    dynorm.convert_model(job, data, held_out=data[:1], steps=0, fold_means=False)
    for ours, theirs in zip(one.parameters(), job.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("verb", "names"),
    [
        (dynorm.convert_, ["to", "witnesses"]),
        (dynorm.distill_, ["lr", "seed", "bf16", "checkpoints"]),
    ],
)
def test_the_verbs_have_the_defaults_of_the_recipe(
    verb: Callable[..., Any], names: list[str]
) -> None:
    parameters = inspect.signature(verb).parameters
    for name in names:
        assert parameters[name].default == getattr(Recipe, name), name


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(),
        Recipe(to="dyt", steps=4, lr=1e-4, checkpoints="kept"),
        Recipe(to={"c.*": "keep", "*": {"to": "dyisru", "witnesses": 2}}),
        Recipe(to="none", stock=True, steps=0),
    ],
)
def test_a_recipe_equals_that_of_its_file(recipe: Recipe, tmp_path: Path) -> None:
    recipe.check()
    recipe.save(tmp_path / "recipe.json")
    read = Recipe.load(tmp_path / "recipe.json")
    assert read == recipe
    assert read.to_dict() == recipe.to_dict() == json.loads((tmp_path / "recipe.json").read_text())


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"stock": True}, "stock must.*to=.none.*got to='dyisru'"),
        ({"to": {"*": "none"}, "stock": True}, "stock must"),
        ({"to": "none", "witnesses": 2}, "witnesses must be 0.*got 2"),
        ({"to": {"*": "none"}, "witnesses": 2}, "witnesses must be 0 where no layer.*got 2"),
        ({"to": {"*": {"witnesses": 4}}, "witnesses": 2}, "witnesses must be 0 where no layer"),
        ({"to": "derf", "witnesses": 2}, "witnesses must be 0 for 'derf', got 2.*dyisru"),
        ({"to": "none", "stock": 1}, "stock must be True"),
    ],
)
def test_fields_that_exclude_each_other(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        Recipe(**fields).check()


@pytest.mark.parametrize("name", ["witneses", "only", "lean", "minutes"])
def test_an_unknown_field_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "recipe.json").write_text(json.dumps({name: 2}))
    with pytest.raises(ArgumentError, match=f"recipe.*got '{name}'"):
        Recipe.load(tmp_path / "recipe.json")


@pytest.mark.parametrize("text", ["{", "4", "\xff", pytest.param("[" * 100_000, id="deep")])
def test_a_file_that_is_not_a_recipe(text: str, tmp_path: Path) -> None:
    (tmp_path / "recipe.json").write_bytes(text.encode("latin-1"))
    for name in ("recipe.json", "missing.json"):
        with pytest.raises(StorageError, match=rf"{name} must.*JSON"):
            Recipe.load(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("to", "nothing"),
        ("to", dynorm.DyT),
        ("to", "annealed"),
        ("witnesses", 17),
        ("steps", 1.5),
        ("steps", -1),
        ("lr", "1e-3"),
        ("lr", 0.0),
        ("seed", None),
        ("seed", -1),
        ("seed", 2**32),
        ("prefix", 1),
        ("bf16", "yes"),
        ("checkpoints", 3),
        ("held_out", 1),
        ("max_length", 1),
        ("batch", 0),
        ("calibration", 0),
    ],
)
def test_wrong_values_are_refused(name: str, value: object) -> None:
    match = "must" if name == "to" else rf"\b{name} must"
    with pytest.raises(ArgumentError, match=match):
        Recipe().changed(**{name: value}).check()


def test_convert_model_takes_a_recipe_and_changes_of_it() -> None:
    recipe = Recipe(witnesses=2, steps=0)
    one, again = plain(), plain()
    report = dynorm.convert_model(one, rows(), recipe=recipe)
    assert report.meta["recipe"] == recipe.filled_for(one).to_dict()
    # The report's recipe is one that can be used again.
    dynorm.convert_model(again, rows(), recipe=Recipe(**report.meta["recipe"]))
    for ours, theirs in zip(one.parameters(), again.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_convert_model_refuses_what_is_not_a_recipe() -> None:
    model = plain()
    with pytest.raises(ArgumentError, match=r"recipe.*dynorm\.Recipe"):
        dynorm.convert_model(model, rows(), recipe={"to": "dyt"})  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="witnesses"):
        dynorm.convert_model(model, rows(), witness=2)
    a_class: Any = nn.Sequential
    with pytest.raises(ArgumentError, match=r"torch\.nn\.Module"):
        dynorm.convert_model(a_class, rows())
    assert isinstance(model.get_submodule("1"), nn.LayerNorm)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"prefix": True}, r"prefix must be left out.*with_prefix\(model\) before"),
        ({"recipe": Recipe(prefix=True)}, r"prefix must be False.*with_prefix\(model\) before"),
        ({"to": "none", "stock": True}, r"stock must be left out.*as_stock"),
        ({"max_length": 64}, r"max_length must be left out.*got max_length=64: cut the texts"),
        ({"batch": 8}, r"batch must be left out.*batches of that size"),
        ({"calibration": None}, r"calibration must be left out.*that many samples"),
        ({"held_out": 64}, r"held_out must be batches.*got 64.*dynorm convert"),
    ],
)
def test_convert_model_refuses_what_only_the_command_can_use(
    options: dict[str, Any], words: str
) -> None:
    model = plain()
    with pytest.raises(ArgumentError, match=words):
        dynorm.convert_model(model, rows(), steps=0, **options)
    assert isinstance(model.get_submodule("1"), nn.LayerNorm)
    # A recipe that the command has saved holds them, and stays usable.
    recipe = Recipe(steps=0, lr=1e-3, held_out=64, max_length=64, batch=8, calibration=16)
    report = dynorm.convert_model(model, rows(), recipe=recipe)
    assert report.meta["recipe"] == recipe.to_dict()


def test_a_recipe_prints_the_options_that_are_given() -> None:
    lines = [line.split() for line in str(Recipe(batch=4)).splitlines()]
    assert ["batch", "4"] in lines
    assert not any("steps" in line for line in lines)
