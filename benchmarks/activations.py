"""Does the paper's claim hold on real activations? ``python -m benchmarks.activations`` inspects two models.

One is all-MiniLM-L6-v2, the other a small pre-norm GPT-2 that is trained here for about a minute on
bytes of the standard library's docstrings. It writes benchmarks/results/inspection.json and
docs/images/inspection-*.png.
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
from dynorm.jobs.recipe import Recipe
from dynorm.jobs.texts import split_texts, standard_library_docstrings
from dynorm.report.colours import COLOURS
from dynorm.report.pictures import draw
from dynorm.table import shortened
from tools.demo_model import folder

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "inspection.json"
STEPS, SAMPLES = 300, 256
# The colours of a picture on white paper, by their use.
DAYLIGHT = COLOURS | {
    "soft": "#5c6570",
    "edge": "#c9c5bd",
    "point": "#c3c7cc",
    "bar": "#333a42",
    "outlier": "#8a3ffc",
}


def save_picture(report: dynorm.report.InspectionReport, path: Path) -> None:
    """Draw all norms of a model: its outliers, and the functions fitted to them."""
    # Three in a row are legible at the width of a page.
    rows = math.ceil(len(report.sites) / 3)
    figure = Figure(figsize=(9, 2.5 * rows), layout="constrained")
    panels = figure.subplots(rows, 3, squeeze=False).flatten()
    for axes, site in zip(panels, report.sites, strict=False):
        draw(axes, site.outliers.fit, site.picture, site.outliers.points, DAYLIGHT)
        residuals = site.outliers.residuals
        figures = "  ".join(f"{short} {residuals[name]:.2f}" for name, short in LABELS.items())
        axes.set_title(f"{shortened(site.path, 34)}\n{figures}", fontsize=9)
        axes.tick_params(labelsize=8)
        axes.set_xlabel(axes.get_xlabel(), fontsize=9)
        axes.set_ylabel(axes.get_ylabel(), fontsize=9)
    for axes in panels[len(report.sites) :]:
        axes.axis("off")
    add_legend(figure)
    # Simplified, the dots would be gone: each is a line of no length.
    with matplotlib.rc_context({"path.simplify": False}):
        figure.savefig(path, dpi=100)


LABELS = {"linear": "linear", "dyt": "DyT", "dyisru": "DyISRU"}


def add_legend(figure: Figure) -> None:
    """Explain the colours."""
    from matplotlib.lines import Line2D

    styles = {"linear": ":", "dyt": "--", "dyisru": "-"}
    handles = [
        Line2D([], [], color=DAYLIGHT[n], linestyle=styles[n], label=label)
        for n, label in LABELS.items()
    ]
    handles += [
        Line2D([], [], color=DAYLIGHT[n], marker="o", linestyle="", markersize=4, label=label)
        for n, label in (("outlier", "outlier of a token"), ("point", "other channels"))
    ]
    handles.append(
        Line2D(
            [], [], color=DAYLIGHT["soft"], linewidth=0.8, linestyle="--", label="the norm's bounds"
        )
    )
    figure.legend(handles=handles, loc="outside upper center", ncols=6, frameon=False, fontsize=9)


def main() -> None:
    """Train, inspect both models, and write the file and the pictures."""
    # Trained on texts that the inspection does not measure on.
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
