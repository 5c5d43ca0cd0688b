"""What replacing all norms of a real encoder costs in quality: every layer by the same recipe, on the same data.

``python -m benchmarks.quality`` writes benchmarks/results/quality.json. Each layer is measured
after each stage: closed-form calibration and joint refinement of the constants;
benchmarks/distillation.py has the next stage. Seeds change the split of texts and their order.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from benchmarks.subjects import (
    BATCH,
    CALIBRATION_TEXTS,
    HELD_OUT,
    REFINE,
    Row,
    Subject,
    add_rows,
    encoder,
    fitted,
    rows_so_far,
)

Arm = tuple[str, bool, int]
# Layer, one constant per channel or one per layer, and the most witnesses per site.
PURE = tuple(
    (layer, per_channel, 0)
    for per_channel in (True, False)
    for layer in ("dyisru", "dyt", "linear", "derf")
)
ARMS: tuple[Arm, ...] = PURE + tuple(
    (layer, True, k) for k in (1, 2, 4) for layer in ("dyisru", "dyt", "linear")
)
RESULTS = Path(__file__).parent / "results" / "quality.json"


def stages(arm: Arm, seed: int) -> Iterator[tuple[str, float, Subject]]:
    """Yield the model after each stage, with the seconds that the stage took."""
    subject, (to, per_channel, witnesses) = encoder(seed), arm
    for stage in fitted(subject, to, seed, per_channel=per_channel, witnesses=witnesses):
        yield *stage, subject


def main() -> None:
    """Measure every layer and write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3, help="seeds of calibration and refinement")
    parser.add_argument(
        "--layers",
        nargs="+",
        default=list(dict.fromkeys(arm[0] for arm in ARMS)),
        help="which to run",
    )
    parser.add_argument(
        "--witnesses",
        nargs="+",
        type=int,
        default=[0, 1, 2, 4],
        help="which numbers of them to run",
    )
    arguments = parser.parse_args()
    for seed in range(arguments.seeds):
        for arm in ARMS:
            layer, per_channel, witnesses = arm
            if layer not in arguments.layers or witnesses not in arguments.witnesses:
                continue
            if any((arm_of(row), row["seed"]) == (arm, seed) for row in rows_so_far(RESULTS)):
                continue
            rows = []
            for stage, seconds, subject in stages(arm, seed):
                key = {
                    "layer": layer,
                    "per_channel": per_channel,
                    "witnesses": witnesses,
                    "seed": seed,
                    "stage": stage,
                }
                rows.append(key | subject.figures() | {"seconds": round(seconds, 1)})
                print(rows[-1], flush=True)
            write(rows)


def arm_of(row: Row) -> Arm:
    """Return the arm of a row; one that names no witnesses had none."""
    return row["layer"], row["per_channel"], row.get("witnesses", 0)


def write(new: list[Row]) -> None:
    """Add the rows of an arm, so that a run that is stopped goes on from there."""
    about = {
        "model": "all-MiniLM-L6-v2, 13 LayerNorms",
        "texts": "first paragraphs of the standard library's docstrings",
        "held_out": HELD_OUT,
        "calibration_texts": CALIBRATION_TEXTS,
        "refine_steps": REFINE,
        "batch": BATCH,
    }
    add_rows(RESULTS, about, new, order=lambda row: (ARMS.index(arm_of(row)), row["seed"]))


if __name__ == "__main__":
    main()
