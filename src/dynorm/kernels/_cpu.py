"""The family on a CPU: functions over raw tensors that call the C++ kernels, without autograd.

``y = weight * scale * f(x - center) + bias``, with f chosen by number: 0 DyISRU ``u / sqrt(constant
+ u^2)``, 1 DyT ``tanh(constant u)``, 2 Derf ``erf(constant u + shift)``, 3 linear ``constant u``. x
is contiguous, its channels last. With one number T per token each row has its own constant:
``constant + T`` for DyISRU, and for the others ``constant / sqrt(1 + ratio constant^2 T)``.

The sums of the parameters' gradients are taken in pieces that depend only on the shape: in float32
for at most 128 rows and in float64 beyond. The sums of a piece are rounded to float32 once (not for
float64 x), and added in float64, in order. So they are the same for any number of threads.
"""

import ctypes
import importlib.util
import logging
import os
import sys
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dynorm.kernels._form import Form, Parameters

# As in csrc/types.h.
DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
_PER_CHANNEL = 4
_log = logging.getLogger("dynorm")


def name() -> str:
    """Return the instruction set, as "cpu-avx512"; "torch" if the kernels are not built."""
    native = _native()
    if native is None:
        return "torch"
    return str(native.name())


def forward(
    form: Form,
    x: Tensor,
    parameters: Parameters,
    token_constant: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return y, of x's dtype; in ``out``, contiguous and of x's shape and dtype, if it is given."""
    y = torch.empty_like(x) if out is None else out
    problem = _problem(form, x, (*parameters, token_constant))
    _native().forward(*problem, y.data_ptr())
    return y


def gradients(
    form: Form,
    grad: Tensor,
    x: Tensor,
    parameters: Parameters,
    token_constant: Tensor | None,
    needed: Sequence[bool],
) -> list[Tensor | None]:
    """Return the gradients of x, of the parameters and of the tokens' numbers, each like its tensor.

    A gradient that is not needed is None. ``grad``, that of y, is contiguous, of x's shape and
    dtype; ``needed`` has a value for each of these tensors.
    """
    results: list[Tensor | None] = []
    for tensor, need in zip((x, *parameters, token_constant), needed, strict=True):
        if need and tensor is not None:
            results.append(torch.empty_like(tensor))
        else:
            results.append(None)
    # The bias has no part in any gradient, so that it need not be read.
    problem = _problem(form, x, (*parameters[:4], None, token_constant))
    grad_x, *others = results
    of_x = 0 if grad_x is None else grad_x.data_ptr()
    _native().backward(*problem, grad.data_ptr(), of_x, *_addresses(others))
    return results


def _problem(form: Form, x: Tensor, tensors: Iterable[Tensor | None]) -> list[object]:
    """Return a call as the C++ side takes it (``read_problem`` in csrc/module.cpp)."""
    channels = x.shape[-1]
    rows = x.numel() // channels
    return [*form, DTYPES[x.dtype], rows, channels, x.data_ptr(), *_addresses(tensors)]


def _addresses(tensors: Iterable[Tensor | None]) -> list[int]:
    """Return each tensor as the C++ side takes it: its address, and a code for dtype and size."""
    numbers: list[int] = []
    for tensor in tensors:
        if tensor is None:
            numbers += (0, 0)
            continue
        code = DTYPES[tensor.dtype]
        if tensor.numel() > 1:
            code |= _PER_CHANNEL
        numbers += (tensor.data_ptr(), code)
    return numbers


@lru_cache(maxsize=1)
def _native() -> Any:
    """Return the C++ module, connected to torch's threads; None if it has not been built."""
    # Another build, such as one with sanitizers.
    elsewhere = os.environ.get("DYNORM_NATIVE")
    path = Path(elsewhere) if elsewhere else Path(__file__).with_name("_native.abi3.so")
    if not path.exists():
        return None
    spec = importlib.util.spec_from_file_location("dynorm.kernels._native", path)
    assert spec is not None
    assert spec.loader is not None
    try:
        native = importlib.util.module_from_spec(spec)
    except ImportError as error:
        _log.warning("the CPU kernels cannot be loaded, build them again: %s", error)
        return None
    spec.loader.exec_module(native)
    native.set_parallel_for(_parallel_for())
    return native


def _parallel_for() -> int:
    """Return the address of ``torch_parallel_for``, torch's thread pool in C; 0 if not found."""
    libraries = {"darwin": "libtorch_cpu.dylib", "win32": "torch_cpu.dll"}
    library = libraries.get(sys.platform, "libtorch_cpu.so")
    path = Path(torch.__file__).parent / "lib" / library
    try:
        # The library is loaded already, so this only looks it up.
        function = ctypes.CDLL(str(path)).torch_parallel_for
    except (OSError, AttributeError):
        _log.warning("this torch has no torch_parallel_for: the CPU kernels use one thread")
        return 0
    return ctypes.cast(function, ctypes.c_void_p).value or 0
