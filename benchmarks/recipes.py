"""Compare ways to distil a strict model: ``python -m benchmarks.recipes MODEL``: minilm, smollm2 or dinov2.

Each way takes the same steps on the same batches, and its model is measured on held-out data on the
way. Curves are added to benchmarks/results/recipes.json; those that are there are not measured again.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback

import dynorm
from benchmarks.quality import SUBJECTS, Batches, Subject, after_a_constant_token
from dynorm.fold import fold_means_
from dynorm.hub import with_prefix
from dynorm.layers import AnnealedNorm
from dynorm.layers.witnesses import WitnessNorm
from dynorm.recipe import ENCODER
from dynorm.replace.converted import dynorm_layers
from dynorm.report.conversion import compare
from dynorm.train.anneal import AnnealStart, annealed_layers
from dynorm.train.callbacks import AnnealCallback

RESULTS = Path(__file__).parent / "results" / "recipes.json"
PENALTY = 0.3
# By how much the logarithms of gains fall while they shrink: a square then counts less than a thousandth.
SHRINKAGE = 9.0
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
        witnesses: how many witnesses the layers have.
        shrinks: let the gains of the witnesses shrink in three quarters of the run, so that there are
            none in the end.
        to: the layer, where it is not annealed.
        prefix: whether the texts follow a constant token.
        lr: the learning rate.
    """

    anneal: tuple[float, float] | None = None
    in_order: bool = False
    penalty: float = 0.0
    witnesses: int = 0
    shrinks: bool = False
    to: str = "dyisru"
    prefix: bool = False
    lr: float = ENCODER.lr


@dataclass(frozen=True)
class Comparison:
    """A model and the ways that are compared on it.

    Args:
        figure: the figure of a report that is measured on the way.
        kinds: the held-out data that it is measured on.
        steps: how long each way is distilled.
        every: after how many steps it is measured.
        compared: on how many batches of each kind, at most.
        batch: how many samples a step takes.
        ways: the ways by their titles.
    """

    figure: str
    kinds: tuple[str, ...]
    steps: int
    every: int
    compared: int
    batch: int
    ways: dict[str, Way]


WAYS = {
    "layers from the start": Way(),
    "sizes made equal first": Way(anneal=(0.4, 0.01), penalty=PENALTY),
    "sizes made equal throughout": Way(penalty=PENALTY),
    "annealed, all at once": Way(anneal=(0.0, 0.5)),
    "annealed, one site after another": Way(anneal=(0.0, 0.5), in_order=True),
}
COMPARISONS = {
    "minilm": Comparison(
        "cosine_mean",
        ("docstrings", "licences"),
        steps=120,
        every=30,
        compared=8,
        batch=16,
        ways={
            **WAYS,
            "four witnesses": Way(witnesses=4),
            "four witnesses whose gains shrink": Way(witnesses=4, shrinks=True),
            "lines from the start": Way(to="linear"),
            "lines, sizes made equal throughout": Way(to="linear", penalty=PENALTY),
        },
    ),
    "smollm2": Comparison(
        "kl",
        ("docstrings", "licences"),
        steps=30,
        every=10,
        compared=1,
        batch=1,
        ways={
            "layers from the start, no constant token": Way(),
            **{title: replace(way, prefix=True) for title, way in WAYS.items()},
            "eight witnesses": Way(witnesses=8, prefix=True, lr=6e-4),
            "eight witnesses whose gains shrink": Way(
                witnesses=8, shrinks=True, prefix=True, lr=6e-4
            ),
            "at 1.6 times the rate": Way(prefix=True, lr=4e-3),
            "at a quarter of the rate": Way(prefix=True, lr=6e-4),
        },
    ),
    "dinov2": Comparison(
        "cosine_mean",
        ("photographs",),
        steps=120,
        every=30,
        compared=12,
        batch=4,
        ways={
            "layers from the start": Way(),
            "sizes made equal throughout": Way(penalty=PENALTY),
            "at a quarter of the rate": Way(lr=6e-4),
        },
    ),
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


class Shrink(TrainerCallback):
    """Let the gains of all witnesses shrink in the first three quarters of the run, and then go."""

    def __init__(self, model: nn.Module) -> None:
        self.layers: list[Any] = list(dynorm_layers(model).values())

    @torch.no_grad()
    def on_step_begin(self, args: object, state: Any, control: object, **kwargs: object) -> None:
        """Make the gains smaller."""
        last = state.max_steps * 3 // 4
        for layer in self.layers:
            if layer.log_gain is None:
                continue
            if state.global_step < last:
                layer.log_gain.sub_(SHRINKAGE / last)
            else:
                layer.log_gain.fill_(-torch.inf)


class Curve(TrainerCallback):
    """Measure the model now and then, with the layers that it will have in the end."""

    def __init__(self, model: nn.Module, subject: Subject, plan: Comparison, way: Way) -> None:
        self.model, self.subject, self.plan, self.way = model, subject, plan, way
        self.points: list[Row] = []
        self.seconds = 0.0
        self.started = time.process_time()

    def on_step_end(self, args: object, state: Any, control: object, **kwargs: object) -> None:
        """Measure now and then."""
        if state.global_step % self.plan.every == 0:
            self.measure(state.global_step)

    def measure(self, step: int) -> None:
        """Add a point."""
        self.seconds += time.process_time() - self.started
        point: Row = {"step": step, "cpu_seconds": round(self.seconds)}
        with as_final_layers(self.model, self.way):
            for kind in self.plan.kinds:
                batches = self.subject.held_out[kind][: self.plan.compared]
                output = compare(self.model, self.subject.model, batches)
                point[kind] = round(getattr(output, self.plan.figure), 4)
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
def as_final_layers(model: nn.Module, way: Way) -> Iterator[None]:
    """Let annealed layers be those that they end as, and witnesses that shrink have no gain."""
    positions, gains = {}, {}
    for layer in dynorm_layers(model).values():
        if isinstance(layer, AnnealedNorm):
            positions[layer] = layer.position
            layer.set_t_(1.0)
        if way.shrinks and isinstance(layer, WitnessNorm) and layer.log_gain is not None:
            gains[layer.log_gain] = layer.log_gain.detach().clone()
            layer.log_gain.data.fill_(-torch.inf)
    yield
    for layer, position in positions.items():
        layer.set_t_(position)
    for parameter, values in gains.items():
        parameter.data.copy_(values)


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


def curve(subject: Subject, plan: Comparison, way: Way) -> list[Row]:
    """Distil a copy of the model in one way, and return its figures on the way."""
    model, teacher = copy.deepcopy(subject.model), subject.model
    if way.prefix:
        model, teacher = with_prefix(model), after_a_constant_token(teacher)
    batch = subject.calibration[0]
    sites = dynorm.find_norms(model, batch)
    means = fold_means_(model, sites, [site.path for site in sites], batch, subject.calibration)
    if means is not None:
        sites = means.norms
    points = Curve(model, subject, plan, way)
    callbacks: list[TrainerCallback] = [points]
    if way.anneal is None:
        dynorm.convert_(model, sites, to=way.to, witnesses=way.witnesses)
        dynorm.calibrate_(model, subject.calibration)
    else:
        dynorm.convert_(model, sites, to="annealed")
        set_constants_(model, subject.calibration)
        anneal = OneByOne(model) if way.in_order else AnnealCallback(*way.anneal)
        callbacks.insert(0, anneal)
    if way.shrinks:
        callbacks.insert(0, Shrink(model))
    if way.penalty:
        penalize_(model, way.penalty)
    points.measure(0)
    dynorm.distill_(
        model,
        subject.fit(plan.batch, 0),
        teacher=teacher,
        steps=plan.steps,
        lr=way.lr,
        callbacks=callbacks,
    )
    return points.points


def main() -> None:
    """Measure the curves that are missing, and write each as soon as it is there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=COMPARISONS)
    model: str = parser.parse_args().model
    plan = COMPARISONS[model]
    subject = SUBJECTS[model]()
    for title, way in plan.ways.items():
        known = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {}
        curves = known.setdefault(model, {})
        if title in curves:
            continue
        print(title, flush=True)
        curves[title] = curve(subject, plan, way)
        RESULTS.write_text(json.dumps(known, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
