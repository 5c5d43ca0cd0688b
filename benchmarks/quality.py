"""Measure the loss of quality if all norms of a real encoder are replaced, with one recipe for all layers.

``python -m benchmarks.quality`` writes benchmarks/results/quality.json. Each layer is measured
after closed-form calibration, and after joint refinement of the constants. The next stage is in
benchmarks/distillation.py. A seed decides how the texts are split and ordered.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.subjects import (
    BATCH,
    CALIBRATION_TEXTS,
    HELD_OUT,
    REFINE,
    Row,
    add_rows,
    encoder,
    fitted,
    rows_so_far,
)

# The layer, whether it has one constant per channel, and the most witnesses per site.
Arm = tuple[str, bool, int]
ARMS: tuple[Arm, ...] = (
    ("dyisru", True, 0),
    ("dyt", True, 0),
    ("linear", True, 0),
    ("derf", True, 0),
    ("dyisru", False, 0),
    ("dyt", False, 0),
    ("linear", False, 0),
    ("derf", False, 0),
    ("dyisru", True, 1),
    ("dyt", True, 1),
    ("linear", True, 1),
    ("dyisru", True, 2),
    ("dyt", True, 2),
    ("linear", True, 2),
    ("dyisru", True, 4),
    ("dyt", True, 4),
    ("linear", True, 4),
)
RESULTS = Path(__file__).parent / "results" / "quality.json"


def measured(arm: Arm, seed: int) -> list[Row]:
    """Convert the encoder, and return a row for each stage."""
    layer, per_channel, witnesses = arm
    subject = encoder(seed)
    stages = fitted(subject, layer, seed, per_channel=per_channel, witnesses=witnesses)
    rows = []
    for stage, seconds in stages:
        row: Row = {
            "layer": layer,
            "per_channel": per_channel,
            "witnesses": witnesses,
            "seed": seed,
            "stage": stage,
        }
        row |= subject.figures()
        row["seconds"] = round(seconds, 1)
        print(row, flush=True)
        rows.append(row)
    return rows


def main() -> None:
    """Measure every layer and write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3, help="seeds of calibration and refinement")
    parser.add_argument(
        "--layers",
        nargs="+",
        default=["dyisru", "dyt", "linear", "derf"],
        help="the layers to run",
    )
    parser.add_argument(
        "--witnesses",
        nargs="+",
        type=int,
        default=[0, 1, 2, 4],
        help="the numbers of witnesses to run",
    )
    arguments = parser.parse_args()
    for seed in range(arguments.seeds):
        for arm in ARMS:
            layer, _, witnesses = arm
            if layer not in arguments.layers or witnesses not in arguments.witnesses:
                continue
            done = [(arm_of(row), row["seed"]) for row in rows_so_far(RESULTS)]
            if (arm, seed) not in done:
                write(measured(arm, seed))


def arm_of(row: Row) -> Arm:
    """Return the arm of a row; a row without a number of witnesses had none."""
    return row["layer"], row["per_channel"], row.get("witnesses", 0)


def write(new: list[Row]) -> None:
    """Add the rows of an arm, so that an interrupted run can continue from there."""
    about = {
        "model": "all-MiniLM-L6-v2, 13 LayerNorms",
        "texts": "first paragraphs of the standard library's docstrings",
        "held_out": HELD_OUT,
        "calibration_texts": CALIBRATION_TEXTS,
        "refine_steps": REFINE,
        "batch": BATCH,
    }
    add_rows(RESULTS, about, new, order=place)


def place(row: Row) -> tuple[int, int]:
    """Return the key to sort rows by."""
    return ARMS.index(arm_of(row)), row["seed"]


if __name__ == "__main__":
    main()
