"""``dynorm inspect``: an encoder from a folder, and the command line."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from dynorm.cli import app


def test_the_command_line(encoder: Path, texts: Path, tmp_path: Path) -> None:
    options = ["--texts", str(texts), "--samples", "16", "--max-length", "16"]
    words = ["inspect", str(encoder), *options]
    page = tmp_path / "page.html"
    done = CliRunner().invoke(app, [*words, "--json", "--out", str(page)])
    assert done.exit_code == 0
    report = json.loads(done.stdout)
    assert len(report["sites"]) == 5
    assert report["meta"]["model"] == "tiny-bert"
    assert page.read_text("utf-8").startswith("<!doctype html>")
    done = CliRunner().invoke(app, words)
    assert "DyISRU fits outliers better than DyT" in done.stdout
    assert "A strict layer" in done.stdout
