"""The result of a benchmark: the figures of the original and of the conversion, side by side."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from dynorm.errors import ArgumentError, DataError
from dynorm.files import write_text
from dynorm.jobs.checkpoint import library_versions

Model = TypeVar("Model")


@dataclass(frozen=True)
class Figure:
    """One figure of both models.

    Args:
        name: the task and the metric.
        original: of the original model.
        converted: of the converted one.
        higher_is_better: whether a larger figure is a better one; None if the evaluator does not
            say.
    """

    name: str
    original: float
    converted: float
    higher_is_better: bool | None

    @property
    def loss(self) -> float:
        """How much worse the converted model is, in the unit of the figure; negative if better."""
        difference = self.converted - self.original
        return -difference if self.higher_is_better else difference

    def to_dict(self) -> dict[str, Any]:
        """Return the fields and the difference, rounded to six digits after the point."""
        values = asdict(self)
        values["difference"] = round(self.converted - self.original, 6)
        values["original"] = round(self.original, 6)
        values["converted"] = round(self.converted, 6)
        return values


@dataclass(frozen=True)
class Result:
    """The results of a benchmark.

    Args:
        figures: the figures that are published of such models.
        parts: the same for each part of the data, such as a class or a block; the worst is kept.
        facts: the settings and the sizes of the data.
    """

    figures: list[Figure]
    parts: list[Figure]
    facts: dict[str, object] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the facts, the figures, and the part that lost most."""
        document: dict[str, Any] = dict(self.facts)
        document["figures"] = [figure.to_dict() for figure in self.figures]
        document["worst"] = worst(self.parts).to_dict()
        return document


def worst(figures: Iterable[Figure]) -> Figure:
    """Return the figure that lost most, among those with a known direction."""
    known = [figure for figure in figures if figure.higher_is_better is not None]
    if not known:
        raise DataError("a benchmark must have a figure with a known direction, but has none")
    return max(known, key=lambda figure: figure.loss)


def side_by_side(
    original: Mapping[str, float],
    converted: Mapping[str, float],
    higher_is_better: Mapping[str, bool | None],
) -> list[Figure]:
    """Return the figures of both models, by their names; both must have the same names."""
    if original.keys() != converted.keys():
        others = sorted(original.keys() ^ converted.keys())
        raise DataError(f"both models must have the same figures, but one lacks {others}")
    figures = []
    for name, value in original.items():
        figures.append(Figure(name, value, converted[name], higher_is_better.get(name)))
    return figures


def of_both(
    load: Callable[[str], Model],
    run: Callable[[Model], Any],
    sources: tuple[str, str],
) -> tuple[Any, Any]:
    """Load and run the original, then the conversion, so that one model is in memory at a time."""
    first = run(load(sources[0]))
    second = run(load(sources[1]))
    return first, second


def required(module: str, package: str) -> Any:
    """Return an evaluator's module, or raise ArgumentError with the package to install."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ArgumentError(
            f"{module} must be installed for this benchmark, but {error}: pip install '{package}'"
        ) from error


def add_result(results: Path, benchmark: str, sources: tuple[str, str], result: Result) -> None:
    """Put a result into the file; it replaces that of the same benchmark and models."""
    key = {"benchmark": benchmark, "original": sources[0], "converted": sources[1]}
    rows = []
    if results.exists():
        for row in json.loads(results.read_text("utf-8"))["rows"]:
            if any(row[name] != value for name, value in key.items()):
                rows.append(row)
    rows.append(key | result.to_dict() | {"made_with": library_versions()})
    write_text(results, json.dumps({"rows": rows}, indent=1) + "\n")
