"""Draw norms of the real encoder from their own activations, for the README and docs/witnesses.md.

``python -m benchmarks.picture`` writes docs/images/before-after.png, the norms that the function
fits best and worst, and docs/images/witness.png, the size of each token against the square of one
of its channels.
"""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import matplotlib as mpl
import torch
from matplotlib.axes import Axes
from torch import Tensor, nn

import dynorm
from dynorm.batches import call, site_tokens, token_masks
from dynorm.fit.site_fit import SiteFit
from dynorm.fit.witnesses import TokenScales, Witnesses
from dynorm.jobs import encode, load_pretrained, make_batches
from dynorm.jobs.texts import standard_library_docstrings
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
    tokens: dict[str, list[Tensor]] = {}
    masks: list[Tensor] = []

    def keep_tokens(path: str, norm: nn.LayerNorm) -> None:
        tokens[path] = []
        layer = dynorm.DyISRU(norm.normalized_shape)

        def hook(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            tokens[path].append(site_tokens(layer, args[0], masks))

        norm.register_forward_hook(hook)

    for path, module in pretrained.model.named_modules():
        if isinstance(module, nn.LayerNorm):
            keep_tokens(path, module)
    with torch.no_grad():
        for batch in batches:
            masks[:] = token_masks(batch)
            call(pretrained.model, batch)
    return {path: torch.cat(parts) for path, parts in tokens.items()}


def fitted(x: Tensor) -> SiteFit:
    """Return the fit of one curve to a norm with these inputs."""
    channels = x.shape[1]
    layer = dynorm.DyISRU(channels, scale=(channels - 1) ** 0.5, elementwise_affine=False)
    layer.requires_grad_(False)
    norm = Replaced(nn.LayerNorm(channels), NormSite("", kind="layernorm"))
    fit = SiteFit(layer, norm)
    fit.fit_(x, dynorm.functional.layer_norm(x))
    return fit


def draw(inputs: dict[str, Tensor]) -> None:
    """Draw the norm and the function at the site that one curve fits best, and at the worst one."""
    mpl.use("agg")
    import matplotlib.pyplot as plt

    fits = {path: fitted(x) for path, x in inputs.items()}
    in_order = sorted(fits, key=lambda path: fits[path].error)
    best = in_order[0]
    worst = in_order[-1]
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    draw_fit(axes[0], inputs[best], fits[best])
    draw_fit(axes[1], inputs[worst], fits[worst])
    error = f"error {fits[best].error:.0%} of the output's spread"
    axes[0].set_title(f"where it fits best: {best}\n{error}", fontsize=10)
    error = f"error {fits[worst].error:.0%} of the output's spread"
    axes[1].set_title(f"where it fits worst: {worst}\n{error}", fontsize=10)
    axes[0].set_ylabel("output y")
    figure.savefig(IMAGES / "before-after.png", dpi=110)


def draw_fit(axes: Axes, inputs: Tensor, fit: SiteFit) -> None:
    """Draw some values of a norm, with the largest ones, and the curve that was fitted to it."""
    x = inputs.flatten()
    y = dynorm.functional.layer_norm(inputs).flatten()
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(x.numel(), generator=generator)
    largest = x.abs().topk(1500).indices
    points = torch.cat([order[:6000], largest])
    axes.scatter(
        x[points],
        y[points],
        c="0.7",
        s=5,
        linewidths=0,
        label="LayerNorm, token by token",
    )
    beta = float(fit.layer.beta())
    left = 1.02 * float(x.min())
    right = 1.02 * float(x.max())
    line = torch.linspace(left, right, 2000)
    curve = dynorm.functional.dyisru(line, beta, scale=fit.layer.scale)
    name = rf"DyISRU, one curve, $\beta$ = {beta:.3g}"
    axes.plot(line, curve, color=COLOURS["dyisru"], lw=2, label=name)
    axes.set_xlabel("input x")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper left", fontsize=9, markerscale=3)


def witnesses_of(x: Tensor, most: int) -> Witnesses:
    """Return at most this number of witnesses of the tokens."""
    scales = TokenScales("layernorm", 1e-12, most)
    scales.update(x)
    return scales.choose()


def draw_witness(x: Tensor) -> None:
    """Draw the sum of each token against one channel, and against a constant and four channels."""
    import matplotlib.pyplot as plt

    sums = x.shape[1] * x.var(1, correction=0)
    figure, (left, right) = plt.subplots(
        1,
        2,
        figsize=(10, 3.6),
        sharey=True,
        layout="constrained",
    )
    grey = {"color": "0.75", "s": 5, "linewidths": 0}
    coloured = {"color": COLOURS["dyisru"], "s": 5, "linewidths": 0, "alpha": 0.5}

    one = witnesses_of(x, 1)
    square = x[:, one.channels[0]].square()
    left.scatter(square, sums, label="a token", **coloured)
    decades = float(square.max().log10()) + 0.05
    line = torch.logspace(0, decades, 300)
    curve = one.beta + one.gains[0] * line
    left.plot(line, curve, color="0.2", lw=1.2, label=r"$\beta + g\,x^2$, fitted")
    left.set_xlim(1, None)
    left.set_title(f"one witness explains {one.explained[1]:.1%} of the sizes", fontsize=11)
    left.set_xlabel(f"square of channel {one.channels[0]}")
    left.set_ylabel("the token's own sum")
    left.legend(frameon=False, loc="upper left", markerscale=3)

    four = witnesses_of(x, 4)
    squares = x[:, list(four.channels)].square()
    estimated = four.beta + squares @ torch.tensor(four.gains)
    constant = torch.full_like(sums, witnesses_of(x, 0).beta)
    right.scatter(constant, sums, label="a constant", **grey)
    right.scatter(estimated, sums, label="four witnesses", **coloured)
    ends = [float(sums.min()), float(sums.max())]
    right.plot(ends, ends, color="0.5", lw=0.8, ls="--", label="exact")
    right.set_title(f"four explain {four.explained[4]:.1%}, a constant none", fontsize=11)
    right.set_xlabel("estimated by the layer")
    right.legend(frameon=False, loc="lower right", markerscale=3)

    for axes in (left, right):
        axes.set(xscale="log", yscale="log")
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(IMAGES / "witness.png", dpi=100)


if __name__ == "__main__":
    inputs_of_norms = activations()
    draw(inputs_of_norms)
    draw_witness(inputs_of_norms[SITE])
