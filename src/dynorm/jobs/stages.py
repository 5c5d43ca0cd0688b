"""The stages of a conversion, one after another: ``convert_model`` and the command share them."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from dynorm.batches import Batch, arguments
from dynorm.errors import ModelError
from dynorm.find import find_norms
from dynorm.fit import calibrate_
from dynorm.fold import attribution, fold_lines_, fold_means_
from dynorm.fold.stock import as_stock
from dynorm.guard import edited_parts, unchanged_on_error
from dynorm.plain import JsonObject
from dynorm.recipe import LANGUAGE, Recipe, defaults_of
from dynorm.replace import convert_
from dynorm.replace.options import chosen_options
from dynorm.report import ModelReport, measure
from dynorm.report.conversion import compare
from dynorm.report.model_report import STAGES, about_loss, ways_on
from dynorm.train import distill_

Say = Callable[[str], None]


@dataclass(frozen=True)
class Data:
    """The batches of each stage."""

    calibration: Sequence[Batch]
    training: Iterable[Batch]
    held_out: Sequence[Batch]
    compared: Sequence[Batch]  # a few held-out batches that show the model after each stage


def silent(line: str) -> None:
    """Say nothing."""


def convert_in_stages_(
    model: nn.Module, data: Data, recipe: Recipe, meta: JsonObject, say: Say = silent
) -> ModelReport:
    """Convert a model by a recipe with all fields filled, and return its report.

    After each stage the outputs for a few held-out batches are compared with the original's. After
    an error the model is as it was before.
    """
    if recipe.steps and recipe.checkpoints is not None:
        _find_checkpoint(Path(recipe.checkpoints), recipe, say)
    batch = data.calibration[0]
    args, kwargs = arguments(model, batch)
    sites = find_norms(model, *args, **kwargs)
    original: Any = _copied(model)
    # The teacher has the prefix. Outputs are compared with the model without it, which the user has.
    stages = _Stages(model, _without_prefix(original, recipe), data.compared, say)
    # After an error these values are written back: the copy serves as the backup.
    before = dict(zip(_tensors(model), _tensors(original), strict=True))
    with unchanged_on_error(edited_parts(model), before):
        # Folding the means makes RMSNorms of LayerNorms.
        norms = sites
        if recipe.fold_means:
            chosen = chosen_options(sites, recipe.options_by_glob())
            means = fold_means_(model, sites, chosen, batch, data.calibration)
            if means is not None:
                norms = means.norms
                say(means.summary())
                stages.details["fold_means"] = means.to_dict()
        converted = convert_(model, norms, recipe.layers, witnesses=recipe.witnesses)
        say(converted.summary())
        stages.run("calibrate", calibrate_, data.calibration)
        may_have_witnesses = not recipe.witnesses and set(converted.layers) == {"dyisru"}
        ways = ways_on(bool(recipe.steps), with_witnesses=may_have_witnesses)
        say(f"To lose less: {ways}.")
        if recipe.steps:
            if recipe.removes_norms:
                _try_to_fold(model, batch, recipe, say)
            stages.run(
                "distill",
                distill_,
                data.training,
                teacher=original,
                steps=recipe.steps,
                lr=recipe.lr,
                seed=recipe.seed,
                bf16=recipe.bf16,
                checkpoints=recipe.checkpoints,
            )
        meta = meta | {"recipe": recipe.to_dict()}
        # As in the stages, the original without its prefix; turned off and not taken out, because the
        # sites' paths begin at the whole model.
        without_prefix = original.disable_adapter() if recipe.prefix else nullcontext()
        # Before the lines are folded away, because each is compared with its norm.
        with stages.timed("measure"), without_prefix:
            report = measure(model, data.held_out, original=original, sites=sites, meta=meta)
        if recipe.removes_norms:
            stages.run("fold", fold_lines_, batch)
            if defaults_of(model) is LANGUAGE:
                stages.details["fold"]["attribution"] = attribution(model, batch)
    report.meta["seconds"] = stages.seconds
    report.meta["stages"] = stages.details
    return report


def _find_checkpoint(folder: Path, recipe: Recipe, say: Say) -> None:
    """Say that the distillation will continue from a checkpoint; refuse before the work one of another run."""
    from dynorm.train.trainer import steps_done

    run = {name: getattr(recipe, name) for name in ("steps", "lr", "seed")}
    done = steps_done(folder, run)
    if done:
        say(f"The distillation continues from step {done} of {recipe.steps}, in {folder}.")


def _try_to_fold(model: nn.Module, batch: Batch, recipe: Recipe, say: Say) -> None:
    """Fold a copy before the long training, to name the lines that will stay, or to refuse them."""
    trial = _copied(model)
    folded = fold_lines_(trial, batch)
    if recipe.stock:
        as_stock(_without_prefix(trial, recipe), batch)
        folded = replace(folded, loads_with="stock")
    say(f"The fold in the end, tried on a copy: {folded.summary()}")
    if not any(line.becomes for line in folded.lines):
        say("No line can be folded away in this model: each norm becomes a line that stays.")


def _without_prefix(model: Any, recipe: Recipe) -> nn.Module:
    """Return the model inside of the one that adds the prefix."""
    base: nn.Module = model.get_base_model() if recipe.prefix else model
    return base


class _Stages:
    """Runs the stages of one conversion, and keeps their reports."""

    def __init__(
        self, model: nn.Module, original: nn.Module, compared: Sequence[Batch], say: Say
    ) -> None:
        self.details: JsonObject = {}
        self.seconds: dict[str, float] = {}
        self._model = model
        self._original = original
        self._compared = compared
        self._say = say

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Note how long the context lasts."""
        begun = time.perf_counter()
        yield
        self.seconds[name] = round(time.perf_counter() - begun, 2)

    def run(self, name: str, verb: Callable[..., Any], batches: Any, **options: object) -> None:
        """Call a verb, and compare the model's outputs with the original's after it."""
        with self.timed(name):
            report = verb(self._model, batches, **options)
        output = compare(self._model, self._original, self._compared)
        done = STAGES[name]
        seconds = f"{self.seconds[name]:.0f} s"
        self._say(f"{done}, in {seconds}, on a few samples: {about_loss(output)}")
        self.details[name] = report.to_dict() | {"output": asdict(output)}


def _copied(model: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(model)
    # A model's parts may raise anything, and torch does for a tensor with a graph.
    except Exception as error:
        raise ModelError(
            "the model must be one that copy.deepcopy copies, because it is compared with its "
            f"original, but {type(error).__name__}: {error}"
        ) from error


def _tensors(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]
