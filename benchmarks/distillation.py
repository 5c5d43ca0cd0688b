"""Measure how much quality distillation recovers, by several recipes, on docstrings and other texts.

``python -m benchmarks.distillation`` converts a real encoder or, with ``--model language``, a small
language model. It writes benchmarks/results/distillation.json after each recipe. The first recipe
is that of ``dynorm convert``. On the encoder 1,200 steps take six minutes on two cores in bfloat16.
The length is a number of steps rather than of minutes, so that a busy machine gives the same
figures.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import random
import re
import sysconfig
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import dynorm
from benchmarks.subjects import (
    BATCH,
    HELD_OUT,
    Row,
    Subject,
    add_rows,
    encoder,
    fitted,
    language_model,
    rows_so_far,
)
from dynorm.jobs.checkpoint import ShuffledBatches, make_batches
from dynorm.jobs.texts import read_texts
from dynorm.train.callbacks import AnnealCallback
from dynorm.train.distill import distill_, distillation_rate

RESULTS = Path(__file__).parent / "results" / "distillation.json"


@dataclass(frozen=True)
class Recipe:
    """One way to convert and distil; the defaults are those of ``dynorm convert``.

    Args:
        to: the layer.
        witnesses: channels that a layer may read.
        per_channel: one constant per channel, or one per layer.
        rate: the highest learning rate over that of ``dynorm convert``.
        anneal: anneal from the norm during this share of the steps, instead of a fit before the
            first.
    """

    to: str = "dyisru"
    witnesses: int = 4
    per_channel: bool = True
    rate: float = 1.0
    anneal: float | None = None


RECIPES = {
    "DyISRU, four witnesses": Recipe(),
    "linear (control), four witnesses": Recipe("linear"),
    "scaled DyT, four witnesses": Recipe("dyt"),
    "scaled Derf, four witnesses": Recipe("derf"),
    "DyISRU, two witnesses": Recipe(witnesses=2),
    "DyISRU": Recipe(witnesses=0),
    "linear (control)": Recipe("linear", 0),
    "scaled DyT": Recipe("dyt", 0),
    "DyISRU, annealed": Recipe("annealed", 0, anneal=0.6),
    "DyISRU, twice the rate": Recipe(witnesses=0, rate=2.0),
}
MODELS = {
    "encoder": "all-MiniLM-L6-v2, 13 LayerNorms",
    "language": "GPT-2 over bytes, 4 layers, C = 128, 9 LayerNorms, trained on docstrings for 1,500 steps",
}
# The modules whose functions are texts, and the number of lines that are taken of each function.
MODULES = (
    "json",
    "email",
    "asyncio",
    "http",
    "xml",
    "logging",
    "importlib",
    "concurrent",
    "tkinter",
)
LINES = 8
# Characters that a text must have.
LEAST_CHARACTERS = 60
# Libraries whose docstrings are further kinds of text.
LIBRARIES = ("torch.nn", "numpy", "sympy")


def code() -> list[str]:
    """Return the first lines of functions of the standard library, without docstrings and comments."""
    root = Path(sysconfig.get_path("stdlib"))
    texts = []
    for module in MODULES:
        for file in sorted((root / module).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text("utf-8"))):
                if not isinstance(node, ast.FunctionDef):
                    continue
                if ast.get_docstring(node) is not None:
                    node.body = node.body[1:] or [ast.Pass()]
                lines = ast.unparse(node).splitlines()
                texts.append("\n".join(lines[:LINES]))
    return sample(long_enough(texts))


def reference() -> list[str]:
    """Return paragraphs of Python's language reference, which is prose and not docstrings."""
    from pydoc_data.topics import topics

    paragraphs = []
    for topic in topics.values():
        for paragraph in re.split(r"\n\s*\n", topic):
            paragraphs.append(" ".join(paragraph.split()))
    return sample(long_enough(paragraphs))


def long_enough(texts: list[str]) -> list[str]:
    """Return the texts that are long enough, without repetitions."""
    return [text for text in dict.fromkeys(texts) if len(text) >= LEAST_CHARACTERS]


def docstrings(library: str) -> list[str]:
    """Return first paragraphs of a library's docstrings."""
    spec = importlib.util.find_spec(library)
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return sample(read_texts(spec.submodule_search_locations))


def sample(texts: list[str]) -> list[str]:
    """Return :data:`HELD_OUT` of the texts, at random."""
    return random.Random(0).sample(texts, HELD_OUT)


def distilled(recipe: Recipe, model: str, steps: int, seed: int, bf16: bool) -> Subject:
    """Return the model after all stages of a recipe."""
    subject = encoder(seed) if model == "encoder" else language_model()
    pretrained = subject.pretrained
    callbacks = []
    if recipe.anneal is None:
        layer = {"per_channel": recipe.per_channel, "witnesses": recipe.witnesses}
        for _ in fitted(subject, recipe.to, seed, **layer):
            pass
    else:
        (probe,) = make_batches(pretrained, subject.encoded[:BATCH], BATCH)
        sites = dynorm.find_norms(pretrained.model, **probe)
        dynorm.convert_(pretrained.model, sites, recipe.to, per_channel=recipe.per_channel)
        callbacks = [AnnealCallback(start=1, length=recipe.anneal)]
    batches = ShuffledBatches(partial(make_batches, pretrained), subject.encoded, BATCH, seed)
    distill_(
        pretrained.model,
        batches,
        teacher=subject.original,
        steps=steps,
        seed=seed,
        lr=recipe.rate * distillation_rate(pretrained.model),
        callbacks=callbacks,
        bf16=bf16,
    )
    if recipe.anneal is not None:
        dynorm.finalize_(pretrained.model)
    return subject


def measured(name: str, model: str, steps: int, seed: int, bf16: bool) -> Row:
    """Return the figures of one recipe."""
    started = time.perf_counter()
    subject = distilled(RECIPES[name], model, steps, seed, bf16)
    seconds = time.perf_counter() - started
    row: Row = {
        "recipe": name,
        "model": model,
        "steps": steps,
        "seed": seed,
        "bf16": bf16,
    }
    row |= on_all_kinds(subject)
    row["seconds"] = round(seconds, 1)
    return row


def on_all_kinds(subject: Subject) -> dict[str, dict[str, float]]:
    """Return the figures on the held-out docstrings, and on kinds of text that no stage has seen."""
    kinds = {"code": code(), "reference": reference()}
    for library in LIBRARIES:
        kinds[library] = docstrings(library)
    figures = {"docstrings": subject.figures()}
    for kind, texts in kinds.items():
        figures[kind] = subject.figures(subject.batches(texts))
    return figures


def main() -> None:
    """Measure the rows that are missing, and write each one when it is measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model", choices=list(MODELS), default="encoder", help="the model to convert"
    )
    parser.add_argument("--steps", type=int, default=400, help="distillation steps of 32 texts")
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="seed of the encoder's split, the order and the training",
    )
    parser.add_argument(
        "--recipes",
        nargs="+",
        choices=list(RECIPES),
        default=list(RECIPES),
        help="the recipes to measure",
    )
    parser.add_argument(
        "--bf16", action="store_true", help="distil in bfloat16, for processors that support it"
    )
    arguments = parser.parse_args()
    about = {"models": MODELS, "batch": BATCH, "texts": HELD_OUT}
    for name in arguments.recipes:
        key = (name, arguments.model, arguments.steps, arguments.seed)
        if key in [key_of(row) for row in rows_so_far(RESULTS)]:
            continue
        row = measured(*key, arguments.bf16)
        print(json.dumps(row), flush=True)
        add_rows(RESULTS, about, [row])


def key_of(row: Row) -> tuple[str, str, int, int]:
    """Return the facts that tell rows apart."""
    return row["recipe"], row["model"], row["steps"], row["seed"]


if __name__ == "__main__":
    main()
