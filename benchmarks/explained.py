"""Measure how much of the outputs of DINOv2-small's 25 LayerNorms a point-wise function explains.

``python -m benchmarks.explained`` writes benchmarks/results/explained.json, in some five minutes on
2 cores. The packages of requirements-models.txt and the photographs of ``make build/pictures`` are
needed.

The inputs x of each norm are collected in the original model, from photographs to fit on and from
held-out ones; y is the norm's output before its weight and bias. The share explained at a norm is

    1 - sum |f(x) - y|^2 / sum |y - mean|^2

over all held-out tokens and channels, where the mean is that of y at this norm. For a LayerNorm that
is one less the mean squared error, because y has the mean 0 and the variance 1 in every token. A row has
the mean over the norms, and the smallest.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

import dynorm
from benchmarks.subjects import Batches, Row
from dynorm.files import write_text
from dynorm.jobs.checkpoint import library_versions, load_pretrained
from dynorm.jobs.images import find_images
from dynorm.jobs.inputs import image_inputs
from tools.demo_model import folder

RESULTS = Path(__file__).parent / "results" / "explained.json"
PHOTOGRAPHS = 32
BATCH = 16
WITNESSES = (4, 16, 64, 128)
# The one or two numbers of a function are fitted to one of this number of tokens.
EVERY = 32
# Intervals of a function of any shape, for a norm or all norms, and for one channel.
STEPS = 1000
STEPS_OF_CHANNEL = 50
# As arXiv 2605.14047 reports them, for functions found by genetic programming on a ViT-B.
REPORTED = {"one for all norms": 0.702, "one per norm": 0.916}
Shape = Callable[[Tensor, float], Tensor]


@dataclass
class Norm:
    """The inputs of one norm, to fit to and held out, each (tokens, channels)."""

    path: str
    eps: float
    fit: Tensor
    held_out: Tensor

    def output(self, x: Tensor) -> Tensor:
        """Return the norm's output before its weight and bias."""
        return nn.functional.layer_norm(x, x.shape[-1:], eps=self.eps)

    def sample(self) -> tuple[Tensor, Tensor]:
        """Return the inputs that one or two numbers are fitted to, and the outputs."""
        x = self.fit[::EVERY]
        return x, self.output(x)

    def explained(self, estimated: Tensor) -> float:
        """Return the share of the held-out outputs that an estimate of them explains."""
        return share(self.output(self.held_out), estimated)


def share(y: Tensor, estimated: Tensor) -> float:
    """Return ``1 - sum |estimated - y|^2 / sum |y - mean|^2``."""
    error = (estimated - y).square().sum(dtype=torch.float64)
    spread = (y - y.mean()).square().sum(dtype=torch.float64)
    return float(1 - error / spread)


@torch.no_grad()
def collect(model: nn.Module, fit: Batches, held_out: Batches) -> list[Norm]:
    """Return the inputs of all norms of the original model."""
    paths = [site.path for site in dynorm.find_norms(model, **fit[0])]
    inputs: dict[str, list[Tensor]] = {}

    def keep(path: str) -> Any:
        def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            inputs[path].append(args[0].flatten(0, -2))

        return hook

    parts = []
    for batches in (fit, held_out):
        inputs = {path: [] for path in paths}
        handles = []
        for path in paths:
            norm = model.get_submodule(path)
            handles.append(norm.register_forward_pre_hook(keep(path)))
        for batch in batches:
            model(**batch)
        for handle in handles:
            handle.remove()
        joined = {}
        for path, tensors in inputs.items():
            joined[path] = torch.cat(tensors)
        parts.append(joined)
    inputs_to_fit, inputs_held_out = parts
    norms = []
    for path in paths:
        eps: Any = model.get_submodule(path).eps
        norms.append(Norm(path, eps, inputs_to_fit[path], inputs_held_out[path]))
    return norms


def dyt(x: Tensor, alpha: float) -> Tensor:
    """Return DyT without its weight and bias."""
    return torch.tanh(alpha * x)


def dyisru(x: Tensor, beta: float) -> Tensor:
    """Return DyISRU without its scale."""
    return x / torch.sqrt(beta + x.square())


@dataclass
class Fitted:
    """A function of one channel with a scale and a constant."""

    shape: Shape
    scale: float
    constant: float

    def __call__(self, x: Tensor) -> Tensor:
        """Return its value."""
        return self.scale * self.shape(x, self.constant)


def fitted(shape: Shape, norms: Sequence[Norm]) -> Fitted:
    """Return the function with the least squared error over some norms.

    The scale that goes with a constant is known in closed form. The constants are searched on a
    grid, which is made finer twice.
    """
    samples = [norm.sample() for norm in norms]
    best = Fitted(shape, 0.0, 1.0)
    least = float("inf")
    middle = 0.0
    width = 6.0
    for _ in range(3):
        for exponent in torch.linspace(middle - width, middle + width, 25).tolist():
            constant = 10.0**exponent
            products = 0.0
            squares = 0.0
            for x, y in samples:
                f = shape(x, constant)
                products += float((f * y).sum())
                squares += float(f.square().sum())
            # The squared error, less the squares of y.
            error = -(products**2) / squares
            if error < least:
                least = error
                best = Fitted(shape, products / squares, constant)
                middle = exponent
        width /= 10
    return best


def steps(x: Tensor, y: Tensor, count: int) -> Callable[[Tensor], Tensor]:
    """Return the mean of y on each interval of x, with equally many x in all.

    Tensors are (functions, numbers), one function per row. The last interval takes the rest.
    """
    x_sorted, order = x.sort(dim=-1)
    y_sorted = y.gather(-1, order)
    length = x.shape[-1] // count
    used = length * count
    intervals = y_sorted[:, :used].unflatten(-1, (count, length))
    means = intervals.mean(-1)
    bounds = x_sorted[:, length:used:length].contiguous()

    def step_function(z: Tensor) -> Tensor:
        interval = torch.searchsorted(bounds, z.contiguous(), right=True)
        return means.gather(-1, interval)

    return step_function


def layer(norm: Norm, per_channel: bool, witnesses: int) -> Tensor:
    """Return the outputs of a layer that ``convert_`` and ``calibrate_`` make of the norm."""
    channels = norm.fit.shape[-1]
    layer_norm = nn.LayerNorm(channels, eps=norm.eps)
    model = nn.Sequential(layer_norm).eval()
    batches = list(norm.fit.split(4096))
    sites = dynorm.find_norms(model, batches[0])
    dynorm.convert_(model, sites, per_channel=per_channel, witnesses=witnesses)
    dynorm.calibrate_(model, batches, lean=0.0)
    with torch.no_grad():
        estimated: Tensor = model(norm.held_out)
    return estimated


def row(function: str, constants: str, shares: Iterable[float]) -> Row:
    """Return a row of the results."""
    values = list(shares)
    figures = {
        "mean": round(fmean(values), 4),
        "least": round(min(values), 4),
        "norms": len(values),
    }
    print(f"{function}, {constants}: {figures}", flush=True)
    return {"function": function, "constants": constants, **figures}


def function_rows(norms: list[Norm]) -> list[Row]:
    """Return the rows of functions with a scale and a constant, and of those of any shape."""
    rows = []
    for name, shape in (("DyT", dyt), ("DyISRU", dyisru)):
        shared = fitted(shape, norms)
        separate = [fitted(shape, [norm]) for norm in norms]
        of_shared = []
        of_norms = []
        for norm, of_norm in zip(norms, separate, strict=True):
            of_shared.append(norm.explained(shared(norm.held_out)))
            of_norms.append(norm.explained(of_norm(norm.held_out)))
        rows.append(row(name, "one for all norms", of_shared))
        rows.append(row(name, "one per norm", of_norms))
    # DyISRU was the last.
    return [*rows, *step_rows(norms, shared, separate)]


def step_rows(norms: list[Norm], shared: Fitted, separate: list[Fitted]) -> list[Row]:
    """Return the rows of functions of any shape, which are step functions added to DyISRU.

    Steps by themselves are too wide for the largest x.

    Args:
        norms: the norms.
        shared: the DyISRU that was fitted to all norms.
        separate: the DyISRU of each norm.
    """
    shared_steps = steps_on_top(shared, norms)
    of_shared = []
    of_norms = []
    of_channels = []
    for norm, of_norm in zip(norms, separate, strict=True):
        z = norm.held_out.reshape(1, -1)
        estimated = shared(z) + shared_steps(z)
        of_shared.append(norm.explained(estimated.reshape(norm.held_out.shape)))

        norm_steps = steps_on_top(of_norm, [norm])
        estimated = of_norm(z) + norm_steps(z)
        of_norms.append(norm.explained(estimated.reshape(norm.held_out.shape)))

        rest = norm.output(norm.fit) - of_norm(norm.fit)
        channel_steps = steps(norm.fit.T, rest.T, STEPS_OF_CHANNEL)
        estimated = of_norm(norm.held_out) + channel_steps(norm.held_out.T).T
        of_channels.append(norm.explained(estimated))
    return [
        row("any", "one for all norms", of_shared),
        row("any", "one per norm", of_norms),
        row("any", "one per channel", of_channels),
    ]


def steps_on_top(function: Fitted, norms: Sequence[Norm]) -> Callable[[Tensor], Tensor]:
    """Return a step function of the rest that a function leaves unexplained at some norms."""
    samples = [norm.sample() for norm in norms]
    x = torch.cat([x.flatten() for x, _ in samples])
    y = torch.cat([y.flatten() for _, y in samples])
    rest = y - function(x)
    return steps(x[None], rest[None], STEPS)


def layer_rows(norms: list[Norm]) -> list[Row]:
    """Return the rows of the library's layers, with their weight, bias and centre per channel."""
    rows = []
    shares = [norm.explained(layer(norm, False, 0)) for norm in norms]
    rows.append(row("DyISRU", "one per norm, weight and bias per channel", shares))
    for witnesses in (0, *WITNESSES):
        shares = [norm.explained(layer(norm, True, witnesses)) for norm in norms]
        constants = "one per channel, weight and bias too"
        if witnesses:
            constants += f", {witnesses} witnesses"
        rows.append(row("DyISRU", constants, shares))
    return rows


def photographs() -> tuple[nn.Module, Batches, Batches]:
    """Return DINOv2-small, with batches to fit to and held-out ones."""
    pretrained = load_pretrained(folder("dinov2"))
    files, _ = find_images(["build/pictures"])
    files_to_fit = files[PHOTOGRAPHS : 2 * PHOTOGRAPHS]
    source = image_inputs(pretrained, files_to_fit, files[:PHOTOGRAPHS], {})
    fit = source.batches(source.fit[:PHOTOGRAPHS], BATCH)
    held_out = source.batches(source.held_out, BATCH)
    model = pretrained.model.eval()
    return model, [dict(batch) for batch in fit], [dict(batch) for batch in held_out]


def main() -> None:
    """Measure all rows and write the file."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    torch.manual_seed(0)
    model, fit, held_out = photographs()
    norms = collect(model, fit, held_out)
    rows = [*function_rows(norms), *layer_rows(norms)]
    first = norms[0]
    document = {
        "model": "DINOv2-small, 25 LayerNorms",
        "photographs": {"fit": PHOTOGRAPHS, "held_out": PHOTOGRAPHS},
        "tokens": {
            "fit": len(first.fit),
            "held_out": len(first.held_out),
        },
        "reported": REPORTED,
        "rows": rows,
        "made_with": library_versions(),
    }
    write_text(RESULTS, json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
