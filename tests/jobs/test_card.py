"""What the card and the report of a job say about the model, the samples and the stages."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from dynorm.jobs.convert import convert_pretrained
from dynorm.jobs.fold import fold_pretrained
from dynorm.recipe import Recipe
from dynorm.report import ModelReport

QUICK = Recipe(held_out=16, max_length=16, batch=8, refine=2, calibration=24, steps=0)


@pytest.mark.filterwarnings("ignore::dynorm.errors.CalibrationWarning")
def test_the_card_names_norms_samples_and_stages(
    encoder: Path, texts: Path, tmp_path: Path
) -> None:
    place = tmp_path / "tiny-bert-v3" / "model"
    shutil.copytree(encoder, place)
    recipe = replace(
        QUICK,
        to={"embeddings.*": None, "*.attention.*": {"to": "dyt", "witnesses": 2}, "*": "dyisru"},
    )
    out = tmp_path / "out"
    report = convert_pretrained(place, out, recipe, texts=[texts])
    title = (
        "tiny-bert-v3: 4 norms replaced by DyISRU and DyT, 1 kept; each value depends on its own "
        "channel and on at most 2 named ones"
    )
    assert report.title() == title
    card = " ".join((out / "model" / "README.md").read_text("utf-8").split())
    assert "# tiny-bert-v3, " in card
    assert f"{title}. Kept: embeddings.LayerNorm." in card
    assert f"The constants were fitted on 24 samples, from {texts}." in card
    assert "distilled for" not in card
    assert "without training" in card
    assert f"<h1>{title}</h1>" in (out / "report.html").read_text("utf-8")
    saved = json.loads((out / "report.json").read_text("utf-8"))
    assert ModelReport.from_dict(saved).title() == title


def test_the_card_of_a_fold_has_the_name(encoder: Path, tmp_path: Path) -> None:
    fold_pretrained(encoder, tmp_path / "folded", {})
    assert "# tiny-bert, " in (tmp_path / "folded" / "model" / "README.md").read_text("utf-8")
