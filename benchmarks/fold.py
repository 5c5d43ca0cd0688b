"""Measure what folds in each model, for docs/fold.md: ``python -m benchmarks.fold``."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from torch import nn

from benchmarks.fold_models import NAMES, build, inputs, linear_
from dynorm.errors import ModelError
from dynorm.fold import FoldReport, fold_

RESULTS = Path(__file__).parent / "results" / "fold.json"
Row = dict[str, Any]


def row_of(name: str) -> Row:
    """Return which norms of a model fold with everything allowed, and why the rest does not."""
    model = double(name)
    report = fold_(model, untie=True, add_bias=True, **inputs(name, model))
    return {
        "model": name,
        "norms": len(report.sites),
        "affine": _count_and_total(report, "affine"),
        "center": _count_and_total(report, "center"),
        "error": report.error,
        "loads_with": report.loads_with,
        "refused": _reasons(report),
        "lines": _lines_of(name),
    }


def double(name: str) -> nn.Module:
    """Return a model in float64."""
    options: Row = {}
    if name == "mixtral":
        # The kernel of the default implementation of experts does not support float64.
        options["experts_implementation"] = "batched_mm"
    return build(name, **options).double()


def _lines_of(name: str) -> Row:
    """Return how many norms are gone if all of them are lines first."""
    model = double(name)
    example = inputs(name, model)
    linear_(model, **example)
    try:
        report = fold_(model, untie=True, add_bias=True, **example)
    except ModelError as error:
        return {"gone": 0, "error": None, "refused": [{"reason": str(error), "sites": 1}]}
    gone = sum(site.becomes == "Identity" for site in report.sites)
    return {"gone": gone, "error": report.error, "refused": _reasons(report)}


def _count_and_total(report: FoldReport, rewrite: str) -> list[int]:
    """Return at how many norms a rewrite was done, and at how many it could be asked for."""
    count = report.count(rewrite)
    return [count, count + report.count(rewrite, "refused")]


def _reasons(report: FoldReport) -> list[Row]:
    counts: Counter[tuple[str, str]] = Counter()
    for site in report.sites:
        for rewrite in ("affine", "center"):
            reason = getattr(site, rewrite).reason
            if reason is not None:
                counts[rewrite, reason] += 1
    rows = []
    for (rewrite, reason), count in counts.most_common():
        rows.append({"rewrite": rewrite, "reason": reason, "sites": count})
    return rows


def main() -> None:
    """Fold all models, and write the results."""
    document = {"models": [row_of(name) for name in NAMES]}
    RESULTS.write_text(json.dumps(document, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
