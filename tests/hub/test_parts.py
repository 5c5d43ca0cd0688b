"""A folder of a model of texts and images, opened as its text model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dynorm
from dynorm.errors import ModelError
from dynorm.jobs.checkpoint import Checkpoint
from dynorm.jobs.pretrained import Pretrained
from dynorm.replace.converted import dynorm_layers
from tests.hub.models import tokens, transformers, witnessed

if not hasattr(transformers, "Qwen3_5Config"):
    pytest.skip("this transformers has no Qwen3.5", allow_module_level=True)

TEXT = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "max_position_embeddings": 64,
    "attn_implementation": "eager",
}
IMAGE = {
    "depth": 1,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_heads": 2,
    "out_hidden_size": 16,
    "num_position_embeddings": 16,
    "patch_size": 4,
}
LAYERS = 2 * 4 + 2 + 1  # two norms per block, those of queries and keys of the last, the final one


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = transformers.Qwen3_5Config(text_config=TEXT, vision_config=IMAGE)
    model = transformers.Qwen3_5ForConditionalGeneration(config).eval()
    sites = dynorm.find_norms(model, input_ids=tokens())
    dynorm.convert_(model, sites)
    dynorm.calibrate_(model, [{"input_ids": tokens()}])
    place = tmp_path_factory.mktemp("qwen") / "model"
    dynorm.save(witnessed(model), place)
    return place


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=tokens()).logits
    return found


@pytest.mark.parametrize("name", ["AutoModelForCausalLM", "Qwen3_5ForCausalLM"])
def test_the_text_model_gets_the_layers(folder: Path, name: str, tmp_path: Path) -> None:
    expected = logits(dynorm.load(folder))
    model = getattr(transformers, name).from_pretrained(folder)
    assert type(model).__name__ == "Qwen3_5ForCausalLM"
    assert len(dynorm_layers(model)) == LAYERS
    assert torch.equal(logits(model), expected)
    # It is a model like any other: saved again, it loads as itself.
    dynorm.save(model, tmp_path / "text")
    for again in (
        dynorm.load(tmp_path / "text"),
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "text"),
    ):
        assert torch.equal(logits(again), expected)


def test_layers_without_a_place_name_the_class_that_was_saved(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    described = config["quantization_config"]
    for layer in described["layers"]:
        layer["paths"] = [f"elsewhere.{path}" for path in layer["paths"]]
    for key in ("layers_sha256", "sha256"):
        del described[key]
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"\(Qwen3_5ForConditionalGeneration\)"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m")


def test_with_texts_only_it_is_a_language_model(folder: Path) -> None:
    checkpoint = Checkpoint(folder)
    assert checkpoint.kind == "texts"
    assert checkpoint.language_model
    model, remarks = checkpoint.model(checkpoint.auto)
    assert type(model).__name__ == "Qwen3_5ForConditionalGeneration"
    assert remarks == ()
    # The sizes of its text model hold.
    assert (
        Pretrained(model, None, True, folder).within_positions(1000)
        == TEXT["max_position_embeddings"]
    )
