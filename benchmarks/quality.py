"""What replacing all norms of a real encoder costs in quality: every layer by the same recipe, on the same data.

``python -m benchmarks.quality`` writes benchmarks/results/quality.json. Each layer is measured after each stage:
closed-form calibration and joint refinement of the constants; benchmarks/distillation.py has what comes after. Seeds
change the split of texts and their order.
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

# Layer, and one constant per channel or one per layer.
ARMS = tuple((layer, per_channel) for per_channel in (True, False) for layer in ("dyisru", "dyt", "linear", "derf"))
RESULTS = Path(__file__).parent / "results" / "quality.json"


def stages(to: str, seed: int, per_channel: bool) -> Iterator[tuple[str, float, Subject]]:
    """Yield the model after each stage, with the seconds that the stage took."""
    subject = encoder(seed)
    for stage in fitted(subject, to, seed, per_channel=per_channel):
        yield *stage, subject


def main() -> None:
    """Measure every layer and write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3, help="seeds of calibration and refinement")
    parser.add_argument("--layers", nargs="+", default=list(dict.fromkeys(arm[0] for arm in ARMS)), help="which to run")
    arguments = parser.parse_args()
    for seed in range(arguments.seeds):
        for to, per_channel in ARMS:
            if to not in arguments.layers or known(to, per_channel, seed):
                continue
            rows = []
            for stage, seconds, subject in stages(to, seed, per_channel):
                arm = {"layer": to, "per_channel": per_channel, "seed": seed, "stage": stage}
                rows.append(arm | subject.figures() | {"seconds": round(seconds, 1)})
                print(rows[-1], flush=True)
            write(rows)


def known(layer: str, per_channel: bool, seed: int) -> bool:
    """Tell whether an earlier run has measured an arm."""
    arm = (layer, per_channel, seed)
    return any((row["layer"], row["per_channel"], row["seed"]) == arm for row in rows_so_far(RESULTS))


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
    add_rows(RESULTS, about, new, order=lambda row: (ARMS.index((row["layer"], row["per_channel"])), row["seed"]))


if __name__ == "__main__":
    main()
