"""The choice of the kernel for a layer's call in eager mode, and its gradients.

``y = weight * scale * f(x - center) + bias``, with f by its :class:`FunctionCode`. The layers call
:func:`pointwise`. It goes straight to the kernel, because a trip through torch's dispatcher takes
longer than the arithmetic of a small input. If no kernel serves, the layer uses its definition.
Second derivatives are those of the definition in ``dynorm.functional`` in every case.
"""

import logging
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
from dynorm.kernels._form import Form, FunctionCode, Parameters

ENABLED = os.environ.get("DYNORM_KERNELS", "1") != "0"
_log = logging.getLogger("dynorm")
_PLAIN_TYPES = (Tensor, Parameter)
_ONE = (1,)
# Up to this one a parameter may have one element for all channels.
_LAST_THAT_MAY_BE_ONE = Parameters._fields.index("center")


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
    dtypes and layouts without a kernel, and for invalid input, so that it raises the error. The
    channels of x come last. ``token_constant``, in float32 or float64, has one number T per token,
    which makes the constant ``constant + T`` for DyISRU, and ``constant / sqrt(1 + ratio constant^2
    T)`` for the functions of a slope. An x on another device than its parameters is an
    ArgumentError.
    """
    if not ENABLED or traced(x) or serving(x.device.type) == "torch":
        return None
    if not fits(x, parameters, token_constant):
        return None
    # A line has no bound, and where tokens grow its constant, the definition clamps x.
    if token_constant is not None and function == FunctionCode.LINEAR:
        return None
    form = _form(function, logarithmic, scale)
    x = x.contiguous()
    if token_constant is not None:
        token_constant = token_constant.contiguous()
    if wants_gradient(x, *parameters, token_constant):
        record: Callable[..., Tensor] = _Pointwise.apply
        return record(form, x, *parameters, token_constant)
    y: Tensor = _kernels_of(x).forward(form, x, parameters, token_constant)
    return y


def traced(*tensors: Tensor) -> bool:
    """Return whether something watches operations one by one, and so must see the definition.

    That is torch.compile, torch.export and torch.jit.trace; vmap, grad and the other transforms of
    torch.func; forward-mode AD; modes, such as FakeTensorMode; and subclasses of Tensor, such as
    DTensor.
    """
    if watched() or forward_ad._current_level >= 0:
        return True
    for tensor in tensors:  # noqa: SIM110 (a generator takes twice its time)
        # Zeros of autograd have no memory.
        if type(tensor) not in _PLAIN_TYPES or tensor._is_zerotensor():
            return True
    return False


def fits(x: Tensor, parameters: Parameters, token_constant: Tensor | None = None) -> bool:
    """Return whether the kernels take these tensors; if not, the definition computes, or says why."""
    # Each of these questions costs some 50 ns, so they are asked once.
    if x.dtype not in _cpu.DTYPES or x.layout is not torch.strided or x.is_neg() or not x.ndim:
        return False
    shape = x.shape
    each_channel = shape[-1:]
    if not each_channel[0]:
        return False
    device = x.device
    for role, parameter in enumerate(parameters):
        if parameter is None:
            continue
        if type(parameter) not in _PLAIN_TYPES or parameter.dtype not in _cpu.DTYPES:
            return False
        if parameter.is_neg() or not parameter.is_contiguous():
            return False
        size = parameter.shape
        if size != each_channel and (size != _ONE or role > _LAST_THAT_MAY_BE_ONE):
            return False
        if parameter.device != device:
            raise ArgumentError(
                f"x and the parameters must be on one device, got {device} and "
                f"{parameter.device}: move one"
            )
    if token_constant is None:
        return True
    return (
        token_constant.dtype in (torch.float32, torch.float64)
        and token_constant.shape == shape[:-1]
        and token_constant.device == device
        and not traced(token_constant)
        and not token_constant.is_neg()
    )


def wants_gradient(*tensors: Tensor | None) -> bool:
    """Return whether autograd records a call with these tensors."""
    if not torch.is_grad_enabled():
        return False
    for tensor in tensors:  # noqa: SIM110 (a generator takes twice its time)
        if tensor is not None and tensor.requires_grad:
            return True
    return False


# Cached, because making a form takes longer than looking it up.
_form = lru_cache(maxsize=1024)(Form)


class _Pointwise(torch.autograd.Function):
    """The kernels with their gradients.

    Only x, the parameters and the tokens' numbers are saved. The function is cheap, memory is not:
    computing f again takes less time than reading a saved result back.
    """

    @staticmethod
    def forward(ctx: Any, form: Form, x: Tensor, *others: Any) -> Tensor:
        ctx.form = form
        ctx.save_for_backward(x, *others)
        *parameters, token_constant = others
        y: Tensor = _kernels_of(x).forward(form, x, Parameters(*parameters), token_constant)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, *parameters, token_constant = ctx.saved_tensors
        arguments = (x, Parameters(*parameters), token_constant)
        # The form has no gradient.
        needed = ctx.needs_input_grad[1:]
        # A second derivative is wanted, or something watches; is_grads_batched brings tensors
        # without memory.
        batched = torch._C._functorch.is_legacy_batchedtensor(grad)
        if torch.is_grad_enabled() or batched or traced(grad, x):
            return (None, *_plain_gradients(ctx.form, grad, *arguments, needed))
        grad = grad.resolve_neg().contiguous()
        return (None, *_kernels_of(x).gradients(ctx.form, grad, *arguments, needed))


def _kernels_of(x: Tensor) -> Any:
    """Return the module with the kernels for the device of x; Triton is imported when needed."""
    if x.is_cpu:
        return _cpu
    from dynorm.kernels import _triton

    return _triton


def _plain_gradients(
    form: Form,
    grad: Tensor,
    x: Tensor,
    parameters: Parameters,
    token_constant: Tensor | None,
    needed: Sequence[bool],
) -> list[Tensor | None]:
    """Return the gradients by the definition, which can be differentiated again."""
    again = torch.is_grad_enabled()
    tensors = (x, *parameters, token_constant)
    results: list[Tensor | None] = [None] * len(tensors)
    chosen = [place for place, tensor in enumerate(tensors) if needed[place] and tensor is not None]
    with torch.enable_grad():
        inputs: list[Any] = [tensors[place] for place in chosen]
        y = form.definition(x, parameters, token_constant)
        gradients = torch.autograd.grad(y, inputs, grad, create_graph=again, materialize_grads=True)
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
