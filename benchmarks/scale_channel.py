"""A decoder without norms and without training, with a scale channel: SmolLM2-135M-Instruct.

``python -m benchmarks.scale_channel`` frees the channel, calibrates, and adds a row to
benchmarks/results/scale_channel.json for each number of fixed channels. It takes some five minutes
per row on 2 cores. The packages of requirements-models.txt are needed.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import sysconfig
import time
from pathlib import Path

import dynorm
from benchmarks.draws import LENGTH, Decoder
from benchmarks.subjects import Batches, Row, add_rows
from dynorm.jobs.checkpoint import encode, make_batches
from dynorm.report.conversion import compare

RESULTS = Path(__file__).parent / "results" / "scale_channel.json"
BLOCKS = 96
# Blocks in a batch, and batches that the axes are chosen on.
BATCH = 8
AXES_FROM = 8
SOURCES = 80
ABOUT = {
    "model": "SmolLM2-135M-Instruct, 61 RMSNorms, a scale channel, no training",
    "fitted_to": f"{BLOCKS} blocks of {LENGTH} tokens, half docstrings and half Python sources",
    "blocks_measured": 8,
}


def batches_to_fit(decoder: Decoder) -> Batches:
    """Return blocks of docstrings and of Python sources, shuffled."""
    texts = random.Random(0).sample(decoder.fit, len(decoder.fit))
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*/*.py"))
    files = random.Random(1).sample(files, SOURCES)
    sources = [file.read_text(errors="ignore")[:20_000] for file in files]
    half = BLOCKS // 2
    blocks = encode(decoder.pretrained, texts[: 40 * half], LENGTH)[:half]
    blocks += encode(decoder.pretrained, sources, LENGTH)[:half]
    random.Random(2).shuffle(blocks)
    return make_batches(decoder.pretrained, blocks, BATCH, 0)


def row(decoder: Decoder, fixed: int) -> Row:
    """Convert a copy and return its figures on every kind of text."""
    original = decoder.pretrained.model
    batches = batches_to_fit(decoder)
    model = copy.deepcopy(original)
    started = time.perf_counter()
    report = dynorm.add_scale_channel_(model, batches[:AXES_FROM], fixed=fixed)
    edited = time.perf_counter()
    dynorm.convert_(model, dynorm.find_norms(model, batches[0]))
    dynorm.calibrate_(model, batches, lean=0.0)
    figures: Row = {
        "fixed": fixed,
        "fixed_energy": round(report.streams[0].fixed_energy, 4),
        "lost_energy": round(report.streams[0].lost_energy, 6),
        "edit_seconds": round(edited - started),
        "seconds": round(time.perf_counter() - started),
    }
    for kind, tests in decoder.tests.items():
        output = compare(model, original, tests)
        figures[kind] = {
            "kl": round(output.kl or 0.0, 4),
            "loss_difference": round(output.loss_difference or 0.0, 4),
            "agreement": round(output.agreement or 0.0, 4),
        }
    return figures


def main() -> None:
    """Measure one row for each number of fixed channels."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fixed", type=int, nargs="*", default=[16], help="fixed channels")
    decoder = Decoder()
    for fixed in parser.parse_args().fixed:
        figures = row(decoder, fixed)
        add_rows(RESULTS, ABOUT, [figures], order=lambda row: row["fixed"])
        print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
