"""The recipe of a conversion: every option with its default, and the defaults for a kind of model.

The defaults are written only here. :func:`dynorm.convert_model`, the verbs and ``dynorm convert``
take them from :class:`Recipe`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, TypedDict

from torch import nn

from dynorm.arguments import (
    check_count,
    check_not_negative,
    check_positive,
    check_share,
)
from dynorm.errors import ArgumentError, StorageError
from dynorm.family import NAMES
from dynorm.files import write_text
from dynorm.plain import Plain
from dynorm.replace.options import LayerOptions, Target, options_by_glob, require_known
from dynorm.site import as_strings
from dynorm.table import Table

Globs = str | Iterable[str] | None
PointWise = Literal["dyisru", "dyt", "derf", "linear"]
"""The layers that ``dynorm convert`` puts in the place of norms."""
LAYER: PointWise = "dyisru"
"""The layer that replaces norms by default."""
KINDS = {
    "input_ids": "texts",
    "pixel_values": "images",
}
"""The kind of samples for each name of a model's main input."""


@dataclass(frozen=True)
class Defaults:
    """The numbers of samples and their size, which depend on the kind of model."""

    batch: int
    calibration: int
    max_length: int | None = None


ENCODER = Defaults(max_length=128, batch=32, calibration=256)
"""For a text encoder, and for a model that is not a transformers model."""
IMAGES = Defaults(batch=8, calibration=128)
LANGUAGE = Defaults(max_length=256, batch=4, calibration=24)


def defaults_for(language_model: bool, noun: str = "texts") -> Defaults:
    """Return the defaults for a kind of model; a language model may take "images" as well."""
    if language_model:
        return LANGUAGE
    return IMAGES if noun == "images" else ENCODER


def defaults_of(model: nn.Module) -> Defaults:
    """Return the defaults for a model.

    A transformers model that generates from tokens is a language model. Others go by the name of their main input. One that is not a transformers model is treated as a text encoder.
    """
    main_input = getattr(model, "main_input_name", "input_ids")
    noun = KINDS.get(main_input, "texts")
    can_generate = getattr(model, "can_generate", None)
    generates = callable(can_generate) and bool(can_generate())
    return defaults_for(generates and main_input in KINDS, noun)


Sites = Mapping[str, Any]
"""A layer or options by the glob of the paths that get them; None leaves these norms unchanged."""


class ModelFields(TypedDict, total=False):
    """The fields of a recipe that :func:`dynorm.convert_model` uses."""

    to: Target
    only: Globs
    skip: Globs
    sites: Sites | None
    per_channel: bool
    center: bool
    witnesses: int | None
    fold_means: bool
    lean: float
    tolerance: float
    refine: int
    refine_lr: float
    steps: int | None
    minutes: float | None
    lr: float | None
    seed: int
    bf16: bool
    accumulate: int
    checkpoints: str | os.PathLike[str] | None
    report_to: str | Iterable[str] | None
    keep_on_interrupt: bool


class RefineFields(TypedDict):
    """The arguments of ``refine_`` after the model and its batches, without the steps."""

    lr: float
    bf16: bool


class DistillFields(TypedDict):
    """The arguments of ``distill_`` that a recipe has."""

    steps: int
    lr: float | None
    seed: int
    bf16: bool
    accumulate: int
    checkpoints: str | os.PathLike[str] | None
    report_to: str | Iterable[str] | None


@dataclass(frozen=True)
class Recipe(Plain):
    """How to convert a model: every option of a conversion, with its default.

    :func:`convert_model` and ``dynorm convert --recipe FILE`` take it. Both put it, with the
    defaults for the model filled in, into ``meta["recipe"]`` of their report; the command also
    saves it as ``recipe.json``. A file of it is JSON with any of the fields.

    None for ``batch``, ``calibration`` and ``max_length`` means the default for the kind of model: a
    text encoder, or a model of language or images.

    Args:
        to: the layer, as in :func:`convert_`.
        only: globs of the paths to convert; None means all.
        skip: globs of the paths to leave unchanged.
        sites: options for each site by the glob of its path, as in :func:`convert_`. The fields
            ``to``, ``per_channel``, ``center`` and ``witnesses`` are for the sites without them.
        per_channel: one constant per channel instead of one per layer.
        center: give each layer a centre.
        witnesses: number of channels from which each layer may estimate the size of a token; 0 for
            the pure function. More than 16 are a sample of all channels. None means 192, and at
            most a third of a norm's channels.
        fold_means: first fold the means of LayerNorms into the weights, as :func:`fold_` does with
            ``center=True``, wherever that is exact: a layer has one centre for all tokens, but
            each token has its own mean. Tied weights are untied for it. The fold sees the operators
            that run on the first batch in eval mode: if another part of the model, such as a head
            that is only used in training, reads the same stream, pass False.
        lean: as in :func:`calibrate_`.
        tolerance: as in :func:`calibrate_`, for ``to="auto"``.
        refine: steps that train the constants of all layers together; 0 for none.
        refine_lr: their learning rate, ``lr`` of :func:`refine_`.
        steps: steps of distillation, which trains all weights. None means none.
        minutes: minutes of distillation, instead of ``steps``.
        lr: highest learning rate of the distillation. None means one from the width of the model
            and trial steps.
        seed: seed of all random choices.
        bf16: refine and distil in bfloat16.
        accumulate: batches per step of distillation.
        checkpoints: folder for checkpoints of the distillation.
        report_to: where the distillation is logged, as in :func:`distill_`. None means nowhere.
        keep_on_interrupt: Ctrl-C ends the distillation early and keeps it, as in :func:`distill_`.
        held_out: number of samples to measure on. This and the next three fields are only for the
            command; :func:`convert_model` takes batches.
        max_length: longest text in tokens, or the size of the blocks of a language model.
        batch: batch size.
        calibration: number of samples on which the constants are fitted site by site.

    Raises:
        ArgumentError: a glob is not a string. The other fields are checked by :meth:`check`.

    Example:
        >>> recipe = dynorm.Recipe(witnesses=2, refine=8)
        >>> recipe.changed(to="dyt").to
        'dyt'
        >>> recipe.filled_for(nn.Linear(8, 8)).batch
        32
    """

    to: Target = LAYER
    only: Globs = None
    skip: Globs = None
    sites: Sites | None = None
    per_channel: bool = False
    center: bool = False
    witnesses: int | None = None
    fold_means: bool = True
    lean: float = 0.0
    # Over the target's spread. With four witnesses, one constant per channel and a lean of 0.7, 7 of
    # the 13 norms of all-MiniLM-L6-v2 become lines, at no cost after 200 steps of training; at 0.08
    # there are 10, for 0.001 of rank correlation.
    tolerance: float = 0.05
    refine: int = 50
    refine_lr: float = 3e-3
    steps: int | None = None
    minutes: float | None = None
    lr: float | None = None
    seed: int = 0
    bf16: bool = False
    accumulate: int = 1
    checkpoints: str | os.PathLike[str] | None = None
    report_to: str | Iterable[str] | None = None
    keep_on_interrupt: bool = False
    held_out: int = 512
    max_length: int | None = None
    batch: int | None = None
    calibration: int | None = None

    def __post_init__(self) -> None:
        """Keep plain values, so that a recipe equals the one that is read from its file."""
        plain: dict[str, object] = {"to": _named(self.to)}
        for name in ("only", "skip"):
            globs = getattr(self, name)
            if globs is not None:
                plain[name] = tuple(as_strings(globs))
        if self.report_to is not None:
            plain["report_to"] = tuple(as_strings(self.report_to, "report_to", "tensorboard"))
        if isinstance(self.checkpoints, (str, os.PathLike)):
            plain["checkpoints"] = Path(self.checkpoints)
        if isinstance(self.sites, Mapping):
            plain["sites"] = {glob: _plain_options(self.sites[glob]) for glob in self.sites}
        for name, value in plain.items():
            # The class is frozen.
            object.__setattr__(self, name, value)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Recipe:
        """Return the recipe in a JSON file; fields that it lacks have their defaults.

        Raises:
            ArgumentError: it has a field that recipes do not have.
            StorageError: it cannot be read, or is not a JSON object.
        """
        try:
            values = json.loads(Path(path).read_text("utf-8"))
        # Text that is not UTF-8, or not JSON, is a ValueError.
        except (OSError, ValueError) as error:
            raise StorageError(
                f"the recipe must be a JSON file that can be read, but {os.fspath(path)!r}: {error}"
            ) from error
        if not isinstance(values, dict):
            raise StorageError(
                f'the recipe must be a JSON object such as {{"witnesses": 4}}, but '
                f"{os.fspath(path)!r} has {values!r:.60}"
            )
        return cls().changed(**values)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the recipe as JSON, with all its fields."""
        write_text(path, json.dumps(self.to_dict(), indent=1) + "\n")

    def changed(self, **values: Any) -> Recipe:
        """Return the recipe with other values of some fields; ArgumentError for an unknown one."""
        require_known(values, [field.name for field in fields(self)], "a recipe")
        return replace(self, **values)

    def __str__(self) -> str:
        """Return the fields that are not None, as a table."""
        rows = []
        for name, value in self.to_dict().items():
            if value is not None:
                rows.append((name, str(value)))
        return str(Table(("option", "value"), rows, title="recipe"))

    def check(self) -> None:
        """Check every value, or raise ArgumentError."""
        if self.witnesses is not None:
            check_count("witnesses", self.witnesses, 0)
        if not isinstance(self.sites, Mapping | None):
            raise ArgumentError(
                "sites must be a mapping from globs to options, such as {'*.ln_f': {'to': 'dyt'}}, "
                f"got {self.sites!r:.60}"
            )
        options_by_glob(self.target, self.base)
        self._check_counts()
        self._check_numbers()
        for name in ("bf16", "keep_on_interrupt", "fold_means"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise ArgumentError(f"{name} must be True or False, got {value!r}")
        if not isinstance(self.checkpoints, Path | None):
            raise ArgumentError(
                f"checkpoints must be the path of a folder, or None, got {self.checkpoints!r}"
            )
        if self.steps is not None and self.minutes is not None:
            raise ArgumentError(
                f"give steps or minutes, not both: got steps={self.steps}, minutes={self.minutes}"
            )
        if self.refine == 0 and self.refine_lr != Recipe.refine_lr:
            raise ArgumentError("refine_lr must come with refine, but refine is 0")
        if self.steps or self.minutes:
            return
        unused = []
        for name in ("lr", "accumulate", "checkpoints", "report_to", "keep_on_interrupt"):
            if getattr(self, name) != getattr(Recipe, name):
                unused.append(name)
        if unused:
            raise ArgumentError(
                f"{' and '.join(unused)} must come with steps or minutes: without them nothing is "
                "distilled"
            )

    def _check_counts(self) -> None:
        least = {
            "steps": 0,
            "refine": 0,
            "held_out": 2,
            "max_length": 2,
            "batch": 1,
            "seed": 0,
            "calibration": 1,
            "accumulate": 1,
        }
        for name, lowest in least.items():
            value = getattr(self, name)
            if value is not None or getattr(Recipe, name) is not None:
                check_count(name, value, lowest)
        if self.seed >= 2**32:
            raise ArgumentError(f"seed must be from 0 to 2**32 - 1, got {self.seed}")

    def _check_numbers(self) -> None:
        check_not_negative("tolerance", self.tolerance)
        check_positive("refine_lr", self.refine_lr)
        if self.minutes is not None:
            check_not_negative("minutes", self.minutes)
        check_share("lean", self.lean)
        if self.lr is not None:
            check_positive("lr", self.lr)

    @property
    def base(self) -> LayerOptions:
        """The options for the sites without theirs."""
        return LayerOptions(self.to, self.per_channel, self.center, self.witnesses or 0)

    @property
    def target(self) -> Target:
        """The layers by the globs of the norms, as ``convert_`` takes them."""
        globs: dict[str, Any] = dict.fromkeys(as_strings(self.skip))
        globs |= self.sites or {}
        if self.only is not None:
            globs |= dict.fromkeys(as_strings(self.only), self.to) | {"*": None}
        return {"*": self.to} | globs

    @property
    def layers(self) -> list[LayerOptions]:
        """The options of all layers that sites may get."""
        return [options for options in options_by_glob(self.target, self.base).values() if options]

    @property
    def refine_fields(self) -> RefineFields:
        """The arguments of ``refine_`` after the model and its batches, without the steps."""
        return RefineFields(lr=self.refine_lr, bf16=self.bf16)

    @property
    def distill_fields(self) -> DistillFields:
        """The arguments of ``distill_`` that a recipe has; 0 steps or minutes mean none."""
        return DistillFields(
            steps=self.steps or 0,
            lr=self.lr,
            seed=self.seed,
            bf16=self.bf16,
            accumulate=self.accumulate,
            checkpoints=self.checkpoints,
            report_to=self.report_to,
        )

    def filled(self, language_model: bool, noun: str = "texts") -> Recipe:
        """Return the recipe with the defaults for the kind of model in place of None."""
        return self._filled(defaults_for(language_model, noun))

    def filled_for(self, model: nn.Module) -> Recipe:
        """Return the recipe with the defaults for a model in place of None."""
        return self._filled(defaults_of(model))

    def _filled(self, defaults: Defaults) -> Recipe:
        values: dict[str, object] = {}
        for name in ("max_length", "batch", "calibration"):
            if getattr(self, name) is None:
                values[name] = getattr(defaults, name)
        return self.changed(**values)


def _named(to: Target) -> Target | str:
    """Return the name of a layer that is given by its class."""
    if isinstance(to, type):
        return NAMES.get(to, to)
    return to


def _plain_options(options: Any) -> object:
    """Return a copy of a site's options that holds plain values."""
    if not isinstance(options, Mapping):
        return options
    plain: dict[str, object] = dict(options)
    if "to" in plain:
        plain["to"] = _named(options["to"])
    return plain
