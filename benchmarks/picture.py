"""Draw the pictures of README.md and docs/quality.md: ``python -m benchmarks.picture``.

It writes docs/images/before-after.png, the two norms of the real encoder that one curve fits best and
worst, on their own activations; and docs/images/sites.png, the errors of all sites of strict models
without training and distilled, from benchmarks/results/quality.json.
"""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

import dynorm
from benchmarks.committed import left_in_place, runs_of
from dynorm.jobs import encode, load_pretrained, make_batches
from dynorm.jobs.texts import standard_library_docstrings
from dynorm.report import InspectedSite
from dynorm.report.colours import COLOURS
from tools.demo_model import folder

IMAGES = Path(__file__).parent.parent / "docs" / "images"
# The conversions whose sites are drawn: the model in the results, its name, and what is left in place.
DRAWN = [
    ("minilm", "all-MiniLM-L6-v2", "DyISRU"),
    ("smollm2", "SmolLM2-135M", "DyISRU after a constant token"),
    ("dinov2", "DINOv2-small", "DyISRU"),
]


def draw_site(axes: Axes, site: InspectedSite, words: str) -> None:
    """Draw some values of a norm, with the largest ones, and the curve that was fitted to it."""
    picture = site.picture
    x = picture.x + picture.outlier_x
    y = picture.y + picture.outlier_y
    axes.scatter(x, y, c="0.7", s=5, linewidths=0, label="LayerNorm, token by token")
    line = torch.linspace(1.02 * min(x), 1.02 * max(x), 2000, dtype=torch.float64)
    name = rf"DyISRU, one curve, $\beta$ = {site.core.betas['dyisru']:.3g}"
    axes.plot(line, site.core.curve("dyisru", line), color=COLOURS["dyisru"], lw=2, label=name)
    error = f"error {site.core.errors['dyisru']:.0%} of the output"
    axes.set_title(f"{words}: {site.path}\n{error}", fontsize=10)
    axes.set_xlabel("input x")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper left", fontsize=9, markerscale=3)


def draw_errors(axes: Axes, model: str, name: str, layer: str) -> None:
    """Draw the error of each site of a strict model, from the first to the last."""
    drawn = next(run for run in runs_of(model) if left_in_place(run[0]) == layer)
    for steps, row in drawn.items():
        errors = [100 * error for _, error in row["sites"]]
        label = f"{steps:,} steps" if steps else "no training"
        axes.plot(range(1, len(errors) + 1), errors, "o-", ms=3, lw=1, label=label)
    axes.set_title(f"{name}, {layer}", fontsize=10)
    axes.set_xlabel("norms, in the order of the model")
    axes.set_ylim(0, 115)
    axes.yaxis.set_major_formatter(PercentFormatter())
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)


def draw_before_after() -> None:
    """Write docs/images/before-after.png."""
    pretrained = load_pretrained(folder())
    batches = make_batches(pretrained, encode(pretrained, standard_library_docstrings()[::60]))
    sites = dynorm.inspect_norms(pretrained.model, batches).sites
    in_order = sorted(sites, key=lambda site: site.core.errors["dyisru"])
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    axes = figure.subplots(1, 2)
    draw_site(axes[0], in_order[0], "where it fits best")
    draw_site(axes[1], in_order[-1], "where it fits worst")
    axes[0].set_ylabel("output y, without weight and bias")
    figure.savefig(IMAGES / "before-after.png", dpi=110)


def draw_sites() -> None:
    """Write docs/images/sites.png."""
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    axes = figure.subplots(1, len(DRAWN))
    for place, conversion in zip(axes, DRAWN, strict=True):
        draw_errors(place, *conversion)
    axes[0].set_ylabel("error over the spread of the norm's output")
    figure.savefig(IMAGES / "sites.png", dpi=110)


def main() -> None:
    """Write both pictures."""
    draw_sites()
    draw_before_after()


if __name__ == "__main__":
    main()
