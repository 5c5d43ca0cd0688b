"""Time distillation per sample with two processes of one thread each, and with one of two threads.

``python -m benchmarks.ranks`` writes benchmarks/results/ranks.json. The model has the shape of
SmolLM2-135M and random weights, which take the same time. It needs an idle machine. Both sides run
in turn, and their medians are compared.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from dynorm.files import write_text

RESULTS = Path(__file__).parent / "results" / "ranks.json"
# Tokens of a block.
LENGTH = 256
# Blocks of a batch.
BATCH = 2
# Steps that are timed, and steps before them that are not.
STEPS = 6
WARM_UP = 2
SHAPE = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
}


def seconds_per_sample(bf16: bool) -> float | None:
    """Return the median time of a step over its samples, on the first process."""
    import time

    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback

    import dynorm
    from dynorm.ranks import joined

    class Clock(TrainerCallback):
        """Record the time at the end of each step."""

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            ends.append(time.perf_counter())

    ends: list[float] = []
    with joined("cpu") as ranks:
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**SHAPE)).eval()
        generator = torch.Generator().manual_seed(ranks.rank)
        batches = []
        for _ in range(4):
            ids = torch.randint(0, 40_000, (BATCH, LENGTH), generator=generator)
            batches.append({"input_ids": ids})
        original = copy.deepcopy(model)
        sites = dynorm.find_norms(model, input_ids=torch.arange(1, 33)[None])
        dynorm.convert_(model, sites, witnesses=8)
        dynorm.calibrate_(model, batches[:1], lean=0.0)
        dynorm.distill_(
            model,
            batches,
            teacher=original,
            steps=WARM_UP + STEPS,
            lr=1e-7,
            bf16=bf16,
            callbacks=[Clock()],
        )
        if ranks.rank:
            return None
        seconds = [after - before for before, after in pairwise(ends[WARM_UP:])]
        return median(seconds) / (BATCH * ranks.size)


def main() -> None:
    """Run both sides in turn, or one of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="number of runs of both sides")
    parser.add_argument("--bf16", action="store_true", help="use autocast in bfloat16")
    parser.add_argument("--inside", action="store_true", help="run as one of the sides")
    options = parser.parse_args()
    if options.inside:
        seconds = seconds_per_sample(options.bf16)
        print("" if seconds is None else json.dumps(seconds))
        return
    side = ["benchmarks.ranks", "--inside"]
    if options.bf16:
        side.append("--bf16")
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    one_process = []
    two_processes = []
    for _ in range(options.rounds):
        one_process.append(timed(side, threads=2))
        two_processes.append(timed([*torchrun, *side], threads=1))
    result = {
        "model": "random, of the shape of SmolLM2-135M",
        "length": LENGTH,
        "blocks": BATCH,
        "bf16": options.bf16,
        "seconds_per_sample": {
            "one process, two threads": one_process,
            "two processes, one thread": two_processes,
        },
        "two_over_one": median(two_processes) / median(one_process),
    }
    write_text(RESULTS, json.dumps(result, indent=1) + "\n")


def timed(module: list[str], threads: int) -> float:
    """Run a module with its options, and return the seconds per sample that it prints last."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONWARNINGS": "ignore"}
    run = subprocess.run(
        [sys.executable, "-m", *module],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return float(run.stdout.split()[-1])


if __name__ == "__main__":
    main()
