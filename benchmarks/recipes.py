"""Compare ways to distil a strict model: ``python -m benchmarks.recipes``.

The model is all-MiniLM-L6-v2. Each way takes the same steps on the same batches, and its model is
measured on held-out data on the way. Curves are added to benchmarks/results/recipes.json; those that
are there are not measured again.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback

import dynorm
from benchmarks.quality import Batches, Subject, minilm
from dynorm.fold import fold_means_
from dynorm.layers import AnnealedNorm
from dynorm.replace.converted import dynorm_layers
from dynorm.report.conversion import compare
from dynorm.train.anneal import AnnealStart, annealed_layers
from dynorm.train.callbacks import AnnealCallback

RESULTS = Path(__file__).parent / "results" / "recipes.json"
# The steps of each way; after how many of them it is measured, and on how many batches of which data.
STEPS, EVERY = 120, 30
MEASURED = {"docstrings": 8, "licences": 8}
PENALTY = 0.3
Row = dict[str, Any]


@dataclass(frozen=True)
class Way:
    """A way from the norms to the layers.

    Args:
        anneal: when the annealing begins and how long it takes, as shares of the run; None for layers
            that replace the norms before the first step.
        in_order: anneal one site after another, from the first to the last.
        penalty: the weight of the variance of the logarithm of the tokens' sizes, at each site; while
            there are norms, if the way is annealed.
    """

    anneal: tuple[float, float] | None = None
    in_order: bool = False
    penalty: float = 0.0


WAYS = {
    "layers from the start": Way(),
    "sizes made equal first": Way(anneal=(0.4, 0.01), penalty=PENALTY),
    "sizes made equal throughout": Way(penalty=PENALTY),
    "annealed, all at once": Way(anneal=(0.0, 0.5)),
    "annealed, one site after another": Way(anneal=(0.0, 0.5), in_order=True),
}


class OneByOne(TrainerCallback):
    """Anneal the layers one after another, each in its part of the first half of the run."""

    def __init__(self, model: nn.Module) -> None:
        self.layers = list(annealed_layers(model).values())

    def on_step_begin(self, args: object, state: Any, control: object, **kwargs: object) -> None:
        """Set the t of every layer."""
        done = 2 * state.global_step / state.max_steps * len(self.layers)
        for place, layer in enumerate(self.layers):
            layer.set_t_(min(max(done - place, 0.0), 1.0))


class Curve(TrainerCallback):
    """Measure the model now and then, with its layers in the norms' place."""

    def __init__(self, model: nn.Module, subject: Subject) -> None:
        self.model, self.subject = model, subject
        self.points: list[Row] = []
        self.seconds = 0.0
        self.started = time.process_time()

    def on_step_end(self, args: object, state: Any, control: object, **kwargs: object) -> None:
        """Measure now and then."""
        if state.global_step % EVERY == 0:
            self.measure(state.global_step)

    def measure(self, step: int) -> None:
        """Add a point."""
        self.seconds += time.process_time() - self.started
        point: Row = {"step": step, "cpu_seconds": round(self.seconds)}
        with as_layers(self.model):
            for kind, count in MEASURED.items():
                batches = self.subject.held_out[kind][:count]
                output = compare(self.model, self.subject.model, batches)
                point[kind] = round(output.cosine_mean, 4)
        self.points.append(point)
        print(json.dumps(point), flush=True)
        self.started = time.process_time()


@torch.no_grad()
def set_constants_(model: nn.Module, batches: Batches) -> None:
    """Set the constants of annealed layers in closed form."""
    with AnnealStart(model):
        for batch in batches:
            model(**batch)


@contextmanager
def as_layers(model: nn.Module) -> Iterator[None]:
    """Let annealed layers be those that they end as."""
    positions = {}
    for layer in dynorm_layers(model).values():
        if isinstance(layer, AnnealedNorm):
            positions[layer] = layer.position
            layer.set_t_(1.0)
    yield
    for layer, position in positions.items():
        layer.set_t_(position)


class EqualSizes(torch.autograd.Function):
    """Return x; in the backward pass, add the gradient of a penalty on the sizes of its tokens."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: float) -> Tensor:
        """Return x."""
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of x with that of the penalty."""
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            penalty = leaf.square().mean(-1).clamp_min(1e-12).log().var()
            (of_penalty,) = torch.autograd.grad(penalty, leaf)
        return grad + ctx.weight * of_penalty, None


def penalize_(model: nn.Module, weight: float) -> None:
    """Put a penalty on the sizes of the tokens at every site; at an annealed one, while it is a norm."""
    layers = dynorm_layers(model).values()

    def hook(layer: Any, args: tuple[Tensor]) -> Tensor | None:
        is_over = isinstance(layer, AnnealedNorm) and layer.position > 0
        if is_over or not args[0].requires_grad:
            return None
        result: Tensor = EqualSizes.apply(args[0], weight / len(layers))
        return result

    for layer in layers:
        layer.register_forward_pre_hook(hook)


def curve(subject: Subject, way: Way) -> list[Row]:
    """Distil a copy of the model in one way, and return its figures on the way."""
    model = copy.deepcopy(subject.model)
    batch = subject.calibration[0]
    sites = dynorm.find_norms(model, batch)
    means = fold_means_(model, sites, [site.path for site in sites], batch, subject.calibration)
    if means is not None:
        sites = means.norms
    points = Curve(model, subject)
    callbacks: list[TrainerCallback] = [points]
    if way.anneal is None:
        dynorm.convert_(model, sites)
        dynorm.calibrate_(model, subject.calibration)
    else:
        dynorm.convert_(model, sites, to="annealed")
        set_constants_(model, subject.calibration)
        anneal = OneByOne(model) if way.in_order else AnnealCallback(*way.anneal)
        callbacks.insert(0, anneal)
    if way.penalty:
        penalize_(model, way.penalty)
    points.measure(0)
    dynorm.distill_(
        model, subject.fit(16, 0), teacher=subject.model, steps=STEPS, callbacks=callbacks
    )
    return points.points


def main() -> None:
    """Measure the curves that are missing, and write each as soon as it is there."""
    subject = minilm()
    for title, way in WAYS.items():
        known = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {}
        if title in known:
            continue
        print(title, flush=True)
        known[title] = curve(subject, way)
        RESULTS.write_text(json.dumps(known, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
