"""Draw norms of the real encoder from their own activations, for the README and docs/witnesses.md.

``python -m benchmarks.picture`` writes docs/images/before-after.png, the best and the worst of its
norms with the function in its place, and
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
from dynorm.batches import call, site_tokens, token_masks
from dynorm.fit.site_fit import SiteFit
from dynorm.fit.witnesses import TokenScales, Witnesses
from dynorm.jobs.checkpoint import encode, load_pretrained, make_batches
from dynorm.jobs.texts import standard_library_docstrings
from dynorm.ranks import Ranks
from dynorm.replace.converted import Replaced
from dynorm.report.colours import COLOURS
from dynorm.site import NormSite
from tools.demo_model import folder

SITE = "encoder.layer.4.output.LayerNorm"
IMAGES = Path(__file__).parent.parent / "docs" / "images"


def activations() -> dict[str, Tensor]:
    """Return the inputs of each norm, as (tokens, C)."""
    pretrained = load_pretrained(folder())
    batches = make_batches(pretrained, encode(pretrained, standard_library_docstrings()[::60]))
    norms = {name: m for name, m in pretrained.model.named_modules() if isinstance(m, nn.LayerNorm)}
    seen: dict[str, list[Tensor]] = {name: [] for name in norms}
    masks: list[Tensor] = []
    for name, norm in norms.items():
        like = dynorm.DyISRU(norm.normalized_shape)
        norm.register_forward_hook(
            lambda _, args, y, n=name, at=like: seen[n].append(site_tokens(at, args[0], masks))
        )
    with torch.no_grad():
        for batch in batches:
            masks[:] = token_masks(batch)
            call(pretrained.model, batch)
    return {name: torch.cat(tokens) for name, tokens in seen.items()}


def draw(inputs: dict[str, Tensor]) -> None:
    """Two panels, the site where one curve fits best and the one where it fits worst, norm and function in each."""
    mpl.use("agg")
    import matplotlib.pyplot as plt

    fits = {}
    for path, x in inputs.items():
        layer = dynorm.DyISRU(
            x.shape[1], scale=(x.shape[1] - 1) ** 0.5, elementwise_affine=False
        ).requires_grad_(False)
        norm = Replaced(nn.LayerNorm(layer.channels), NormSite("", kind="layernorm"))
        fits[path] = SiteFit(layer, norm, Ranks())
        fits[path].update(x, dynorm.functional.layer_norm(x), 1.0, torch.arange(len(x)))
        fits[path].solve_()
    in_order = sorted(fits, key=lambda path: fits[path].error)
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    for axis, path, words in zip(axes, (in_order[0], in_order[-1]), ("best", "worst"), strict=True):
        x, fit = inputs[path], fits[path]
        y = dynorm.functional.layer_norm(x).flatten()
        chosen = torch.randperm(x.numel(), generator=torch.Generator().manual_seed(0))[:6000]
        points = torch.cat([chosen, x.flatten().abs().topk(1500).indices])
        axis.scatter(
            x.flatten()[points],
            y[points],
            c="0.7",
            s=5,
            linewidths=0,
            label="LayerNorm, token by token",
        )
        line = torch.linspace(float(x.min()) * 1.02, float(x.max()) * 1.02, 2000)
        curve = dynorm.functional.dyisru(line, float(fit.layer.beta()), scale=fit.layer.scale)
        name = rf"DyISRU, one curve, $\beta$ = {float(fit.layer.beta()):.3g}"
        axis.plot(line, curve, color=COLOURS["dyisru"], lw=2, label=name)
        axis.set_title(
            f"where it fits {words}: {path}\nerror {fit.error:.0%} of the output's spread",
            fontsize=10,
        )
        axis.set_xlabel("input x")
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, loc="upper left", fontsize=9, markerscale=3)
    axes[0].set_ylabel("output y")
    figure.savefig(IMAGES / "before-after.png", dpi=110)


def witnesses_of(x: Tensor, most: int) -> Witnesses:
    """Return at most so many witnesses of some tokens."""
    scales = TokenScales("layernorm", 1e-12, Ranks(), most)
    scales.update(x)
    return scales.choose()


def draw_witness(x: Tensor) -> None:
    """Two panels: the sum of each token against one channel, and against a constant and four channels."""
    import matplotlib.pyplot as plt

    none, one, four = witnesses_of(x, 0), witnesses_of(x, 1), witnesses_of(x, 4)
    sums = x.shape[1] * x.var(1, correction=0)
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.6), sharey=True, layout="constrained")
    square = x[:, one.channels[0]].square()
    axes[0].scatter(
        square, sums, s=5, color=COLOURS["dyisru"], linewidths=0, alpha=0.5, label="a token"
    )
    line = torch.logspace(0, float(square.max().log10()) + 0.05, 300)
    axes[0].plot(
        line, one.beta + one.gains[0] * line, color="0.2", lw=1.2, label=r"$\beta + g\,x^2$, fitted"
    )
    axes[0].set_xlim(1, None)
    axes[0].set_title(f"one witness explains {one.explained[1]:.1%} of the sizes", fontsize=11)
    axes[0].set_xlabel(f"square of channel {one.channels[0]}")
    estimated = four.beta + x[:, list(four.channels)].square() @ torch.tensor(four.gains)
    constant = torch.full_like(sums, none.beta)
    axes[1].scatter(constant, sums, s=5, color="0.75", linewidths=0, label="a constant")
    axes[1].scatter(
        estimated,
        sums,
        s=5,
        color=COLOURS["dyisru"],
        linewidths=0,
        alpha=0.5,
        label="four witnesses",
    )
    ends = [float(sums.min()), float(sums.max())]
    axes[1].plot(ends, ends, color="0.5", lw=0.8, ls="--", label="exact")
    axes[1].set_title(f"four explain {four.explained[4]:.1%}, a constant none", fontsize=11)
    axes[1].set_xlabel("estimated by the layer")
    for axis, place in zip(axes, ("upper left", "lower right"), strict=True):
        axis.legend(frameon=False, loc=place, markerscale=3)
        axis.set(xscale="log", yscale="log")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("the token's own sum")
    figure.savefig(IMAGES / "witness.png", dpi=100)


if __name__ == "__main__":
    found = activations()
    draw(found)
    draw_witness(found[SITE])
