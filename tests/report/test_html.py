"""The report's page: whole, self-contained, escaped, and written at once or not at all."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter, OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
import torch
from torch import nn

from dynorm.errors import DynormError, StorageError
from dynorm.report import InspectionReport, ModelReport, OutputReport, inspect_norms, measure
from tests.pages import Page
from tests.report.cases import converted, toy_batches

pytest.importorskip("matplotlib")


META = {"model": "<script>alert(1)</script>", "path": Path("a&b"), "v": {"<b>": 1.5}}


def original() -> nn.Module:
    """A model with names that are markup."""
    torch.manual_seed(0)
    norm = '<img src=x onerror="alert(1)">&'
    parts = [("first", nn.Linear(8, 8)), (norm, nn.LayerNorm(8)), ("2", nn.RMSNorm(8))]
    return nn.Sequential(OrderedDict(parts))


@pytest.fixture(scope="module")
def report() -> ModelReport:
    model = converted(original(), toy_batches())
    return measure(model, toy_batches(), original=original(), meta=META)


@pytest.fixture(scope="module")
def inspected() -> InspectionReport:
    return inspect_norms(original(), toy_batches(), meta=META)


def page_of(report: Any, folder: Path) -> str:
    report.to_html(folder / "report.html")
    return (folder / "report.html").read_text(encoding="utf-8")


def test_it_is_named_after_the_model(report: ModelReport) -> None:
    assert repr(report) == "<ModelReport of <script>alert(1)</script>: 2 sites, 3 batches>"


def test_an_inspection_holds_a_picture_of_each_site(
    inspected: InspectionReport, tmp_path: Path
) -> None:
    text = page_of(inspected, tmp_path)
    page = Page(text)
    assert page.tags["figure"] == page.tags["svg"] == 2
    assert page.tags["tr"] == 3
    labels = [value for tag, name, value in page.attributes if (tag, name) == ("svg", "aria-label")]
    assert all("DyISRU 0." in label for label in labels)
    assert text.count("curve error: linear") == 2
    assert all(f"var(--{name})" in text for name in ("dyisru", "dyt", "linear", "soft", "edge"))
    assert "#0101" not in text


@pytest.mark.parametrize("kind", ["report", "inspected"])
def test_it_loads_nothing_and_escapes_names(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    report = request.getfixturevalue(kind)
    text = page_of(report, tmp_path)
    page = Page(text)
    assert "http" not in text
    assert "@import" not in text
    assert not page.tags.keys() & {"script", "link", "img", "iframe", "object", "b>"}
    links = [value for _, name, value in page.attributes if name in ("src", "href", "xlink:href")]
    own = ("#", "data:image/png;base64,", "data:application/json,")
    assert all(link.startswith(own) for link in links)
    (data,) = [link for link in links if link.startswith("data:application")]
    assert json.loads(unquote(data.removeprefix("data:application/json,"))) == report.to_dict()
    for name in ('<img src=x onerror="alert(1)">&', "<script>alert(1)</script>: ", "a&b"):
        assert any(name in piece for piece in page.texts)


def test_each_id_of_a_picture_is_there_once(inspected: InspectionReport, tmp_path: Path) -> None:
    text = page_of(inspected, tmp_path)
    page = Page(text)
    ids = Counter(value for _, name, value in page.attributes if name == "id")
    links = [value for _, name, value in page.attributes if name == "xlink:href"]
    used = {link[1:] for link in links if link.startswith("#")}
    used |= set(re.findall(r"url\(#([^)]+)\)", text))
    assert used
    assert {name: ids[name] for name in used} == dict.fromkeys(used, 1)


def test_stages(report: ModelReport, tmp_path: Path) -> None:
    stages = {
        "calibrate": {"output": {"loss_now": 2.9}},
        "distill": {"output": {"loss_now": 2.1}},
    }
    output = OutputReport(
        "language", 8, 0.9, 0.8, loss_original=2.0, loss_now=2.5, loss_difference=0.5, kl=0.6
    )
    full = replace(
        report,
        output=output,
        meta={"stages": stages, "seconds": {"distill": 59.7}},
    )
    full.to_html(tmp_path / "page.html")
    page = Page((tmp_path / "page.html").read_text("utf-8"))
    said = " ".join(" ".join(page.texts).split())
    assert "Much of the quality was lost: the loss is 2.500" in said
    assert "without training 2.900" in said
    assert "distilled 2.100" in said
    assert "norms kept 0 of 2" in said
    # A report shows no times.
    assert "59.7" not in said


def test_it_is_written_whole_or_not_at_all(
    report: ModelReport,
    inspected: InspectionReport,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "report.html"
    path.write_text("old")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", fail)
        with pytest.raises(StorageError, match="No space left"):
            report.to_html(path)
    assert (path.read_text(), [p.name for p in tmp_path.iterdir()]) == ("old", ["report.html"])
    for bad in (tmp_path, tmp_path / "missing" / "report.html"):
        with pytest.raises(StorageError):
            report.to_html(bad)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(DynormError, match=r"pip.*install"):
        inspected.to_html(tmp_path / "other.html")
