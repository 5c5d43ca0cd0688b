"""A pretrained model in: converted, calibrated, distilled, measured and saved, or its norms inspected."""

from __future__ import annotations

import copy
import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dynorm.arguments import check_positive
from dynorm.distill.distill import FEW, distill_
from dynorm.distill.pretrained import (
    Pretrained,
    ShuffledBatches,
    encode,
    folders_of_modules,
    greedy,
    library_versions,
    load_pretrained,
    make_batches,
    on_device,
    require_apart,
    require_config,
    require_device,
    require_free,
    within_positions,
    write_model,
    write_out,
)
from dynorm.distill.texts import read_texts, split_texts, standard_library_docstrings
from dynorm.errors import ArgumentError, ModelError, require_library
from dynorm.family import layer_class
from dynorm.find import find_norms
from dynorm.fit import CalibrationWarning, calibrate_, refine_
from dynorm.hub.contents import is_changed
from dynorm.layers import AnnealedNorm
from dynorm.replace import convert_
from dynorm.report import Continuation, InspectionReport, ModelReport, inspect_norms, measure
from dynorm.report.conversion import compare
from dynorm.site import select_sites

Batches = Sequence[dict[str, Tensor]]
Track = Callable[[Batches, str], Iterable[dict[str, Tensor]]]

# Held-out blocks that are continued, the tokens of each that are given, and those that are asked for.
_CONTINUED, _GIVEN, _ASKED = 16, 32, 64
_DOCSTRINGS = "docstrings of the standard library"


# Batches of held-out texts that each stage is measured on.
_COMPARED = 4
# Blocks in a batch of calibration. Witnesses are chosen anew after 1, 2, 4, 8 batches: some must be left after that.
CALIBRATION_BLOCKS = 2
# What a recipe leaves open: for an encoder, and for a language model. The latter's were measured on SmolLM2-135M.
_ENCODER = {"max_length": 128, "batch": 32, "calibration": 256, "per_channel": True, "lean": 0.7}
_LANGUAGE = {"max_length": 256, "batch": 4, "calibration": 24, "per_channel": False, "lean": 0.0}


@dataclass(frozen=True)
class Recipe:
    """How to convert a model. None stands for what suits its kind: an encoder or a language model.

    Args:
        to: the layer that replaces the norms; not one that still is a norm at first.
        steps: distillation steps, 0 for none; or
        minutes: the time for distillation.
        refine: steps of joint refinement of the constants, 0 for none.
        held_out: how many texts to keep for measuring.
        max_length: the longest text in tokens, 128; for a language model, the size of a block of joined texts, 256.
        batch: texts per step, 32; or blocks, 4.
        only: globs of the paths to convert.
        skip: globs of the paths to leave alone.
        calibration: how many texts, 256, or blocks, 24, the constants are fitted to, site by site.
        lean: of :func:`calibrate_`, 0.7 or 0.
        per_channel: one constant per channel (an encoder), or one per layer (a language model).
        witnesses: how many channels each layer may read to tell a token's size; 0 for the pure function.
        seed: for the split, the order of texts and the training.
        lr: the highest learning rate of distillation; None takes ``distillation_rate``.
        bf16: distil under ``torch.autocast`` in bfloat16.
        checkpoints: a folder for the Trainer's checkpoints, from which a stopped run goes on.
    """

    to: str = "dyisru"
    steps: int | None = None
    minutes: float | None = None
    refine: int = 50
    held_out: int = 512
    max_length: int | None = None
    batch: int | None = None
    calibration: int | None = None
    lean: float | None = None
    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    per_channel: bool | None = None
    witnesses: int = 4
    seed: int = 0
    lr: float | None = None
    bf16: bool = False
    checkpoints: str | None = None

    def check(self) -> None:
        """Check every value.

        Raises:
            ArgumentError: one is outside its domain.
        """
        if issubclass(layer_class(self.to), AnnealedNorm):
            raise ArgumentError(
                f"to must be point-wise, but {self.to!r} is a norm until its path is gone: train it with AnnealCallback"
            )
        for name in ("steps", "refine", "held_out", "max_length", "batch", "calibration", "seed"):
            if (value := getattr(self, name)) is not None and type(value) is not int:
                raise ArgumentError(f"{name} must be an integer, got {value!r}")
        if not 0 <= self.seed < 2**32:
            raise ArgumentError(f"seed must be from 0 to 2**32 - 1, got {self.seed}")
        if self.minutes is not None and type(self.minutes) not in (int, float):
            raise ArgumentError(f"minutes must be a number, got {self.minutes!r}")
        if self.steps is not None and self.minutes is not None:
            raise ArgumentError(f"give steps or minutes, not both: got steps={self.steps}, minutes={self.minutes}")
        for name in ("steps", "minutes", "refine"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise ArgumentError(f"{name} must be finite and not negative, got {value}")
        for name, least in (("held_out", 2), ("max_length", 2), ("batch", 1), ("calibration", 1)):
            if (count := getattr(self, name)) is not None and count < least:
                raise ArgumentError(f"{name} must be at least {least}, got {count}")
        if not isinstance(self.witnesses, int) or isinstance(self.witnesses, bool) or self.witnesses < 0:
            raise ArgumentError(f"witnesses must be a number of channels, 0 or more, got {self.witnesses!r}")
        if self.lr is not None:
            check_positive("lr", self.lr)

    def filled(self, language_model: bool) -> Recipe:
        """Return the recipe with what suits the kind of model in the place of None."""
        suits: dict[str, Any] = _LANGUAGE if language_model else _ENCODER
        return replace(self, **{name: value for name, value in suits.items() if getattr(self, name) is None})


def convert_pretrained(
    source: str | Path,
    out: str | Path,
    recipe: Recipe | None = None,
    *,
    texts: Sequence[str | Path] = (),
    name: str | None = None,
    device: str = "cpu",
    dtype: str = "float32",
    keep_original: bool = False,
    overwrite: bool = False,
    quiet: bool = False,
    say: Callable[[str], None] = lambda line: None,
    track: Track = lambda batches, description: batches,
) -> ModelReport:
    """Convert a pretrained model and save it, with its report, in a folder.

    Args:
        source: the folder of a transformers model with its tokenizer, or a GGUF file.
        out: the new folder; ``model`` (loadable), ``report.json`` and ``report.html`` go there.
        recipe: how to do it; the demo's way by default.
        texts: files and folders of texts; the docstrings of Python's standard library by default.
        name: the model's name in the report; the folder's by default.
        device: "cpu", "cuda", ...
        dtype: of the weights, or "auto" for the checkpoint's own.
        keep_original: write ``original`` too, the model before the conversion.
        overwrite: replace a model that is in ``out`` already.
        quiet: no progress bar.
        say: called with a line at the start of each stage.
        track: wraps the batches of a stage, to show a progress bar; given them and a description.

    Returns:
        The report on held-out texts.

    Raises:
        DynormError: bad arguments, texts, model or folder; nothing is written then.
    """
    recipe, out = recipe or Recipe(), Path(out)
    recipe.check()
    require_library("matplotlib", "the report's pictures", "plots")
    names = ("model", "original") if keep_original else ("model",)
    require_apart(Path(source), out, names)
    require_free(out, overwrite, (*names, "report.json", "report.html"))
    if recipe.checkpoints is not None:
        _require_own_place(Path(recipe.checkpoints), [Path(source), *(out / name for name in names)])
    if Path(source).is_dir():
        folders_of_modules(Path(source))
    subject = _Subject.load(source, texts, recipe, device, dtype)
    recipe = subject.recipe
    model, fit, held_out = subject.pretrained.model, subject.fit, subject.held_out
    say(f"{type(model).__name__} from {source}: {len(fit)} texts to fit on, {len(held_out)} held out")
    for remark in subject.pretrained.remarks:
        say(remark)
    job = _Job(recipe, subject, copy.deepcopy(model), say, track)
    job.convert_()
    if recipe.refine:
        job.refine_()
    if recipe.steps or recipe.minutes:
        job.distill_(quiet)
    meta = subject.meta(name) | {
        "recipe": asdict(recipe),
        "texts_to_fit": len(fit),
        "tokens_to_fit": sum(map(len, fit)),
        "device": str(next(model.parameters()).device),
        "threads": torch.get_num_threads(),
    }
    with job.stage("measure"):
        tests = track(subject.batches(held_out), f"measuring on {len(held_out)} held-out texts")
        fit_on = subject.batches(subject.calibration)
        report = measure(model, tests, original=job.original, fit_on=fit_on, seed=recipe.seed, meta=meta)
    if subject.pretrained.language_model:
        with job.stage("continue"):
            report = replace(report, continuations=job.continuations())
    report.meta["seconds"], report.meta["stages"] = job.seconds, job.details
    if report.output.worst is not None:
        # The order of the batches.
        text = sorted(held_out, key=len)[report.output.worst]
        report.meta["worst_text"] = subject.pretrained.tokenizer.decode(text, skip_special_tokens=True)
    each, origin = "channel" if recipe.per_channel else "layer", ", ".join(map(str, texts)) or _DOCSTRINGS
    training = ", distilled" if job.details.get("distill", {}).get("kept") else ""
    refined = f", refined together in {recipe.refine} steps" if recipe.refine else ""
    facts = [
        f"{len(report.sites)} norms of {meta['model']} are replaced by {recipe.to} layers, with one constant per "
        f"{each}, and at most {recipe.witnesses} witness channels per layer.",
        f"The constants are fitted{refined}{training} on {len(fit)} texts: {origin}.",
        *subject.pretrained.remarks,
        "Measured on other texts:\n\n```\n" + report.table().title + "\n```",
    ]
    write_out(model, subject.pretrained.source, out, report.to_dict(), facts, overwrite)
    if keep_original:
        write_model(job.original, subject.pretrained.source, out / "original", overwrite)
    report.to_html(out / "report.html")
    say(f"saved {out / 'model'}, {out / 'report.json'} and {out / 'report.html'}")
    return report


def _require_own_place(checkpoints: Path, taken: Sequence[Path]) -> None:
    for folder in taken:
        if checkpoints.resolve().is_relative_to(folder.resolve()):
            raise ArgumentError(f"checkpoints must have a folder of their own, but {checkpoints} is inside {folder}")
    require_free(checkpoints, True, ())


def inspect_pretrained(
    source: str | Path,
    *,
    texts: Sequence[str | Path] = (),
    samples: int = 256,
    max_length: int | None = None,
    only: Sequence[str] = (),
    skip: Sequence[str] = (),
    seed: int = 0,
    name: str | None = None,
    device: str = "cpu",
    track: Track = lambda batches, description: batches,
) -> InspectionReport:
    """Inspect the norms of a pretrained model: :func:`dynorm.inspect_norms` on texts.

    Args:
        source: the folder of a transformers model with its tokenizer, or a GGUF file.
        texts: files and folders of texts; the docstrings of Python's standard library by default.
        samples: how many texts (of a language model: blocks) to fit on at most, and how many texts to measure on.
        max_length: the longest text, or the size of a block, in tokens; None takes 128, or 256 of a language model.
        only: globs of the paths to inspect.
        skip: globs of the paths to leave out.
        seed: for the split of texts and for the samples.
        name: the model's name in the report; the folder's by default.
        device: "cpu", "cuda", ...
        track: wraps the batches, to show a progress bar; given them and a description.

    Returns:
        The report.

    Raises:
        DynormError: bad arguments, texts, model or folder.
    """
    if samples < 1:
        raise ArgumentError(f"samples must be at least 1, got {samples}")
    Recipe(max_length=max_length).check()
    recipe = Recipe(held_out=samples, max_length=max_length, seed=seed, only=tuple(only), skip=tuple(skip))
    subject = _Subject.load(source, texts, recipe, device)
    model = subject.pretrained.model
    fitted, measured = (subject.batches(part[:samples]) for part in (subject.fit, subject.held_out))
    sites = select_sites(find_norms(model, **on_device(fitted[0], model)), only or None, skip or None)
    meta = subject.meta(name) | {
        "texts_held_out": len(subject.held_out[:samples]),
        "max_length": subject.max_length,
        "seed": seed,
    }
    fit_on = track(fitted, "fitting")
    decode = subject.pretrained.tokenizer.convert_ids_to_tokens
    tests = track(measured, "measuring")
    return inspect_norms(model, tests, sites=sites, fit_on=fit_on, seed=seed, meta=meta, decode=decode)


@dataclass(frozen=True)
class _Subject:
    """A pretrained model with encoded texts to fit on, and others held out."""

    pretrained: Pretrained
    texts: Sequence[str | Path]
    recipe: Recipe
    max_length: int
    batch: int
    fit: list[list[int]]
    held_out: list[list[int]]

    @staticmethod
    def load(
        source: str | Path, texts: Sequence[str | Path], recipe: Recipe, device: str, dtype: str = "float32"
    ) -> _Subject:
        # What costs little comes first.
        require_device(device)
        whole = require_config(Path(source), (*recipe.only, *recipe.skip))
        # A language model learns from whole docstrings: of first paragraphs it would hardly see a second sentence.
        recipe = recipe.filled(whole)
        found = read_texts(texts, whole=whole) if texts else standard_library_docstrings(whole=whole)
        parts = split_texts(found, recipe.held_out, recipe.seed)
        size, batch = recipe.max_length, recipe.batch
        assert size is not None
        assert batch is not None
        pretrained = load_pretrained(source, device, dtype)
        size = within_positions(pretrained, size)
        recipe = replace(recipe, max_length=size)
        fit, test = (encode(pretrained, part, size) for part in parts)
        return _Subject(pretrained, texts, recipe, size, batch, fit, test)

    @property
    def calibration(self) -> list[list[int]]:
        """Texts that the constants are fitted to, site by site."""
        return self.fit[: self.recipe.calibration]

    def batches(self, encoded: Sequence[list[int]], seed: int | None = None) -> list[dict[str, Tensor]]:
        return make_batches(self.pretrained, encoded, self.batch, seed)

    def meta(self, name: str | None) -> dict[str, Any]:
        return {
            "model": name or self.pretrained.source.stem,
            "texts": [str(path) for path in self.texts] or _DOCSTRINGS,
            "texts_held_out": len(self.held_out),
            "versions": library_versions(),
            **({"remarks": list(self.pretrained.remarks)} if self.pretrained.remarks else {}),
        }


@dataclass
class _Job:
    """A conversion under way: its stages change the model, and note results and times for the report."""

    recipe: Recipe
    subject: _Subject
    original: nn.Module
    say: Callable[[str], None]
    track: Track
    seconds: dict[str, float] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[name] = round(time.perf_counter() - started, 2)
        if name in self.details:
            subject = self.subject
            few = subject.batches(subject.held_out[: _COMPARED * subject.batch])
            self.details[name]["output"] = asdict(compare(subject.pretrained.model, self.original, few))

    def convert_(self) -> None:
        model, recipe = self.subject.pretrained.model, self.recipe
        size = CALIBRATION_BLOCKS if self.subject.pretrained.language_model else self.subject.batch
        batches = make_batches(self.subject.pretrained, self.subject.calibration, size, recipe.seed)
        with self.stage("find"):
            sites = find_norms(model, **on_device(batches[len(batches) // 2], model))
        if not sites and is_changed(model):
            raise ModelError(
                f"{self.subject.pretrained.source} must have norms, but those it had are converted already: convert "
                "the original"
            )
        with self.stage("convert"):
            only, skip = recipe.only or None, recipe.skip or None
            options: dict[str, Any] = {"per_channel": recipe.per_channel, "witnesses": recipe.witnesses}
            done = convert_(model, sites, layer_class(recipe.to), only=only, skip=skip, **options)
        self.say(str(done))
        self.details["refused"] = [site.to_dict() for site in done.refused]
        with self.stage("calibrate"):
            tracked = self.track(batches, f"calibrating on {len(batches)} batches")
            self.details["calibrate"] = calibrate_(model, tracked, lean=recipe.lean or 0.0).to_dict()

    def refine_(self) -> None:
        subject, steps = self.subject, self.recipe.refine
        with self.stage("refine"):
            # Other texts than those of the calibration, where there are enough.
            first = len(subject.calibration)
            rest = subject.fit[first : first + steps * subject.batch] or subject.fit
            batches = list(islice(cycle(subject.batches(rest, self.recipe.seed)), steps))
            tracked = self.track(batches, f"refining all constants together, {steps} steps")
            self.details["refine"] = refine_(subject.pretrained.model, tracked, steps=steps).to_dict()

    def distill_(self, quiet: bool) -> None:
        recipe, subject = self.recipe, self.subject
        self.say(
            f"distilling for {recipe.steps} steps" if recipe.steps else f"distilling for {recipe.minutes:g} minutes"
        )
        if recipe.steps and recipe.steps < FEW:
            warnings.warn(
                f"steps below {FEW} can hardly help, got {recipe.steps}: give more, or none",
                CalibrationWarning,
                stacklevel=2,
            )
        with self.stage("distill"):
            self.details["distill"] = distill_(
                subject.pretrained.model,
                ShuffledBatches(subject.pretrained, subject.fit, subject.batch, recipe.seed),
                teacher=self.original,
                steps=recipe.steps or None,
                minutes=recipe.minutes or None,
                lr=recipe.lr,
                seed=recipe.seed,
                bf16=recipe.bf16,
                checkpoints=recipe.checkpoints,
                quiet=quiet,
            ).to_dict()

    def continuations(self) -> list[Continuation]:
        """Return how the original and the converted model continue the first tokens of held-out blocks."""
        subject = self.subject
        given = min(_GIVEN, subject.max_length // 2)
        prompts = [block[:given] for block in subject.held_out[:_CONTINUED]]
        asked = min(_ASKED, subject.max_length - given)
        decode: Callable[[Any], str] = subject.pretrained.tokenizer.decode
        models = (self.original, subject.pretrained.model)
        before, now = (greedy(subject.pretrained, model, prompts, asked) for model in models)
        same = (before == now).float().mean(1).tolist()
        return [
            Continuation(decode(prompt), decode(a), decode(b), share)
            for prompt, a, b, share in zip(prompts, before, now, same, strict=True)
        ]
