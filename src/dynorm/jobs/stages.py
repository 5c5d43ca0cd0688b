"""The stages of a conversion, one after another: ``convert_model`` and the command share them."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dynorm.batches import Batch
from dynorm.errors import ModelError
from dynorm.find import find_norms
from dynorm.fit import calibrate_, refine_
from dynorm.fold import fold_means_
from dynorm.guard import edited_parts, unchanged_on_error, usable_bf16
from dynorm.plain import JsonObject
from dynorm.recipe import Recipe
from dynorm.replace import convert_
from dynorm.replace.options import chosen_options
from dynorm.report import ModelReport, measure, words
from dynorm.report.conversion import compare
from dynorm.report.output import OutputReport
from dynorm.train import distill_

Say = Callable[[str], None]


@dataclass(frozen=True)
class Data:
    """The batches of each stage."""

    calibration: Sequence[Batch]
    refinement: Sequence[Batch]
    training: Iterable[Batch]
    held_out: Sequence[Batch]
    compared: Sequence[Batch]  # a few held-out batches, for a look at the model after each stage


@dataclass(frozen=True)
class Stage:
    """A verb that trains a converted model, with its batches and options."""

    name: str
    verb: Callable[..., Any]
    batches: Iterable[Batch]
    options: Mapping[str, object] = field(default_factory=dict)


def silent(line: str) -> None:
    """Say nothing."""


def convert_in_stages_(
    model: nn.Module, data: Data, recipe: Recipe, meta: JsonObject, say: Say = silent
) -> ModelReport:
    """Convert a model by a recipe without None, and return its report.

    After each stage the outputs for a few held-out batches are compared with the original's. The
    model keeps the values of the stage with the least loss there. After an error the model is as it
    was before.
    """
    batch = data.calibration[len(data.calibration) // 2]
    sites = sites_of_original = find_norms(model, batch)
    original = _copied(model)
    course = _Course(model, original, data.compared, say)
    with _restored_on_error(model, original):
        if recipe.fold_means:
            chosen = chosen_options(sites, recipe.options_by_glob())
            sites, means = fold_means_(model, sites, chosen, batch, data.calibration)
            if means is not None:
                say(str(means))
                course.details["fold_means"] = means.to_dict()
        converted = convert_(
            model,
            sites,
            recipe.to,
            per_channel=recipe.per_channel,
            center=recipe.center,
            witnesses=recipe.witnesses,
        )
        say(converted.summary())
        course.details["refused"] = [site.to_dict() for site in converted.refused]
        course.details["skipped"] = [site.path for site in converted.skipped]
        closed_form, *trainings = _stages(data, recipe, original, say)
        course.run(closed_form)
        ways = words.ways_on(bool(recipe.steps), bool(recipe.witnesses))
        say(f"To lose less: {ways}.")
        for training in trainings:
            course.run(training)
        course.keep_the_best_()
        begun = time.perf_counter()
        report = measure(
            model,
            data.held_out,
            original=original,
            sites=sites_of_original,
            seed=recipe.seed,
            meta=meta | {"recipe": recipe.to_dict()},
        )
    course.seconds["measure"] = round(time.perf_counter() - begun, 2)
    report.meta["seconds"] = course.seconds
    report.meta["stages"] = course.details
    return report


def _stages(data: Data, recipe: Recipe, original: nn.Module, say: Say) -> list[Stage]:
    """Return the stages of a recipe, in order."""
    # Asked once: it warns.
    bf16 = recipe.bf16 and usable_bf16(original)
    stages = [Stage("calibrate", calibrate_, data.calibration)]
    if recipe.refine:
        options: dict[str, object] = {"steps": recipe.refine, "bf16": bf16}
        stages.append(Stage("refine", refine_, data.refinement, options))
    if recipe.steps:
        # It imports transformers.
        from dynorm.jobs.progress import Progress

        options = {
            "teacher": original,
            "steps": recipe.steps,
            "lr": recipe.lr,
            "seed": recipe.seed,
            "bf16": bf16,
            "checkpoints": recipe.checkpoints,
            "callbacks": [Progress(say)],
        }
        stages.append(Stage("distill", distill_, data.training, options))
    return stages


class _Course:
    """Runs the stages of one conversion, and remembers the values of the best one."""

    def __init__(
        self, model: nn.Module, original: nn.Module, compared: Sequence[Batch], say: Say
    ) -> None:
        self.details: JsonObject = {}
        self.seconds: dict[str, float] = {}
        self._model = model
        self._original = original
        self._compared = compared
        self._say = say
        self._losses: dict[str, float] = {}
        self._best: list[Tensor] = []

    def run(self, stage: Stage) -> None:
        """Run a stage, and compare the model's outputs with the original's after it."""
        begun = time.perf_counter()
        report = stage.verb(self._model, stage.batches, **stage.options)
        seconds = time.perf_counter() - begun
        self.seconds[stage.name] = round(seconds, 2)
        output = compare(self._model, self._original, self._compared)
        done = words.STAGES[stage.name]
        self._say(f"{done}, in {seconds:.0f} s, on a few samples: {words.about_loss(output)}")
        self.details[stage.name] = report.to_dict() | {"output": asdict(output)}
        self._losses[stage.name] = loss_of(output)
        if self._losses[stage.name] == min(self._losses.values()):
            self._best = [tensor.detach().clone() for tensor in _tensors(self._model)]

    @torch.no_grad()
    def keep_the_best_(self) -> None:
        """Give the model the values of the best stage; mark the later ones as not kept."""
        best = min(self._losses, key=lambda name: self._losses[name])
        names = list(self._losses)
        later = names[names.index(best) + 1 :]
        for name in later:
            self.details[name]["kept"] = False
        if later:
            self._say(f"{' and '.join(later)} did not help: the values before are kept")
            for tensor, value in zip(_tensors(self._model), self._best, strict=True):
                tensor.copy_(value)


def loss_of(output: OutputReport) -> float:
    """Return the figure by which stages are compared: less is better."""
    for loss in (output.kl, output.error):
        if loss is not None:
            return loss
    assert output.cosine_mean is not None
    return 1 - output.cosine_mean


def _copied(model: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(model)
    # A model's parts may raise anything, and torch does for a tensor with a graph.
    except Exception as error:
        raise ModelError(
            "the model must be one that copy.deepcopy copies, because it is compared with its "
            f"original, but {type(error).__name__}: {error}"
        ) from error


@contextmanager
def _restored_on_error(model: nn.Module, original: nn.Module) -> Iterator[None]:
    """Give a model its modules and its values back, those of its copy, if an error is raised."""
    try:
        with unchanged_on_error(edited_parts(model), tensors=()):
            yield
    except BaseException:
        with torch.no_grad():
            for tensor, before in zip(_tensors(model), _tensors(original), strict=True):
                # Some are expanded, or were made in inference mode, and cannot be written into.
                if not torch.equal(tensor, before):
                    tensor.copy_(before)
        raise


def _tensors(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]
