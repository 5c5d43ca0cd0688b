"""A job on a pretrained model: the model with its samples, and their batches."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypedDict

import torch

from dynorm.errors import ArgumentError
from dynorm.jobs.checkpoint import Checkpoint, model_name
from dynorm.jobs.images import find_images
from dynorm.jobs.inputs import Batches, Inputs, image_inputs, text_inputs
from dynorm.jobs.pretrained import Pretrained
from dynorm.jobs.stages import Say
from dynorm.jobs.texts import read_texts, split_texts, standard_library_docstrings
from dynorm.plain import JsonObject
from dynorm.recipe import Recipe

Paths = Sequence[str | Path]


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
    *,
    name: str | None = None,
    device: str = "cpu",
    dtype: str = "float32",
    **samples: Paths,
) -> Job:
    """Load a model with its samples, and fill the recipe; cheap checks come first."""
    checkpoint = Checkpoint(source, device, dtype)
    noun = checkpoint.require_kind(samples)
    if noun != "texts" and recipe.max_length is not None:
        raise ArgumentError(
            f"max_length must be left out for a model of {noun}, got {recipe.max_length}"
        )
    paths = samples.get(noun, ())
    found: Sequence[Any]
    # A language model learns from whole docstrings: their first paragraphs hardly ever have a
    # second sentence.
    if noun == "images":
        found = find_images(paths)
    elif paths:
        found = read_texts(paths, whole=checkpoint.language_model)
    else:
        found = standard_library_docstrings(whole=checkpoint.language_model)
    facts: JsonObject = {
        noun: [str(path) for path in paths] or "docstrings of the standard library"
    }
    fit, held_out = split_texts(found, recipe.held_out, recipe.seed, noun)
    pretrained = checkpoint.load()
    recipe = recipe.filled_for(pretrained.model)
    if noun == "images":
        inputs = image_inputs(pretrained, fit, held_out, facts)
    else:
        # A prefix takes the first position.
        longest = pretrained.within_positions((recipe.max_length or 0) + recipe.prefix)
        recipe = replace(recipe, max_length=longest - recipe.prefix)
        inputs = text_inputs(pretrained, fit, held_out, facts, recipe.max_length or 0)
    unit = " blocks" if checkpoint.language_model else ""
    say(
        f"{type(pretrained.model).__name__} from {checkpoint.source}, {noun}: "
        f"{inputs.facts[f'{noun}_to_fit']}{unit} to fit on, {len(inputs.held_out)}{unit} held out"
    )
    for remark in pretrained.remarks:
        say(remark)
    return Job(pretrained, recipe, inputs, name or model_name(checkpoint.source))


@dataclass
class Job:
    """A pretrained model with samples to fit on and held-out ones."""

    pretrained: Pretrained
    # A Recipe without None in the fields that depend on the kind of model.
    recipe: Any
    inputs: Inputs
    name: str

    def batches(self, samples: Sequence[object], seed: int | None = None) -> Batches:
        """Return batches of samples."""
        return self.inputs.batches(samples, self.recipe.batch, seed)

    @property
    def meta(self) -> JsonObject:
        """The part of a report about the job: the model, its samples, versions of libraries."""
        meta: JsonObject = {"model": self.name, **self.inputs.facts}
        meta[f"{self.inputs.noun}_held_out"] = len(self.inputs.held_out)
        meta["versions"] = library_versions()
        meta["device"] = str(next(self.pretrained.model.parameters()).device)
        meta["threads"] = torch.get_num_threads()
        if self.pretrained.remarks:
            meta["remarks"] = list(self.pretrained.remarks)
        return meta


def library_versions() -> dict[str, str]:
    """Return the versions that a result depends on."""
    import transformers

    from dynorm import version

    return {
        "dynorm": version.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
