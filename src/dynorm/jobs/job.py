"""A job on a pretrained model: the model with its samples, and the stages that it goes through."""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypedDict

import torch

from dynorm.batches import arguments
from dynorm.errors import ArgumentError, CalibrationWarning, ModelError, listed
from dynorm.family import AUTO
from dynorm.find import find_norms
from dynorm.fit import calibrate_, refine_
from dynorm.jobs.audio import find_audio
from dynorm.jobs.checkpoint import (
    Batches,
    Checkpoint,
    Pretrained,
    ShuffledBatches,
    library_versions,
)
from dynorm.jobs.images import find_images
from dynorm.jobs.inputs import Inputs, audio_inputs, image_inputs, text_inputs
from dynorm.jobs.recipe import Recipe
from dynorm.jobs.speech import Listener, word_errors
from dynorm.jobs.texts import read_texts, split_audio, split_texts, standard_library_docstrings
from dynorm.ranks import Ranks
from dynorm.replace import convert_
from dynorm.replace.edits import is_changed
from dynorm.report import ModelReport, measure
from dynorm.report.conversion import compare
from dynorm.report.records import Continuation
from dynorm.train.distill import FEW, distill_

Paths = Sequence[str | Path]
Say = Callable[[str], None]
Track = Callable[[Sequence[Any], str], Iterable[Any]]
# Held-out blocks that are continued, the tokens of each that are given, and those that are asked
# for.
_CONTINUED, _GIVEN, _ASKED = 16, 32, 64
# Batches of held-out texts that each stage is measured on: few, for a decoder's take half a minute
# on two cores.
_COMPARED = 2
# Blocks, or audio files, in a batch of calibration. Witnesses are chosen anew after 1, 2, 4, 8
# batches: some must be left after that.
CALIBRATION_BLOCKS = 2


class Given(TypedDict, total=False):
    """What a model is fitted to and measured on, and where it goes."""

    texts: Paths  # files and folders; by default the docstrings of Python's standard library
    images: Paths
    audio: Paths
    name: str | None  # the model's in the report; by default the folder's
    device: str
    dtype: str  # of the weights, or "auto" for the checkpoint's own


def load_job(
    source: Path,
    recipe: Recipe,
    say: Say,
    track: Track,
    *,
    name: str | None = None,
    device: str = "cpu",
    dtype: str = "float32",
    **given: Paths,
) -> Job:
    """Return a model with its samples, and the recipe filled; what costs little is checked first."""
    checkpoint = Checkpoint(source, device, dtype)
    checkpoint.require_modules((*recipe.only, *recipe.skip))
    noun, whole = checkpoint.require_kind(given), checkpoint.language_model
    paths, damaged = given.get(noun, ()), list[str]()
    if noun == "texts":
        # A language model learns from whole docstrings: of first paragraphs it would hardly see a
        # second sentence.
        found: Any = (
            read_texts(paths, whole=whole) if paths else standard_library_docstrings(whole=whole)
        )
    elif recipe.max_length is not None:
        raise ArgumentError(
            f"max_length must be left out for a model of {noun}, got {recipe.max_length}"
        )
    else:
        found, damaged = find_images(paths) if noun == "images" else find_audio(paths)
    facts: dict[str, Any] = {
        noun: [str(path) for path in paths] or "docstrings of the standard library"
    }
    if damaged:
        facts[f"{noun}_that_cannot_be_read"] = damaged
        say(f"left out, for they cannot be read: {len(damaged)} files of {noun}: {listed(damaged)}")
    parts = (split_audio if noun == "audio" else split_texts)(
        found, recipe.held_out, recipe.seed, noun
    )
    pretrained, recipe, listener = checkpoint.load(), recipe.filled(whole, noun), None
    if noun == "audio":
        listener = Listener(pretrained, copy.deepcopy(pretrained.model))
        inputs = audio_inputs(listener, *parts, facts)
        for rate, count in inputs.facts.get("audio_at_another_rate", {}).items():
            say(
                f"resampled to {listener.rate:,} Hz, as the model takes it: {count} files of "
                f"{rate:,} Hz"
            )
    elif noun == "images":
        inputs = image_inputs(pretrained, *parts, facts)
    else:
        recipe = replace(recipe, max_length=pretrained.within_positions(recipe.max_length or 0))
        inputs = text_inputs(pretrained, *parts, facts, recipe.max_length or 0)
    name = name or source.absolute().name.removesuffix(".gguf")
    original = listener and listener.original
    return Job(
        pretrained, recipe, inputs, name, say, track, Ranks(), original=original, listener=listener
    )


@dataclass(frozen=True)
class _Told(Sequence[Any]):
    """Batches that move a bar on each time one of them is taken."""

    batches: Sequence[Any]
    bar: Iterator[Any]

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: Any) -> Any:
        batch = self.batches[index]
        next(self.bar, None)
        return batch


@dataclass
class Job:
    """A pretrained model with samples to fit on, and others held out; its stages note results and times."""

    pretrained: Pretrained
    # A Recipe that is filled: nothing in it is None that suits the kind of model.
    recipe: Any
    inputs: Inputs
    name: str
    say: Say
    track: Track
    ranks: Ranks
    original: Any = None
    listener: Listener | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def calibration(self) -> list[Any]:
        """Samples that the constants are fitted to, site by site."""
        return self.inputs.fit[: self.recipe.calibration]

    def batches(
        self, samples: Sequence[Any], seed: int | None = None, size: int | None = None
    ) -> Batches:
        """Return batches of samples, of the recipe's size unless another is given."""
        return self.inputs.batches(samples, size or self.recipe.batch, seed)

    @property
    def meta(self) -> dict[str, Any]:
        """What a report says about the job: the model, its samples, and the versions of the libraries."""
        return {
            "model": self.name,
            **self.inputs.facts,
            f"{self.inputs.noun}_held_out": len(self.inputs.held_out),
            "versions": library_versions(),
            **({"remarks": list(self.pretrained.remarks)} if self.pretrained.remarks else {}),
        }

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Note how long a stage takes, and how far the model is from its original after it."""
        started = time.perf_counter()
        yield
        self.seconds[name] = round(time.perf_counter() - started, 2)
        if name in self.details:
            few = self.batches(self.inputs.held_out[: _COMPARED * self.recipe.batch])
            self.details[name]["output"] = asdict(
                compare(self.pretrained.model, self.original, few)
            )

    def convert_(self) -> None:
        """Find the norms, replace them, and calibrate what replaces them."""
        model, recipe = self.pretrained.model, self.recipe
        size = CALIBRATION_BLOCKS if self.pretrained.language_model or self.listener else None
        batches = self.batches(self.calibration, recipe.seed, size)
        with self.stage("find"):
            sites = find_norms(model, **arguments(model, batches[len(batches) // 2])[1])
        if not sites and is_changed(model):
            raise ModelError(
                f"{self.pretrained.source} must have norms, but those it had are converted "
                "already: "
                "convert the original"
            )
        with self.stage("convert"):
            options: dict[str, Any] = {"only": recipe.only or None, "skip": recipe.skip or None}
            options |= {"per_channel": recipe.per_channel, "witnesses": recipe.witnesses}
            done = convert_(model, sites, recipe.to, **options)
        self.say(str(done))
        self.details["refused"] = [site.to_dict() for site in done.refused]
        with self.stage("calibrate"):
            tracked = self.track(
                self.ranks.share(batches), f"calibrating on {len(batches)} batches"
            )
            fitted = calibrate_(model, tracked, lean=recipe.lean, tolerance=recipe.tolerance)
            self.details["calibrate"] = fitted.to_dict()
        if recipe.to == AUTO:
            self.say(str(fitted))

    def refine_(self) -> None:
        """Refine all constants together."""
        steps = self.recipe.refine
        with self.stage("refine"):
            # Other texts than those of the calibration, where there is a batch of them for each
            # process.
            first, size = len(self.calibration), self.recipe.batch
            rest = self.inputs.fit[first : first + steps * size * self.ranks.size]
            rest = rest if len(rest) > (self.ranks.size - 1) * size else self.inputs.fit
            batches = self.ranks.share(self.batches(rest, self.recipe.seed))
            # They are measured before and after the steps.
            taken = range(steps + 2 * len(batches))
            bar = iter(self.track(taken, f"refining all constants together, {steps} steps"))
            self.details["refine"] = refine_(
                self.pretrained.model, _Told(batches, bar), steps=steps, bf16=self.recipe.bf16
            ).to_dict()

    def distill_(self, quiet: bool) -> None:
        """Train all weights towards the original's outputs."""
        recipe = self.recipe
        self.say(
            "distilling for "
            f"{f'{recipe.steps} steps' if recipe.steps else f'{recipe.minutes:g} minutes'}"
        )
        if recipe.steps and recipe.steps < FEW:
            words = f"steps below {FEW} can hardly help, got {recipe.steps}: give more, or none"
            warnings.warn(words, CalibrationWarning, stacklevel=2)
        with self.stage("distill"):
            self.details["distill"] = distill_(
                self.pretrained.model,
                ShuffledBatches(
                    self.inputs.batches,
                    self.ranks.share(self.inputs.fit),
                    recipe.batch,
                    recipe.seed,
                ),
                teacher=self.original,
                steps=recipe.steps or None,
                minutes=recipe.minutes or None,
                quiet=quiet,
                **{
                    name: getattr(recipe, name)
                    for name in ("lr", "seed", "bf16", "accumulate", "checkpoints")
                },
            ).to_dict()

    def measure(self) -> ModelReport:
        """Return the report on the held-out samples."""
        model, seed, held_out = self.pretrained.model, self.recipe.seed, self.inputs.held_out
        meta = self.meta | {
            "recipe": asdict(self.recipe),
            **self.inputs.counts,
            "device": str(next(model.parameters()).device),
            "threads": torch.get_num_threads(),
        }
        with self.stage("measure"):
            tests = self.track(
                self.batches(held_out), f"measuring on {len(held_out)} held-out {self.inputs.noun}"
            )
            fit_on = self.batches(self.calibration)
            report = measure(
                model, tests, original=self.original, fit_on=fit_on, seed=seed, meta=meta
            )
        if self.pretrained.language_model or (self.listener and self.listener.tokenizer):
            with self.stage("continue"):
                made = self.transcripts(self.listener) if self.listener else self.continuations()
                report = replace(report, continuations=made)
        report.meta["seconds"], report.meta["stages"] = self.seconds, self.details
        if report.output.worst is not None:
            report.meta["worst_sample"] = self.inputs.name(report.output.worst)
        return report

    def continuations(self) -> list[Continuation]:
        """Return how the original and the converted model continue the first tokens of held-out blocks."""
        given = min(_GIVEN, self.recipe.max_length // 2)
        prompts = [block[:given] for block in self.inputs.held_out[:_CONTINUED]]
        asked = min(_ASKED, self.recipe.max_length - given)
        decode: Callable[[Any], str] = self.pretrained.tokenizer.decode
        models = (self.original, self.pretrained.model)
        before, now = (self.pretrained.greedy(model, prompts, asked) for model in models)
        same = (before == now).float().mean(1).tolist()
        return [
            Continuation(decode(prompt), decode(a), decode(b), share)
            for prompt, a, b, share in zip(prompts, before, now, same, strict=True)
        ]

    def transcripts(self, listener: Listener) -> list[Continuation]:
        """Return what the original and the converted model write down of the held-out audio."""
        found, batches = list[Continuation](), self.batches(self.inputs.held_out)
        for batch in self.track(batches, f"writing down {len(self.inputs.held_out)} audio files"):
            written = (
                listener.write(model, batch) for model in (self.original, self.pretrained.model)
            )
            for before, now in zip(*(map(listener.text, ids) for ids in written), strict=True):
                wrong, words = word_errors(now, before)
                words = max(words, 1)
                found.append(
                    Continuation(
                        self.inputs.name(len(found)), before, now, 1 - wrong / words, words
                    )
                )
        return found
