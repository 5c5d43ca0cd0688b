"""Measure what a conversion loses, without training and distilled: ``python -m benchmarks.quality MODEL``.

MODEL is minilm, smollm2 or dinov2. Each run converts a copy, measures it on held-out data of
several kinds, distils it, and measures again. Rows are added to benchmarks/results/quality.json;
rows that are there are not measured again. ``--check`` measures the first untrained row of the
model again, and fails if it is worse than the committed one by more than its noise. The errors of the
sites are those on the first kind of data.
"""

import argparse
import copy
import json
import os
import random
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import Tensor, nn

import dynorm
from dynorm.errors import DataError
from dynorm.hub import with_prefix
from dynorm.jobs import encode, load_pretrained, make_batches
from dynorm.jobs.images import find_images
from dynorm.jobs.inputs import image_inputs
from dynorm.jobs.texts import split_texts, standard_library_docstrings
from dynorm.recipe import ENCODER, IMAGES
from dynorm.report.conversion import compare
from tools import pictures
from tools.demo_model import folder

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "quality.json"
# The figure by which rows are compared with the committed ones, and its noise.
CHECKED = {
    "minilm": ("cosine_mean", 0.01),
    "smollm2": ("kl", 0.05),
    "dinov2": ("cosine_mean", 0.01),
}
EMBEDDING = ("cosine_mean", "cosine_min", "spearman", "neighbours")
LANGUAGE = ("loss_difference", "kl", "kl_worst", "agreement")
# In place of the figures, if the outputs are not finite.
OVERFLOWS = "overflows"
Batches = list[dict[str, Tensor]]
Row = dict[str, Any]


@dataclass
class Subject:
    """A model with its data.

    Args:
        model: the original.
        calibration: batches to set the constants on.
        fit: the batches to distil on, of a size and in the order of a seed, one per step; they are
            repeated if steps remain.
        held_out: batches to measure on, for each kind of data.
        figures: the figures of a report that count for this kind of model.
    """

    model: nn.Module
    calibration: Batches
    fit: Callable[[int, int], Batches]
    held_out: dict[str, Batches]
    figures: tuple[str, ...]


@dataclass(frozen=True)
class Run:
    """A conversion and its distillation.

    Args:
        to: the layer.
        witnesses: its witnesses.
        steps: how long it is distilled.
        lr: at which rate.
        seeds: how often, each time with another order of the batches.
        prefix: whether the texts follow a constant token.
        batch: how many samples a step takes.
    """

    to: str
    witnesses: int
    steps: int
    lr: float = ENCODER.lr
    seeds: int = 1
    prefix: bool = False
    batch: int = 16

    def stages(self, seed: int) -> list[Row]:
        """Return what distinguishes its rows: one without training, and one distilled per seed."""
        start: Row = {
            "to": self.to,
            "witnesses": self.witnesses,
            "prefix": self.prefix,
            "seed": seed,
        }
        stages = []
        if seed == 0:
            stages.append({**start, "steps": 0})
        if self.steps:
            stages.append({**start, "steps": self.steps, "lr": self.lr, "batch": self.batch})
        return stages


RUNS = {
    "minilm": [
        Run("dyisru", 0, 500, seeds=3),
        Run("linear", 0, 500),
        Run("dyt", 0, 0),
        Run("derf", 0, 0),
        Run("dyisru", 4, 500),
        Run("dyisru", 16, 500),
    ],
    "smollm2": [
        Run("dyisru", 0, 80, batch=2),
        Run("dyisru", 0, 360, seeds=3, prefix=True, batch=1),
        Run("linear", 0, 0),
        Run("linear", 0, 120, lr=6e-4, prefix=True, batch=1),
        Run("dyisru", 8, 180, lr=6e-4, batch=1),
        Run("dyisru", 8, 180, lr=6e-4, prefix=True, batch=1),
    ],
    "dinov2": [
        Run("dyisru", 0, 200, lr=IMAGES.lr, seeds=3, batch=4),
        Run("linear", 0, 200, lr=IMAGES.lr, batch=4),
        Run("dyisru", 4, 200, lr=IMAGES.lr, batch=4),
    ],
}


def minilm() -> Subject:
    """Return the encoder of texts; it is fitted to docstrings only."""
    pretrained = load_pretrained(folder())
    fit, docstrings = split_texts(standard_library_docstrings(), 512)
    ids = encode(pretrained, fit)
    kinds = {"docstrings": docstrings, "packages": packages(512), "licences": licences(256)}
    held_out = {}
    for kind, texts in kinds.items():
        held_out[kind] = make_batches(pretrained, encode(pretrained, texts), 32)
    return Subject(
        pretrained.model,
        make_batches(pretrained, ids[:256], 32, 0),
        partial(make_batches, pretrained, ids),
        held_out,
        EMBEDDING,
    )


def smollm2() -> Subject:
    """Return the decoder, in blocks of 256 tokens; it is fitted to docstrings only."""
    pretrained = load_pretrained(folder("smollm2"))
    fit, docstrings = split_texts(standard_library_docstrings(whole=True), 96)
    ids = encode(pretrained, fit, 256)
    kinds = {
        "docstrings": docstrings,
        "packages": packages(512),
        "licences": licences(512),
        "C headers": headers(),
    }
    held_out = {}
    for kind, texts in kinds.items():
        held_out[kind] = make_batches(pretrained, encode(pretrained, texts, 256)[:8], 4)
    held_out["one context"] = make_batches(pretrained, encode(pretrained, docstrings, 4096)[:1], 1)
    generator = torch.Generator().manual_seed(0)
    size = (4, 256)
    drawn = torch.randint(pretrained.model.config.vocab_size, size, generator=generator)
    held_out["random tokens"] = [{"input_ids": drawn, "attention_mask": torch.ones_like(drawn)}]
    return Subject(
        pretrained.model,
        make_batches(pretrained, ids[:24], 2, 0),
        partial(make_batches, pretrained, ids),
        held_out,
        LANGUAGE,
    )


def dinov2() -> Subject:
    """Return the encoder of images, on crops of photographs; held-out photographs are whole."""
    pretrained = load_pretrained(folder("dinov2"))
    readable = find_images([pictures.gather(ROOT / "build" / "pictures")])
    fit, held_out = split_texts(readable, 96, 0, "images")
    inputs = image_inputs(pretrained, fit, held_out, {})
    return Subject(
        pretrained.model,
        list(inputs.batches(inputs.fit[:128], 2, 0)),
        lambda batch, seed: list(inputs.batches(inputs.fit, batch, seed)),
        {"photographs": list(inputs.batches(inputs.held_out, 8))},
        EMBEDDING,
    )


class MovedByOnePixel(nn.Module):
    """A model that sees each image one pixel further to the right: a change that nobody notices."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: Tensor) -> object:
        """Return the model's output of the moved images."""
        return self.model(pixel_values=pixel_values.roll(1, -1))


def after_a_constant_token(model: nn.Module) -> nn.Module:
    """Return a copy whose texts follow a constant token, with its norms."""
    return with_prefix(copy.deepcopy(model))


# What the original itself becomes by a change that is small, or that comes before a conversion.
CHANGED: dict[str, tuple[Run, Callable[[nn.Module], nn.Module]]] = {
    "smollm2": (Run("norms", 0, 0, prefix=True), after_a_constant_token),
    "dinov2": (Run("moved", 0, 0), MovedByOnePixel),
}
SUBJECTS: dict[str, Callable[[], Subject]] = {
    "minilm": minilm,
    "smollm2": smollm2,
    "dinov2": dinov2,
}


def packages(count: int) -> list[str]:
    """Return descriptions of Debian's installed packages."""
    texts = []
    for stanza in Path("/var/lib/dpkg/status").read_text("utf-8").split("\n\n"):
        _, found, description = stanza.partition("\nDescription: ")
        if found:
            texts.append(re.sub(r"\s+", " ", description))
    return random.Random(0).sample(texts, min(count, len(texts)))


def licences(count: int) -> list[str]:
    """Return paragraphs of Debian's common licences."""
    texts = []
    for file in sorted(Path("/usr/share/common-licenses").iterdir()):
        if file.is_symlink():
            continue
        for paragraph in file.read_text("utf-8", errors="replace").split("\n\n"):
            if len(paragraph) > 100:
                texts.append(" ".join(paragraph.split()))
    texts = list(dict.fromkeys(texts))
    return random.Random(0).sample(texts, min(count, len(texts)))


def headers() -> list[str]:
    """Return the beginnings of C headers."""
    files = random.Random(0).sample(sorted(Path("/usr/include").rglob("*.h")), 60)
    return [file.read_text(errors="ignore")[:4000] for file in files]


def figures_of(model: nn.Module, subject: Subject) -> Row:
    """Return the figures of a model on each kind of data, compared with the original."""
    row: Row = {}
    for kind, batches in subject.held_out.items():
        try:
            output = compare(model, subject.model, batches)
        except DataError as error:
            # A line has no bound.
            if "must be finite" not in str(error):
                raise
            row[kind] = OVERFLOWS
            continue
        row[kind] = {name: round(getattr(output, name), 4) for name in subject.figures}
    return row


def measured(model: nn.Module, teacher: nn.Module, subject: Subject) -> Row:
    """Return the figures of a converted model on each kind of data, and the error of each site."""
    row = figures_of(model, subject)
    first = next(iter(subject.held_out.values()))
    report = dynorm.measure(model, first[:8], original=teacher)
    row["sites"] = [[site.path, site.error_now] for site in report.sites]
    return row


def rows(subject: Subject, run: Run, stages: list[Row]) -> Iterator[Row]:
    """Convert a copy as ``dynorm convert`` does, and yield its figures at each of the stages."""
    model = copy.deepcopy(subject.model)
    teacher = subject.model
    if run.prefix:
        model = with_prefix(model)
        teacher = after_a_constant_token(teacher)
    started = time.process_time()
    seconds = 0.0
    # Its own report is not used: all kinds are measured below.
    dynorm.convert_model(
        model,
        subject.calibration,
        held_out=next(iter(subject.held_out.values()))[:1],
        to=run.to,
        witnesses=run.witnesses,
        steps=0,
    )
    for about in stages:
        if about["steps"]:
            batches = subject.fit(run.batch, about["seed"])
            report = dynorm.distill_(model, batches, teacher=teacher, steps=run.steps, lr=run.lr)
            about = {**about, "kept": report.kept}
        seconds += time.process_time() - started
        yield {**about, "cpu_seconds": round(seconds), **measured(model, teacher, subject)}
        started = time.process_time()


def committed() -> dict[str, list[Row]]:
    """Return the rows of the committed file, by model."""
    if not RESULTS.exists():
        return {}
    document: dict[str, list[Row]] = json.loads(RESULTS.read_text("utf-8"))
    return document


def add(model: str, row: Row) -> None:
    """Write a row to the committed file."""
    document = committed()
    document.setdefault(model, []).append(row)
    RESULTS.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
    print(json.dumps(row), flush=True)


def known(model: str, about: Row) -> Row | None:
    """Return the row of a stage in the committed file, or None if it is missing."""
    for row in committed().get(model, []):
        if about.items() <= row.items():
            return row
    return None


def check(model: str, subject: Subject) -> None:
    """Measure the first untrained row again, and exit with 1 if it is worse than the committed one."""
    run = RUNS[model][0]
    kind = next(iter(subject.held_out))
    name, noise = CHECKED[model]
    untrained = run.stages(0)[0]
    row = known(model, untrained)
    if row is None:
        sys.exit(f"{RESULTS} has no row of {untrained}")
    before = row[kind][name]
    now = next(rows(subject, run, [untrained]))[kind][name]
    worse = now - before if name == "kl" else before - now
    print(f"{model}, {kind}, {name}: {now:.4f}, committed {before:.4f}, noise {noise}")
    if worse > noise:
        sys.exit("worse than the committed figure by more than its noise")


def main() -> None:
    """Measure the rows that are missing, and write each as soon as it is there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=SUBJECTS)
    parser.add_argument("--runs", type=int, nargs="+", help="only these runs, from 0")
    parser.add_argument("--check", action="store_true", help="compare one figure, write nothing")
    options = parser.parse_args()
    subject = SUBJECTS[options.model]()
    if options.check:
        check(options.model, subject)
        return
    if options.model in CHANGED:
        run, change = CHANGED[options.model]
        about = run.stages(0)[0]
        if known(options.model, about) is None:
            add(options.model, {**about, **figures_of(change(subject.model), subject)})
    chosen = options.runs or range(len(RUNS[options.model]))
    for number in chosen:
        run = RUNS[options.model][number]
        for seed in range(run.seeds):
            stages = [about for about in run.stages(seed) if known(options.model, about) is None]
            if stages:
                for row in rows(subject, run, stages):
                    add(options.model, row)


if __name__ == "__main__":
    main()
