"""Check an installed dynorm as a user gets it, without extras: the kernels work, and so does every verb of the core.

Times of DyISRU and LayerNorm, with inputs of 512 x 768, are printed as JSON.
"""

from __future__ import annotations

import copy
import json
import sys
import tempfile
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
    use_the_core()
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


def use_the_core() -> None:
    """Convert, save, load, train and fold a small model with torch, numpy, rich and safetensors only."""
    optional = {"transformers", "accelerate", "typer", "jinja2", "matplotlib", "scipy"}
    batches = [torch.randn(64, 8) for _ in range(4)]
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.LayerNorm(16), torch.nn.Linear(16, 4)
    ).eval()
    dynorm.fold_(copy.deepcopy(model), batches[0])
    report = dynorm.convert_model(model, batches, steps=0)
    assert report.output.cosine_mean > 0.5, str(report)
    before = model(batches[0])
    with tempfile.TemporaryDirectory() as folder:
        dynorm.save(model, f"{folder}/saved")
        loaded = dynorm.load(f"{folder}/saved", model)
    assert torch.equal(loaded(batches[0]), before)
    model.train()
    dynorm.init_from_batch_(model, batches[0])
    optimizer = torch.optim.AdamW(dynorm.param_groups(model, lr=1e-3))
    with dynorm.Monitor(model) as monitor:
        model(batches[0]).square().mean().backward()
        optimizer.step()
        assert monitor.read()
    assert not optional & set(sys.modules), optional & set(sys.modules)


def microseconds(layer: torch.nn.Module, x: torch.Tensor) -> float:
    """Return the mean time of a call."""
    started = time.perf_counter()
    for _ in range(CALLS):
        layer(x)
    return (time.perf_counter() - started) / CALLS * 1e6


if __name__ == "__main__":
    sys.exit(main())
