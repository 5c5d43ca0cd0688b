"""Time the Triton kernels, torch's and others' layers and whole models on a GPU.

``python -m benchmarks.gpu`` first checks every output. It measures the most important first, and
writes benchmarks/results/gpu.json after every row, so that a run that is cut off keeps its rows.
Whole models are compiled at once, each in a process, and then timed one after the other. Device time
is that of a replayed CUDA graph; host time is that of a call on 16 rows, without waiting.
``--static`` needs no GPU. To run only the checks, under the memory checker:

    compute-sanitizer --tool memcheck python -m benchmarks.gpu --check
    compute-sanitizer --tool racecheck python -m benchmarks.gpu --check
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.testing import assert_close

import dynorm
from benchmarks import gpu_models
from dynorm import files, functional
from dynorm.kernels import _triton
from dynorm.kernels._form import Form, FunctionCode, Parameters

RESULTS = Path(__file__).parent / "results" / "gpu.json"
ROUNDS = 3
# Rows and channels: first a wide stream, and one of the width of a small encoder.
SIZES = ((8192, 4096), (32768, 768), (2048, 768), (4096, 8192))
FEW = 4
HOST_ROWS, HOST_CALLS = 16, 100
Contender = Callable[[], Any]
# The largest difference of a whole model's outputs from the same model's, as a share of their size:
# bfloat16 rounds 3 digits, and the order of sums differs.
MOST_DIFFERENT = 0.05


def main() -> None:
    """Check, measure, and write the file after every row."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--check", action="store_true", help="only check outputs, for compute-sanitizer"
    )
    parser.add_argument(
        "--static", action="store_true", help="only inspect the kernels' machine code; needs no GPU"
    )
    parser.add_argument("--minutes", type=float, default=60, help="begin no row after this time")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.static:
        print_static()
        return
    require_gpu("benchmarks.gpu")
    end = time.monotonic() + 60 * options.minutes
    files.require_writable(options.out, overwrite=True)
    check_family("cuda")
    check_product("cuda")
    print("All outputs are right.", flush=True)
    if options.check:
        return
    result: dict[str, Any] = {"device": describe_device(), "rounds": ROUNDS}
    for room, row in rows():
        result.setdefault(room, []).append(row)
        files.write_text(options.out, json.dumps(result, indent=1) + "\n")
        print(room, json.dumps(row), flush=True)
        if time.monotonic() > end:
            print(f"{options.minutes} minutes are over; rows that follow were not measured")
            return


def require_gpu(command: str) -> None:
    """End a command that cannot measure anything here."""
    if not torch.cuda.is_available() or not _triton.available():
        sys.exit(
            f"{command} needs a GPU that torch and Triton can use; none is here, and nothing was "
            "measured"
        )


def rows() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every row with the name of its table, the most important first."""
    for row in measure_models():
        yield "models", row
    for size in SIZES:
        yield "family", measure_family(*size, torch.bfloat16, "cuda")
    yield "host", measure_host(SIZES[1][1], torch.bfloat16, "cuda")
    for size in SIZES:
        yield "family", measure_family(*size, torch.float32, "cuda")


BFLOAT16: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}


def print_static() -> None:
    """Print the numbers of the machine code; exit with status 1 if a limit is broken."""
    from benchmarks import static

    result, broken = static.measure()
    for name, code in result["kernels"].items():
        print(name, code)
    print(json.dumps(result["one pass"], indent=1))
    if broken:
        sys.exit("\n".join(broken))


def measure_models() -> Iterator[dict[str, Any]]:
    """Yield the rows of all models."""
    context = multiprocessing.get_context("spawn")
    workers = []
    for name, is_trained in gpu_models.passes():
        here, there = context.Pipe()
        context.Process(target=measure_model, args=(name, is_trained, there), daemon=True).start()
        # If the process dies, receiving from it then ends.
        there.close()
        workers.append(here)
    compiled = [worker for worker in workers if _received(worker)]
    for worker in compiled:
        worker.send("go on")
        yield from _received(worker)


def _received(worker: Connection) -> Any:
    """Return what a process sends; nothing if it died, which it has said itself."""
    try:
        return worker.recv()
    except EOFError:
        return []


def measure_model(name: str, is_trained: bool, parent: Connection) -> None:
    """Compile every contender and compare its outputs; when the parent says so, time them.

    The parent gets a row for each: the milliseconds by the clock, those of a replayed graph, and the
    memory that a call takes beyond what it starts with.
    """
    make = gpu_models.steps if is_trained else gpu_models.forwards
    title = {"model": name, "pass": "training step" if is_trained else "forward"}
    rows: list[dict[str, Any]] = []
    outputs: dict[str, Tensor] = {}
    times: list[tuple[dict[str, Any], Contender, list[float]]] = []
    for contender, call in make(name, **BFLOAT16):
        row: dict[str, Any] = {**title, "contender": contender}
        rows.append(row)
        with _noted_in(row, "error"):
            output = call().detach().float()
            # Contenders of one kind have the same weights.
            expected = outputs.setdefault(contender.split()[0], output)
            row["difference"] = round(float((output - expected).norm() / expected.norm()), 5)
            assert row["difference"] <= MOST_DIFFERENT, "the outputs differ"
            times.append((row, call, []))
    outputs.clear()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    parent.send("compiled")
    parent.recv()
    for _ in range(ROUNDS):
        for _, call, milliseconds in times:
            milliseconds.append(wall_time(call))
    for row, call, milliseconds in times:
        row |= spread(milliseconds)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        row["working_gib"] = round((torch.cuda.max_memory_allocated() - before) / 2**30, 3)
        with _noted_in(row, "graph_error"):
            row["graph"] = round(device_time(call), 5)
    parent.send(rows)


@contextmanager
def _noted_in(row: dict[str, Any], key: str) -> Iterator[None]:
    """Note an error in a row: the other contenders are worth measuring if one cannot run."""
    try:
        yield
    except Exception as error:
        row[key] = repr(error)


def wall_time(call: Contender, seconds: float = 0.2) -> float:
    """Return the milliseconds of a call, one behind the other, by the clock."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    calls = 0
    while time.perf_counter() - start < seconds:
        call()
        calls += 1
        # Few are waiting when the time is over.
        if calls % 8 == 0:
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start) / calls


def device_time(call: Contender) -> float:
    """Return the milliseconds of a call in a replayed CUDA graph, which no host delays."""
    from triton.testing import do_bench_cudagraph

    return float(do_bench_cudagraph(call, rep=20, return_mode="median"))


def host_time(call: Contender) -> float:
    """Return the milliseconds that the host needs for a call on few rows."""
    call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(HOST_CALLS):
        call()
    elapsed = time.perf_counter() - start
    torch.cuda.synchronize()
    return 1e3 * elapsed / HOST_CALLS


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
        _check_one(FunctionCode.DYISRU, (33, 517), dtype, tolerance, device, has_tokens=True)


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

    parameters = Parameters(uniform(1), None, uniform(), uniform())
    if function == FunctionCode.DERF:
        parameters = parameters._replace(shift=uniform(1))
    token_constant = uniform(rows) if has_tokens else None
    form = Form(function, False, 1.5)
    y = _triton.forward(form, x, parameters, token_constant)
    arguments = (form, grad, x, parameters, token_constant, (True,) * 6)
    found = _triton.gradients(*arguments)
    again = _triton.gradients(*arguments)
    leaves: list[Any] = []
    for tensor in (x, *parameters, token_constant):
        leaves.append(None if tensor is None else tensor.double().requires_grad_())
    expected = form.definition(leaves[0], Parameters(*leaves[1:5]), leaves[5])
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
    """Compare the fused product with the plain definition in float64."""
    for dtype, tolerance in {torch.bfloat16: 2**-7, torch.float16: 2**-10}.items():
        # Several tiles; a few rows; rows that the copy engine cannot load.
        for m, n, k in ((300, 520, 264), (7, 264, 520), (33, 35, 37)):
            x = torch.randn(m, k, device=device, dtype=dtype)
            weight = torch.randn(n, k, device=device, dtype=dtype)
            residual = torch.randn(m, n, device=device, dtype=dtype)
            layer = layer_arguments(n, 2.0, 1.5, device=device, dtype=dtype)
            total, y = fused(x, weight, residual, layer)
            expected = x.double() @ weight.double().t() + residual.double()
            assert_close(total.double(), expected, rtol=tolerance, atol=tolerance * k**0.5)
            expected = functional.dyisru(total.double(), 2.0, scale=1.5)
            assert_close(y.double(), expected, rtol=tolerance, atol=tolerance)


def layer_arguments(width: int, beta: float, scale: float, **options: Any) -> tuple[Any, ...]:
    """Return a layer as the op of a fused product takes it."""
    # Importing it defines the op.
    dynorm.compile_options()
    constant, weight = torch.full((1,), beta, **options), torch.ones(width, **options)
    return (constant, None, weight, None, int(FunctionCode.DYISRU), False, scale)


def fused(x: Tensor, weight: Tensor, residual: Tensor, layer: tuple[Any, ...]) -> Any:
    """Return ``x @ weight.t() + residual`` and its function, by the op of compiled models."""
    return torch.ops.dynorm.product(x, weight, False, None, None, residual, True, *layer)


def measure_family(rows: int, columns: int, dtype: torch.dtype, device: str) -> dict[str, Any]:
    """Time each contender's forward pass, and forward with backward."""
    # Else torch compiles for any number of rows from the second size on.
    torch.compiler.reset()
    forward, both = contenders(rows, columns, dtype, device)
    forward_times, both_times = measure(forward), measure(both)
    copy = forward_times["copy"]["median"]
    for times in forward_times.values():
        times["over_floor"] = round(times["median"] / copy, 3)
    # A copy moves two tensors. Forward and backward move five: they read x twice and grad once, and
    # write y and the gradient of x.
    for times in both_times.values():
        times["over_floor"] = round(times["median"] / (2.5 * copy), 3)
    size = rows * columns * dtype.itemsize
    return {
        "rows": rows,
        "columns": columns,
        "dtype": str(dtype).removeprefix("torch."),
        "forward": forward_times,
        "both": both_times,
        "copy_terabytes_per_second": round(2 * size / copy / 1e9, 3),
    }


def measure_host(columns: int, dtype: torch.dtype, device: str) -> dict[str, Any]:
    """Return the milliseconds that each contender takes the host, on few rows."""
    torch.compiler.reset()
    row: dict[str, Any] = {"rows": HOST_ROWS, "columns": columns}
    for title, calls in zip(
        ("forward", "both"), contenders(HOST_ROWS, columns, dtype, device), strict=True
    ):
        row[title] = {name: round(host_time(calls[name]), 5) for name in runnable(calls)}
    return row


def contenders(
    rows: int, columns: int, dtype: torch.dtype, device: str
) -> tuple[dict[str, Contender], dict[str, Contender]]:
    """Return the calls of a forward pass, and of forward with backward, by name."""
    options: dict[str, Any] = {"device": device, "dtype": dtype}
    x = torch.randn(rows, columns, **options).requires_grad_()
    grad = torch.randn(rows, columns, **options)
    y = torch.empty(rows, columns, **options)
    leaf = x.detach()
    # The code of a layer is compiled for two functions, two sizes, with gradients and without.
    torch._dynamo.config.recompile_limit = 16
    compiled: Any = partial(torch.compile, dynamic=False)
    modules: dict[str, nn.Module] = {
        "layer_norm": nn.LayerNorm(columns, **options),
        "rms_norm": nn.RMSNorm(columns, **options),
        "layer_norm compiled": compiled(nn.LayerNorm(columns, **options)),
        "rms_norm compiled": compiled(nn.RMSNorm(columns, **options)),
        "dyisru layer": dynorm.DyISRU(columns, **options),
        "dyisru compiled": compiled(dynorm.DyISRU(columns, **options)),
        "dyt compiled": compiled(dynorm.DyT(columns, **options)),
        "dyt layer": dynorm.DyT(columns, **options),
        "derf layer": dynorm.Derf(columns, **options),
        "dyisru layer, few witnesses": dynorm.DyISRU(columns, witnesses=FEW, **options),
        **peers(columns, **options),
    }
    forward: dict[str, Contender] = {"copy": lambda: y.copy_(leaf)}
    both: dict[str, Contender] = {}
    form = Form(FunctionCode.DYISRU, True, columns**0.5)
    weight, bias = torch.randn(2, columns, **options)
    parameters = Parameters(torch.full((1,), 0.7, **options), weight=weight, bias=bias)
    forward["dyisru kernel, output given"] = lambda: _triton.forward(form, leaf, parameters, out=y)

    def kernels() -> None:
        _triton.forward(form, leaf, parameters)
        _triton.gradients(form, grad, leaf, parameters, None, (True,) * 6)

    both["dyisru kernel"] = kernels
    for name, module in modules.items():
        forward[name] = without_gradient(module, leaf)
        both[name] = with_gradient(module, x, grad)
    return forward, both


def without_gradient(module: nn.Module, x: Tensor) -> Contender:
    """Return a forward pass without a gradient."""

    def call() -> Tensor:
        with torch.no_grad():
            return module(x)

    return call


def with_gradient(module: nn.Module, x: Tensor, grad: Tensor) -> Contender:
    """Return a forward and a backward pass with all gradients, which are not added to old ones."""
    leaves = [x, *module.parameters()]
    return lambda: torch.autograd.grad(module(x), leaves, grad)


def peers(columns: int, **options: Any) -> dict[str, nn.Module]:
    """Return the layers of other libraries that are installed."""
    found: dict[str, nn.Module] = {}
    if importlib.util.find_spec("liger_kernel") is not None:
        from liger_kernel.transformers.dyt import LigerDyT
        from liger_kernel.transformers.rms_norm import LigerRMSNorm

        found["dyt liger"] = LigerDyT(columns).to(**options)
        found["rms_norm liger"] = LigerRMSNorm(columns).to(**options)
    if importlib.util.find_spec("quack") is not None:
        from quack.rmsnorm import QuackRMSNorm

        found["rms_norm quack"] = QuackRMSNorm(columns, **options)
    return found


def measure(contenders: dict[str, Contender]) -> dict[str, dict[str, float]]:
    """Return the milliseconds of each contender on the device, over interleaved rounds."""
    times: dict[str, list[float]] = {name: [] for name in runnable(contenders)}
    for _ in range(ROUNDS):
        for name, milliseconds in times.items():
            milliseconds.append(device_time(contenders[name]))
    return {name: spread(milliseconds) for name, milliseconds in times.items()}


def runnable(contenders: dict[str, Contender]) -> list[str]:
    """Call each contender, which compiles it, and return those that ran."""
    names = []
    for name, call in contenders.items():
        try:
            call()
            names.append(name)
        # A peer that cannot run is left out.
        except Exception as error:
            print(f"{name} cannot run: {error!r}", flush=True)
    return names


def spread(milliseconds: list[float]) -> dict[str, float]:
    """Return the median and the extremes."""
    return {
        "median": round(statistics.median(milliseconds), 5),
        "least": round(min(milliseconds), 5),
        "most": round(max(milliseconds), 5),
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
