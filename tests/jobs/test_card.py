"""The card and the report of a job: the model's name, the samples, the layers, the license."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from dynorm.jobs.checkpoint import model_name
from dynorm.jobs.convert import convert_pretrained
from dynorm.jobs.fold import fold_pretrained
from dynorm.recipe import Recipe

QUICK = Recipe(held_out=16, max_length=16, batch=8, steps=0, calibration=24)
pytestmark = pytest.mark.filterwarnings("ignore::dynorm.errors.CalibrationWarning")


def words_of(path: Path) -> str:
    return " ".join(path.read_text("utf-8").split())


@pytest.mark.parametrize(("path", "name"), [
    ("/data/all-MiniLM-L6-v2", "all-MiniLM-L6-v2"),
    ("/data/distilled/model", "distilled"),
    ("/data/llama-3.Q4.gguf", "llama-3.Q4"),
    ("/data/tiny/model.gguf", "tiny"),
    ("/cache/hub/models--meta-llama--Llama-3/snapshots/0123abcd", "meta-llama/Llama-3"),
    ("/model", "model"),
])  # fmt: skip
def test_a_folder_called_model_does_not_name_the_model(path: str, name: str) -> None:
    assert model_name(Path(path)) == name


def test_the_card_is_our_own_and_keeps_the_license(
    encoder: Path, texts: Path, tmp_path: Path
) -> None:
    source = shutil.copytree(encoder, tmp_path / "tiny-v1.5" / "model")
    card = "---\nlicense: mit\nlanguage:\n- en\ntags:\n- old\n---\n# Tiny\n"
    (source / "README.md").write_text(card)
    recipe = replace(QUICK, steps=4, to={"embeddings.*": "keep", "*.layer.0.attention.*": "dyt"})
    out = tmp_path / "out"
    report = convert_pretrained(source, out, recipe, texts=[texts])
    stages = report.meta["stages"]
    assert stages["calibrate"]["samples"] == 24
    own = words_of(out / "model" / "README.md")
    # A folder on this machine is no base model to others.
    assert own.startswith("--- license: mit language: - en tags: - dynorm")
    for fact in (
        "4 norms replaced by DyISRU and DyT",
        "Kept: embeddings.LayerNorm",
        "import dynorm",
    ):
        assert fact in own
    assert (out / "model" / "README.original.md").read_text() == card
    assert "4 norms replaced by DyISRU and DyT" in words_of(out / "report.html")

    cached = shutil.copytree(source, tmp_path / "models--team--tiny" / "snapshots" / "0123")
    fold_pretrained(cached, tmp_path / "folded", {})
    folded = words_of(tmp_path / "folded" / "model" / "README.md")
    assert folded.startswith("--- license: mit language: - en base_model: team/tiny tags: - dynorm")
    assert "# team/tiny, " in folded
