"""Measure the errors of the CPU kernels against float64, for every one of the 2^32 floats.

``python -m benchmarks.accuracy`` takes a few minutes per function on one core, and writes
``benchmarks/results/accuracy.json``. An error is given in units of the last place of the exact
value.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from dynorm.files import write_text
from dynorm.kernels import _cpu
from dynorm.kernels._form import Form, FunctionCode, Parameters

RESULT = Path(__file__).parent / "results" / "accuracy.json"
# The number of floats that fit into the cache.
CHUNK = 2**16
# The bits of infinity.
INFINITY = 0x7F800000


@dataclass
class Case:
    """A function with its constant, and the exact value in float64."""

    function: FunctionCode
    constant: float
    exact: Callable[[Tensor], Tensor]


def _dyisru(z: Tensor, beta: float) -> Tensor:
    return z / (beta + z * z).sqrt()


CASES = {
    "dyisru, beta 1": Case(FunctionCode.DYISRU, 1.0, partial(_dyisru, beta=1)),
    "dyisru, beta 384": Case(FunctionCode.DYISRU, 384.0, partial(_dyisru, beta=384)),
    "tanh": Case(FunctionCode.DYT, 1.0, torch.tanh),
    "erf": Case(FunctionCode.DERF, 1.0, torch.special.erf),
}


def main() -> None:
    """Sweep every case and write the largest errors."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stride", type=int, default=1, help="take one of this number of floats")
    parser.add_argument("--set", default=_cpu.name(), help="cpu-avx512, cpu-avx2 or cpu-portable")
    arguments = parser.parse_args()
    _cpu._native().choose(arguments.set)
    torch.set_num_threads(1)
    cases = {}
    for name, case in CASES.items():
        cases[name] = sweep(name, case, arguments.stride)
    results = {
        "stride": arguments.stride,
        "machine": platform.machine(),
        "torch": torch.__version__,
        "cases": cases,
    }
    document = {}
    if RESULT.exists():
        document = json.loads(RESULT.read_text())
    document[arguments.set] = results
    write_text(RESULT, json.dumps(document, indent=2) + "\n")


def sweep(name: str, case: Case, stride: int) -> dict[str, Any]:
    """Return the largest error, its place, and the share of values that are correctly rounded."""
    form = Form(case.function, False, 1.0, 1, 1)
    parameters = Parameters(torch.tensor([case.constant]))
    largest = 0.0
    place = 0.0
    correct = 0
    count = 0
    # The positive floats with infinity; the negative ones must give the same with the other sign.
    starts = range(0, INFINITY + 1, CHUNK * stride)
    for start in track(starts, name, console=Console(stderr=True), update_period=1):
        stop = min(start + CHUNK * stride, INFINITY + 1)
        bits = torch.arange(start, stop, stride, dtype=torch.int32)
        x = bits.view(torch.float32)
        y = _cpu.forward(form, x, parameters)
        mirrored = _cpu.forward(form, -x, parameters)
        is_positive = x > 0
        if not torch.equal(mirrored[is_positive], -y[is_positive]):
            raise AssertionError(f"{name} is not odd between {x[0]} and {x[-1]}")
        exact = case.exact(x.double())
        exact.masked_fill_(x.isinf(), 1.0)
        nearest = exact.float()
        error = in_last_places(y, exact, nearest)
        correct += int((y == nearest).sum())
        count += x.numel()
        if float(error.max()) > largest:
            largest = float(error.max())
            place = float(x[error.argmax()])
    return {"largest_error": largest, "at": place, "correctly_rounded": correct / count}


def in_last_places(y: Tensor, exact: Tensor, nearest: Tensor) -> Tensor:
    """Return the errors in units of the last place; ``nearest`` has the floats next to the exact values."""
    following = torch.nextafter(nearest, torch.full_like(nearest, torch.inf))
    unit = following.double() - nearest.double()
    return (y.double() - exact).abs() / unit


if __name__ == "__main__":
    main()
