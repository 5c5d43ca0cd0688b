"""Measure what folds in each model: ``python -m benchmarks.fold``, for docs/fold.md."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

from torch import nn

from benchmarks.fold_models import NAMES, build, inputs, linear_
from dynorm.errors import ModelError
from dynorm.fold import FoldReport, fold_

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "fold.json"
PAGE = ROOT / "docs" / "fold.md"
START = "<!-- answers: made by python -m benchmarks.fold -->"
END = "<!-- end -->"
# The models of the page's table, which are the best known, with their titles.
SHOWN = {
    "gpt2": "GPT-2",
    "llama": "Llama",
    "qwen3": "Qwen3",
    "mixtral": "Mixtral",
    "bert": "BERT",
    "t5": "T5",
    "vit": "ViT",
    "dinov2": "DINOv2",
    "convnext": "ConvNeXt",
    "whisper": "Whisper",
    "encoder_post": "nn.TransformerEncoder, post-norm",
    "nanogpt": "a hand-written GPT",
}
Row = dict[str, Any]


def row_of(name: str) -> Row:
    """Return which norms of a model fold with everything allowed, and why the rest does not."""
    model = _double(name)
    report = fold_(model, untie=True, add_bias=True, **inputs(name, model))
    return {
        "model": name,
        "allowed": {
            "sites": len(report.sites),
            "affine": _count_and_total(report, "affine"),
            "center": _count_and_total(report, "center"),
            "error": report.error,
            "loads_with": report.loads_with,
            "refused": _reasons(report),
        },
        "linear": _linear_row(name),
    }


def _linear_row(name: str) -> Row:
    """Return how many norms are gone if all of them are linear layers."""
    model = _double(name)
    example = inputs(name, model)
    linear_(model, **example)
    try:
        report = fold_(model, untie=True, add_bias=True, **example)
    except ModelError as error:
        return {"gone": 0, "error": None, "refused": [{"reason": str(error), "sites": 1}]}
    gone = sum(site.becomes == "Identity" for site in report.sites)
    return {"gone": gone, "error": report.error, "refused": _reasons(report)}


def _double(name: str) -> nn.Module:
    options: dict[str, Any] = {}
    if name == "mixtral":
        # The kernel of the default implementation of experts does not support float64.
        options["experts_implementation"] = "batched_mm"
    return build(name, **options).double()


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


def answers_table(document: Row) -> str:
    """Return a row for each of the best-known models."""
    lines = [
        "| model | norms | affine folded | means removed | linear layers removed |",
        "|---|---|---|---|---|",
    ]
    rows = {row["model"]: row for row in document["models"]}
    for name, title in SHOWN.items():
        row = rows[name]
        sites = row["allowed"]["sites"]
        cells = [title, str(sites), _of(row["allowed"]["affine"]), _of(row["allowed"]["center"])]
        cells.append(f"{row['linear']['gone']} of {sites}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _of(pair: list[int]) -> str:
    count, total = pair
    return f"{count} of {total}" if total else "none"


def renewed(text: str, document: Row) -> str:
    """Return the page with its table made from the results."""
    before, rest = text.split(START)
    _, after = rest.split(END, 1)
    return f"{before}{START}\n{answers_table(document)}\n{END}{after}"


def main() -> None:
    """Fold all models, and renew the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tables", action="store_true", help="only write the page")
    options = parser.parse_args()
    if not options.tables:
        document = {"models": [row_of(name) for name in NAMES]}
        RESULTS.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
    document = json.loads(RESULTS.read_text("utf-8"))
    PAGE.write_text(renewed(PAGE.read_text("utf-8"), document), "utf-8")


if __name__ == "__main__":
    main()
