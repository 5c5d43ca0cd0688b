"""Measure how much the calibration of a decoder, SmolLM2-135M-Instruct, depends on the draw of its text.

``python -m benchmarks.draws`` calibrates on draws of docstrings, each in several sizes, and writes
benchmarks/results/draws.json. It does not measure rows again that are there already. A row takes
one to three minutes. ``--check`` measures one more draw and fails if its divergence is more than
three standard deviations above the committed mean. The packages of requirements-models.txt are
needed.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import statistics
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import torch

from benchmarks.distillation import reference
from benchmarks.subjects import Batches, Row, add_rows, calibrate, rows_so_far
from dynorm.jobs.checkpoint import Pretrained, encode, load_pretrained, make_batches
from dynorm.jobs.job import CALIBRATION_BLOCKS
from dynorm.jobs.texts import split_texts, standard_library_docstrings
from dynorm.recipe import DEFAULT_WITNESSES, Recipe
from dynorm.report.conversion import compare
from tools.demo_model import folder

RESULTS = Path(__file__).parent / "results" / "draws.json"
DRAWS = 10
SIZES = (12, 24, 64)
LENGTH = 256
HELD_OUT = 96
MEASURED = 8
ABOUT = {
    "model": "SmolLM2-135M-Instruct, 61 RMSNorms, calibrated only",
    "held_out": HELD_OUT,
    "blocks_measured": MEASURED,
    "length": LENGTH,
}
# The number of standard deviations that a new draw's divergence may lie above the committed mean.
NOISE = 3.0
CHECKED = 24


class Decoder:
    """The model, the docstrings to draw from, and the held-out texts of each kind."""

    def __init__(self) -> None:
        self.pretrained: Pretrained = load_pretrained(folder("smollm2"))
        self.fit, held_out = split_texts(standard_library_docstrings(whole=True), HELD_OUT)
        kinds = {
            "docstrings": held_out,
            "reference": reference(),
            "licences": _licences(),
            "random tokens": None,
        }
        self.tests: dict[str, Batches] = {}
        for kind, texts in kinds.items():
            self.tests[kind] = self._tests(texts)

    def _tests(self, texts: Iterable[str] | None) -> Batches:
        if texts is None:
            generator = torch.Generator().manual_seed(0)
            count = len(self.pretrained.tokenizer)
            ids = torch.randint(count, (MEASURED, LENGTH), generator=generator)
            blocks = ids.tolist()
        else:
            blocks = encode(self.pretrained, list(texts), LENGTH)[:MEASURED]
        return make_batches(self.pretrained, blocks, 4)

    def draw(self, number: int, blocks: int) -> Batches:
        """Return batches to calibrate on: the texts in the draw's order, cut into this number of blocks."""
        texts = random.Random(number).sample(self.fit, len(self.fit))
        # A block has 256 tokens, a docstring about 80.
        encoded = encode(self.pretrained, texts[: 40 * blocks], LENGTH)[:blocks]
        return make_batches(self.pretrained, encoded, CALIBRATION_BLOCKS, 0)

    def row(self, number: int, blocks: int, witnesses: int) -> Row:
        """Calibrate a copy on a draw, and return its figures on every kind of text."""
        recipe = Recipe(held_out=HELD_OUT, witnesses=witnesses).filled(language_model=True)
        model = copy.deepcopy(self.pretrained.model)
        batches = self.draw(number, blocks)
        started = time.perf_counter()
        calibrate(model, batches, recipe)
        row: Row = {
            "witnesses": witnesses,
            "draw": number,
            "blocks": blocks,
            "seconds": round(time.perf_counter() - started),
        }
        for kind, tests in self.tests.items():
            output = compare(model, self.pretrained.model, tests)
            row[kind] = {
                "kl": round(output.kl or 0.0, 4),
                "loss_difference": round(output.loss_difference or 0.0, 4),
                "agreement": round(output.agreement or 0.0, 4),
            }
        return row


def _licences() -> list[str]:
    """Return the licence texts that come with Debian."""
    files = sorted(Path("/usr/share/common-licenses").iterdir())
    return [file.read_text() for file in files if not file.is_symlink()]


def summary(rows: list[Row], witnesses: int, blocks: int, kind: str) -> dict[str, float]:
    """Return the mean, the worst and the standard deviation of the divergence over the draws."""
    divergences = []
    for row in rows:
        if (row["witnesses"], row["blocks"]) == (witnesses, blocks):
            divergences.append(row[kind]["kl"])
    if not divergences:
        return {"draws": 0}
    spread = statistics.stdev(divergences) if len(divergences) > 1 else 0.0
    return {
        "draws": len(divergences),
        "mean": round(statistics.mean(divergences), 4),
        "worst": round(max(divergences), 4),
        "noise": round(spread, 4),
    }


def check() -> None:
    """Measure one draw that is not among the committed ones; exit with 1 if it diverges far more."""
    rows = json.loads(RESULTS.read_text())["rows"]
    decoder = Decoder()
    row = decoder.row(DRAWS, CHECKED, DEFAULT_WITNESSES)
    failed = False
    for kind in decoder.tests:
        committed = summary(rows, DEFAULT_WITNESSES, CHECKED, kind)
        limit = committed["mean"] + NOISE * committed["noise"]
        is_worse = row[kind]["kl"] > limit
        failed = failed or is_worse
        print(
            f"{kind}: divergence {row[kind]['kl']:.3f}, committed {committed['mean']:.3f} with a "
            f"noise of {committed['noise']:.3f}{': WORSE' if is_worse else ''}"
        )
    if failed:
        sys.exit(1)


def main() -> None:
    """Measure the draws that are missing, or check one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="measure one draw, compare, and stop")
    parser.add_argument("--sizes", type=int, nargs="*", default=SIZES, help="numbers of blocks")
    parser.add_argument("--draws", type=int, default=DRAWS, help="number of draws")
    parser.add_argument(
        "--witnesses", type=int, default=DEFAULT_WITNESSES, help="per layer, at most"
    )
    options = parser.parse_args()
    if options.check:
        check()
        return
    decoder = Decoder()
    done = {place(row) for row in rows_so_far(RESULTS)}
    for number in range(options.draws):
        for blocks in options.sizes:
            if (options.witnesses, blocks, number) not in done:
                row = decoder.row(number, blocks, options.witnesses)
                add_rows(RESULTS, ABOUT, [row], order=place)
                print(json.dumps(row), flush=True)


def place(row: Row) -> tuple[int, int, int]:
    """Return the key to sort rows by."""
    return row["witnesses"], row["blocks"], row["draw"]


if __name__ == "__main__":
    main()
