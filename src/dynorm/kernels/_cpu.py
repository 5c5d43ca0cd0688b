"""The family on a CPU: functions over raw tensors that call the C++ kernels, without autograd.

``y = weight * scale * f(x) + bias``, with f chosen by number: 0 DyISRU ``x / sqrt(constant
+ x^2)``, 1 DyT ``tanh(constant x)``, 2 Derf ``erf(constant x + shift)``, 3 linear ``constant x``. x
is contiguous, its channels last. With one number T per token, which only DyISRU takes, a row's
constant is ``constant + T``.

The sums of the parameters' gradients are taken in pieces that depend only on the shape: in float32
for at most 128 rows and in float64 beyond. The sums of a piece are rounded to float32 once (not for
float64 x), and added in float64, in order. So they are the same for any number of threads.
"""

import ctypes
import importlib.util
import logging
import os
import sys
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dynorm.kernels._form import Fields, Numbers, UnfitError

_log = logging.getLogger("dynorm")


def name() -> str:
    """Return the instruction set, as "cpu-avx512"; "torch" if the kernels are not built."""
    native = _native()
    if native is None:
        return "torch"
    return str(native.name())


def forward(
    form: Fields,
    x: Tensor,
    parameters: Numbers,
    token_constant: Tensor | None = None,
    residual: Tensor | None = None,
    total: Tensor | None = None,
) -> Tensor:
    """Return y, of x's shape, dtype and order in memory.

    With a residual, y is the function of ``x + residual``, which is written to ``total``.

    Raises:
        UnfitError: the tensors are not as the kernels take them.
    """
    if residual is not None:
        x = torch.add(x, residual, out=total)
    y = torch.empty_like(x)
    native = _native()
    if native is None or not native.forward(x, *parameters, token_constant, *form, y):
        raise UnfitError
    return y


def gradients(
    form: Fields,
    grad: Tensor,
    x: Tensor,
    parameters: Numbers,
    token_constant: Tensor | None,
    needed: Sequence[bool],
    grad_sum: Tensor | None = None,
) -> list[Tensor | None]:
    """Return the gradients of x, of the parameters and of the tokens' numbers, each like its tensor.

    A gradient that is not needed is None. ``grad``, that of y, is like x; ``needed`` has a value
    for each of these tensors; ``grad_sum`` is added to the gradient of x.

    Raises:
        UnfitError: the tensors are not as the kernels take them.
    """
    results: list[Tensor | None] = [None] * len(needed)
    for place, tensor in enumerate((x, *parameters, token_constant)):
        if needed[place] and tensor is not None:
            results[place] = torch.empty_like(tensor)
    # The bias has no part in any gradient, so that it need not be read.
    inputs = (x, *parameters[:3], None, token_constant)
    native = _native()
    if native is None or not native.backward(*inputs, *form, grad, *results):
        raise UnfitError
    if grad_sum is not None and results[0] is not None:
        results[0] += grad_sum
    return results


@lru_cache(maxsize=1)
def _native() -> Any:
    """Return the C++ module, connected to torch; None if it has not been built. Log which it is."""
    # Another build, such as one with sanitizers.
    elsewhere = os.environ.get("DYNORM_NATIVE")
    path = Path(elsewhere) if elsewhere else Path(__file__).with_name("_native.abi3.so")
    if not path.exists():
        _log.warning(
            "the CPU kernels are not there, so plain torch computes the point-wise layers, several "
            "times slower: install g++, then run python -m dynorm.kernels._build"
        )
        return None
    spec = importlib.util.spec_from_file_location("dynorm.kernels._native", path)
    assert spec is not None
    assert spec.loader is not None
    try:
        native = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(native)
        exchange = Tensor.__dlpack_c_exchange_api__
        native.connect(_parallel_for(), exchange, Tensor, torch.nn.Parameter)
    except (ImportError, AttributeError) as error:
        _log.warning("the CPU kernels cannot be loaded, build them again: %s", error)
        return None
    _log.info("point-wise layers on cpu: %s", native.name())
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
