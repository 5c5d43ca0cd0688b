"""README and docs say what the committed results say, and name only what exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import dynorm
from benchmarks.tables import PAGES, renewed

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("page", sorted(PAGES))
def test_tables_are_those_of_the_committed_results(page: str) -> None:
    assert renewed(page) == (ROOT / page).read_text("utf-8")


@pytest.mark.parametrize("page", ["README.md", "docs/guide.md"])
def test_pages_name_only_what_exists(page: str) -> None:
    text = (ROOT / page).read_text("utf-8")
    named = set(re.findall(r"dynorm\.([A-Za-z_]+)\(", text))
    assert named
    assert named <= set(dir(dynorm))


@pytest.mark.parametrize("page", sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/*.md")))
def test_links_lead_somewhere(page: str) -> None:
    path = ROOT / page
    for target in re.findall(r"\]\(([^)#:]+)\)", path.read_text("utf-8")):
        assert (path.parent / target).exists(), target


def test_every_public_name_is_in_the_reference() -> None:
    text = (ROOT / "docs" / "api.md").read_text("utf-8")
    missing = [name for name in dynorm.__all__ if not re.search(rf":: {name}\b|automodule:: dynorm\.{name}\b", text)]
    assert missing == []
