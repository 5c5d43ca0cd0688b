"""Check the paper's claim on real activations of two models: ``python -m benchmarks.activations``.

They are all-MiniLM-L6-v2, with the norms after the blocks, and SmolLM2-135M, with the norms before
them (``make models`` installs it). The results are benchmarks/results/inspection.json and
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

import torch
from matplotlib.figure import Figure

import dynorm
from dynorm.jobs.inspect import inspect_pretrained
from dynorm.recipe import Recipe
from dynorm.report.colours import COLOURS
from dynorm.report.pictures import draw
from tools.demo_model import folder

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "inspection.json"
LENGTH = 128  # the most tokens of a text, or of a block of the decoder
# The model in the package, and the number of texts or blocks: about 4,500 tokens each.
MODELS = {"all-MiniLM-L6-v2": ("minilm", 256), "SmolLM2-135M": ("smollm2", 32)}
PANELS = 15  # the most norms in a picture
LABELS = {"linear": "linear", "dyt": "DyT", "dyisru": "DyISRU"}
# The colours of a picture on white paper, by their use.
DAYLIGHT = COLOURS | {
    "soft": "#5c6570",
    "edge": "#c9c5bd",
    "point": "#a4aab0",
    "outlier": "#9a5bff",
}


def save_picture(report: dynorm.report.InspectionReport, path: Path) -> None:
    """Draw the norms of a model, or every n-th of many: outliers, and the functions fitted to them."""
    sites = report.sites[:: math.ceil(len(report.sites) / PANELS)]
    # Three in a row are legible at the width of a page.
    rows = math.ceil(len(sites) / 3)
    figure = Figure(figsize=(9, 2.5 * rows), layout="constrained")
    panels = figure.subplots(rows, 3, squeeze=False).flatten()
    for axes, site in zip(panels, sites, strict=False):
        draw(axes, site.outliers, site.picture, DAYLIGHT)
        figures = []
        for name, label in LABELS.items():
            figures.append(f"{label} {site.outliers.errors[name]:.2f}")
        axes.set_title(f"{site.path}\n{'  '.join(figures)}", fontsize=9)
        axes.tick_params(labelsize=8)
        axes.set_xlabel(axes.get_xlabel(), fontsize=9)
        axes.set_ylabel(axes.get_ylabel(), fontsize=9)
    for axes in panels[len(sites) :]:
        axes.axis("off")
    add_legend(figure)
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
    """Inspect both models, and write the file and the pictures."""
    threads = torch.get_num_threads()
    document: dict[str, Any] = {
        "command": "python -m benchmarks.activations",
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {threads} threads",
        "models": {},
    }
    for name, (package, samples) in MODELS.items():
        recipe = Recipe(max_length=LENGTH, held_out=samples)
        report = inspect_pretrained(folder(package), recipe)
        print(report, end="\n\n")
        document["models"][name] = report.to_dict()
        save_picture(report, ROOT / "docs" / "images" / f"inspection-{name}.png")
    RESULTS.write_text(json.dumps(document, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
