"""Draw two norms of the real encoder on their own activations, with the function in their place.

``python -m benchmarks.picture`` writes docs/images/before-after.png: the norms that one curve fits
best and worst.
"""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import matplotlib as mpl
import torch
from matplotlib.axes import Axes

import dynorm
from dynorm.jobs import encode, load_pretrained, make_batches
from dynorm.jobs.texts import standard_library_docstrings
from dynorm.report import InspectedSite
from dynorm.report.colours import COLOURS
from tools.demo_model import folder

IMAGE = Path(__file__).parent.parent / "docs" / "images" / "before-after.png"


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


def main() -> None:
    """Write docs/images/before-after.png."""
    mpl.use("agg")
    import matplotlib.pyplot as plt

    pretrained = load_pretrained(folder())
    batches = make_batches(pretrained, encode(pretrained, standard_library_docstrings()[::60]))
    sites = dynorm.inspect_norms(pretrained.model, batches).sites
    in_order = sorted(sites, key=lambda site: site.core.errors["dyisru"])
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    draw_site(axes[0], in_order[0], "where it fits best")
    draw_site(axes[1], in_order[-1], "where it fits worst")
    axes[0].set_ylabel("output y, without weight and bias")
    figure.savefig(IMAGE, dpi=110)


if __name__ == "__main__":
    main()
