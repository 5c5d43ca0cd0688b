"""The Triton kernels on a GPU, compared with torch's layers and with a plain copy, which is the limit.

``python -m benchmarks.gpu`` checks every output first, then writes benchmarks/results/gpu.json:
medians of CUDA events with the cache flushed before each run, in interleaved rounds. The checks
alone, under the memory checker:

    compute-sanitizer --tool memcheck python -m benchmarks.gpu --check
    compute-sanitizer --tool racecheck python -m benchmarks.gpu --check
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.testing import assert_close

import dynorm
from dynorm import files, functional
from dynorm.kernels import _triton
from dynorm.kernels._dispatch import plain
from dynorm.kernels._form import Form, FunctionCode, Parameters

RESULTS = Path(__file__).parent / "results" / "gpu.json"
ROUNDS = 5
Contender = Callable[[], Any]


def main() -> None:
    """Check, measure, write the file and print it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--check", action="store_true", help="check outputs only, for compute-sanitizer"
    )
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument(
        "--columns", type=int, default=4096, help="channels, and the width of the product"
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if not torch.cuda.is_available() or not _triton.available():
        sys.exit(
            "benchmarks.gpu needs a GPU that torch and Triton can use; none is here, and nothing "
            "was measured"
        )
    files.require_writable(options.out)
    check_family("cuda")
    check_product("cuda")
    print("All outputs are right.")
    if options.check:
        return
    result = {
        "device": describe_device(),
        "rounds": ROUNDS,
        "family": measure_family(options.rows, options.columns, "cuda"),
        "product": measure_product(options.rows, options.columns, "cuda"),
    }
    files.write_text(options.out, json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


def check_family(device: str) -> None:
    """Compare values and gradients with the plain definition in float64, for sizes even and odd and every dtype."""
    for dtype, tolerance in (
        (torch.float32, 4e-6),
        (torch.bfloat16, 2**-8),
        (torch.float16, 2**-11),
    ):
        for function in FunctionCode:
            # Channels last, wide and odd; channels first.
            for shape, dim in (((257, 1024), -1), ((33, 517), -1), ((3, 40, 77), 1)):
                _check_one(function, shape, dim, dtype, tolerance, device)


def _check_one(
    function: int,
    shape: tuple[int, ...],
    dim: int,
    dtype: torch.dtype,
    tolerance: float,
    device: str,
) -> None:
    x, grad = (torch.randn(shape, device=device, dtype=dtype) * width for width in (3, 1))
    channels, inner = shape[dim], 1 if dim == -1 else shape[-1]
    constant, shift, center, weight, bias = (
        torch.rand(channels, device=device) + 0.5 for _ in range(5)
    )
    parameters = Parameters(constant, None, center, weight, bias)
    if function == FunctionCode.DERF:
        parameters = parameters._replace(shift=shift)
    form = Form(function, False, 1.5, channels, inner)
    y = _triton.forward(form, x, parameters)
    grad_x, sums = _triton.backward(form, grad, x, parameters)
    _, again = _triton.backward(form, grad, x, parameters)
    twin = [None if t is None else t.double().requires_grad_() for t in (x, *parameters)]
    expected = plain(form, twin[0], Parameters(*twin[1:]))
    expected.backward(grad.double())
    assert grad_x is not None
    assert sums is not None
    assert again is not None
    assert_close(y.double(), expected.detach(), rtol=tolerance, atol=tolerance)
    assert_close(grad_x.double(), twin[0].grad, rtol=2 * tolerance, atol=tolerance)
    assert torch.equal(sums, again), "the sums of two runs differ"
    for row, leaf in zip(sums, twin[1:], strict=False):
        if leaf is not None:
            assert_close(row.double(), leaf.grad, rtol=1e-4, atol=1e-4 * float(sums.abs().max()))


def check_product(device: str) -> None:
    """Compare the fused product with a product, a sum and the plain definition in float64."""
    from benchmarks.speed.gemm import gemm_add_forward

    for dtype, tolerance in (
        (torch.bfloat16, 2**-7),
        (torch.float16, 2**-10),
        (torch.float32, 2e-5),
    ):
        # Sizes for the copy engine, and sizes that only masks can do.
        for m, n, k in ((300, 520, 264), (33, 35, 37)):
            a, b = (
                torch.randn(m, k, device=device, dtype=dtype),
                torch.randn(n, k, device=device, dtype=dtype).t(),
            )
            residual, one = (
                torch.randn(m, n, device=device, dtype=dtype),
                torch.full((1,), 2.0, device=device),
            )
            weight = torch.rand(n, device=device)
            y, h = gemm_add_forward(
                Form(FunctionCode.DYISRU, False, 1.5, n, 1),
                *(a, b, residual, None, Parameters(one, weight=weight)),
            )
            total = a.double() @ b.double() + residual.double()
            assert_close(h.double(), total, rtol=tolerance, atol=tolerance * k**0.5)
            expected = functional.dyisru(h.double(), 2.0, weight.double(), scale=1.5)
            assert_close(y.double(), expected, rtol=tolerance, atol=tolerance)


def measure_family(rows: int, columns: int, device: str) -> dict[str, Any]:
    """Time each contender's forward pass, and forward with backward, in bfloat16."""
    dtype = torch.bfloat16
    x, grad, y = (torch.randn(rows, columns, device=device, dtype=dtype) for _ in range(3))
    x.requires_grad_()
    weight, bias = (
        torch.randn(columns, device=device, dtype=dtype).requires_grad_() for _ in range(2)
    )
    constant = torch.full((1,), 0.7, device=device, dtype=dtype).requires_grad_()
    leaf = x.detach()

    def dyt(x: Tensor) -> Tensor:
        return torch.tanh(constant * x) * weight + bias

    modules: dict[str, Callable[[Tensor], Tensor]] = {
        "layer_norm": lambda x: F.layer_norm(x, (columns,), weight, bias),
        "rms_norm": lambda x: F.rms_norm(x, (columns,), weight),
        "dyt eager": dyt,
        "dyt compiled": torch.compile(dyt),
        "dyisru layer": dynorm.DyISRU(columns, device=device, dtype=dtype),
        "dyt layer": dynorm.DyT(columns, device=device, dtype=dtype),
        **liger(columns, device, dtype),
    }
    forward: dict[str, Contender] = {"copy": lambda: y.copy_(leaf)}
    both: dict[str, Contender] = {}
    for function in FunctionCode:
        name = function.name.lower()
        forward[f"{name} kernel, output given"], both[f"{name} kernel"] = kernel_calls(
            function, leaf, grad, (constant.detach(), weight.detach(), bias.detach()), y
        )
    for name, module in modules.items():
        forward[name] = without_gradient(module, leaf)
        both[name] = with_gradient(module, x, grad)
    found = {"rows": rows, "columns": columns, "dtype": "bfloat16", "forward": measure(forward)}
    copy = found["forward"]["copy"]["median"]
    # A copy moves two tensors; forward and backward read x twice and grad once, and write y and the
    # gradient of x.
    found["both"] = measure(both)
    for name, contender in found["forward"].items():
        contender["over_floor"] = round(contender["median"] / copy, 3) if name != "copy" else 1.0
    for contender in found["both"].values():
        contender["over_floor"] = round(contender["median"] / (2.5 * copy), 3)
    found["copy_terabytes_per_second"] = round(2 * x.nbytes / copy / 1e9, 3)
    return found


def kernel_calls(
    function: int, x: Tensor, grad: Tensor, parameters: tuple[Tensor, Tensor, Tensor], out: Tensor
) -> tuple[Contender, Contender]:
    """Return a call of the forward kernel, and one of forward and backward."""
    constant, weight, bias = parameters
    given = Parameters(constant, weight=weight, bias=bias)
    if function == FunctionCode.DERF:
        given = given._replace(shift=torch.zeros_like(constant))
    form = Form(function, False, 1.0, x.shape[-1], 1)

    def both() -> Any:
        _triton.forward(form, x, given)
        return _triton.backward(form, grad, x, given)

    return lambda: _triton.forward(form, x, given, out=out), both


def without_gradient(module: Callable[[Tensor], Tensor], x: Tensor) -> Contender:
    """Return a call that records nothing."""

    def call() -> Tensor:
        with torch.no_grad():
            return module(x)

    return call


def with_gradient(module: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor) -> Contender:
    """Return a forward and a backward pass, which adds to no old gradient."""

    def call() -> None:
        x.grad = None
        module(x).backward(grad)

    return call


def liger(columns: int, device: str, dtype: torch.dtype) -> dict[str, Callable[[Tensor], Tensor]]:
    """Return Liger's DyT where it is installed."""
    if importlib.util.find_spec("liger_kernel") is None:
        return {}
    from liger_kernel.transformers.dyt import LigerDyT

    return {"dyt liger": LigerDyT(columns).to(device, dtype)}


def measure_product(rows: int, width: int, device: str) -> dict[str, Any]:
    """Time the fused product against the plain one with its residual, alone and followed by a norm."""
    from benchmarks.speed.gemm import gemm_add_forward

    dtype = torch.bfloat16
    a, residual = (torch.randn(rows, width, device=device, dtype=dtype) for _ in range(2))
    b = torch.randn(width, width, device=device, dtype=dtype).t()
    constant, weight = (
        torch.full((1,), float(width), device=device),
        torch.ones(width, device=device, dtype=dtype),
    )
    form = Form(FunctionCode.DYISRU, False, width**0.5, width, 1)
    parameters = Parameters(constant, weight=weight)

    def normed() -> Tensor:
        return F.layer_norm(torch.addmm(residual, a, b), (width,), weight)

    found = measure(
        {
            "product with residual": lambda: torch.addmm(residual, a, b),
            "product, then residual": lambda: a @ b + residual,
            "product with residual, then layer_norm": normed,
            "fused with dyisru": lambda: gemm_add_forward(form, a, b, residual, None, parameters),
        }
    )
    floor = found["product with residual"]["median"]
    for contender in found.values():
        contender["over_product"] = round(contender["median"] / floor, 3)
        contender["teraflops"] = round(2 * rows * width * width / contender["median"] / 1e9, 1)
    return {"m": rows, "n": width, "k": width, "dtype": "bfloat16", "contenders": found}


def measure(contenders: dict[str, Contender]) -> dict[str, dict[str, float]]:
    """Return the median milliseconds of each, over rounds in which all take turns, and the rounds' extremes."""
    from triton.testing import do_bench

    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(ROUNDS):
        for name, call in contenders.items():
            times[name].append(float(do_bench(call, return_mode="median")))
    return {
        name: {
            "median": round(statistics.median(found), 5),
            "least": round(min(found), 5),
            "most": round(max(found), 5),
        }
        for name, found in times.items()
    }


def describe_device() -> dict[str, Any]:
    """Return the machine and versions of the figures."""
    import triton

    properties = torch.cuda.get_device_properties(0)
    return {
        "name": properties.name,
        "capability": list(torch.cuda.get_device_capability()),
        "multiprocessors": properties.multi_processor_count,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "triton": str(triton.__version__),
        "python": platform.python_version(),
    }


if __name__ == "__main__":
    main()
