"""Write the tables of README.md and docs/quality.md from the committed results: ``python -m benchmarks.tables``."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean
from typing import Any

ROOT = Path(__file__).parent.parent
START, END = "<!-- quality: made by python -m benchmarks.tables -->", "<!-- end -->"
NAMES = {"dyisru": "DyISRU", "dyt": "DyT (scaled)", "derf": "Derf (scaled)", "linear": "linear (control)"}
STAGES = ("calibrated", "refined", "distilled")


def load() -> dict[str, Any]:
    """Return the committed results."""
    document: dict[str, Any] = json.loads((ROOT / "benchmarks" / "results" / "quality.json").read_text("utf-8"))
    return document


def cell(rows: list[dict[str, Any]]) -> str:
    """Mean cosine / Spearman over the seeds, with the spread where there are several."""
    if not rows:
        return "not run"
    cosines, ranks = [row["cosine"] for row in rows], [row["spearman"] for row in rows]
    if len(rows) == 1:
        return f"{cosines[0]:.4f} / {ranks[0]:.4f}"
    return f"{mean(cosines):.3f} ± {_half_range(cosines):.3f} / {mean(ranks):.3f} ± {_half_range(ranks):.3f}"


def quality_table(document: dict[str, Any]) -> str:
    """One row a layer, one column a stage."""
    rows = document["rows"]
    lines = [
        "| all 13 norms replaced by | calibrated, no training | constants refined together | "
        f"{document['distillation_steps']} steps of distillation |",
        "|---|---|---|---|",
    ]
    for layer, per_channel in dict.fromkeys((row["layer"], row["per_channel"]) for row in rows):
        name = NAMES[layer] + (", a constant a channel" if per_channel else "")
        mine = [row for row in rows if (row["layer"], row["per_channel"]) == (layer, per_channel)]
        cells = [cell([row for row in mine if row["stage"] == stage]) for stage in STAGES]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def with_table(text: str, table: str) -> str:
    """Put the table between its marks."""
    before, rest = text.split(START)
    _, after = rest.split(END, 1)
    return f"{before}{START}\n{table}\n{END}{after}"


def _half_range(values: list[float]) -> float:
    return (max(values) - min(values)) / 2


def main() -> None:
    """Renew the tables."""
    table = quality_table(load())
    for name in ("README.md", "docs/quality.md"):
        path = ROOT / name
        path.write_text(with_table(path.read_text("utf-8"), table), "utf-8")


if __name__ == "__main__":
    main()
