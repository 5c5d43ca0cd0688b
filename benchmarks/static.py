"""Measure the Triton kernels without a GPU: registers, spills and instructions of their machine code.

``python -m benchmarks.gpu --static`` compiles them for compute capabilities 8.0 and 9.0, counts the
launches and torch's operators of one forward and backward pass, and ends with status 1 where a
limit is broken.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dynorm.kernels import _form, _triton, _triton_kernels, _triton_product
from dynorm.kernels._form import Form, FunctionCode, Parameters
from dynorm.kernels._triton_product import Tile

AMPERE, HOPPER = GPUTarget("cuda", 80, 32), GPUTarget("cuda", 90, 32)
# A size that 16 divides, and one of which nothing is known: they are compiled apart.
EVEN, ANY = ("i32", 16), ("i32", 1)
THREADS = 128
# The gradients that are computed: of x, the constant, weight and bias.
_WANTED = _form.OF_X | _form.OF_CONSTANT | _form.OF_WEIGHT | _form.OF_BIAS
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
# The asynchronous copies of Ampere and later: the next tile is loaded while this one is computed.
LOAD_AHEAD = "LDGSTS"
# The limits: registers per thread, of a backward pass with 16 elements per thread; launches of a
# forward and backward pass; allocations of a backward pass.
REGISTERS, LAUNCHES, ALLOCATIONS = 128, 3, 2


class Code(NamedTuple):
    """The machine code of a kernel."""

    registers: int
    # Bytes of local memory per thread.
    spilled: int
    # Of the loop, or of the whole kernel if it has none.
    instructions: int
    loads_ahead: int


def compiled(
    kernel: Any, target: GPUTarget, warps: int = 4, stages: int = 3, **arguments: Any
) -> Any:
    """Compile a kernel for arguments given as (type, what divides it), or as the constant itself."""
    types, constants, divisors = {}, {}, {}
    for index, name in enumerate(kernel.arg_names):
        value = arguments[name]
        if type(value) is tuple:
            types[name] = value[0]
            if value[1] == 16:
                divisors[(index,)] = [["tt.divisibility", 16]]
        else:
            types[name], constants[(index,)] = "constexpr", value
    source = ASTSource(kernel, types, constants, divisors)
    return triton.compile(source, target=target, options={"num_warps": warps, "num_stages": stages})


def pointers(dtype: str, **present: bool) -> dict[str, Any]:
    """Return the tensors of a kernel: those present of the dtype, the others None."""
    return {f"{name}_ptr": (f"*{dtype}", 16) if there else None for name, there in present.items()}


def forward_kernel(
    target: GPUTarget, function: int, dtype: str, channels: int, *, parts: bool = False
) -> Any:
    """Compile the forward kernel: with weight and bias, or with all ``parts`` that the function takes."""
    return compiled(
        _triton_kernels.forward_kernel,
        target,
        **_arguments(function, dtype, channels, parts),
        **pointers(dtype, y=True, residual=parts, total=parts, bias=True),
        numel=EVEN,
        BLOCK=_triton._TILE,
    )


def backward_kernel(
    target: GPUTarget, function: int, dtype: str, channels: int, *, parts: bool = False
) -> Any:
    """Compile the backward kernel for the gradients of all that :func:`forward_kernel` takes."""
    rows, columns = _triton.tile(channels)
    wanted = _WANTED
    if parts and function == FunctionCode.DYISRU:
        wanted |= _form.OF_TOKENS
    if parts and function == FunctionCode.DERF:
        wanted |= _form.OF_SHIFT
    return compiled(
        _triton_kernels.backward_kernel,
        target,
        **_arguments(function, dtype, channels, parts),
        **pointers(dtype, grad=True, buffer=True, grad_total=parts),
        partial_offset=EVEN,
        rows=ANY,
        chunks=ANY,
        WANTED=wanted,
        BLOCK_ROWS=rows,
        BLOCK_COLUMNS=columns,
    )


def sum_kernel(target: GPUTarget, dtype: str, channels: int) -> Any:
    """Compile the kernel that adds up the partial sums."""
    return compiled(
        _triton_kernels.sum_kernel,
        target,
        **pointers(dtype, buffer=True, gradients=True),
        partial_offset=EVEN,
        rows=ANY,
        chunks=ANY,
        FORM=_triton.Choices(FunctionCode.DYISRU, True, 1.0, channels),
        WANTED=_WANTED,
        BLOCKS=_triton.ceil_divide(channels, _triton.tile(channels)[1]),
        SLOT=_triton._aligned(channels),
        BLOCK_PARTS=_triton._PARTS,
        BLOCK_NUMBERS=_triton._NUMBERS,
    )


def product_kernel(target: GPUTarget, dtype: str, tile: Tile, *, transposed: bool) -> Any:
    """Compile the fused product for all its parts."""
    channels = 4096
    block = f"{tile.depth},{tile.columns}" if transposed else f"{tile.columns},{tile.depth}"
    return compiled(
        _triton_product.product_kernel,
        target,
        tile.warps,
        tile.stages,
        a=(f"tensordesc<{dtype}[{tile.rows},{tile.depth}]>", 1),
        b=(f"tensordesc<{dtype}[{block}]>", 1),
        **pointers(dtype, residual=True, total=True, y=True),
        **pointers(dtype, product_bias=True, factor=True, constant=True, shift=False),
        **pointers(dtype, weight=True, bias=True),
        rows=ANY,
        depth=EVEN,
        FORM=_triton.Choices(FunctionCode.DYISRU, True, channels**0.5, channels),
        TRANSPOSED=transposed,
        BLOCK_M=tile.rows,
        BLOCK_N=tile.columns,
        BLOCK_K=tile.depth,
    )


def _arguments(function: int, dtype: str, channels: int, parts: bool) -> dict[str, Any]:
    dyisru, derf = function == FunctionCode.DYISRU, function == FunctionCode.DERF
    return {
        **pointers(dtype, x=True, constant=True, weight=True, shift=parts and derf),
        **pointers("fp32", token=parts and dyisru),
        "FORM": _triton.Choices(int(function), dyisru, channels**0.5, channels),
    }


def code_of(kernel: Any) -> Code:
    """Return the numbers of a compiled kernel, by the tools that come with Triton."""
    with _binary(kernel) as binary:
        registers, spilled = _usage(binary)
        instructions = _loop(_run(TOOLS / "nvdisasm", "-c", binary))
    loads_ahead = sum(LOAD_AHEAD in line for line in instructions)
    return Code(registers, spilled, len(instructions), loads_ahead)


def spilled_by(kernel: Any) -> int:
    """Return how many bytes of registers a compiled kernel spills."""
    with _binary(kernel) as binary:
        return _usage(binary)[1]


@contextmanager
def _binary(kernel: Any) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder) / "kernel.cubin"
        binary.write_bytes(kernel.asm["cubin"])
        yield binary


def _usage(binary: Path) -> tuple[int, int]:
    """Return the registers of a thread, and the bytes of them that are spilled."""
    usage = _run(TOOLS / "cuobjdump", "-res-usage", binary)
    registers, stack, local = (
        int(re.search(rf"{name}:(\d+)", usage)[1]) for name in ("REG", "STACK", "LOCAL")
    )
    return registers, stack + local


def _run(tool: Path, option: str, binary: Path) -> str:
    command = [str(tool), option, str(binary)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _loop(listing: str) -> list[str]:
    """Return the instructions of the longest loop, or all up to the end if there is none."""
    instructions: list[str] = []
    labels: dict[str, int] = {}
    longest: list[str] = []
    for line in listing.splitlines():
        label = re.match(r"(\.L\w+):", line)
        if label:
            labels[label[1]] = len(instructions)
        if not re.match(r"\s+/\*[0-9a-f]{4,}\*/", line):
            continue
        instructions.append(line)
        target = re.search(r"BRA `\((\.L\w+)\)", line)
        if target and target[1] in labels:
            loop = instructions[labels[target[1]] :]
            longest = max(longest, loop, key=len)
    if len(longest) > 1:
        return longest
    return [line for line in instructions if "NOP" not in line]


class _Operators(TorchDispatchMode):
    """Collects the names of torch's operators."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class _Recorder:
    """Stands in for a kernel, and counts its launches."""

    def __init__(self) -> None:
        self.launches = 0

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **choices: Any) -> None:
            self.launches += 1

        return launch


def calls_of_one_pass() -> dict[str, Any]:
    """Return the launches, and torch's operators, of one forward and backward pass with all gradients."""
    channels = 768
    x, grad = torch.zeros(2, 64, channels).bfloat16(), torch.zeros(2, 64, channels).bfloat16()
    weight, bias, constant = (torch.ones(n).bfloat16() for n in (channels, channels, 1))
    parameters = Parameters(constant, weight=weight, bias=bias)
    form = Form(FunctionCode.DYISRU, True, 1.0)
    recorder = _Recorder()
    names = ("forward_kernel", "backward_kernel", "sum_kernel")
    with ExitStack() as stack:
        for name in names:
            stack.enter_context(mock.patch.object(_triton_kernels, name, recorder))
        with _Operators() as forward:
            _triton.forward(form, x, parameters)
        with _Operators() as backward:
            _triton.gradients(form, grad, x, parameters, None, (True,) * 6)
    return {
        "launches": recorder.launches,
        "forward operators": forward.names,
        "backward operators": backward.names,
        "backward allocations": sum("empty" in name for name in backward.names),
    }


def measure() -> tuple[dict[str, Any], list[str]]:
    """Return the numbers of all kernels, and a line for each limit that is broken."""
    broken = []
    kernels = {}
    for target in (AMPERE, HOPPER):
        for function in FunctionCode:
            for dtype in ("bf16", "fp32"):
                for channels in (768, 4096):
                    name = f"sm_{target.arch} {function.name.lower()} {dtype} {channels}"
                    plain = function == FunctionCode.DYISRU and dtype == "bf16"
                    codes = {
                        "forward": code_of(forward_kernel(target, function, dtype, channels)),
                        "backward": code_of(backward_kernel(target, function, dtype, channels)),
                    }
                    tiles = {"forward": _triton._TILE, "backward": _triton._BACKWARD_TILE}
                    for which, code in codes.items():
                        per_thread = tiles[which] // THREADS
                        kernels[f"{name} {which}"] = {
                            **code._asdict(),
                            "instructions_per_element": code.instructions / per_thread,
                        }
                    limits = broken_limits(codes["backward"], plain)
                    broken += [f"{name}: {line}" for line in limits]
    calls = calls_of_one_pass()
    if calls["launches"] > LAUNCHES:
        broken.append(f"{calls['launches']} launches, at most {LAUNCHES}")
    if calls["backward allocations"] > ALLOCATIONS:
        broken.append(f"{calls['backward allocations']} allocations, at most {ALLOCATIONS}")
    return {"kernels": kernels, "one pass": calls}, broken


def broken_limits(code: Code, plain: bool) -> list[str]:
    """Return a line for each limit that a backward kernel breaks; ``plain`` limits its registers too."""
    broken = []
    if plain and code.registers > REGISTERS:
        broken.append(f"{code.registers} registers, at most {REGISTERS}")
    if code.spilled:
        broken.append(f"{code.spilled} bytes of registers spilled")
    if not code.loads_ahead:
        broken.append("the next tile is not loaded ahead")
    return broken
