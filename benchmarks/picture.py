"""Draw one norm of the real encoder from its own activations, for the README and docs/witnesses.md.

``python -m benchmarks.picture`` writes docs/images/before-after.png, the norm and the function in its place, and
docs/images/witness.png, the size of each token against the square of one of its channels.
"""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import matplotlib as mpl
import torch
from torch import Tensor, nn

import dynorm
from dynorm.distill.pretrained import encode, load_pretrained, make_batches
from dynorm.distill.texts import standard_library_docstrings
from dynorm.family import FAMILY
from dynorm.fit.site_fit import SiteFit
from dynorm.fit.witnesses import TokenScales
from dynorm.replace.specs import Replaced
from dynorm.site import NormSite
from dynorm.watch import call, site_tokens, token_masks
from tools.demo_model import folder

SITE = "encoder.layer.4.output.LayerNorm"
IMAGES = Path(__file__).parent.parent / "docs" / "images"


def activations() -> tuple[Tensor, Tensor]:
    """Return what the norm sees and its core, without weight and bias, as (tokens, C)."""
    pretrained = load_pretrained(folder())
    texts = standard_library_docstrings()[::60]
    seen: list[Tensor] = []
    batches = make_batches(pretrained, encode(pretrained, texts))
    layer = dynorm.DyISRU(pretrained.model.get_submodule(SITE).weight.numel())
    with torch.no_grad():
        for batch in batches:
            masks = token_masks(batch)
            handle = pretrained.model.get_submodule(SITE).register_forward_hook(
                lambda module, args, output, masks=masks: seen.append(site_tokens(layer, args[0], masks))
            )
            call(pretrained.model, batch)
            handle.remove()
    x = torch.cat(seen)
    return x, dynorm.functional.layer_norm(x)


def draw(x: Tensor, y: Tensor) -> None:
    """Two panels: every token has its own line; one curve for all."""
    mpl.use("agg")
    import matplotlib.pyplot as plt

    layer = dynorm.DyISRU(x.shape[1], scale=(x.shape[1] - 1) ** 0.5, elementwise_affine=False)
    fit = SiteFit(layer, Replaced(nn.LayerNorm(layer.channels), NormSite("", kind="layernorm")))
    fit.update(x, y)
    fit.solve_()
    chosen = torch.randperm(x.numel(), generator=torch.Generator().manual_seed(0))[:6000]
    far = x.flatten().abs().topk(1500).indices
    points = torch.cat([chosen, far])
    sigma = x.std(1, keepdim=True).expand_as(x).flatten()[points]
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.6), sharey=True, layout="constrained")
    marks = axes[0].scatter(
        x.flatten()[points], y.flatten()[points], c=sigma.log10(), s=5, cmap="viridis", linewidths=0
    )
    figure.colorbar(marks, ax=axes[0], label=r"$\log_{10}\sigma$ of the token")
    axes[0].set_title("before: LayerNorm, one line per token", fontsize=11)
    line = torch.linspace(float(x.min()) * 1.02, float(x.max()) * 1.02, 2000)
    axes[1].scatter(x.flatten()[points], y.flatten()[points], c="0.8", s=5, linewidths=0)
    curve = dynorm.functional.dyisru(line, float(layer.beta()), scale=layer.scale).detach()
    axes[1].plot(line, curve, color=FAMILY["dyisru"].color, lw=2, label=rf"DyISRU, $\beta$ = {float(layer.beta()):.0f}")
    axes[1].set_title("after: DyISRU, one curve, no statistics", fontsize=11)
    axes[1].legend(frameon=False, loc="lower right")
    for axis in axes:
        axis.axhline(layer.scale, color="0.5", lw=0.8, ls="--")
        axis.axhline(-layer.scale, color="0.5", lw=0.8, ls="--")
        axis.set_xlabel("input x")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("output y")
    figure.savefig(IMAGES / "before-after.png", dpi=110)


def draw_witness(x: Tensor) -> None:
    """Two panels: what one channel tells of each token's sum, and what a constant and four channels make of it."""
    import matplotlib.pyplot as plt

    scales = TokenScales("layernorm", 1e-12)
    scales.update(x)
    one, four = scales.choose(1), scales.choose(4)
    sums = x.shape[1] * x.var(1, correction=0)
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.6), sharey=True, layout="constrained")
    square = x[:, one.channels[0]].square()
    axes[0].scatter(square, sums, s=5, color=FAMILY["dyisru"].color, linewidths=0, alpha=0.5)
    line = torch.logspace(0, float(square.max().log10()) + 0.05, 300)
    axes[0].plot(line, one.beta + one.gains[0] * line, color="0.2", lw=1.2)
    axes[0].set_xlim(1, None)
    axes[0].set_title(f"one witness tells {one.explained[1]:.1%} of the sizes", fontsize=11)
    axes[0].set_xlabel(f"square of channel {one.channels[0]}")
    told = four.beta + x[:, list(four.channels)].square() @ torch.tensor(four.gains)
    constant = torch.full_like(sums, scales.choose(0).beta)
    axes[1].scatter(constant, sums, s=5, color="0.75", linewidths=0, label="a constant")
    axes[1].scatter(told, sums, s=5, color=FAMILY["dyisru"].color, linewidths=0, alpha=0.5, label="four witnesses")
    ends = [float(sums.min()), float(sums.max())]
    axes[1].plot(ends, ends, color="0.5", lw=0.8, ls="--")
    axes[1].set_title(f"four tell {four.explained[4]:.1%}, a constant none", fontsize=11)
    axes[1].set_xlabel("told")
    axes[1].legend(frameon=False, loc="upper left", markerscale=3)
    for axis in axes:
        axis.set(xscale="log", yscale="log")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("the token's own sum")
    figure.savefig(IMAGES / "witness.png", dpi=100)


if __name__ == "__main__":
    found = activations()
    draw(*found)
    draw_witness(found[0])
