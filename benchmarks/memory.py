"""Measure the memory of each stage and of training on small Llamas, and estimate it for 8 B parameters.

``python -m benchmarks.memory`` writes benchmarks/results/memory.json: the peak of the process that
computes, as the kernel reports it. It does not depend on speed, so that a busy machine gives the
same figures.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import nnls

from dynorm.files import write_text

RESULTS = Path(__file__).parent / "results" / "memory.json"
# The first is for comparison: the same model, with its norms.
STAGES = ("train", "calibrate", "refine", "distill")
# Layers, channels, words, and tokens of a batch. The last one only checks the estimate from the
# others.
CONFIGS = (
    (8, 512, 8192, 256),
    (8, 512, 8192, 1024),
    (8, 512, 16384, 1024),
    (12, 640, 8192, 768),
)
# Llama of 8 B parameters, with an inner width of 3.5 C and a quarter of the heads for keys and values.
LARGE = {
    "layers": 32,
    "channels": 4096,
    "words": 128256,
    "tokens": 512,
    "parameters": 8_030_261_248,
}


def terms(row: dict[str, float]) -> list[float]:
    """Return the numbers of weights, of channels in all layers and tokens, and of words in all tokens."""
    return [
        row["parameters"],
        row["tokens"] * row["layers"] * row["channels"],
        row["tokens"] * row["words"],
    ]


def process_status(name: str) -> float:
    """Return an entry of the kernel's status of this process, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        key, value = line.split(":", 1)
        if key == name:
            return 1024.0 * int(value.removesuffix("kB"))
    raise KeyError(name)


def measured(layers: int, channels: int, words: int, tokens: int) -> dict[str, float]:
    """Return the peak memory of each stage above that before the model, in bytes."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer

    import dynorm

    assert Trainer
    heads = channels // 64
    config = LlamaConfig(
        vocab_size=words,
        hidden_size=channels,
        intermediate_size=channels * 7 // 2,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 4,
        use_cache=False,
    )
    # The first product allocates the buffers of the library.
    torch.ones(64, 64) @ torch.ones(64, 64)
    before = process_status("VmRSS")

    def peak(act: Any) -> float:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        act()
        return process_status("VmHWM") - before

    batches = [{"input_ids": torch.randint(0, words, (1, tokens))}] * 2
    peaks = {"train": peak(lambda: train(LlamaForCausalLM(config), batches))}
    model = LlamaForCausalLM(config).eval()
    sites = dynorm.find_norms(model, **batches[0])
    dynorm.convert_(model, sites, witnesses=8)
    calibrate = partial(dynorm.calibrate_, model, batches, lean=0.0)
    refine = partial(dynorm.refine_, model, batches, steps=2)
    distill = partial(dynorm.distill_, model, batches, steps=2, lr=1e-6, quiet=True)
    peaks["calibrate"] = peak(calibrate)
    model.activation_checkpointing_enable()
    peaks["refine"] = peak(refine)
    peaks["distill"] = peak(distill)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return {**peaks, "parameters": float(parameters)}


def train(model: Any, batches: list[dict[str, Any]]) -> None:
    """Train a model with its norms by AdamW on the loss of the next token, as without dynorm."""
    import torch

    model.activation_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.train().parameters(), fused=True)
    for batch in batches:
        model(**batch, labels=batch["input_ids"]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def main() -> None:
    """Measure each configuration in a new process, and write the file."""
    if len(sys.argv) > 1:
        print(json.dumps(measured(*map(int, sys.argv[1:]))))
        return
    # Freed memory goes back to the system at once, so that it no longer counts.
    environment = {
        **os.environ,
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
    }
    rows = []
    for config in CONFIGS:
        command = [sys.executable, "-m", "benchmarks.memory", *map(str, config)]
        run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        layers, channels, words, tokens = config
        row = {"layers": layers, "channels": channels, "words": words, "tokens": tokens}
        rows.append(row | json.loads(run.stdout))
    write_text(RESULTS, json.dumps(summary(rows), indent=1) + "\n")


def summary(rows: list[dict[str, float]]) -> dict[str, Any]:
    """Return the bytes per unit, fitted to all rows except the last, and the estimate of the last.

    No number of bytes is negative.
    """
    *fitted, check = rows
    units = np.array([terms(row) for row in fitted])
    document: dict[str, Any] = {"small": rows, "bytes": {}, "check": {}}
    for stage in STAGES:
        peaks = np.array([row[stage] for row in fitted])
        bytes_per_unit, _ = nnls(units, peaks)
        weight, channel, word = bytes_per_unit.round(2).tolist()
        document["bytes"][stage] = {"weight": weight, "channel": channel, "word": word}
        document["check"][stage] = {
            "formula": float(np.dot(terms(check), bytes_per_unit)),
            "measured": check[stage],
        }
    return document


if __name__ == "__main__":
    main()
