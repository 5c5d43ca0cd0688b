"""Time the Triton kernels on a GPU, torch's layers, and a plain copy, which is the limit.

``python -m benchmarks.gpu`` first checks every output, then writes benchmarks/results/gpu.json:
medians of CUDA events with the cache flushed before each run, in interleaved rounds. To run only
the checks, under the memory checker:

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
from dynorm.kernels._form import Form, FunctionCode, Parameters

RESULTS = Path(__file__).parent / "results" / "gpu.json"
ROUNDS = 5
# Rows and channels: a wide stream, and one of the width of a small encoder.
SIZES = ((8192, 4096), (32768, 768))
FEW = 4
Contender = Callable[[], Any]
Module = Callable[[Tensor], Tensor]


def main() -> None:
    """Check, measure, write the file and print it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--check", action="store_true", help="only check outputs, for compute-sanitizer"
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
        "family": [measure_family(rows, columns, "cuda") for rows, columns in SIZES],
        "product": [measure_product(rows, width, "cuda") for rows, width in SIZES],
    }
    files.write_text(options.out, json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


def check_family(device: str) -> None:
    """Compare values and gradients with the plain definition in float64, for several sizes and dtypes."""
    tolerances = {
        torch.float32: 4e-6,
        torch.bfloat16: 2**-8,
        torch.float16: 2**-11,
    }
    for dtype, tolerance in tolerances.items():
        for function in FunctionCode:
            _check_one(function, (257, 1024), dtype, tolerance, device)
            # An odd number of channels.
            _check_one(function, (33, 517), dtype, tolerance, device)
            _check_one(function, (33, 517), dtype, tolerance, device, has_tokens=True)


def _check_one(
    function: int,
    shape: tuple[int, int],
    dtype: torch.dtype,
    tolerance: float,
    device: str,
    has_tokens: bool = False,
) -> None:
    x = 3 * torch.randn(shape, device=device, dtype=dtype)
    grad = torch.randn(shape, device=device, dtype=dtype)
    rows, channels = shape

    def uniform(size: int = channels) -> Tensor:
        return torch.rand(size, device=device) + 0.5

    parameters = Parameters(uniform(), None, uniform(), uniform(), uniform())
    if function == FunctionCode.DERF:
        parameters = parameters._replace(shift=uniform())
    token_constant = uniform(rows) if has_tokens else None
    form = Form(function, False, 1.5)
    y = _triton.forward(form, x, parameters, token_constant)
    arguments = (form, grad, x, parameters, token_constant, (True,) * 7)
    found = _triton.gradients(*arguments)
    again = _triton.gradients(*arguments)
    leaves: list[Any] = []
    for tensor in (x, *parameters, token_constant):
        leaves.append(None if tensor is None else tensor.double().requires_grad_())
    expected = form.definition(leaves[0], Parameters(*leaves[1:6]), leaves[6])
    expected.backward(grad.double())
    assert_close(y.double(), expected.detach(), rtol=tolerance, atol=tolerance)
    for got, got_again, leaf in zip(found, again, leaves, strict=True):
        if got is None or got_again is None:
            continue
        assert torch.equal(got, got_again), "the gradients of two runs differ"
        if leaf is leaves[0]:
            assert_close(got.double(), leaf.grad, rtol=2 * tolerance, atol=tolerance)
        else:
            largest = float(leaf.grad.abs().max())
            assert_close(got.double(), leaf.grad, rtol=1e-4, atol=1e-4 * largest)


def check_product(device: str) -> None:
    """Compare the fused product with a product, a sum and the plain definition in float64."""
    tolerances = {
        torch.bfloat16: 2**-7,
        torch.float16: 2**-10,
        torch.float32: 2e-5,
    }
    for dtype, tolerance in tolerances.items():
        # Sizes that the copy engine can load.
        _check_product(300, 520, 264, dtype, tolerance, device)
        # Sizes that need masks.
        _check_product(33, 35, 37, dtype, tolerance, device)


def _check_product(
    m: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    tolerance: float,
    device: str,
) -> None:
    from benchmarks.gemm import gemm_add_forward

    a = torch.randn(m, k, device=device, dtype=dtype)
    b = torch.randn(n, k, device=device, dtype=dtype).t()
    residual = torch.randn(m, n, device=device, dtype=dtype)
    beta = torch.full((1,), 2.0, device=device)
    weight = torch.rand(n, device=device)
    form = Form(FunctionCode.DYISRU, False, 1.5)
    parameters = Parameters(beta, weight=weight)
    y, h = gemm_add_forward(form, a, b, residual, None, parameters)
    total = a.double() @ b.double() + residual.double()
    assert_close(h.double(), total, rtol=tolerance, atol=tolerance * k**0.5)
    expected = functional.dyisru(h.double(), 2.0, weight.double(), scale=1.5)
    assert_close(y.double(), expected, rtol=tolerance, atol=tolerance)


def measure_family(rows: int, columns: int, device: str) -> dict[str, Any]:
    """Time each contender's forward pass, and forward with backward, in bfloat16."""
    options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    x = torch.randn(rows, columns, **options)
    grad = torch.randn(rows, columns, **options)
    y = torch.randn(rows, columns, **options)
    x.requires_grad_()
    weight = torch.randn(columns, **options).requires_grad_()
    bias = torch.randn(columns, **options).requires_grad_()
    constant = torch.full((1,), 0.7, **options).requires_grad_()
    leaf = x.detach()

    def dyt(x: Tensor) -> Tensor:
        return torch.tanh(constant * x) * weight + bias

    modules: dict[str, Module] = {
        "layer_norm": lambda x: F.layer_norm(x, (columns,), weight, bias),
        "rms_norm": lambda x: F.rms_norm(x, (columns,), weight),
        "dyt eager": dyt,
        "dyt compiled": torch.compile(dyt),
        "dyisru layer": dynorm.DyISRU(columns, **options),
        "dyisru layer, few witnesses": dynorm.DyISRU(columns, witnesses=FEW, **options),
        "dyt layer": dynorm.DyT(columns, **options),
        **liger(columns, device, torch.bfloat16),
    }
    forward: dict[str, Contender] = {"copy": lambda: y.copy_(leaf)}
    both: dict[str, Contender] = {}
    parameters = Parameters(
        constant.detach(),
        weight=weight.detach(),
        bias=bias.detach(),
    )
    for function in FunctionCode:
        name = function.name.lower()
        kernel_forward, kernel_both = kernel_calls(function, leaf, grad, parameters, y)
        forward[f"{name} kernel, output given"] = kernel_forward
        both[f"{name} kernel"] = kernel_both
    for name, module in modules.items():
        forward[name] = without_gradient(module, leaf)
        both[name] = with_gradient(module, x, grad)
    forward_times = measure(forward)
    both_times = measure(both)
    copy = forward_times["copy"]["median"]
    for times in forward_times.values():
        times["over_floor"] = round(times["median"] / copy, 3)
    forward_times["copy"]["over_floor"] = 1.0
    # A copy moves two tensors. Forward and backward move five: they read x twice and grad once, and
    # write y and the gradient of x.
    for times in both_times.values():
        times["over_floor"] = round(times["median"] / (2.5 * copy), 3)
    return {
        "rows": rows,
        "columns": columns,
        "dtype": "bfloat16",
        "forward": forward_times,
        "both": both_times,
        "copy_terabytes_per_second": round(2 * x.nbytes / copy / 1e9, 3),
    }


def kernel_calls(
    function: FunctionCode,
    x: Tensor,
    grad: Tensor,
    parameters: Parameters,
    out: Tensor,
) -> tuple[Contender, Contender]:
    """Return a call of the forward kernel, and one of forward and backward."""
    if function == FunctionCode.DERF:
        parameters = parameters._replace(shift=torch.zeros_like(parameters.constant))
    form = Form(function, False, 1.0)

    def forward() -> Any:
        return _triton.forward(form, x, parameters, out=out)

    def both() -> Any:
        _triton.forward(form, x, parameters)
        needed = [tensor is not None for tensor in (x, *parameters, None)]
        return _triton.gradients(form, grad, x, parameters, None, needed)

    return forward, both


def without_gradient(module: Module, x: Tensor) -> Contender:
    """Return a forward pass without a gradient."""

    def call() -> Tensor:
        with torch.no_grad():
            return module(x)

    return call


def with_gradient(module: Module, x: Tensor, grad: Tensor) -> Contender:
    """Return a forward and a backward pass, which does not add to an old gradient."""

    def call() -> None:
        x.grad = None
        module(x).backward(grad)

    return call


def liger(
    columns: int,
    device: str,
    dtype: torch.dtype,
) -> dict[str, Module]:
    """Return Liger's DyT if it is installed."""
    if importlib.util.find_spec("liger_kernel") is None:
        return {}
    from liger_kernel.transformers.dyt import LigerDyT

    return {"dyt liger": LigerDyT(columns).to(device, dtype)}


def measure_product(rows: int, width: int, device: str) -> dict[str, Any]:
    """Time the fused product, and the plain one with its residual, also followed by a norm."""
    from benchmarks.gemm import gemm_add_forward

    options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    a = torch.randn(rows, width, **options)
    residual = torch.randn(rows, width, **options)
    b = torch.randn(width, width, **options).t()
    beta = torch.full((1,), float(width), device=device)
    weight = torch.ones(width, **options)
    form = Form(FunctionCode.DYISRU, False, width**0.5)
    parameters = Parameters(beta, weight=weight)

    def normed() -> Tensor:
        product = torch.addmm(residual, a, b)
        return F.layer_norm(product, (width,), weight)

    contenders = {
        "product with residual": lambda: torch.addmm(residual, a, b),
        "product, then residual": lambda: a @ b + residual,
        "product with residual, then layer_norm": normed,
        "fused with dyisru": lambda: gemm_add_forward(form, a, b, residual, None, parameters),
    }
    results = measure(contenders)
    product = results["product with residual"]["median"]
    operations = 2 * rows * width * width
    for times in results.values():
        times["over_product"] = round(times["median"] / product, 3)
        times["teraflops"] = round(operations / times["median"] / 1e9, 1)
    return {
        "m": rows,
        "n": width,
        "k": width,
        "dtype": "bfloat16",
        "contenders": results,
    }


def measure(contenders: dict[str, Contender]) -> dict[str, dict[str, float]]:
    """Return the median milliseconds of each contender over interleaved rounds, and the extremes."""
    from triton.testing import do_bench

    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(ROUNDS):
        for name, call in contenders.items():
            times[name].append(float(do_bench(call, return_mode="median")))
    results = {}
    for name, milliseconds in times.items():
        results[name] = {
            "median": round(statistics.median(milliseconds), 5),
            "least": round(min(milliseconds), 5),
            "most": round(max(milliseconds), 5),
        }
    return results


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
