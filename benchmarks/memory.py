"""The memory of each stage beside that of training: measured on small Llamas, with a formula for 8 B parameters.

``python -m benchmarks.memory`` writes benchmarks/results/memory.json: the peak of the process that
computes, from the kernel's own books. Speed has no part in it, so that a busy machine gives the
same figures.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import nnls

from dynorm.files import write_text

RESULTS = Path(__file__).parent / "results" / "memory.json"
# The first is for comparison: the same model, with its norms.
STAGES = ("train", "calibrate", "refine", "distill")
# Layers, channels, words, and tokens of a batch. The last one only checks the estimate of the others.
CONFIGS = ((8, 512, 8192, 256), (8, 512, 8192, 1024), (8, 512, 16384, 1024), (12, 640, 8192, 768))
# Llama of 8 B parameters: an inner width of 3.5 C, a quarter of the heads for keys and values.
LARGE = {
    "layers": 32,
    "channels": 4096,
    "words": 128256,
    "tokens": 512,
    "parameters": 8_030_261_248,
}


def terms(row: dict[str, float]) -> list[float]:
    """Return the units of the bytes: weights; channels of all layers, and words, of all tokens."""
    return [
        row["parameters"],
        row["tokens"] * row["layers"] * row["channels"],
        row["tokens"] * row["words"],
    ]


def booked(name: str) -> float:
    """Return an entry of the kernel's book on this process, in bytes."""
    book = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return 1024.0 * int(book[name].removesuffix("kB"))


def measured(layers: int, channels: int, words: int, tokens: int) -> dict[str, float]:
    """Return the peak memory of each stage above that before the model, in bytes."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer

    import dynorm

    assert Trainer
    heads = channels // 64
    config = LlamaConfig(
        vocab_size=words, hidden_size=channels, intermediate_size=channels * 7 // 2, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=heads // 4, use_cache=False,
    )  # fmt: skip
    torch.ones(64, 64) @ torch.ones(64, 64)
    before = booked("VmRSS")

    def peak(act: Any) -> float:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        act()
        return booked("VmHWM") - before

    batches = [{"input_ids": torch.randint(0, words, (1, tokens))}] * 2
    found = {"train": peak(lambda: train(LlamaForCausalLM(config), batches))}
    model = LlamaForCausalLM(config).eval()
    dynorm.convert_(model, dynorm.find_norms(model, **batches[0]), witnesses=8)
    found["calibrate"] = peak(lambda: dynorm.calibrate_(model, batches, lean=0.0))
    model.activation_checkpointing_enable()
    found["refine"] = peak(lambda: dynorm.refine_(model, batches, steps=2))
    found["distill"] = peak(lambda: dynorm.distill_(model, batches, steps=2, lr=1e-6, quiet=True))
    return found | {"parameters": float(sum(p.numel() for p in model.parameters()))}


def train(model: Any, batches: list[dict[str, Any]]) -> None:
    """Train a model with its norms, as one does without dynorm: AdamW on the loss of the next token."""
    import torch

    model.activation_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.train().parameters(), fused=True)
    for batch in batches:
        model(**batch, labels=batch["input_ids"]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def main() -> None:
    """Measure in processes of their own, and write."""
    if len(sys.argv) > 1:
        print(json.dumps(measured(*map(int, sys.argv[1:]))))
        return
    # Freed memory goes back at once, and counts no more.
    environment = {
        **os.environ,
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
    }
    rows = []
    for config in CONFIGS:
        words = [sys.executable, "-m", "benchmarks.memory", *map(str, config)]
        run = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
        rows.append(
            dict(zip(("layers", "channels", "words", "tokens"), config, strict=True))
            | json.loads(run.stdout)
        )
    write_text(RESULTS, json.dumps(summary(rows), indent=1) + "\n")


def summary(rows: list[dict[str, float]]) -> dict[str, Any]:
    """Return the bytes per unit from all rows except the last, none negative, and the estimate of the last."""
    found: dict[str, Any] = {"small": rows, "bytes": {}, "check": {}}
    for stage in STAGES:
        *fitted, check = [(terms(row), row[stage]) for row in rows]
        per, _ = nnls(np.array([row for row, _ in fitted]), np.array([peak for _, peak in fitted]))
        found["bytes"][stage] = dict(
            zip(("weight", "channel", "word"), per.round(2).tolist(), strict=True)
        )
        found["check"][stage] = {"formula": float(np.dot(check[0], per)), "measured": check[1]}
    return found


if __name__ == "__main__":
    main()
