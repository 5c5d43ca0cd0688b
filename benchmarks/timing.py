"""Time calls side by side, in rounds in which all run in random order."""

import gc
import os
import platform
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.benchmark import Timer

from dynorm import __version__
from dynorm.kernels import backend

Call = Callable[[], Any]
# Seconds that one call is repeated for in each round.
SLICE = 2e-3


def measure(calls: Mapping[str, Call], rounds: int, seed: int = 0) -> dict[str, list[float]]:
    """Return the seconds per call in each round, by name; each call is warmed up first."""
    timers: dict[str, Timer] = {}
    repetitions: dict[str, int] = {}
    for name, call in calls.items():
        timers[name] = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
        first = timers[name].blocked_autorange(min_run_time=SLICE)
        repetitions[name] = max(1, round(SLICE / first.median))
    times: dict[str, list[float]] = {name: [] for name in calls}
    order = list(calls)
    generator = random.Random(seed)
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            generator.shuffle(order)
            for name in order:
                times[name].append(timers[name].timeit(repetitions[name]).mean)
    finally:
        gc.enable()
    return times


def ratio(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """Return median and quartiles of the ratios in each round, in which a slow round cancels."""
    quotients = [a / b for a, b in zip(above, below, strict=True)]
    lower, median, upper = statistics.quantiles(quotients, n=4, method="inclusive")
    return [float(f"{value:.3g}") for value in (median, lower, upper)]


def machine() -> dict[str, Any]:
    """Return the processor, the versions and the load, for which the figures hold."""
    cpu = platform.processor() or platform.machine()
    flags: list[str] = []
    path = Path("/proc/cpuinfo")
    if path.exists():
        for line in path.read_text(errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                cpu = value.strip()
            if key.strip() in ("flags", "Features"):
                flags = value.split()
    return {
        "cpu": cpu,
        "instructions": [flag for flag in ("avx2", "avx512f", "avx512_bf16") if flag in flags],
        "threads": torch.get_num_threads(),
        "kernels": backend(),
        "torch": torch.__version__,
        "dynorm": __version__,
        "load": [round(value, 1) for value in os.getloadavg()],
    }
