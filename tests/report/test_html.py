"""The report's page: whole, self-contained, escaped, and written at once or not at all."""

from __future__ import annotations

import json
import math
import re
import sys
from collections import Counter, OrderedDict
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
import torch
from torch import nn

from dynorm import calibrate_, convert_, find_norms
from dynorm.errors import DynormError, StorageError
from dynorm.report import ModelReport, measure
from dynorm.report.output import OutputReport
from tests.pages import Page

pytest.importorskip("matplotlib")


def odd_report() -> ModelReport:
    """A report with names that are markup."""
    torch.manual_seed(0)
    model = nn.Sequential(
        OrderedDict(
            [
                ("first", nn.Linear(8, 8)),
                ('<img src=x onerror="alert(1)">&', nn.LayerNorm(8)),
                ("2", nn.RMSNorm(8)),
            ]
        )
    )
    meta = {
        "model": "<script>alert(1)</script>",
        "loss": math.nan,
        "path": Path("a&b"),
        "seeds": (1, 2),
        "v": {"<b>": 1.5},
    }
    batches = [torch.randn(50, 8) for _ in range(3)]
    convert_(model, find_norms(model, batches[0]))
    calibrate_(model, batches)
    return measure(model, batches, meta=meta)


def test_a_notebook_shows_the_table() -> None:
    report = odd_report()
    page = Page(report._repr_html_())
    assert page.tags["tr"] == 4
    assert page.tags["script"] == page.tags["img"] == 0
    assert repr(report) == "<ModelReport of <script>alert(1)</script>: 2 sites, 3 batches>"


class TestPage:
    @pytest.fixture(scope="class")
    @staticmethod
    def text(tmp_path_factory: pytest.TempPathFactory) -> str:
        path = tmp_path_factory.mktemp("report") / "report.html"
        odd_report().to_html(path)
        return path.read_text(encoding="utf-8")

    def test_it_holds_a_picture_of_each_site(self, text: str) -> None:
        page = Page(text)
        assert page.tags["figure"] == page.tags["svg"] == 2
        assert page.tags["tr"] == 4
        labels = [
            value for tag, name, value in page.attributes if (tag, name) == ("svg", "aria-label")
        ]
        assert all("DyISRU 0." in label for label in labels)
        assert all(f"var(--{name})" in text for name in ("dyisru", "dyt", "linear", "point", "bar"))
        assert "#0101" not in text

    def test_it_loads_nothing(self, text: str) -> None:
        page = Page(text)
        assert "http" not in text
        assert not page.tags.keys() & {"script", "link", "img", "iframe", "object"}
        links = [
            value for _, name, value in page.attributes if name in ("src", "href", "xlink:href")
        ]
        assert all(link.startswith(("#", "data:application/json,")) for link in links)
        assert "@import" not in text

    def test_what_it_refers_to_is_there_once(self, text: str) -> None:
        page = Page(text)
        ids = Counter(value for _, name, value in page.attributes if name == "id")
        used = {value[1:] for _, name, value in page.attributes if name == "xlink:href"}
        used |= set(re.findall(r"url\(#([^)]+)\)", text))
        assert used
        assert {name: ids[name] for name in used} == dict.fromkeys(used, 1)

    def test_names_are_escaped(self, text: str) -> None:
        page = Page(text)
        assert not page.tags.keys() & {"img", "script", "b>"}
        assert any('<img src=x onerror="alert(1)">&' in piece for piece in page.texts)
        assert any("<script>alert(1)</script> without" in piece for piece in page.texts)
        assert any("a&b" in piece for piece in page.texts)

    def test_the_same_report_gives_the_same_page(self, text: str, tmp_path: Path) -> None:
        odd_report().to_html(tmp_path / "again.html")
        assert (tmp_path / "again.html").read_text(encoding="utf-8") == text

    def test_an_encoder_and_a_language_model_have_their_cards(self, tmp_path: Path) -> None:
        outputs = {
            "of embeddings": OutputReport("encoder", 8, 0.9, 0.8, 0.85, 0.92, spearman=0.123),
            "nats per token: 2.000 to 2.500": OutputReport(
                "language", 8, 0.9, 0.8, 0.85, 0.92, None, 70, 2.0, 2.5, 0.5, 0.6
            ),
        }
        for words, output in outputs.items():
            replace(odd_report(), output=output).to_html(tmp_path / "page.html")
            text = (tmp_path / "page.html").read_text(encoding="utf-8")
            Page(text)
            assert words in text
            assert {"encoder": "0.123", "language": "+0.500"}[output.kind] in text

    def test_all_figures_can_be_downloaded(self, text: str) -> None:
        links = [
            value for tag, name, value in Page(text).attributes if (tag, name) == ("a", "href")
        ]
        assert (
            json.loads(unquote(links[0].removeprefix("data:application/json,")))
            == odd_report().to_dict()
        )
        assert "error_now" not in unescape(re.sub(r"<[^>]*>", "", text))

    def test_it_begins_with_a_verdict_and_shows_each_stage(self, tmp_path: Path) -> None:
        stages = {
            "refused": [],
            "calibrate": {
                "batches": 3,
                "output": {"samples": 8, "cosine_mean": 0.9111, "cosine_min": 0.7},
            },
            "distill": {
                "samples": 1920,
                "steps": 60,
                "kept": False,
                "output": {"cosine_mean": 0.9222},
            },
        }
        meta = {
            "stages": stages,
            "seconds": {"calibrate": 3.2, "distill": 59.7},
            "worst_sample": "a <b> sad one",
        }
        meta["recipe"] = {"to": "dyisru", "held_out": 60, "only": [], "lr": None}
        report = replace(
            odd_report(), meta=meta, output=OutputReport("encoder", 8, 0.9, 0.8, 0.85, 0.92, 0.7)
        )
        report.to_html(tmp_path / "page.html")
        page = Page((tmp_path / "page.html").read_text("utf-8"))
        said = " ".join(" ".join(page.texts).split())
        assert "Much of the quality was lost: the mean cosine similarity between" in said
        assert "the original embeddings is 0.900, and the rank correlation" in said
        assert (
            'has a cosine of 0.800: "a <b> sad one". Next: distil again with more data or a lower '
            "learning rate" in said
        )
        assert "calibrated, site by site 0.911 0.700 3 batches 3" in said
        assert "distilled, all weights, but not kept 0.922 – 1,920 samples, 60 steps 60" in said
        assert "to dyisru, held out 60" in said
        assert (
            said.index("Much of the quality was lost")
            < said.index("Stage by stage")
            < said.index("DyISRU fits best")
        )

    def test_it_is_written_whole_or_not_at_all(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        report, path = odd_report(), tmp_path / "report.html"
        path.write_text("old")

        def fail(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr("os.replace", fail)
            with pytest.raises(StorageError, match="No space left"):
                report.to_html(path)
        assert (path.read_text(), [p.name for p in tmp_path.iterdir()]) == ("old", ["report.html"])
        report.to_html(path)
        assert path.read_text(encoding="utf-8").startswith("<!doctype html>")
        assert [p.name for p in tmp_path.iterdir()] == ["report.html"]

    def test_paths_that_cannot_be_written(self, tmp_path: Path) -> None:
        report = odd_report()
        for path in (tmp_path, tmp_path / "missing" / "report.html", str(tmp_path / "null\0byte")):
            with pytest.raises(StorageError, match="cannot be written"):
                report.to_html(path)

    def test_without_matplotlib(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        report = odd_report()
        monkeypatch.setitem(sys.modules, "matplotlib", None)
        with pytest.raises(DynormError, match=r"pip.*install"):
            report.to_html(tmp_path / "report.html")
        assert list(tmp_path.iterdir()) == []


def test_the_loss_curve_of_a_distillation_is_drawn(tmp_path: Path) -> None:
    report = odd_report()
    report.meta["stages"] = {"distill": {"losses": [(2, 1.5), (4, 0.5), (6, 1.0)], "kept": True}}
    report.to_html(tmp_path / "report.html")
    page = Page((tmp_path / "report.html").read_text("utf-8"))
    points = [
        value for tag, name, value in page.attributes if (tag, name) == ("polyline", "points")
    ]
    # The largest loss is at the top, and the axes are linear.
    assert points == ["0.0,0.0 300.0,140.0 600.0,70.0"]
    assert "Loss of the distillation" in page.texts
