"""Wall time of distillation per sample: two processes of one thread each against one process of two threads.

``python -m benchmarks.ranks`` writes benchmarks/results/ranks.json. The model has the shape of
SmolLM2-135M and random weights, which take the same time. It wants an idle machine: both sides run
in turn, and their medians are compared.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

from dynorm.files import write_text

RESULTS = Path(__file__).parent / "results" / "ranks.json"
# Tokens of a block, blocks of a batch, steps that are timed after those that are not.
LENGTH, BATCH, STEPS, FIRST = 256, 2, 6, 2
SHAPE = {
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True,
}  # fmt: skip


def seconds_per_sample(bf16: bool) -> float | None:
    """Return the median time of a step over its samples, on the first process."""
    import time

    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback

    import dynorm
    from dynorm.ranks import joined

    class Clock(TrainerCallback):
        """Notes when each step ends."""

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            times.append(time.perf_counter())

    times: list[float] = []
    with joined("cpu") as ranks:
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**SHAPE)).eval()
        generator = torch.Generator().manual_seed(ranks.rank)
        batches = [
            {"input_ids": torch.randint(0, 40_000, (BATCH, LENGTH), generator=generator)}
            for _ in range(4)
        ]
        original = copy.deepcopy(model)
        dynorm.convert_(
            model, dynorm.find_norms(model, input_ids=torch.arange(1, 33)[None]), witnesses=8
        )
        dynorm.calibrate_(model, batches[:1], lean=0.0)
        options: dict[str, Any] = {"lr": 1e-7, "bf16": bf16, "quiet": True, "callbacks": [Clock()]}
        dynorm.distill_(model, batches, teacher=original, steps=FIRST + STEPS, **options)
        steps = [
            after - before for before, after in zip(times[FIRST:], times[FIRST + 1 :], strict=False)
        ]
        return None if ranks.rank else median(steps) / (BATCH * ranks.size)


def main() -> None:
    """Run both sides in turn, or one of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="how often both sides run")
    parser.add_argument("--bf16", action="store_true", help="under autocast in bfloat16")
    parser.add_argument("--inside", action="store_true", help="be one of the sides")
    given = parser.parse_args()
    if given.inside:
        found = seconds_per_sample(given.bf16)
        print(*[json.dumps(found)] * (found is not None))
        return
    inside = ["benchmarks.ranks", "--inside", *["--bf16"] * given.bf16]
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    sides = {
        "one process, two threads": ("2", inside),
        "two processes, one thread": ("1", [*torchrun, *inside]),
    }
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(given.rounds):
        for name, (threads, words) in sides.items():
            environment = {**os.environ, "OMP_NUM_THREADS": threads, "PYTHONWARNINGS": "ignore"}
            run = subprocess.run(
                [sys.executable, "-m", *words],
                env=environment,
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
            times[name].append(float(run.stdout.split()[-1]))
    one, two = (median(found) for found in times.values())
    about = {
        "model": "random, of the shape of SmolLM2-135M",
        "length": LENGTH,
        "blocks": BATCH,
        "bf16": given.bf16,
    }
    result = about | {"seconds_per_sample": times, "two_over_one": two / one}
    write_text(RESULTS, json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
