"""The main job: a pretrained model in, a converted, calibrated, distilled, measured and saved model out."""

from __future__ import annotations

import copy
import json
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import dynorm.hub as hub
from dynorm.distill.distill import distill_
from dynorm.distill.folders import copy_rest, folders_of_modules, require_free
from dynorm.distill.pretrained import (
    Pretrained,
    encode,
    library_versions,
    load_pretrained,
    make_batches,
    on_device,
)
from dynorm.distill.texts import read_texts, split_texts, standard_library_docstrings
from dynorm.errors import ArgumentError, StorageError
from dynorm.family import layer_class
from dynorm.files import write_text
from dynorm.find import find_norms
from dynorm.fit import calibrate_, refine_
from dynorm.layers import AnnealedNorm
from dynorm.layers._base import check_positive
from dynorm.replace import convert_
from dynorm.report import ModelReport, measure
from dynorm.report.picture import require_matplotlib

Say = Callable[[str], None]
Batches = Sequence[dict[str, Tensor]]
Track = Callable[[Batches, str], Iterable[dict[str, Tensor]]]

_CALIBRATION_TEXTS = 256
_BATCH = 32


@dataclass(frozen=True)
class Recipe:
    """How to convert; the defaults are the demo's.

    Args:
        to: the layer that the norms become; none that is still a norm at first.
        steps: distillation steps, 0 for none; or
        minutes: the time for distillation.
        refine: steps of joint refinement of the constants, 0 for none.
        held_out: how many texts to keep for measuring.
        max_length: the longest text in tokens.
        only: globs of the paths to convert.
        skip: globs of the paths to leave alone.
        per_channel: one constant a channel, or one a layer.
        seed: of the split, the order of texts and the training.
        lr: the highest learning rate of distillation; None goes by the width, see ``distillation_rate``.
        checkpoints: a folder for the Trainer's checkpoints, to go on from after a stop.
    """

    to: str = "dyisru"
    steps: int | None = None
    minutes: float | None = None
    refine: int = 50
    held_out: int = 512
    max_length: int = 128
    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    per_channel: bool = True
    seed: int = 0
    lr: float | None = None
    checkpoints: str | None = None

    def check(self) -> None:
        """Raise ArgumentError where a number is outside its domain."""
        if issubclass(layer_class(self.to), AnnealedNorm):
            raise ArgumentError(
                f"to must be point-wise, but {self.to!r} is a norm until its path is gone: train it with AnnealCallback"
            )
        if self.steps is not None and self.minutes is not None:
            raise ArgumentError(f"give steps or minutes, not both: got steps={self.steps}, minutes={self.minutes}")
        if (self.steps or 0) < 0 or self.refine < 0 or not math.isfinite(self.minutes or 0) or (self.minutes or 0) < 0:
            raise ArgumentError(f"steps, minutes and refine must not be negative, got {self}")
        if self.held_out < 2 or self.max_length < 2:
            raise ArgumentError(f"held_out and max_length must be at least 2, got {self.held_out}, {self.max_length}")
        if self.lr is not None:
            check_positive("lr", self.lr)


@dataclass
class Stages:
    """What each stage did, for the report.

    Args:
        seconds: how long each took.
        details: the stages' own reports.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)


def convert_pretrained(
    folder: str | Path,
    out: str | Path,
    recipe: Recipe | None = None,
    *,
    texts: Sequence[str | Path] = (),
    name: str | None = None,
    device: str = "cpu",
    overwrite: bool = False,
    quiet: bool = False,
    say: Say = lambda line: None,
    track: Track = lambda batches, description: batches,
) -> ModelReport:
    """Convert the pretrained model in a folder and save it, with its report, in another.

    Args:
        folder: a transformers model with its tokenizer.
        out: the new folder; ``model`` (loadable), ``report.json`` and ``report.html`` go there.
        recipe: how to do it; the demo's way by default.
        texts: files and folders of texts; the docstrings of Python's standard library by default.
        name: what the report calls the model; the folder's name by default.
        device: "cpu", "cuda", ...
        overwrite: replace a model that is in ``out`` already.
        quiet: no progress bar.
        say: called with a line at the start of each stage.
        track: wraps the batches of a stage, to show a progress bar; given them and a description.

    Returns:
        The report on held-out texts.

    Raises:
        DynormError: bad arguments, texts, model or folder; nothing is written then.
    """
    recipe = recipe or Recipe()
    recipe.check()
    require_matplotlib()
    out = Path(out)
    require_free(out, overwrite)
    stages = Stages()
    fit, held_out = split_texts(
        read_texts(texts) if texts else standard_library_docstrings(), recipe.held_out, recipe.seed
    )
    pretrained = load_pretrained(folder, device)
    folders_of_modules(pretrained.folder)
    encoded, tests = (encode(pretrained, part, recipe.max_length) for part in (fit, held_out))
    say(f"{type(pretrained.model).__name__} from {folder}: {len(encoded)} texts to fit on, {len(tests)} held out")
    original = copy.deepcopy(pretrained.model)
    _convert(pretrained, recipe, encoded, stages, say, track)
    _distill(pretrained, original, recipe, encoded, stages, quiet, say)
    with _Timer(stages, "measure"):
        held = make_batches(pretrained, tests, _BATCH)
        meta = _meta(name or Path(folder).name, recipe, texts, pretrained, len(encoded), len(tests))
        fit_on = make_batches(pretrained, encoded[:_CALIBRATION_TEXTS], _BATCH)
        tracked = track(held, f"measuring on {len(tests)} held-out texts")
        report = measure(pretrained.model, tracked, original=original, fit_on=fit_on, seed=recipe.seed, meta=meta)
    report.meta["seconds"], report.meta["stages"] = stages.seconds, stages.details
    _save(pretrained, out, report, overwrite, say)
    return report


def _convert(
    pretrained: Pretrained, recipe: Recipe, encoded: Sequence[list[int]], stages: Stages, say: Say, track: Track
) -> None:
    model = pretrained.model
    batches = make_batches(pretrained, encoded[:_CALIBRATION_TEXTS], _BATCH, recipe.seed)
    with _Timer(stages, "find"):
        sites = find_norms(model, **on_device(batches[len(batches) // 2], model))
    with _Timer(stages, "convert"):
        done = convert_(
            model, sites, recipe.to, only=recipe.only or None, skip=recipe.skip or None, per_channel=recipe.per_channel
        )
    say(str(done))
    stages.details["refused"] = [site.to_dict() for site in done.refused]
    with _Timer(stages, "calibrate"):
        tracked = track(batches, f"calibrating on {len(batches)} batches")
        stages.details["calibrate"] = calibrate_(model, tracked).to_dict()
    if recipe.refine:
        with _Timer(stages, "refine"):
            rest = encoded[_CALIBRATION_TEXTS : _CALIBRATION_TEXTS + recipe.refine * _BATCH] or encoded
            more = list(islice(cycle(make_batches(pretrained, rest, _BATCH, recipe.seed)), recipe.refine))
            tracked = track(more, f"refining all constants together, {recipe.refine} steps")
            stages.details["refine"] = refine_(model, tracked, steps=recipe.refine).to_dict()


def _distill(
    pretrained: Pretrained,
    original: Any,
    recipe: Recipe,
    encoded: Sequence[list[int]],
    stages: Stages,
    quiet: bool,
    say: Say,
) -> None:
    if not recipe.steps and not recipe.minutes:
        return
    say(f"distilling for {recipe.steps} steps" if recipe.steps else f"distilling for {recipe.minutes:g} minutes")
    with _Timer(stages, "distill"):
        stages.details["distill"] = distill_(
            pretrained,
            original,
            encoded,
            steps=recipe.steps or None,
            minutes=recipe.minutes or None,
            batch_size=_BATCH,
            lr=recipe.lr,
            seed=recipe.seed,
            checkpoints=recipe.checkpoints,
            quiet=quiet,
        ).to_dict()


class _Timer:
    def __init__(self, stages: Stages, name: str) -> None:
        self.stages, self.name = stages, name

    def __enter__(self) -> None:
        self.started = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self.stages.seconds[self.name] = round(time.perf_counter() - self.started, 2)


def _meta(
    name: str, recipe: Recipe, texts: Sequence[str | Path], pretrained: Pretrained, fit: int, tests: int
) -> dict[str, Any]:
    return {
        "model": name,
        "recipe": asdict(recipe),
        "texts": [str(path) for path in texts] or "docstrings of the standard library",
        "texts_to_fit": fit,
        "texts_held_out": tests,
        "device": str(next(pretrained.model.parameters()).device),
        "threads": torch.get_num_threads(),
        "versions": library_versions(),
    }


def _save(pretrained: Pretrained, out: Path, report: ModelReport, overwrite: bool, say: Say) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"the output folder {out} must be writable, but: {error}") from error
    hub.save(pretrained.model, out / "model", overwrite=overwrite)
    copy_rest(pretrained.folder, out / "model")
    text = json.dumps(report.to_dict(), indent=1) + "\n"
    write_text(out / "report.json", text)
    report.to_html(out / "report.html")
    say(f"saved {out / 'model'}, {out / 'report.json'} and {out / 'report.html'}")
