"""``dynorm inspect``: an encoder and a language model from folders, and the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import dynorm
from dynorm.cli import app
from dynorm.jobs.inspect import inspect_pretrained
from dynorm.recipe import Recipe


def test_an_encoder_and_a_language_model(encoder: Path, language_model: Path, texts: Path) -> None:
    report = inspect_pretrained(encoder, Recipe(max_length=16), texts=[texts], samples=16)
    assert len(report.sites) == 5
    assert report.meta["model"] == "tiny-bert"
    recipe = Recipe(max_length=16, only=["*ln_1"])
    report = inspect_pretrained(language_model, recipe, texts=[texts], samples=16, name="tiny")
    assert [site.path for site in report.sites] == ["transformer.h.0.ln_1", "transformer.h.1.ln_1"]
    assert report.meta["model"] == "tiny"


def test_bad_arguments(encoder: Path, texts: Path, tmp_path: Path) -> None:
    with pytest.raises(dynorm.errors.ArgumentError, match="samples"):
        inspect_pretrained(encoder, texts=[texts], samples=0)
    with pytest.raises(dynorm.errors.ArgumentError, match="glob"):
        inspect_pretrained(encoder, Recipe(only=["nothing*"]), texts=[texts], samples=16)
    for device in ("cuda:99", "nothing"):
        with pytest.raises(dynorm.errors.ArgumentError, match=r"device.*torch"):
            inspect_pretrained(encoder, texts=[texts], samples=16, device=device)
    with pytest.raises(dynorm.errors.StorageError, match=r"config\.json"):
        inspect_pretrained(tmp_path, texts=[texts], samples=16)


def test_the_command_line(encoder: Path, texts: Path, tmp_path: Path) -> None:
    words = [
        "inspect",
        str(encoder),
        "--texts",
        str(texts),
        "--samples",
        "16",
        "--max-length",
        "16",
    ]
    done = CliRunner().invoke(app, [*words, "--json", "--html", str(tmp_path / "page.html")])
    assert done.exit_code == 0
    assert len(json.loads(done.stdout)["sites"]) == 5
    assert (tmp_path / "page.html").read_text("utf-8").startswith("<!doctype html>")
    done = CliRunner().invoke(app, words)
    assert "DyISRU fits outliers better than DyT" in done.stdout
    done = CliRunner().invoke(app, [*words, "--html", str(texts / "page.html")])
    assert isinstance(done.exception, dynorm.errors.StorageError)
    assert "Example: dynorm inspect" in CliRunner().invoke(app, ["inspect", "--help"]).output
