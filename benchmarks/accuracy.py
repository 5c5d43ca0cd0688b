"""How exact the CPU kernels are: every one of the 2^32 floats through each function, against float64.

Run it with ``python -m benchmarks.accuracy``, a few minutes a function on one core; it writes
``benchmarks/results/accuracy.json``. An error is given in units of the last place of the exact
value.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Callable
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
# Small enough for the cache.
CHUNK = 2**16
INFINITY = 0x7F800000
# Name: the function's number, its constant, and the exact value in float64.
CASES: dict[str, tuple[int, float, Callable[[Tensor], Tensor]]] = {
    "dyisru, beta 1": (FunctionCode.DYISRU, 1.0, lambda z: z / (1 + z * z).sqrt()),
    "dyisru, beta 384": (FunctionCode.DYISRU, 384.0, lambda z: z / (384 + z * z).sqrt()),
    "tanh": (FunctionCode.DYT, 1.0, torch.tanh),
    "erf": (FunctionCode.DERF, 1.0, torch.special.erf),
}


def main() -> None:
    """Sweep every case and write the largest errors."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stride", type=int, default=1, help="every how many-th float")
    parser.add_argument("--set", default=_cpu.name(), help="cpu-avx512, cpu-avx2 or cpu-portable")
    arguments = parser.parse_args()
    _cpu._native().choose(arguments.set)
    torch.set_num_threads(1)
    found = {name: sweep(name, *case, arguments.stride) for name, case in CASES.items()}
    before = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    described = {
        "stride": arguments.stride,
        "machine": platform.machine(),
        "torch": torch.__version__,
        "cases": found,
    }
    write_text(RESULT, json.dumps(before | {arguments.set: described}, indent=2) + "\n")


def sweep(
    name: str, function: int, constant: float, exact: Callable[[Tensor], Tensor], stride: int
) -> dict[str, Any]:
    """Return the largest error, where it is, and how many of the values are correctly rounded."""
    form = Form(function, False, 1.0, 1, 1)
    parameters = Parameters(torch.tensor([constant]))
    worst, place, right, count = 0.0, 0.0, 0, 0
    # Positive floats with infinity; the negative ones must give the same with the other sign.
    for start in track(
        range(0, INFINITY + 1, CHUNK * stride), name, console=Console(stderr=True), update_period=1
    ):
        stop = min(start + CHUNK * stride, INFINITY + 1)
        x = torch.arange(start, stop, stride, dtype=torch.int32).view(torch.float32)
        y = _cpu.forward(form, x, parameters)
        mirrored = _cpu.forward(form, -x, parameters)
        if not torch.equal(mirrored[x > 0], -y[x > 0]):
            raise AssertionError(f"{name} is not odd between {x[0]} and {x[-1]}")
        value = exact(x.double()).masked_fill_(x.isinf(), 1.0)
        error, rounded = in_last_places(y, value)
        right, count = right + rounded, count + x.numel()
        if float(error.max()) > worst:
            worst, place = float(error.max()), float(x[error.argmax()])
    return {"largest_error": worst, "at": place, "correctly_rounded": right / count}


def in_last_places(y: Tensor, exact: Tensor) -> tuple[Tensor, int]:
    """Return errors in units of the last place, and how many values are the float nearest to the exact one."""
    nearest = exact.float()
    unit = torch.nextafter(nearest, torch.full_like(nearest, torch.inf)).double() - nearest.double()
    return (y.double() - exact).abs() / unit, int((y == nearest).sum())


if __name__ == "__main__":
    main()
