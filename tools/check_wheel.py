"""Try an installed dynorm as a stranger would: the kernels serve, and DyISRU beside LayerNorm at 512 x 768, as JSON."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from statistics import median

import torch

import dynorm
from dynorm.kernels import backend

ROUNDS, CALLS = 15, 40


def main() -> int:
    """Print medians in microseconds; return 1 where plain torch serves or the checkout was imported, else 0."""
    installed = Path(dynorm.__file__).resolve()
    torch.manual_seed(0)
    x, norm = torch.randn(512, 768), torch.nn.LayerNorm(768)
    model = torch.nn.Sequential(torch.nn.LayerNorm(768))
    dynorm.convert_(model, dynorm.find_norms(model, x))
    with torch.inference_mode():
        dynorm.calibrate_(model, [x])
        torch.testing.assert_close(model(x), norm(x), rtol=0.3, atol=0.3)
        layers = {"layer_norm_us": norm, "dyisru_us": model[0]}
        times: dict[str, list[float]] = {name: [] for name in layers}
        for _ in range(ROUNDS):
            for name, layer in layers.items():
                started = time.perf_counter()
                for _ in range(CALLS):
                    layer(x)
                times[name].append((time.perf_counter() - started) / CALLS * 1e6)
    found = {name: round(median(values), 1) for name, values in times.items()}
    print(
        json.dumps(
            {"backend": backend("cpu"), "shape": [512, 768], "installed": str(installed), **found}
        )
    )
    is_checkout = Path(__file__).resolve().parents[1] / "src" in installed.parents
    return int(is_checkout or backend("cpu") == "torch")


if __name__ == "__main__":
    sys.exit(main())
