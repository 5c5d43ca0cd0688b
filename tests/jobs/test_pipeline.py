"""The main job on tiny models: its files, its lines, and that bad input writes nothing."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from dynorm.cli import app
from dynorm.errors import ArgumentError, DynormError, StorageError
from dynorm.jobs import load_pretrained
from dynorm.jobs.convert import convert_pretrained
from dynorm.recipe import Recipe
from dynorm.replace.converted import dynorm_layers

QUICK = Recipe(steps=0, held_out=16, max_length=16, batch=8, calibration=24)
pytestmark = pytest.mark.filterwarnings("ignore::dynorm.errors.CalibrationWarning")


def test_an_encoder_is_written_as_a_folder_that_loads(
    encoder: Path, texts: Path, tmp_path: Path
) -> None:
    said: list[str] = []
    out = tmp_path / "out"
    to = {"embeddings.*": "keep", "*.0.*": "dyt"}
    recipe = replace(QUICK, steps=2, to=to, checkpoints=tmp_path / "kept")
    report = convert_pretrained(encoder, out, recipe, texts=[texts], say=said.append)
    names = {"model", "report.json", "report.html", "recipe.json"}
    assert {path.name for path in out.iterdir()} == names
    assert json.loads((out / "report.json").read_text()) == json.loads(json.dumps(report.to_dict()))
    kinds = [
        type(layer).__name__
        for layer in dynorm_layers(load_pretrained(out / "model").model).values()
    ]
    assert kinds == ["DyT", "DyT", "DyISRU", "DyISRU"]
    lines = "\n".join(said)
    assert "without training, in" in lines
    # Not all layers may have witnesses.
    assert "To lose less: distil it longer, or keep the norms of" in lines
    assert Recipe.load(out / "recipe.json").steps == 2
    with pytest.raises(StorageError, match="overwrite"):
        convert_pretrained(encoder, out, QUICK, texts=[texts])
    convert_pretrained(encoder, out, recipe, texts=[texts], overwrite=True, say=said.append)
    assert f"The distillation continues from step 2 of 2, in {recipe.checkpoints}." in said
    said.clear()
    with pytest.raises(StorageError, match="of this run, but its seed is 0"):
        convert_pretrained(
            encoder, tmp_path / "other", replace(recipe, seed=1), texts=[texts], say=said.append
        )
    assert "replaced by" not in "".join(said)
    (out / "mine.txt").write_text("")
    with pytest.raises(StorageError, match=r"earlier run.*mine\.txt"):
        convert_pretrained(encoder, out, QUICK, texts=[texts], overwrite=True)


def test_a_decoder_after_a_prefix_loads_by_its_prefix(
    language_model: Path, texts: Path, tmp_path: Path
) -> None:
    from peft import AutoPeftModelForCausalLM

    plain = convert_pretrained(language_model, tmp_path / "plain", QUICK, texts=[texts])
    recipe = replace(QUICK, prefix=True, steps=2)
    out = tmp_path / "out"
    report = convert_pretrained(language_model, out, recipe, texts=[texts])
    # It is compared with the original without a prefix.
    assert report.output.loss_original == plain.output.loss_original
    loaded = AutoPeftModelForCausalLM.from_pretrained(out / "prefix")
    assert len(dynorm_layers(loaded)) == 5
    ids = torch.arange(12)[None]
    after_prefix = loaded(input_ids=ids).logits
    assert not torch.allclose(after_prefix, loaded.get_base_model()(ids).logits)
    assert 'from_pretrained(model, "path/to/prefix")' in (out / "model" / "README.md").read_text()
    # Its card would name the original as the base.
    assert not (out / "prefix" / "README.md").exists()
    # The prefix takes one of the 32 positions.
    report = convert_pretrained(
        language_model, out, replace(recipe, max_length=32), texts=[texts], overwrite=True
    )
    assert report.meta["recipe"]["max_length"] == 31


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"to": "softmax"}, "softmax"),
        ({"to": {"nowhere.*": "dyt"}}, "nowhere"),
    ],
)
def test_bad_recipes_write_nothing(
    encoder: Path, texts: Path, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ArgumentError, match=words):
        convert_pretrained(encoder, tmp_path / "out", replace(QUICK, **changes), texts=[texts])
    assert not (tmp_path / "out").exists()


def test_outputs_are_apart_from_their_source(encoder: Path, texts: Path, tmp_path: Path) -> None:
    source = shutil.copytree(encoder, tmp_path / "source")
    for out in (tmp_path, source, source / "out"):
        with pytest.raises(DynormError, match="apart"):
            convert_pretrained(source, out, QUICK, texts=[texts], overwrite=True)


def test_the_command_takes_layers_by_globs(encoder: Path, texts: Path, tmp_path: Path) -> None:
    words = ["convert", str(encoder), str(tmp_path / "out"), "--texts", str(texts), "--json"]
    words += ["--held-out", "16", "--max-length", "16", "--steps", "0"]
    done = CliRunner().invoke(app, [*words, "--to", "dyt", "--to", "embeddings.*=keep"])
    assert done.exit_code == 0, done.output
    recipe = json.loads(done.stdout)["meta"]["recipe"]
    assert recipe["to"] == {"embeddings.*": "keep", "*": "dyt"}
    assert recipe["witnesses"] == 0
