"""The family on a CPU: plain functions over raw tensors that call the C++ kernels; no autograd inside.

``y = weight * scale * f(x - center) + bias``, with f chosen by number: 0 DyISRU ``u / sqrt(constant
+ u^2)``, 1 DyT ``tanh(constant u)``, 2 Derf ``erf(constant u + shift)``, 3 linear ``constant u``. x
is contiguous and seen as (outer, channels, inner). With witnesses each row has its own constant:
``constant + T`` for DyISRU, and for the others ``constant / sqrt(1 + ratio constant^2 T)``, where T
is the sum of ``exp(log_gain_k) u_k^2`` over them.

The sums of the parameters' gradients are taken in pieces that depend on the shape alone: in float32
for at most 128 rows (4096 elements of a run) and in float64 beyond; a piece's sums are rounded to
float32 once (not for float64 x), and added in float64, in order. They are the same for any number
of threads.
"""

import ctypes
import importlib.util
import logging
import os
import sys
from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from dynorm.arguments import WATCHERS
from dynorm.kernels._form import Form, Parameters

# As in csrc/types.h.
DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
_PER_CHANNEL = 4
_log = logging.getLogger("dynorm")


def name() -> str:
    """Return the instruction set that runs: "cpu-avx512", "cpu-avx2" or "cpu-portable"; "torch" without kernels."""
    native = _native()
    return "torch" if native is None else str(native.name())


def most_witnesses() -> int:
    """Return how many witnesses the kernels take: 0 where they are not built, or were before there were witnesses."""
    return getattr(_native(), "MOST_WITNESSES", 0)


def forward(form: Form, x: Tensor, parameters: Parameters, out: Tensor | None = None) -> Tensor:
    """Return y, of x's dtype; in ``out``, contiguous and of x's shape and dtype, where it is given."""
    y = torch.empty_like(x) if out is None else out
    _native().forward(*_problem(form, x, parameters[:5]), y.data_ptr(), *_told(form, parameters))
    return y


def gradients(
    form: Form, grad: Tensor, x: Tensor, parameters: Parameters, needed: Sequence[bool]
) -> list[Tensor | None]:
    """Return the gradients of x and of the parameters, each of its own dtype and shape; None where not needed.

    ``grad``, that of y, is contiguous, of x's shape and dtype; ``needed`` speaks of x and of each
    parameter.
    """
    found = [
        torch.empty_like(t) if t is not None and need else None
        for t, need in zip((x, *parameters), needed, strict=True)
    ]
    numbers = [_numbers(gradient) for gradient in found]
    # The bias has no part in any gradient, so that it need not be read.
    given = (
        *_problem(form, x, (*parameters[:4], None)),
        grad.data_ptr(),
        numbers[0][0],
        *chain(*numbers[1:6]),
    )
    _native().backward(*given, *_told(form, parameters), *chain(*numbers[6:]))
    return found


def serve(
    x: Tensor,
    parameters: Parameters,
    function: int,
    logarithmic: bool,
    scale: float,
    shape: tuple[int, ...],
    witnesses: tuple[int, ...] = (),
) -> Tensor | Literal[True] | None:
    """Return y, or True where a gradient is wanted; None where these tensors do not fit, or something watches.

    C++ checks all of that: a small input's arithmetic takes less time than to ask ten things of its
    tensors in Python. ``shape`` has the sizes of the last axes of x; the rest is as in
    :class:`Form`. A torch without a DLPack exchange interface gives None too.
    """
    if (native := _native()) is None:
        return None
    told = (witnesses, parameters[5]) if len(parameters) > 5 else ()
    y: Tensor | Literal[True] | None = native.serve(
        x, *parameters[:5], function, logarithmic, scale, shape, *told
    )
    return y


def serve_gradients(
    form: Form, grad: Tensor, inputs: Sequence[Tensor | None], needed: Sequence[bool]
) -> tuple[Tensor | None, ...] | None:
    """Return what autograd's backward does: None for the form, and the gradients as :func:`gradients` has them.

    ``inputs`` are x, its channels last, and the parameters; ``needed`` speaks of the form too. As
    of :func:`serve`, there is None alone where the tensors do not fit, or a gradient of the
    gradient is wanted.
    """
    if (native := _native()) is None:
        return None
    told = (form.witnesses,) if form.witnesses else ()
    found: tuple[Tensor | None, ...] | None = native.serve_gradients(
        grad, inputs, needed, *form[:4], *told
    )
    return found


def _problem(form: Form, x: Tensor, parameters: Sequence[Tensor | None]) -> list[Any]:
    """Return a call as the C++ side takes it (``read_problem`` in csrc/module.cpp)."""
    function, logarithmic, scale, channels, inner, _ = form
    sizes = (x.numel(), channels, inner)
    return [
        function,
        logarithmic,
        DTYPES[x.dtype],
        *sizes,
        scale,
        x.data_ptr(),
        *chain(*map(_numbers, parameters)),
    ]


def _told(form: Form, parameters: Parameters) -> tuple[Any, ...]:
    """Return the witnesses as the C++ side takes them, after all else; nothing where there are none."""
    return (form.witnesses, *_numbers(parameters[5])) if len(parameters) > 5 else ()


def _numbers(parameter: Tensor | None) -> tuple[int, int]:
    """Return a parameter as the C++ side takes it: its address, and a code for its dtype and size."""
    if parameter is None:
        return 0, 0
    return parameter.data_ptr(), DTYPES[parameter.dtype] | (
        _PER_CHANNEL if parameter.numel() > 1 else 0
    )


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
        known = (
            Tensor,
            Parameter,
            torch.empty_like,
            torch.is_grad_enabled,
            "requires_grad",
            Tensor.is_neg,
        )
        native.set_torch(exchange, *known, WATCHERS, forward_ad, "_current_level")
    return native


def _parallel_for() -> int:
    """Return the address of ``torch_parallel_for``, torch's own pool in its C interface; 0 where it is not found."""
    library = {"darwin": "libtorch_cpu.dylib", "win32": "torch_cpu.dll"}.get(
        sys.platform, "libtorch_cpu.so"
    )
    path = Path(torch.__file__).parent / "lib" / library
    try:
        # It is loaded already, so this only finds it.
        found = ctypes.CDLL(str(path)).torch_parallel_for
    except (OSError, AttributeError):
        _log.warning("this torch has no torch_parallel_for: the CPU kernels use one thread")
        return 0
    return ctypes.cast(found, ctypes.c_void_p).value or 0
