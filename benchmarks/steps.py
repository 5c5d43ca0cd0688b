"""Time a training step with point-wise layers, with annealed ones, and with norms.

``python -m benchmarks.steps`` trains the study's small models side by side, one step of each per
round in a random order, and writes benchmarks/results/steps.json in a few minutes on two cores. A
step is forward, backward, clipping and AdamW, as in the study.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import dynorm
from benchmarks.speed.machine import describe, load_average
from benchmarks.speed.timing import measure, ratio, spread
from dynorm.files import write_text
from studies.data import Data, draw_batch, load
from studies.models import build, inputs_of
from studies.settings import Settings
from studies.trainer import WEIGHT_DECAY, losses

RESULTS = Path(__file__).parent / "results" / "steps.json"
LR = 1e-3
# By the name of a row: the arm, and its t.
PLACES: dict[str, tuple[str, float | None]] = {
    "annealed DyISRU, t = 0": ("dyisru_annealed", 0.0),
    "annealed DyISRU, t = 0.5": ("dyisru_annealed", 0.5),
    "annealed DyISRU, t = 1": ("dyisru_annealed", 1.0),
    "DyISRU": ("dyisru", None),
    "scaled DyT": ("dyt", None),
}
NORMS = {"gpt2": "layernorm", "llama": "rmsnorm"}


def step_of(settings: Settings, data: Data, t: float | None) -> Callable[[], None]:
    """Return one training step of a new model of an arm, with an annealed one at ``t``."""
    model = build(settings, data).train()
    batch = draw_batch(data, settings.size_spec.batch)
    if t is not None:
        with dynorm.AnnealStart(model), torch.no_grad():
            model(**inputs_of(batch))
        dynorm.set_anneal_(model, t)
    groups = dynorm.param_groups(model, lr=LR, weight_decay=WEIGHT_DECAY)
    optimizer = torch.optim.AdamW(groups, fused=True)

    def step() -> None:
        logits = model(**inputs_of(batch)).logits
        losses(logits, batch["labels"]).mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def measured(family: str, threads: int, rounds: int) -> dict[str, Any]:
    """Return seconds and ratios of the steps of one model family."""
    torch.set_num_threads(threads)
    norm = NORMS[family]
    settings = Settings(norm, LR, model=family)
    data = load(settings)
    calls = {norm: step_of(settings, data, None)}
    for name, (arm, t) in PLACES.items():
        calls[name] = step_of(Settings(arm, LR, model=family), data, t)
    times = measure(calls, rounds=rounds, seconds=3600).times
    milliseconds = {}
    for name, seconds in times.items():
        milliseconds[name] = spread(seconds).scaled(1e3).rounded()
    over_norm = {}
    for name in PLACES:
        over_norm[name] = ratio(times[name], times[norm]).rounded()
    return {
        "model": family,
        "threads": threads,
        "norm": norm,
        "rounds": rounds,
        "milliseconds": milliseconds,
        "over_norm": over_norm,
    }


def main() -> None:
    """Measure both families, with all threads and with one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=31)
    arguments = parser.parse_args()
    before = load_average()
    all_threads = torch.get_num_threads()
    rows = []
    for family in NORMS:
        for threads in sorted({all_threads, 1}, reverse=True):
            row = measured(family, threads, arguments.rounds)
            print(json.dumps(row), flush=True)
            rows.append(row)
    document = {
        "machine": describe(),
        "load": {"before": before, "after": load_average()},
        "rows": rows,
    }
    write_text(RESULTS, json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
