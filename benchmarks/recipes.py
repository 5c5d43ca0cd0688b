"""Compare ways to distil a strict model: ``python -m benchmarks.recipes MODEL``.

MODEL is minilm or smollm2. Each way takes the same steps on the same batches, and its model is
measured on held-out data on the way. Curves are added to benchmarks/results/recipes.json; those that
are there are not measured again.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, TrainerCallback

import dynorm
from benchmarks.quality import SUBJECTS, Batches, Subject
from dynorm.fold import fold_means_
from dynorm.layers import AnnealedNorm, PointwiseNorm
from dynorm.report.conversion import compare
from dynorm.train.anneal import AnnealSchedule, AnnealStart

RESULTS = Path(__file__).parent / "results" / "recipes.json"
# The steps of each way, and the kinds and batches of data on which it is measured.
STEPS = {"minilm": 120, "smollm2": 24}
MEASURED = {
    "minilm": {"docstrings": 8, "licences": 8},
    "smollm2": {"docstrings": 1, "licences": 1},
}
FIGURE = {"minilm": "cosine_mean", "smollm2": "kl"}
POINTS = 4
# What is left of a gain whose witness no longer counts.
LEAST_GAIN = 1e-4
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
        witnesses: how many each layer begins with; their gains fade away in the first half.
        prefix: hold the keys and values of the first token, computed with the norms, constant.
    """

    anneal: tuple[float, float] | None = None
    in_order: bool = False
    penalty: float = 0.0
    witnesses: int = 0
    prefix: bool = False


WAYS = {
    "layers from the start": Way(),
    "sizes made equal first": Way(anneal=(0.4, 0.01), penalty=PENALTY),
    "sizes made equal throughout": Way(penalty=PENALTY),
    "annealed, all at once": Way(anneal=(0.0, 0.5)),
    "annealed, one site after another": Way(anneal=(0.0, 0.5), in_order=True),
    "witnesses that fade": Way(witnesses=8),
    "the first token as a constant prefix": Way(prefix=True),
}


class OneByOne(TrainerCallback):  # type: ignore[misc]
    """Anneal the layers one after another, each in its part of the first half of the run."""

    def __init__(self, model: nn.Module) -> None:
        self.layers = list(layers_of(model, AnnealedNorm))

    def on_step_begin(self, args: object, state: Any, control: object, **kwargs: object) -> None:
        """Set the t of every layer."""
        done = 2 * state.global_step / state.max_steps * len(self.layers)
        for place, layer in enumerate(self.layers):
            layer.set_t_(min(max(done - place, 0.0), 1.0))


class Anneal(TrainerCallback):  # type: ignore[misc]
    """Anneal all layers by a schedule."""

    def __init__(self, model: nn.Module, batches: Batches, start: float, length: float) -> None:
        self.model, self.batches = model, batches
        self.schedule = AnnealSchedule(start, length)

    def on_step_begin(self, args: object, state: Any, control: object, **kwargs: object) -> None:
        """Set the t of every layer; and its constants, to the activations where the annealing begins."""
        start, _ = self.schedule.steps(state.max_steps)
        if state.global_step == start:
            set_constants_(self.model, self.batches)
        self.schedule.apply_(self.model, state.global_step, state.max_steps)


class Fade(TrainerCallback):  # type: ignore[misc]
    """Lower the gains of the witnesses in the first half of the run, and raise beta for them.

    Beta gets the sum of the witnesses' squares of a usual token, which it replaces.
    """

    def __init__(self, model: nn.Module, batch: dict[str, Tensor]) -> None:
        self.usual: dict[PointwiseNorm, Tensor] = {}
        handles = [layer.register_forward_pre_hook(self._see) for layer in layers_of(model)]
        with torch.no_grad():
            model(**batch)
        for handle in handles:
            handle.remove()

    def _see(self, layer: PointwiseNorm, args: tuple[Tensor]) -> None:
        witnesses, gain = layer.witnesses_and_gains()
        total = (args[0].index_select(-1, witnesses).square() * gain).sum(-1)
        self.usual[layer] = total.median()

    @torch.no_grad()
    def on_step_begin(self, args: object, state: Any, control: object, **kwargs: object) -> None:
        """Take a step's part from every gain, and give it to beta."""
        step, fading = state.global_step, state.max_steps // 2
        if not 0 < step <= fading:
            return
        left, before = max(1 - step / fading, LEAST_GAIN), 1 - (step - 1) / fading
        for layer, total in self.usual.items():
            layer.log_gain += math.log(left / before)
            layer.set_slope_(layer.beta() + total / fading)
            if step == fading:
                # The square of a massive token is not small even so.
                layer.set_witnesses_(())


class Curve(TrainerCallback):  # type: ignore[misc]
    """Measure the model now and then, with its layers in the norms' place."""

    def __init__(self, name: str, model: nn.Module, subject: Subject, teacher: nn.Module) -> None:
        self.name, self.model, self.subject, self.teacher = name, model, subject, teacher
        self.points: list[Row] = []
        self.seconds = 0.0
        self.started = time.process_time()

    def on_step_end(self, args: object, state: Any, control: object, **kwargs: object) -> None:
        """Measure after each quarter of the run."""
        if state.global_step % (state.max_steps // POINTS) == 0:
            self.measure(state.global_step)

    def measure(self, step: int) -> None:
        """Add a point."""
        self.seconds += time.process_time() - self.started
        point: Row = {"step": step, "cpu_seconds": round(self.seconds)}
        with as_layers(self.model):
            for kind, count in MEASURED[self.name].items():
                output = compare(self.model, self.teacher, self.subject.held_out[kind][:count])
                point[kind] = round(getattr(output, FIGURE[self.name]), 4)
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
    positions = {layer: layer.position for layer in layers_of(model, AnnealedNorm)}
    for layer in positions:
        layer.set_t_(1.0)
    yield
    for layer, position in positions.items():
        layer.set_t_(position)


def layers_of(model: nn.Module, kind: type[Any] = PointwiseNorm) -> Iterator[Any]:
    """Return the layers of a model."""
    return (module for module in model.modules() if isinstance(module, kind))


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
    layers = list(layers_of(model))

    def hook(layer: Any, args: tuple[Tensor]) -> Tensor | None:
        is_over = isinstance(layer, AnnealedNorm) and layer.position > 0
        if is_over or not args[0].requires_grad:
            return None
        result: Tensor = EqualSizes.apply(args[0], weight / len(layers))
        return result

    for layer in layers:
        layer.register_forward_pre_hook(hook)


def hold_first_token_(models: tuple[nn.Module, nn.Module]) -> None:
    """Let the models see a first token before every text, whose keys and values stay those of the last.

    The models are the converted one and the original.
    """
    original: Any = models[-1]
    first = torch.tensor([[original.config.bos_token_id]])
    with torch.no_grad():
        past = original(input_ids=first, use_cache=True).past_key_values

    def hook(
        model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        count = len(kwargs["input_ids"])
        cache = DynamicCache()
        for place, layer in enumerate(past.layers):
            keys, values = (t.expand(count, -1, -1, -1) for t in (layer.keys, layer.values))
            cache.update(keys, values, place)
        mask = kwargs["attention_mask"]
        mask = torch.cat([mask.new_ones(count, 1), mask], 1)
        return args, {**kwargs, "past_key_values": cache, "attention_mask": mask}

    for model in models:
        model.register_forward_pre_hook(hook, with_kwargs=True)


def curve(name: str, subject: Subject, way: Way) -> list[Row]:
    """Distil a copy of the model in one way, and return its figures on the way."""
    model, teacher = copy.deepcopy(subject.model), copy.deepcopy(subject.model)
    if way.prefix:
        hold_first_token_((model, teacher))
    batch = subject.calibration[0]
    sites = dynorm.find_norms(model, batch)
    means = fold_means_(model, sites, [site.path for site in sites], batch, subject.calibration)
    if means is not None:
        sites = means.norms
    points = Curve(name, model, subject, teacher)
    callbacks: list[TrainerCallback] = [points]
    if way.anneal is None:
        dynorm.convert_(model, sites, witnesses=way.witnesses)
        dynorm.calibrate_(model, subject.calibration)
        if way.witnesses:
            callbacks.insert(0, Fade(model, batch))
    else:
        dynorm.convert_(model, sites, to="annealed")
        set_constants_(model, subject.calibration)
        anneal = Anneal(model, subject.calibration, *way.anneal)
        callbacks.insert(0, OneByOne(model) if way.in_order else anneal)
    if way.penalty:
        penalize_(model, way.penalty)
    points.measure(0)
    steps = STEPS[name]
    dynorm.distill_(model, subject.fit, teacher=teacher, steps=steps, callbacks=callbacks)
    return points.points


def main() -> None:
    """Measure the curves that are missing, and write each as soon as it is there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=STEPS)
    name = parser.parse_args().model
    subject = SUBJECTS[name]()
    for title, way in WAYS.items():
        document = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {}
        known = document.setdefault(name, {})
        # An encoder of texts has no first token that is massive.
        if title in known or (way.prefix and name == "minilm"):
            continue
        print(title, flush=True)
        known[title] = curve(name, subject, way)
        RESULTS.write_text(json.dumps(document, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
