"""The family on a CPU: plain functions over raw tensors that call the C++ kernels; no autograd inside.

``y = weight * scale * f(x - center) + bias``, with f chosen by number: 0 DyISRU ``u / sqrt(constant + u^2)``, 1 DyT
``tanh(constant u)``, 2 Derf ``erf(constant u + shift)``, 3 linear ``constant u``. x is contiguous and seen as (outer,
channels, inner). With ``logarithmic`` the constant is log(beta), and the linear slope ``1 / sqrt(beta)``.

The sums of the parameters' gradients are taken in pieces that depend on the shape alone: in float32 for at most 128
rows (4096 elements of a run) and in float64 beyond; a piece's sums are rounded to float32 once (not for float64 x), and
added in float64, in order. They are the same for any number of threads.
"""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import os
import sys
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

__all__ = ["available", "backward", "forward", "gradients", "name", "serve", "serve_gradients"]

# As in csrc/types.h.
DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
# What to ask for whether something watches operations one by one: functorch's transforms, modes, torch.jit.trace. Each
# gives None, 0 or False when it does not.
WATCHERS: tuple[Callable[[], object], ...] = (
    torch._C._functorch.peek_interpreter_stack,
    torch._C._len_torch_dispatch_stack,
    torch._C._len_torch_function_stack,
    torch._C._get_tracing_state,
)
_PER_CHANNEL = 4
_ABSENT = (0, 0)
_log = logging.getLogger("dynorm")


def available() -> bool:
    """Say whether the kernels have been built.

    Example:
        >>> available() in (True, False)
        True
    """
    return _native() is not None


def name() -> str:
    """Return the instruction set that runs: "cpu-avx512", "cpu-avx2" or "cpu-portable"; "torch" without kernels.

    Example:
        >>> name() in ("cpu-avx512", "cpu-avx2", "cpu-portable", "torch")
        True
    """
    native = _native()
    return "torch" if native is None else str(native.name())


def forward(
    function: int,
    x: Tensor,
    constant: Tensor,
    shift: Tensor | None,
    center: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    scale: float,
    channels: int,
    inner: int,
    out: Tensor | None = None,
    *,
    logarithmic: bool = False,
) -> Tensor:
    """Return y, of x's dtype; in ``out``, contiguous and of x's shape and dtype, where it is given."""
    y = torch.empty_like(x) if out is None else out
    # fmt: off
    _native().forward(
        function, logarithmic, DTYPES[x.dtype], x.numel(), channels, inner, scale, x.data_ptr(),
        *_numbers(constant), *_numbers(shift), *_numbers(center), *_numbers(weight), *_numbers(bias), y.data_ptr(),
    )
    # fmt: on
    return y


def backward(
    function: int,
    grad: Tensor,
    x: Tensor,
    constant: Tensor,
    shift: Tensor | None,
    center: Tensor | None,
    weight: Tensor | None,
    scale: float,
    channels: int,
    inner: int,
    need_x: bool,
    need_parameters: bool,
    *,
    logarithmic: bool = False,
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradient of x, and per-channel sums of shape (5, C), in float32 (float64 for float64 x).

    The sums are the gradients of constant, shift, center, weight and bias, each as if it had a number for each channel.
    """
    sums = None
    rows: list[Tensor | None] = [None] * 5
    if need_parameters:
        sums = torch.empty((5, channels), dtype=compute_dtype(x.dtype))
        rows = list(sums.unbind())
    parameters = (constant, shift, center, weight)
    grad_x = torch.empty_like(x) if need_x else None
    _backward(function, grad, x, parameters, grad_x, rows, scale, channels, inner, logarithmic, _PER_CHANNEL)
    return grad_x, sums


def gradients(
    function: int,
    grad: Tensor,
    x: Tensor,
    parameters: tuple[Tensor | None, ...],
    needed: tuple[bool, ...],
    scale: float,
    channels: int,
    inner: int,
    logarithmic: bool,
) -> list[Tensor | None]:
    """Return the gradients of x, constant, shift, center, weight and bias, in their own dtypes; None if not needed.

    Args:
        function: the function's number.
        grad: gradient of y, contiguous, of x's dtype.
        x: as in :func:`forward`.
        parameters: constant, shift, center, weight and bias.
        needed: of x and of each parameter, whether its gradient is wanted.
        scale: as in :func:`forward`.
        channels: C.
        inner: elements from one channel to the next.
        logarithmic: as in :func:`forward`.
    """
    grad_x = torch.empty_like(x) if needed[0] else None
    results = [
        torch.empty_like(p) if p is not None and need else None for p, need in zip(parameters, needed[1:], strict=True)
    ]
    _backward(function, grad, x, parameters[:4], grad_x, results, scale, channels, inner, logarithmic, 0)
    return [grad_x, *results]


def serve(
    x: Tensor,
    parameters: tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None],
    function: int,
    logarithmic: bool,
    scale: float,
    shape: tuple[int, ...],
) -> Tensor | Literal[True] | None:
    """Return y, all that :func:`forward` and its caller check having been checked on the C++ side.

    A small input's arithmetic takes less time than to ask ten things of its tensors in Python.

    Args:
        x: any tensor.
        parameters: constant, shift, center, weight and bias.
        function: the function's number.
        logarithmic: as in :func:`forward`.
        scale: as in :func:`forward`.
        shape: the sizes of the last axes of x, along which the parameters lie.

    Returns:
        y; True where x and the parameters fit, but a gradient is wanted; None where they do not, or something watches
        operations one by one, or this torch has no DLPack exchange interface.
    """
    native = _native()
    found: Tensor | Literal[True] | None = None
    if native is not None:
        found = native.serve(x, *parameters, function, logarithmic, scale, shape)
    return found


def serve_gradients(
    grad: Tensor,
    inputs: tuple[Tensor | None, ...],
    needed: tuple[bool, ...],
    function: int,
    logarithmic: bool,
    scale: float,
    channels: int,
) -> tuple[Tensor | None, ...] | None:
    """Return what autograd's backward does, all that :func:`gradients` needs having been checked on the C++ side.

    Args:
        grad: gradient of y.
        inputs: x, constant, shift, center, weight and bias.
        needed: of the form, of x and of each parameter, whether its gradient is wanted.
        function: the function's number.
        logarithmic: as in :func:`forward`.
        scale: as in :func:`forward`.
        channels: C, the last axes of x.

    Returns:
        None for the form, and the gradients as :func:`gradients` has them; None for all, where the tensors do not fit,
        or a gradient of the gradient is wanted, or something watches, or this torch has no DLPack exchange interface.
    """
    native = _native()
    found: tuple[Tensor | None, ...] | None = None
    if native is not None:
        found = native.serve_gradients(grad, inputs, needed, function, logarithmic, scale, channels)
    return found


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return what a dtype is computed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _backward(
    function: int,
    grad: Tensor,
    x: Tensor,
    parameters: tuple[Tensor | None, ...],
    grad_x: Tensor | None,
    results: list[Tensor | None],
    scale: float,
    channels: int,
    inner: int,
    logarithmic: bool,
    code: int,
) -> None:
    arguments = [function, logarithmic, DTYPES[x.dtype], x.numel(), channels, inner, scale, x.data_ptr()]
    for p in parameters:
        arguments += _numbers(p)
    # The bias has no part in any gradient.
    arguments += [*_ABSENT, grad.data_ptr(), 0 if grad_x is None else grad_x.data_ptr()]
    for r in results:
        # A row of the sums of one channel is per channel too.
        arguments += _ABSENT if r is None else (r.data_ptr(), DTYPES[r.dtype] | (code or _per_channel(r)))
    _native().backward(*arguments)


def _numbers(parameter: Tensor | None) -> tuple[int, int]:
    """Return a parameter as the C++ side takes it: its address, and a code for its dtype and size."""
    if parameter is None:
        return _ABSENT
    return parameter.data_ptr(), DTYPES[parameter.dtype] | _per_channel(parameter)


def _per_channel(parameter: Tensor) -> int:
    return _PER_CHANNEL if parameter.numel() > 1 else 0


@lru_cache(maxsize=1)
def _native() -> Any:
    """Return the C++ module, told where torch's threads are; None where it has not been built."""
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
    exchange = getattr(Tensor, "__dlpack_c_exchange_api__", None)
    if exchange is not None:
        # fmt: off
        native.set_torch(
            exchange, Tensor, Parameter, torch.empty_like, torch.is_grad_enabled, "requires_grad",
            Tensor.is_neg, WATCHERS, forward_ad, "_current_level",
        )
        # fmt: on
    return native


def _parallel_for() -> int:
    """Return the address of ``torch_parallel_for``, torch's own pool in its C interface; 0 where it is not found."""
    library = {"darwin": "libtorch_cpu.dylib", "win32": "torch_cpu.dll"}.get(sys.platform, "libtorch_cpu.so")
    path = Path(torch.__file__).parent / "lib" / library
    try:
        # It is loaded already, so this only finds it.
        found = ctypes.CDLL(str(path)).torch_parallel_for
    except (OSError, AttributeError):
        _log.warning("this torch has no torch_parallel_for: the CPU kernels use one thread")
        return 0
    return ctypes.cast(found, ctypes.c_void_p).value or 0
