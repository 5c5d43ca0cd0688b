"""What an encoder of images loses and gets back, from the reports of ``dynorm convert``.

``python -m benchmarks.images build/dinov2-calibrated/report.json build/dinov2-distilled/report.json``
writes benchmarks/results/images.json; ``make images`` makes both reports first.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.subjects import Row
from dynorm.files import write_text

RESULTS = Path(__file__).parent / "results" / "images.json"
FIGURES = ("cosine_mean", "cosine_median", "cosine_min", "spearman", "neighbours")


def row(report: dict[str, Any]) -> Row:
    """Return what was done, and how far the images' embeddings are from the original's."""
    meta = report["meta"]
    training = meta["stages"].get("distill", {})
    return {
        "witnesses": meta["recipe"]["witnesses"],
        "refined": meta["recipe"]["refine"],
        **{name: training.get(name, 0) for name in ("steps", "samples", "lr")},
        **{name: report["output"][name] for name in FIGURES},
    }


def main() -> None:
    """Read the reports and write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("reports", nargs="+", type=Path)
    reports = [json.loads(path.read_text("utf-8")) for path in parser.parse_args().reports]
    names = ("model", "recipe", "versions", "threads", "images_to_fit", "crops", "images_held_out")
    about = {name: reports[-1]["meta"][name] for name in names}
    write_text(RESULTS, json.dumps(about | {"rows": [row(report) for report in reports]}, indent=2) + "\n")


if __name__ == "__main__":
    main()
