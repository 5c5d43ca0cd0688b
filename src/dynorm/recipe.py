"""The recipe of a conversion: every option with its default, and the defaults for a kind of model."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from torch import nn

from dynorm.arguments import check_count, check_kind, check_path, check_positive, check_seed
from dynorm.errors import ArgumentError
from dynorm.files import read_json, write_text
from dynorm.plain import Plain
from dynorm.replace.options import REST, LayerOptions, Target, options_by_glob, require_known

KINDS = {"input_ids": "texts", "pixel_values": "images"}
"""The kind of samples for each name of a model's main input."""
NO_NORM = "none"
"""Means in ``Recipe.to`` that nothing is to be left of a norm."""
# It is a line first, which can be folded away.
_LINE = {"to": "linear", "witnesses": 0}
# The least value of each count.
_LEAST = {
    "steps": 0,
    "held_out": 2,
    "max_length": 2,
    "batch": 1,
    "calibration": 1,
}


@dataclass(frozen=True)
class Defaults:
    """The steps of distillation, its rate and the samples, which depend on the kind of model."""

    steps: int
    batch: int
    calibration: int
    max_length: int | None = None
    lr: float = 2.5e-3


# Many small steps: at equal time 16 texts per step lose less than 32, and 8 are level. Such a step takes
# MiniLM half a second on two cores without bfloat16.
ENCODER = Defaults(steps=500, batch=16, calibration=256, max_length=64)
"""For a text encoder, and for a model that is not a transformers model."""
# At the rate of texts DINOv2's outputs are further from the original's after every number of steps.
IMAGES = Defaults(steps=200, batch=4, calibration=128, lr=6e-4)
LANGUAGE = Defaults(steps=360, batch=1, calibration=24, max_length=256)


def defaults_of(model: nn.Module) -> Defaults:
    """Return the defaults for a model.

    A transformers model that generates from tokens is a language model. Others go by the name of
    their main input. One that is not a transformers model is treated as a text encoder.
    """
    kind = KINDS.get(getattr(model, "main_input_name", "input_ids"))
    can_generate = getattr(model, "can_generate", None)
    if kind == "texts" and callable(can_generate) and can_generate():
        return LANGUAGE
    return IMAGES if kind == "images" else ENCODER


@dataclass(frozen=True)
class Recipe(Plain):
    """How to convert a model: every option of a conversion, with its default.

    :func:`convert_model` and ``dynorm convert --recipe FILE`` take it. Both put it, with the
    defaults for the model filled in, into ``meta["recipe"]`` of their report; the command also
    saves it as ``recipe.json``. A file of it is JSON with any of the fields.

    None for ``steps``, ``lr``, ``batch``, ``calibration`` and ``max_length`` means the default for the kind
    of model: a text encoder, or a model of language or images.

    Args:
        to: the layer in the place of the norms by its name, or a mapping from globs of their paths
            to layers, as in :func:`convert_`; point-wise, not annealed. "keep" leaves the norms, and
            "none" leaves nothing: each norm becomes a line, whose bias takes the mean out if it was a
            LayerNorm, and :func:`fold_` removes it in the end. A line that cannot be folded stays, and
            the report names it.
        stock: with ``to="none"``, save the model in its own class, as :func:`dynorm.hub.as_stock`
            returns it. Only for the command, as ``prefix``, ``held_out`` and the three fields behind it are.
        prefix: let all texts of a decoder follow one constant token, see :func:`dynorm.hub.with_prefix`.
        witnesses: the number of channels, at most 16, from which each DyISRU may estimate the size
            of a token. With 0 each value depends on its own channel; other functions take 0.
        fold_means: first fold the means of LayerNorms into the weights, as :func:`fold_` does with
            ``center=True``, wherever that is exact: each token has its own mean, which a point-wise
            layer does not see. Tied weights are untied for it. The fold sees the operators that run
            on one batch in eval mode: if another part of the model, such as a head that is only
            used in training, reads the same stream, pass False.
        steps: steps of distillation, which trains all weights; 0 for none.
        lr: highest learning rate of the distillation, as a share of the size of a weight, see
            :func:`distill_`.
        seed: seed of all random choices.
        bf16: distil in bfloat16.
        checkpoints: folder for checkpoints of the distillation.
        held_out: number of samples to measure on. This and the next three fields are only for the
            command: :func:`convert_model` takes batches, ignores them in a recipe, and refuses them
            as keywords.
        max_length: longest text in tokens, or the size of the blocks of a language model.
        batch: batch size.
        calibration: number of samples on which the constants are fitted site by site.

    Example:
        >>> recipe = dynorm.Recipe(to={"*.attention.*": "dyt", "*": "dyisru"}, steps=8)
        >>> recipe.changed(to="dyt").to
        'dyt'
        >>> recipe.filled_for(nn.Linear(8, 8)).batch
        16
    """

    to: Target = LayerOptions.to
    stock: bool = False
    prefix: bool = False
    witnesses: int = 0
    fold_means: bool = True
    steps: int | None = None
    lr: float | None = None
    seed: int = 0
    bf16: bool = False
    checkpoints: str | os.PathLike[str] | None = None
    held_out: int = 512
    max_length: int | None = None
    batch: int | None = None
    calibration: int | None = None

    def __post_init__(self) -> None:
        """Keep plain values, so that a recipe equals the one that is read from its file."""
        # The class is frozen.
        if isinstance(self.checkpoints, (str, os.PathLike)):
            object.__setattr__(self, "checkpoints", Path(self.checkpoints))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Recipe:
        """Return the recipe in a JSON file; fields that it lacks have their defaults.

        Raises:
            ArgumentError: it has a field that recipes do not have, or ``path`` is not a path.
            StorageError: it cannot be read, or is not a JSON object.
        """
        return cls().changed(**read_json(check_path("the recipe", path)))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the recipe as JSON, with all its fields."""
        write_text(path, json.dumps(self.to_dict(), indent=1) + "\n")

    def changed(self, **values: Any) -> Recipe:
        """Return the recipe with other values of some fields; ArgumentError for an unknown one."""
        require_known(values, [field.name for field in fields(self)], "a recipe")
        return replace(self, **values)

    def filled_for(self, model: nn.Module) -> Recipe:
        """Return the recipe with the defaults for a model in place of None."""
        defaults = vars(defaults_of(model))
        missing = {name: value for name, value in defaults.items() if getattr(self, name) is None}
        return replace(self, **missing)

    def __str__(self) -> str:
        """Return the fields that are not None, one per line."""
        given = {name: value for name, value in self.to_dict().items() if value is not None}
        return "\n".join(["recipe", *(f"  {name:11}  {value}" for name, value in given.items())])

    @property
    def layers(self) -> Target:
        """The layers in ``to``, with lines for "none"."""
        if self.to == NO_NORM:
            return {REST: _LINE}
        if not isinstance(self.to, Mapping):
            return self.to
        layers = dict(self.to)
        for glob in layers:
            if layers[glob] == NO_NORM:
                layers[glob] = _LINE
        return layers

    @property
    def removes_norms(self) -> bool:
        """Whether lines are to be folded away."""
        return self.layers != self.to

    def options_by_glob(self) -> dict[str, LayerOptions | None]:
        """Return the checked options of the layers for each glob; None where the norms stay."""
        return options_by_glob(self.layers, LayerOptions(witnesses=self.witnesses))

    def check(self) -> None:
        """Check every value, or raise ArgumentError."""
        chosen = self.options_by_glob().values()
        for options in chosen:
            if options is None:
                continue
            if options.is_annealed:
                raise ArgumentError(
                    f"to must be point-wise, but {options.to!r} is a norm until its annealing "
                    "ends: call convert_, and train it with AnnealCallback"
                )
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None or getattr(Recipe, name) is not None:
                check_count(name, value, least)
        check_seed(self.seed)
        if self.lr is not None:
            check_positive("lr", self.lr)
        for name in ("bf16", "fold_means", "prefix", "stock"):
            check_kind(name, getattr(self, name), bool, "True or False")
        if self.stock and self.to != NO_NORM:
            raise ArgumentError(
                f'stock must go with to="{NO_NORM}", because no class of transformers has layers of '
                f"dynorm, got to={self.to!r}"
            )
        read = {options.witnesses for options in chosen if options is not None}
        if self.witnesses and self.witnesses not in read:
            raise ArgumentError(
                f"witnesses must be 0 where no layer takes them from the recipe, got {self.witnesses} with "
                f"to={self.to!r}; a line that is to be folded away reads its own channel only"
            )
        check_kind("checkpoints", self.checkpoints, Path | None, "the path of a folder, or None")
