"""The family on a CPU: functions over raw tensors that call the C++ kernels, without autograd.

``y = weight * scale * f(x - center) + bias``, with f chosen by number: 0 DyISRU ``u / sqrt(constant
+ u^2)``, 1 DyT ``tanh(constant u)``, 2 Derf ``erf(constant u + shift)``, 3 linear ``constant u``. x
is contiguous and seen as (outer, channels, inner). With witnesses each row has its own constant:
``constant + T`` for DyISRU, and for the others ``constant / sqrt(1 + ratio constant^2 T)``, where T
is the sum of ``exp(log_gain_k) u_k^2`` over them.

The sums of the parameters' gradients are taken in pieces that depend only on the shape: in float32
for at most 128 rows (4096 elements of a run) and in float64 beyond. The sums of a piece are rounded
to float32 once (not for float64 x), and added in float64, in order. So they are the same for any
number of threads.
"""

import ctypes
import importlib.util
import logging
import os
import sys
from collections.abc import Sequence
from functools import lru_cache
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
# The parameters that every call has; log_gain comes after them, and only with witnesses.
_ALWAYS = Parameters._fields.index("log_gain")
_log = logging.getLogger("dynorm")


def name() -> str:
    """Return the instruction set, as "cpu-avx512"; "torch" if the kernels are not built."""
    native = _native()
    if native is None:
        return "torch"
    return str(native.name())


def most_witnesses() -> int:
    """Return how many witnesses the kernels take: 0 if they are not built, or an old build."""
    return getattr(_native(), "MOST_WITNESSES", 0)


def forward(
    form: Form,
    x: Tensor,
    parameters: Parameters,
    out: Tensor | None = None,
) -> Tensor:
    """Return y, of x's dtype; in ``out``, contiguous and of x's shape and dtype, if it is given."""
    y = torch.empty_like(x) if out is None else out
    arguments = [*_problem(form, x, parameters), y.data_ptr()]
    if form.witnesses:
        arguments += [form.witnesses, *_numbers(parameters.log_gain)]
    _native().forward(*arguments)
    return y


def gradients(
    form: Form, grad: Tensor, x: Tensor, parameters: Parameters, needed: Sequence[bool]
) -> list[Tensor | None]:
    """Return the gradients of x and of the parameters, each like its tensor.

    A gradient that is not needed is None. ``grad``, that of y, is contiguous, of x's shape and
    dtype; ``needed`` has a value for x and for each parameter.
    """
    results: list[Tensor | None] = []
    for tensor, need in zip((x, *parameters), needed, strict=True):
        if need and tensor is not None:
            results.append(torch.empty_like(tensor))
        else:
            results.append(None)
    grad_x, *of_parameters = results
    # The bias has no part in any gradient, so that it need not be read.
    arguments = _problem(form, x, parameters._replace(bias=None))
    arguments += [grad.data_ptr(), 0 if grad_x is None else grad_x.data_ptr()]
    for gradient in of_parameters[:_ALWAYS]:
        arguments += _numbers(gradient)
    if form.witnesses:
        arguments += [form.witnesses, *_numbers(parameters.log_gain)]
        arguments += _numbers(of_parameters[_ALWAYS])
    _native().backward(*arguments)
    return results


def serve(
    x: Tensor,
    parameters: Sequence[Tensor | None],
    function: int,
    logarithmic: bool,
    scale: float,
    shape: tuple[int, ...],
    witnesses: tuple[int, ...] = (),
) -> Tensor | Literal[True] | None:
    """Return y, or True if a gradient is wanted; None if the kernels cannot take this call.

    They cannot take tensors that do not fit, or a call that something watches. C++ checks all of
    that, because asking ten things of tensors in Python takes longer than the arithmetic of a small
    input. ``parameters`` are in the order of :class:`Parameters`, ``shape`` has the sizes of the
    last axes of x; the rest is as in :class:`Form`. A torch without a DLPack exchange interface
    gives None too.
    """
    native = _native()
    if native is None:
        return None
    constant, shift, center, weight, bias, log_gain = parameters
    # Not collected in lists first: this is called for every layer.
    y: Tensor | Literal[True] | None
    if witnesses:
        y = native.serve(
            *(x, constant, shift, center, weight, bias, function, logarithmic, scale, shape),
            *(witnesses, log_gain),
        )
    else:
        y = native.serve(
            x, constant, shift, center, weight, bias, function, logarithmic, scale, shape
        )
    return y


def serve_gradients(
    form: Form, grad: Tensor, inputs: Sequence[Tensor | None], needed: Sequence[bool]
) -> tuple[Tensor | None, ...] | None:
    """Return what autograd's backward does: None for the form, and the gradients.

    ``inputs`` are x, its channels last, and the parameters; ``needed`` has a value for the form, x
    and each parameter. The result is None if the tensors do not fit, as in :func:`serve`, or if a
    gradient of the gradient is wanted.
    """
    native = _native()
    if native is None:
        return None
    rest = (form.function, form.logarithmic, form.scale, form.channels)
    results: tuple[Tensor | None, ...] | None
    if form.witnesses:
        results = native.serve_gradients(grad, inputs, needed, *rest, form.witnesses)
        return results
    # Without witnesses the C++ side knows no log_gain.
    results = native.serve_gradients(grad, inputs[:-1], needed[:-1], *rest)
    if results is None:
        return None
    return (*results, None)


def _problem(form: Form, x: Tensor, parameters: Parameters) -> list[object]:
    """Return a call as the C++ side takes it (``read_problem`` in csrc/module.cpp)."""
    arguments: list[object] = [
        form.function,
        form.logarithmic,
        DTYPES[x.dtype],
        x.numel(),
        form.channels,
        form.inner,
        form.scale,
        x.data_ptr(),
    ]
    for parameter in parameters[:_ALWAYS]:
        arguments += _numbers(parameter)
    return arguments


def _numbers(parameter: Tensor | None) -> tuple[int, int]:
    """Return a parameter as the C++ side takes it: its address, and a code for dtype and size."""
    if parameter is None:
        return 0, 0
    code = DTYPES[parameter.dtype]
    if parameter.numel() > 1:
        code |= _PER_CHANNEL
    return parameter.data_ptr(), code


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
    exchange = getattr(Tensor, "__dlpack_c_exchange_api__", None)
    if exchange is not None:
        native.set_torch(
            exchange,
            Tensor,
            Parameter,
            torch.empty_like,
            torch.is_grad_enabled,
            "requires_grad",
            Tensor.is_neg,
            WATCHERS,
            forward_ad,
            "_current_level",
        )
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
