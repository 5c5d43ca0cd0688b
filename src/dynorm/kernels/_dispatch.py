"""The choice of the kernel for a layer's call in eager mode, and its gradients.

``y = weight * scale * f(x - center) + bias``, with f by its :class:`FunctionCode`. The layers call
:func:`pointwise`. It goes straight to the kernel, because a trip through torch's dispatcher takes
longer than the arithmetic of a small input. If no kernel serves, the layer uses the definition in
``dynorm.functional``; that gives second derivatives in every case.
"""

import logging
import math
import os
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from dynorm.arguments import watched
from dynorm.errors import ArgumentError
from dynorm.kernels import _cpu
from dynorm.kernels._form import Form, Parameters

ENABLED = os.environ.get("DYNORM_KERNELS", "1") != "0"
_log = logging.getLogger("dynorm")
_PLAIN_TYPES = (Tensor, Parameter)
# The parameters that may have one element for all channels.
_ONE_FOR_ALL = ("constant", "shift", "center")


def backend(device: torch.device | str = "cpu") -> str:
    """Return what computes the point-wise layers in eager mode on a device.

    Args:
        device: a device or its type.

    Returns:
        "cpu-avx512", "cpu-avx2" or "cpu-portable" for the C++ kernels, "triton" for those of a GPU;
        "torch" for the plain definition, if the kernels are not built, not supported, or switched
        off with ``DYNORM_KERNELS=0``.

    Raises:
        ArgumentError: torch does not know the device.

    Example:
        >>> backend("cpu") in ("cpu-avx512", "cpu-avx2", "cpu-portable", "torch")
        True
        >>> backend("meta")
        'torch'
    """
    try:
        kind = torch.device(device).type
    # A TypeError if the value is not a device at all.
    except (RuntimeError, TypeError) as error:
        raise ArgumentError(
            f"device must be one that torch knows, as 'cpu' or 'cuda', got {device!r}"
        ) from error
    if ENABLED:
        return serving(kind)
    return "torch"


def pointwise(
    function: int,
    x: Tensor,
    parameters: Parameters,
    scale: float,
    logarithmic: bool = False,
    token_constant: Tensor | None = None,
) -> Tensor | None:
    """Return y, of the shape and dtype of x, by a kernel; None if only the definition can serve.

    The definition serves under a tracer, a transform or a mode, for subclasses of Tensor, for
    layouts without a kernel, and for invalid input, so that it raises the error. The channels of x
    come last. ``token_constant`` has one number per token, the T by which the constant of the token
    grows. An x on another device than its parameters is an ArgumentError.
    """
    if not ENABLED or torch.compiler.is_compiling() or token_constant is not None or not x.ndim:
        return None
    shape = (x.shape[-1],)
    y = fast_path(function, x, parameters, scale, shape, logarithmic, ())
    if y is not None:
        return y
    if traced(x) or serving(x.device.type) == "torch":
        return None
    if not fits(x, parameters, shape, 0):
        return None
    call: Callable[..., Tensor] = _compute
    if wants_gradient(x, parameters):
        call = _Pointwise.apply
    form = _form(function, logarithmic, scale, shape[0], 1)
    return call(form, x.contiguous(), *parameters)


def fast_path(
    function: int,
    x: Tensor,
    parameters: Parameters,
    scale: float,
    shape: tuple[int, ...],
    logarithmic: bool,
    witnesses: tuple[int, ...],
) -> Tensor | None:
    """Return y, of x with its channels last, by the CPU kernels; None if their own check refuses.

    Nearly every call on a CPU ends here. The check is one call to C++, which takes less time than
    two checks in Python.
    """
    y = _cpu.serve(x, parameters, function, logarithmic, scale, shape, witnesses)
    if y is None:
        return None
    # True instead of y: the call is right, but autograd has to record it.
    if y is True:
        form = _form(function, logarithmic, scale, math.prod(shape), 1, witnesses)
        record: Callable[..., Tensor] = _Pointwise.apply
        return record(form, x, *parameters)
    # For its log line.
    serving("cpu")
    return y


def traced(*tensors: Tensor) -> bool:
    """Return whether something watches operations one by one, and so must see the definition.

    That is torch.compile, torch.export and torch.jit.trace; vmap, grad and the other transforms of
    torch.func; forward-mode AD; modes, such as FakeTensorMode; and subclasses of Tensor, such as
    DTensor.
    """
    return (
        watched()
        or not all(type(t) in _PLAIN_TYPES for t in tensors)
        # Zeros of autograd that have no memory.
        or any(t._is_zerotensor() for t in tensors)
        or forward_ad._current_level >= 0
    )


def fits(
    x: Tensor,
    parameters: Parameters,
    shape: tuple[int, ...],
    witnesses: int,
) -> bool:
    """Return whether the kernels take these tensors; if not, the definition computes, or says why."""
    # Each of these questions costs some 70 ns, so they are asked once.
    if x.dtype not in _cpu.DTYPES or x.layout is not torch.strided or x.is_neg() or not x.ndim:
        return False
    device = x.device
    for role, parameter in zip(Parameters._fields, parameters, strict=True):
        if parameter is None:
            continue
        if type(parameter) not in _PLAIN_TYPES or parameter.dtype not in _cpu.DTYPES:
            return False
        if not parameter.is_contiguous() or parameter.is_neg() or parameter._is_zerotensor():
            return False
        expected = (witnesses,) if role == "log_gain" else shape
        size = parameter.shape
        if size != expected and (size != (1,) or role not in _ONE_FOR_ALL):
            return False
        if parameter.device != device:
            raise ArgumentError(
                f"x and the parameters must be on one device, got {device} and "
                f"{parameter.device}: move one"
            )
    return True


def wants_gradient(x: Tensor, parameters: Parameters) -> bool:
    """Return whether autograd records the call."""
    if not torch.is_grad_enabled():
        return False
    return any(tensor is not None and tensor.requires_grad for tensor in (x, *parameters))


# Cached, because making a form takes longer than looking it up.
_form = lru_cache(maxsize=1024)(Form)


class _Pointwise(torch.autograd.Function):
    """The kernels with their gradients.

    Only x and the parameters are saved. The function is cheap, memory is not: computing f again
    takes less time than reading a saved result back.
    """

    @staticmethod
    def forward(
        ctx: Any,
        form: Form,
        x: Tensor,
        *parameters: Tensor | None,
    ) -> Tensor:
        ctx.form = form
        ctx.save_for_backward(x, *parameters)
        if form.inner == 1:
            shape = (form.channels,)
            # Again if `fast_path` said True: here no gradient is wanted.
            y = _cpu.serve(
                x, parameters, form.function, form.logarithmic, form.scale, shape, form.witnesses
            )
            if isinstance(y, Tensor):
                return y
        return _compute(form, x, *parameters)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        form, inputs = ctx.form, ctx.saved_tensors
        if form.inner == 1:
            gradients = _cpu.serve_gradients(form, grad, inputs, ctx.needs_input_grad)
            if gradients is not None:
                return gradients
        x = inputs[0]
        parameters = Parameters(*inputs[1:])
        # For x and the parameters; the form has no gradient.
        needed = ctx.needs_input_grad[1:]
        # A second derivative is wanted, or something watches; is_grads_batched brings tensors
        # without memory.
        batched = torch._C._functorch.is_legacy_batchedtensor(grad)
        if torch.is_grad_enabled() or batched or traced(grad, x):
            return (None, *_plain_gradients(form, grad, x, parameters, needed))
        kernels = _kernels_of(x)
        return (None, *kernels.gradients(form, grad.contiguous(), x, parameters, needed))


def _compute(form: Form, x: Tensor, *parameters: Any) -> Tensor:
    """Compute y of contiguous x, without a gradient."""
    y: Tensor = _kernels_of(x).forward(form, x, Parameters(*parameters))
    return y


def _kernels_of(x: Tensor) -> Any:
    """Return the module with the kernels for the device of x; Triton is imported when needed."""
    if x.is_cpu:
        return _cpu
    from dynorm.kernels import _triton

    return _triton


def plain(form: Form, x: Tensor, parameters: Parameters) -> Tensor:
    """Return y by the definition, with x seen as (outer, channels, inner)."""
    flat: Any = [None if p is None else p.reshape(-1) for p in parameters]
    witnesses = None
    if form.witnesses:
        witnesses = torch.tensor(form.witnesses, device=x.device)
    seen = x.reshape(-1, form.channels, form.inner)
    return form.definition(seen, Parameters(*flat), 1, witnesses).reshape(x.shape)


def _plain_gradients(
    form: Form, grad: Tensor, x: Tensor, parameters: Parameters, needed: Sequence[bool]
) -> list[Tensor | None]:
    """Return the gradients by the definition, which can be differentiated again."""
    again = torch.is_grad_enabled()
    tensors = (x, *parameters)
    chosen: list[int] = []
    for place, tensor in enumerate(tensors):
        if needed[place] and tensor is not None:
            chosen.append(place)
    with torch.enable_grad():
        inputs: list[Any] = [tensors[place] for place in chosen]
        y = plain(form, x, parameters)
        gradients = torch.autograd.grad(y, inputs, grad, create_graph=again, materialize_grads=True)
    results: list[Tensor | None] = [None] * len(tensors)
    for place, gradient in zip(chosen, gradients, strict=True):
        results[place] = gradient
    return results


@lru_cache
def serving(device: str) -> str:
    """Return what computes the layers on a device, and log it once."""
    name = "torch"
    if device == "cpu":
        name = _cpu.name()
    elif device == "cuda":
        from dynorm.kernels import _triton

        if _triton.available():
            name = "triton"
    if device == "cpu" and name == "torch":
        _log.warning(
            "the CPU kernels are not there, so plain torch computes the point-wise layers, several "
            "times slower: install g++, then run python -m dynorm.kernels._build"
        )
    elif device in ("cpu", "cuda"):
        _log.info("point-wise layers on %s: %s", device, name)
    return name
