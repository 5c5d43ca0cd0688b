"""``dynorm inspect``: an encoder from a folder, and the command line."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from dynorm.cli import app
from dynorm.jobs.inspect import inspect_pretrained
from dynorm.recipe import Recipe


def test_an_encoder(encoder: Path, texts: Path) -> None:
    report = inspect_pretrained(encoder, Recipe(max_length=16, held_out=16), texts=[texts])
    assert len(report.sites) == 5
    assert report.meta["model"] == "tiny-bert"


def test_the_command_line(encoder: Path, texts: Path, tmp_path: Path) -> None:
    options = ["--texts", str(texts), "--samples", "16", "--max-length", "16"]
    words = ["inspect", str(encoder), *options]
    page = tmp_path / "page.html"
    done = CliRunner().invoke(app, [*words, "--json", "--out", str(page)])
    assert done.exit_code == 0
    assert len(json.loads(done.stdout)["sites"]) == 5
    assert page.read_text("utf-8").startswith("<!doctype html>")
    done = CliRunner().invoke(app, words)
    assert "DyISRU fits outliers better than DyT" in done.stdout
    assert "A strict layer" in done.stdout
