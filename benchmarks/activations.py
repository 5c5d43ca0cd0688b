"""Check the paper's claim on real activations of two models: ``python -m benchmarks.activations``.

One is all-MiniLM-L6-v2. The other is a small pre-norm GPT-2 that is trained here for about a minute
on bytes of the standard library's docstrings. The results are benchmarks/results/inspection.json
and docs/images/inspection-*.png.
"""

from __future__ import annotations

import json
import math
import os
import platform
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import matplotlib
import torch
from matplotlib.figure import Figure

import dynorm
from benchmarks.subjects import LENGTH, trained
from dynorm.jobs.inspect import inspect_pretrained
from dynorm.jobs.texts import split_texts, standard_library_docstrings
from dynorm.recipe import Recipe
from dynorm.report.colours import COLOURS
from dynorm.report.pictures import draw
from tools.demo_model import folder

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "inspection.json"
STEPS = 300
SAMPLES = 256
LABELS = {"linear": "linear", "dyt": "DyT", "dyisru": "DyISRU"}
# The colours of a picture on white paper, by their use.
DAYLIGHT = COLOURS | {
    "soft": "#5c6570",
    "edge": "#c9c5bd",
    "point": "#c3c7cc",
    "outlier": "#8a3ffc",
}


def save_picture(report: dynorm.report.InspectionReport, path: Path) -> None:
    """Draw all norms of a model: its outliers, and the functions fitted to them."""
    # Three in a row are legible at the width of a page.
    rows = math.ceil(len(report.sites) / 3)
    figure = Figure(figsize=(9, 2.5 * rows), layout="constrained")
    panels = figure.subplots(rows, 3, squeeze=False).flatten()
    for axes, site in zip(panels, report.sites, strict=False):
        draw(axes, site.outliers, site.picture, DAYLIGHT)
        figures = []
        for name, label in LABELS.items():
            figures.append(f"{label} {site.outliers.errors[name]:.2f}")
        axes.set_title(f"{site.path}\n{'  '.join(figures)}", fontsize=9)
        axes.tick_params(labelsize=8)
        axes.set_xlabel(axes.get_xlabel(), fontsize=9)
        axes.set_ylabel(axes.get_ylabel(), fontsize=9)
    for axes in panels[len(report.sites) :]:
        axes.axis("off")
    add_legend(figure)
    # Each dot is a line of length zero, which a simplified path would lose.
    with matplotlib.rc_context({"path.simplify": False}):
        figure.savefig(path, dpi=100)


def add_legend(figure: Figure) -> None:
    """Explain the colours."""
    from matplotlib.lines import Line2D

    handles = []

    def add(label: str, colour: str, **style: Any) -> None:
        handles.append(Line2D([], [], color=DAYLIGHT[colour], label=label, **style))

    add(LABELS["linear"], "linear", linestyle=":")
    add(LABELS["dyt"], "dyt", linestyle="--")
    add(LABELS["dyisru"], "dyisru", linestyle="-")
    add("outlier of a token", "outlier", marker="o", linestyle="", markersize=4)
    add("other channels", "point", marker="o", linestyle="", markersize=4)
    add("the norm's bounds", "soft", linewidth=0.8, linestyle="--")
    figure.legend(handles=handles, loc="outside upper center", ncols=6, frameon=False, fontsize=9)


def main() -> None:
    """Train, inspect both models, and write the file and the pictures."""
    # The inspection measures on texts that the small model was not trained on.
    texts, _ = split_texts(standard_library_docstrings(), SAMPLES, 0)
    small = trained(STEPS, texts)
    training = json.loads((small / "training.json").read_text("utf-8"))
    models = {"all-MiniLM-L6-v2": folder(), "small-pre-norm": small}
    document: dict[str, Any] = {
        "command": "python -m benchmarks.activations",
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads",
        "training": training,
        "models": {},
    }
    for name, path in models.items():
        report = inspect_pretrained(path, Recipe(max_length=LENGTH), samples=SAMPLES, name=name)
        print(report, end="\n\n")
        document["models"][name] = report.to_dict()
        save_picture(report, ROOT / "docs" / "images" / f"inspection-{name}.png")
    RESULTS.write_text(json.dumps(document, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
