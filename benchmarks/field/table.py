"""Make the table of docs/benchmarks.md: the benchmarks, their commands, and their results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent.parent / "results" / "field.json"
NOT_MEASURED = "not measured here"
COLUMNS = ("benchmark", "command", "published figure", "original", "converted", "worst part")
# The command, after the name of the benchmark, and the figure to compare with.
ABOUT = {
    "openwebtext": (
        "openai-community/gpt2 CONVERTED --data val.bin",
        "GPT-2 small, fine-tuned until no LayerNorm is left: the loss grows by 0.067 nats per token "
        "([arXiv 2507.02559](https://arxiv.org/abs/2507.02559))",
    ),
    "lm-eval": (
        "HuggingFaceTB/SmolLM2-135M-Instruct CONVERTED --tasks lambada_openai hellaswag",
        "of a conversion none; the original's is in its model card",
    ),
    "mteb": (
        'sentence-transformers/all-MiniLM-L6-v2 CONVERTED --benchmark "MTEB(eng, v2)"',
        "of a conversion none; the original's is in [the leaderboard](https://huggingface.co/spaces/mteb/leaderboard)",
    ),
    "imagenet": (
        "facebook/dinov2-small CONVERTED --data ./imagenet --device cuda",
        "DINOv2-small, the original: 79.0% by k-NN, 81.1% by a linear classifier "
        "([DINOv2](https://github.com/facebookresearch/dinov2))",
    ),
}


def field_table() -> str:
    """Return one row per result, and one per benchmark without a result."""
    rows = []
    if RESULTS.exists():
        rows = json.loads(RESULTS.read_text("utf-8"))["rows"]
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    for name, (command, published) in ABOUT.items():
        start = [f"`{name}`", f"`python -m benchmarks.field {name} {command}`", published]
        results = [row for row in rows if row["benchmark"] == name]
        if not results:
            lines.append(f"| {' | '.join(start)} | {NOT_MEASURED} | {NOT_MEASURED} |  |")
        for row in results:
            lines.append(f"| {' | '.join(start + cells(row))} |")
    return "\n".join(lines)


def cells(row: dict[str, Any]) -> list[str]:
    """Return the cells of a result: the figures of both models, and the worst part."""
    before = [f"{figure['name']}: {figure['original']:.4g}" for figure in row["figures"]]
    after = [f"{figure['converted']:.4g}" for figure in row["figures"]]
    worst = row["worst"]
    return [
        f"{row['original']}<br>{'; '.join(before)}",
        f"{row['converted']}<br>{'; '.join(after)}",
        f"{worst['name']}: {worst['original']:.4g} and {worst['converted']:.4g}",
    ]
