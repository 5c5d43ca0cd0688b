"""The size and the latency of a model before and after its conversion."""

from __future__ import annotations

import time

import torch
from torch import nn

from dynorm.batches import Batch, call
from dynorm.guard import undisturbed

# Runs of each model: at least and at most, and the seconds after which no more are begun.
_LEAST = 5
_MOST = 50
_SECONDS = 1.0


def costs(original: nn.Module, model: nn.Module, batch: Batch) -> dict[str, dict[str, float]]:
    """Return parameters, bytes and milliseconds per batch of the original and of the model.

    The time is that of the fastest run of each, because other programs only make a run slower. There
    are 5 to 50, which take turns, after one that is not counted.
    """
    models = {"original": original, "now": model}
    times: dict[str, list[float]] = {"original": [], "now": []}
    with undisturbed(original, evaluate=True), undisturbed(model, evaluate=True):
        for module in models.values():
            _seconds(module, batch)
        spent = 0.0
        while len(times["now"]) < _LEAST or (spent < _SECONDS and len(times["now"]) < _MOST):
            for name, module in models.items():
                seconds = _seconds(module, batch)
                times[name].append(seconds)
                spent += seconds
    found = {}
    for name, module in models.items():
        # Tied parameters count once.
        parameters = list(module.parameters())
        found[name] = {
            "parameters": sum(p.numel() for p in parameters),
            "bytes": sum(p.numel() * p.element_size() for p in parameters),
            "milliseconds": round(1000 * min(times[name]), 3),
        }
    return found


def _seconds(model: nn.Module, batch: Batch) -> float:
    device = next(model.parameters()).device
    begun = time.perf_counter()
    with torch.no_grad():
        call(model, batch)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begun
