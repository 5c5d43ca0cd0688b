"""What distillation gives back, by several recipes, on held-out docstrings and on texts of other kinds.

``python -m benchmarks.distillation`` writes benchmarks/results/distillation.json, a recipe after another, each when it
is done. The first recipe is that of ``dynorm convert``; 1,200 steps take about ten minutes on two cores. Steps and not
minutes are given, so that a busy machine gives the same figures.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import sysconfig
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import dynorm
from benchmarks.quality import BATCH, HELD_OUT, Subject, fitted, rows_so_far, subject_of
from dynorm.files import write_text
from dynorm.integrations import AnnealCallback
from dynorm.integrations.distill import distill_
from dynorm.integrations.pretrained import encode, library_versions, make_batches

RESULTS = Path(__file__).parent / "results" / "distillation.json"


@dataclass(frozen=True)
class Recipe:
    """One way to convert and distil.

    Args:
        to: the layer.
        options: of ``dynorm.convert_``.
        lr: the highest learning rate.
        path: anneal from the norm during this share of the steps, instead of a fit before the first.
    """

    to: str = "dyisru"
    options: dict[str, Any] = field(default_factory=dict)
    lr: float = 3e-4
    path: float | None = None


RECIPES = {
    "DyISRU": Recipe(),
    "linear (control)": Recipe("linear"),
    "DyT (scaled)": Recipe("dyt"),
    "DyISRU, a constant a channel": Recipe(options={"per_channel": True}),
    "DyISRU, a learned centre": Recipe(options={"center": True}),
    "DyISRU by the path": Recipe("annealed", path=0.6),
    "DyISRU, twice the rate": Recipe(lr=6e-4),
}
# Lines of a function that make a text, and modules whose functions are taken.
LINES, MODULES = 8, ("json", "email", "asyncio", "http", "xml", "logging", "importlib", "concurrent", "tkinter")


def code() -> list[str]:
    """Return the first lines of functions of the standard library, without docstrings and comments."""
    root = Path(sysconfig.get_path("stdlib"))
    found = []
    for module in MODULES:
        for file in sorted((root / module).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text("utf-8"))):
                if isinstance(node, ast.FunctionDef):
                    if ast.get_docstring(node) is not None:
                        node.body = node.body[1:] or [ast.Pass()]
                    found.append("\n".join(ast.unparse(node).splitlines()[:LINES]))
    return sample([text for text in dict.fromkeys(found) if len(text) >= 60])


def reference() -> list[str]:
    """Return paragraphs of Python's language reference, as ``help()`` shows it: prose, and no docstring."""
    from pydoc_data.topics import topics

    paragraphs = (" ".join(part.split()) for text in topics.values() for part in re.split(r"\n\s*\n", text))
    return sample([text for text in dict.fromkeys(paragraphs) if len(text) >= 60])


def sample(texts: list[str]) -> list[str]:
    """Return as many texts as are held out, at random."""
    return random.Random(0).sample(texts, HELD_OUT)


def distilled(recipe: Recipe, steps: int, seed: int) -> Subject:
    """Return the model after all of a recipe."""
    subject = subject_of(seed)
    pretrained = subject.pretrained
    callbacks = []
    if recipe.path is None:
        for _ in fitted(subject, recipe.to, seed, **recipe.options):
            pass
    else:
        sites = dynorm.find_norms(pretrained.model, **subject.tests[0])
        dynorm.convert_(pretrained.model, sites, recipe.to, **recipe.options)
        callbacks = [AnnealCallback(start=1, length=recipe.path)]
    distill_(
        pretrained, subject.original, subject.encoded, steps=steps, seed=seed, lr=recipe.lr, quiet=True,
        callbacks=callbacks,
    )  # fmt: skip
    if recipe.path is not None:
        dynorm.finalize_(pretrained.model)
    return subject


def measured(name: str, steps: int, seed: int) -> dict[str, Any]:
    """Return the figures of one recipe."""
    started = time.perf_counter()
    subject = distilled(RECIPES[name], steps, seed)
    seconds = time.perf_counter() - started
    row: dict[str, Any] = {"recipe": name, "steps": steps, "seed": seed, "docstrings": subject.figures()}
    for kind, texts in {"code": code(), "reference": reference()}.items():
        row[kind] = subject.figures(make_batches(subject.pretrained, encode(subject.pretrained, texts), BATCH))
    return row | {"seconds": round(seconds, 1)}


def main() -> None:
    """Measure what no earlier run has measured; each row is written when it is done."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1200, help="distillation steps of 32 texts")
    parser.add_argument("--seed", type=int, default=0, help="of the split, the order and the training")
    parser.add_argument("--recipes", nargs="+", choices=list(RECIPES), default=list(RECIPES), help="which")
    arguments = parser.parse_args()
    for name in arguments.recipes:
        key = (name, arguments.steps, arguments.seed)
        if any((row["recipe"], row["steps"], row["seed"]) == key for row in rows_so_far(RESULTS)):
            continue
        row = measured(*key)
        print(json.dumps(row), flush=True)
        document = {"model": "all-MiniLM-L6-v2, 13 LayerNorms", "batch": BATCH, "texts": HELD_OUT}
        rows = [*rows_so_far(RESULTS), row]
        write_text(RESULTS, json.dumps(document | {"versions": library_versions(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
