"""Reports of two processes: each is what one process reports on the same batches, and no rank waits for another."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

import dynorm
from tests.parallel import report_cases as cases
from tests.parallel.launch import Found, launch, values
from tests.parallel.test_data import same

SOURCES = Path(dynorm.__file__).parent


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Found:
    folder = tmp_path_factory.mktemp("reports")
    return launch("report_cases", 2, folder, "on_the_first", "on_all")


def figures(report: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Tokens, errors and sizes of each site, as JSON has them."""
    names = ("path", "tokens", "outlier", "sizes", "fit", "error_now", "explained")
    found = [
        {name: site[name] for name in names if name in site}
        for sites in report.values()
        for site in sites
    ]
    return json.loads(json.dumps(found))


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for site, other in zip(figures(found), figures(expected), strict=True):
        assert site.pop("path") == other.pop("path")
        sizes, sizes_of_other = site.pop("sizes"), other.pop("sizes")
        assert sizes["channels"] == sizes_of_other["channels"]
        same(sizes["explained"], sizes_of_other["explained"], rel=1e-9, abs=1e-9)
        if "fit" in site:
            same(site.pop("fit")["errors"], other.pop("fit")["errors"], rel=1e-9)
        same(site, other, rel=1e-9)


@pytest.mark.slow
def test_one_rank_may_report_while_the_others_do_not(two: Found) -> None:
    first, second = values(two, "on_the_first")
    assert_same(first, cases.reported(0))
    assert second is None


@pytest.mark.slow
def test_every_column_of_a_report_is_of_the_same_tokens(two: Found) -> None:
    found = values(two, "on_all")
    for rank, report in enumerate(found):
        assert_same(report, cases.reported(rank))
    # Otherwise sums over the ranks could be right by chance.
    first, second = (report["inspected"][0] for report in found)
    assert first["sizes"]["channels"] != second["sizes"]["channels"]
    assert first["tokens"] > second["tokens"] > 0


def test_who_communicates_is_never_a_default() -> None:
    """With a default ``Ranks()`` a report or a helper would communicate because an argument was forgotten."""
    taken = 0
    for path in SOURCES.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef):
                names = node.args.posonlyargs + node.args.args
                given = dict(zip(reversed(names), reversed(node.args.defaults), strict=False))
                given |= zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
                of_ranks = [a for a in (*names, *node.args.kwonlyargs) if names_ranks(a)]
                taken += len(of_ranks)
                assert not [a.arg for a in of_ranks if given.get(a)], f"{path}: {node.name}"
            if isinstance(node, ast.AnnAssign) and names_ranks(node):
                taken += 1
                assert node.value is None, f"{path}: line {node.lineno}"
    assert taken >= 8


def names_ranks(node: ast.arg | ast.AnnAssign) -> bool:
    return node.annotation is not None and "Ranks" in ast.unparse(node.annotation)
