"""What replacing all norms of a real encoder costs in quality: every layer by the same recipe, on the same data.

``python -m benchmarks.quality`` writes benchmarks/results/quality.json. Each layer is measured after each stage:
closed-form calibration, joint refinement of the constants, and distillation of all weights. Seeds change the split of
texts, their order and the training.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import platform
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

import dynorm
from dynorm.integrations.distill import distill_
from dynorm.integrations.pretrained import Pretrained, encode, library_versions, load_pretrained, make_batches
from dynorm.texts import split_texts, standard_library_docstrings
from tools.demo_model import folder

# Layer, one constant a channel or not, and whether it is distilled too (which takes minutes).
ARMS = (
    ("dyisru", False, True),
    ("dyt", False, True),
    ("linear", False, True),
    ("derf", False, False),
    ("dyisru", True, False),
)
RESULTS = Path(__file__).parent / "results" / "quality.json"
CALIBRATION_TEXTS, BATCH, HELD_OUT, REFINE = 256, 32, 512, 50


@dataclass
class Subject:
    """A model on its way, and what it is fitted to and measured on.

    Args:
        pretrained: what is converted.
        original: the same before.
        encoded: texts to fit on, as token ids.
        tests: batches of held-out texts.
    """

    pretrained: Pretrained
    original: Any
    encoded: list[list[int]]
    tests: list[dict[str, torch.Tensor]]

    def figures(self, tests: list[dict[str, torch.Tensor]] | None = None) -> dict[str, float]:
        """Return how far the outputs on batches, the held-out ones by default, are from the original's."""
        output = dynorm.measure(self.pretrained.model, tests or self.tests, original=self.original).output
        return {"cosine": output.cosine_mean, "worst": output.cosine_min, "spearman": output.spearman}


def subject_of(seed: int) -> Subject:
    """Return the model as it is, and the texts of a seed's split."""
    fit, held_out = split_texts(standard_library_docstrings(), HELD_OUT, seed)
    pretrained = load_pretrained(folder())
    original = copy.deepcopy(pretrained.model)
    encoded, tests = encode(pretrained, fit), make_batches(pretrained, encode(pretrained, held_out), BATCH)
    return Subject(pretrained, original, encoded, tests)


def stages(to: str, seed: int, steps: int, per_channel: bool) -> Iterator[tuple[str, float, Subject]]:
    """Yield the model after each stage, with the seconds that the stage took."""
    subject = subject_of(seed)
    for stage in fitted(subject, to, seed, per_channel=per_channel):
        yield *stage, subject
    if steps:
        started = time.perf_counter()
        distill_(subject.pretrained, subject.original, subject.encoded, steps=steps, seed=seed, quiet=True)
        yield "distilled", time.perf_counter() - started, subject


def fitted(subject: Subject, to: str, seed: int, **options: Any) -> Iterator[tuple[str, float]]:
    """Convert, calibrate and refine; yield after each stage its name and how long it took."""
    pretrained, encoded = subject.pretrained, subject.encoded
    batches = make_batches(pretrained, encoded[:CALIBRATION_TEXTS], BATCH, seed)
    more = make_batches(pretrained, encoded[CALIBRATION_TEXTS : CALIBRATION_TEXTS + REFINE * BATCH], BATCH, seed)
    sites = dynorm.find_norms(pretrained.model, **batches[0])
    dynorm.convert_(pretrained.model, sites, to, **options)
    started = time.perf_counter()
    dynorm.calibrate_(pretrained.model, batches)
    yield "calibrated", time.perf_counter() - started
    started = time.perf_counter()
    dynorm.refine_(pretrained.model, more, steps=REFINE)
    yield "refined", time.perf_counter() - started


def main() -> None:
    """Measure every layer and write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400, help="distillation steps")
    parser.add_argument("--seeds", type=int, default=3, help="seeds of calibration and refinement")
    parser.add_argument("--layers", nargs="+", default=list(dict.fromkeys(arm[0] for arm in ARMS)), help="which to run")
    arguments = parser.parse_args()
    for seed in range(arguments.seeds):
        for to, per_channel, distilled in ARMS:
            if to not in arguments.layers or known(to, per_channel, seed):
                continue
            steps = arguments.steps if distilled and seed == 0 else 0
            rows = []
            for stage, seconds, subject in stages(to, seed, steps, per_channel):
                arm = {"layer": to, "per_channel": per_channel, "seed": seed, "stage": stage}
                rows.append(arm | subject.figures() | {"seconds": round(seconds, 1)})
                print(rows[-1], flush=True)
            write(rows, arguments.steps)


def rows_so_far(results: Path = RESULTS) -> list[dict[str, Any]]:
    """Return what earlier runs have measured; delete the file to measure all anew."""
    return list(json.loads(results.read_text("utf-8"))["rows"]) if results.exists() else []


def known(layer: str, per_channel: bool, seed: int) -> bool:
    """Tell whether an earlier run has measured an arm."""
    return any((row["layer"], row["per_channel"], row["seed"]) == (layer, per_channel, seed) for row in rows_so_far())


def write(new: list[dict[str, Any]], steps: int) -> None:
    """Add the rows of an arm, so that a run that is stopped goes on from there."""
    rows = rows_so_far() + new
    order = [arm[:2] for arm in ARMS]
    document = {
        "model": "all-MiniLM-L6-v2, 13 LayerNorms",
        "texts": "first paragraphs of the standard library's docstrings",
        "held_out": HELD_OUT,
        "calibration_texts": CALIBRATION_TEXTS,
        "refine_steps": REFINE,
        "distillation_steps": steps,
        "batch": BATCH,
        "machine": {"processor": platform.machine(), "threads": torch.get_num_threads()},
        "versions": library_versions(),
        "rows": sorted(rows, key=lambda row: (order.index((row["layer"], row["per_channel"])), row["seed"])),
    }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(document, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
