"""A job on a pretrained model: the model, its samples, and the stages of the conversion."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypedDict

import torch
from torch import Tensor

from dynorm.batches import arguments
from dynorm.errors import ArgumentError, ModelError, listed
from dynorm.find import find_norms
from dynorm.fit import calibrate_, refine_
from dynorm.jobs.checkpoint import (
    Batches,
    Checkpoint,
    Pretrained,
    ShuffledBatches,
    library_versions,
    model_name,
)
from dynorm.jobs.images import find_images
from dynorm.jobs.inputs import Inputs, image_inputs, text_inputs
from dynorm.jobs.means import fold_means_
from dynorm.jobs.texts import read_texts, split_texts, standard_library_docstrings
from dynorm.plain import JsonObject
from dynorm.ranks import Ranks
from dynorm.recipe import Recipe
from dynorm.replace import ConversionReport, convert_
from dynorm.replace.edits import is_changed
from dynorm.replace.options import REST
from dynorm.report import ModelReport, measure
from dynorm.report.conversion import compare
from dynorm.report.cost import costs
from dynorm.report.records import Continuation
from dynorm.site import as_strings
from dynorm.train.distill import distill_

Paths = Sequence[str | Path]
Say = Callable[[str], None]
Track = Callable[[Sequence[Any], str], Iterable[Any]]
# How a language model is tried out: the number of held-out blocks, how many tokens of each are the
# prompt, and how many are generated.
_PROMPTS = 16
_PROMPT_TOKENS = 32
_NEW_TOKENS = 64
# Batches of held-out samples that a model is compared on after each stage. More would be slow: a
# decoder takes half a minute for these two on two cores.
_COMPARED = 2
# Blocks in a batch of calibration. Witnesses are chosen again after 1, 2, 4 and 8
# batches, and batches must be left after that.
CALIBRATION_BLOCKS = 2


class JobOptions(TypedDict, total=False):
    """The samples of a job, and how its model is loaded."""

    texts: Paths  # files and folders; by default the docstrings of Python's standard library
    images: Paths
    name: str | None  # of the model in the report; by default that of its folder
    device: str
    dtype: str  # of the weights, or "auto" for the checkpoint's


def load_job(
    source: str | Path,
    recipe: Recipe,
    say: Say,
    track: Track,
    *,
    name: str | None = None,
    device: str = "cpu",
    dtype: str = "float32",
    **samples: Paths,
) -> Job:
    """Load a model with its samples, and fill the recipe; cheap checks come first."""
    checkpoint = Checkpoint(source, device, dtype)
    globs = (*as_strings(recipe.only), *as_strings(recipe.skip), *(recipe.sites or {}))
    checkpoint.require_modules([glob for glob in globs if glob != REST])
    noun = checkpoint.require_kind(samples)
    language_model = checkpoint.language_model
    paths = samples.get(noun, ())
    readable: Sequence[object]
    damaged: list[str] = []
    if noun != "texts" and recipe.max_length is not None:
        raise ArgumentError(
            f"max_length must be left out for a model of {noun}, got {recipe.max_length}"
        )
    # A language model learns from whole docstrings: their first paragraphs hardly ever have a
    # second sentence.
    if noun == "images":
        readable, damaged = find_images(paths)
    elif paths:
        readable = read_texts(paths, whole=language_model)
    else:
        readable = standard_library_docstrings(whole=language_model)
    facts: dict[str, object] = {
        noun: [str(path) for path in paths] or "docstrings of the standard library"
    }
    if damaged:
        facts[f"{noun}_that_cannot_be_read"] = damaged
        say(f"left out {len(damaged)} files of {noun} that cannot be read: {listed(damaged)}")
    fit, held_out = split_texts(readable, recipe.held_out, recipe.seed, noun)
    pretrained = checkpoint.load()
    recipe = recipe.filled(language_model, noun)
    if noun == "images":
        inputs = image_inputs(pretrained, fit, held_out, facts)
    else:
        max_length = pretrained.within_positions(recipe.max_length or 0)
        recipe = replace(recipe, max_length=max_length)
        inputs = text_inputs(pretrained, fit, held_out, facts, max_length)
    return Job(
        pretrained,
        recipe,
        inputs,
        name or model_name(checkpoint.source),
        say,
        track,
        Ranks(),
    )


@dataclass
class Job:
    """A pretrained model with samples to fit on and held-out ones; records results and times."""

    pretrained: Pretrained
    # A Recipe without None in the fields that depend on the kind of model.
    recipe: Any
    inputs: Inputs
    name: str
    say: Say
    track: Track
    ranks: Ranks
    original: Any = None
    seconds: dict[str, float] = field(default_factory=dict)
    details: JsonObject = field(default_factory=dict)

    @property
    def calibration(self) -> list[Any]:
        """The samples on which the constants are fitted, site by site."""
        return self.inputs.fit[: self.recipe.calibration]

    def batches(
        self, samples: Sequence[object], seed: int | None = None, size: int | None = None
    ) -> Batches:
        """Return batches of samples, by default of the recipe's size."""
        return self.inputs.batches(samples, size or self.recipe.batch, seed)

    @property
    def meta(self) -> JsonObject:
        """The part of a report about the job: the model, its samples, versions of libraries."""
        meta: dict[str, object] = {"model": self.name, **self.inputs.facts}
        meta[f"{self.inputs.noun}_held_out"] = len(self.inputs.held_out)
        meta["versions"] = library_versions()
        if self.pretrained.remarks:
            meta["remarks"] = list(self.pretrained.remarks)
        return meta

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Record the time of a stage, and how far the model is from its original after it."""
        started = time.perf_counter()
        yield
        self.seconds[name] = round(time.perf_counter() - started, 2)
        if name in self.details:
            few = self.batches(self.inputs.held_out[: _COMPARED * self.recipe.batch])
            output = compare(self.pretrained.model, self.original, few)
            self.details[name]["output"] = asdict(output)

    def calibration_batches(self) -> Batches:
        """Return batches of the samples for the calibration."""
        size = None
        if self.pretrained.language_model:
            size = CALIBRATION_BLOCKS
        return self.batches(self.calibration, self.recipe.seed, size)

    def replace_norms_(self, batches: Batches) -> ConversionReport:
        """Keep a copy of the original, and replace the norms, without their means if the recipe says so."""
        recipe = self.recipe
        model = self.pretrained.model
        if self.original is None:
            self.original = copy.deepcopy(model)
        batch = batches[len(batches) // 2]
        _, example = arguments(model, batch)
        if recipe.fold_means:
            with self.stage("fold_means"):
                means = fold_means_(model, batch, recipe, batches)
            if means is not None:
                self.say(str(means))
                self.details["fold_means"] = means.to_dict()
        with self.stage("find"):
            sites = find_norms(model, **example)
        if not sites and is_changed(model):
            raise ModelError(
                f"{self.pretrained.source} must have norms, but they are converted already: "
                "convert the original"
            )
        with self.stage("convert"):
            return convert_(
                model,
                sites,
                recipe.target,
                per_channel=recipe.per_channel,
                center=recipe.center,
                witnesses=recipe.witnesses or 0,
            )

    def convert_(self) -> None:
        """Replace the norms, and calibrate the new layers."""
        recipe = self.recipe
        batches = self.calibration_batches()
        converted = self.replace_norms_(batches)
        # The report has the table of the sites.
        self.say(converted.summary())
        self.details["refused"] = [site.to_dict() for site in converted.refused]
        self.details["skipped"] = [site.path for site in converted.skipped]
        with self.stage("calibrate"):
            tracked = self.track(
                self.ranks.share(batches), f"calibrating on {len(batches)} batches"
            )
            fitted = calibrate_(self.pretrained.model, tracked)
            self.details["calibrate"] = fitted.to_dict() | {"samples": len(self.calibration)}

    def refine_(self) -> None:
        """Refine all constants together."""
        steps = self.recipe.refine
        with self.stage("refine"):
            # Samples that calibration has not seen, if there is a batch of them for each process.
            start = len(self.calibration)
            size = self.recipe.batch
            samples = self.inputs.fit[start : start + steps * size * self.ranks.size]
            if len(samples) <= (self.ranks.size - 1) * size:
                samples = self.inputs.fit
            batches = self.batches(samples, self.recipe.seed)
            parts = self.ranks.share(batches.parts)
            # Each batch is also measured before and after the steps.
            taken = range(steps + 2 * len(parts))
            bar = iter(self.track(taken, f"refining all constants together, {steps} steps"))

            def tracked(part: Sequence[object]) -> dict[str, Tensor]:
                next(bar, None)
                return batches.make(part)

            refined = refine_(
                self.pretrained.model,
                Batches(tracked, parts),
                steps=steps,
                **self.recipe.refine_fields,
            )
            used = min(len(samples), steps * size * self.ranks.size)
            self.details["refine"] = refined.to_dict() | {"samples": used}

    def distill_(self, quiet: bool) -> None:
        """Train all weights to reproduce the original's outputs."""
        recipe = self.recipe
        self.say(f"distilling for {recipe.steps} steps")
        batches = ShuffledBatches(
            self.inputs.batches, self.ranks.share(self.inputs.fit), recipe.batch, recipe.seed
        )
        with self.stage("distill"):
            distilled = distill_(
                self.pretrained.model,
                batches,
                teacher=self.original,
                **recipe.distill_fields,
            )
            self.details["distill"] = distilled.to_dict()

    def measure(self) -> ModelReport:
        """Return the report on the held-out samples."""
        model = self.pretrained.model
        held_out = self.inputs.held_out
        meta = self.meta | {
            "recipe": self.recipe.to_dict(),
            **self.inputs.counts,
            "device": str(next(model.parameters()).device),
            "threads": torch.get_num_threads(),
        }
        with self.stage("measure"):
            title = f"measuring on {len(held_out)} held-out {self.inputs.noun}"
            report = measure(
                model,
                self.track(self.batches(held_out), title),
                original=self.original,
                fit_on=self.batches(self.calibration),
                seed=self.recipe.seed,
                meta=meta,
            )
        if self.pretrained.language_model:
            with self.stage("continue"):
                report = replace(report, continuations=self.continuations())
        report.meta["cost"] = costs(self.original, model, self.batches(held_out)[0])
        report.meta["seconds"] = self.seconds
        report.meta["stages"] = self.details
        if report.output.worst is not None:
            report.meta["worst_sample"] = self.inputs.name(report.output.worst)
        return report

    def continuations(self) -> list[Continuation]:
        """Continue the first tokens of held-out blocks, with the original and the new model."""
        max_length = self.recipe.max_length
        prompt_tokens = min(_PROMPT_TOKENS, max_length // 2)
        new_tokens = min(_NEW_TOKENS, max_length - prompt_tokens)
        prompts = [block[:prompt_tokens] for block in self.inputs.held_out[:_PROMPTS]]
        before = self.pretrained.greedy(self.original, prompts, new_tokens)
        after = self.pretrained.greedy(self.pretrained.model, prompts, new_tokens)
        same = (before == after).float().mean(1).tolist()
        decode: Callable[[object], str] = self.pretrained.tokenizer.decode
        return [
            Continuation(decode(prompt), decode(before[i]), decode(after[i]), same[i])
            for i, prompt in enumerate(prompts)
        ]
