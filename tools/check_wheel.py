"""Check an installed dynorm as a user gets it: the kernels work, and DyISRU is timed against LayerNorm.

The times, of inputs of 512 x 768, are printed as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from statistics import median

import torch

import dynorm
from dynorm.kernels import backend

TOKENS = 512
CHANNELS = 768
ROUNDS = 15
CALLS = 40


def main() -> int:
    """Print medians in microseconds; return 1 if plain torch is used or the checkout was imported, else 0."""
    torch.manual_seed(0)
    x = torch.randn(TOKENS, CHANNELS)
    norm = torch.nn.LayerNorm(CHANNELS)
    model = torch.nn.Sequential(torch.nn.LayerNorm(CHANNELS))
    sites = dynorm.find_norms(model, x)
    dynorm.convert_(model, sites)
    with torch.inference_mode():
        dynorm.calibrate_(model, [x])
        torch.testing.assert_close(model(x), norm(x), rtol=0.3, atol=0.3)
        layers = {"layer_norm_us": norm, "dyisru_us": model[0]}
        times: dict[str, list[float]] = {name: [] for name in layers}
        for _ in range(ROUNDS):
            for name, layer in layers.items():
                times[name].append(microseconds(layer, x))

    installed = Path(dynorm.__file__).resolve()
    figures: dict[str, object] = {
        "backend": backend("cpu"),
        "shape": [TOKENS, CHANNELS],
        "installed": str(installed),
    }
    for name, values in times.items():
        figures[name] = round(median(values), 1)
    print(json.dumps(figures))

    sources = Path(__file__).resolve().parents[1] / "src"
    is_checkout = sources in installed.parents
    if is_checkout or backend("cpu") == "torch":
        return 1
    return 0


def microseconds(layer: torch.nn.Module, x: torch.Tensor) -> float:
    """Return the mean time of a call."""
    started = time.perf_counter()
    for _ in range(CALLS):
        layer(x)
    return (time.perf_counter() - started) / CALLS * 1e6


if __name__ == "__main__":
    sys.exit(main())
