"""Which kernel serves a layer's call in eager mode, and its gradients.

``y = weight * scale * f(x - center) + bias``, with f of ``_form.FUNCTIONS``. :func:`pointwise` is
what the layers call: straight to the kernel, because a trip through torch's dispatcher costs more
than a small input's arithmetic. Where no kernel serves, the plain definition in
``dynorm.functional`` does, and it gives second derivatives everywhere.
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

# Triton's kernels are the longer for each.
MOST_WITNESSES = 16
ENABLED = os.environ.get("DYNORM_KERNELS", "1") != "0"
_log = logging.getLogger("dynorm")
_PLAIN_TYPES = (Tensor, Parameter)


def backend(device: torch.device | str = "cpu") -> str:
    """Say what computes the point-wise layers in eager mode on a device.

    Args:
        device: a device or its type.

    Returns:
        "cpu-avx512", "cpu-avx2" or "cpu-portable" for the C++ kernels, "triton" for the GPU's,
        "torch" for the plain
        definition: where the kernels are not built, not supported, or switched off with
            ``DYNORM_KERNELS=0``.

    Raises:
        ArgumentError: torch knows no such device.

    Example:
        >>> backend("cpu") in ("cpu-avx512", "cpu-avx2", "cpu-portable", "torch")
        True
        >>> backend("meta")
        'torch'
    """
    try:
        kind = torch.device(device).type
    # A TypeError where it is no device at all.
    except (RuntimeError, TypeError) as error:
        raise ArgumentError(
            f"device must be one that torch knows, as 'cpu' or 'cuda', got {device!r}"
        ) from error
    return serving(kind) if ENABLED else "torch"


def pointwise(
    function: int,
    x: Tensor,
    parameters: Parameters,
    scale: float,
    shape: tuple[int, ...],
    dim: int | tuple[int, ...],
    logarithmic: bool = False,
    witnesses: tuple[int, ...] = (),
) -> Tensor | None:
    """Return y, of the shape and dtype of x, by a kernel; None where the plain definition has to serve.

    That is under a tracer, a transform or a mode, for subclasses of Tensor, layouts with no kernel,
    more witnesses than kernels take, and for whatever the definition refuses. The sizes of x at
    ``dim``, an axis or several, are ``shape``, over which witnesses are counted. The parameters are
    :data:`Parameters`; the rest is as in :class:`Form`. An x on another device than its parameters is an ArgumentError.
    """
    if not ENABLED or torch.compiler.is_compiling():
        return None
    if witnesses and len(witnesses) > (_cpu.most_witnesses() if x.is_cpu else MOST_WITNESSES):
        return None
    last = dim == -1 or (not isinstance(dim, int) and dim == tuple(range(-len(dim), 0)))
    # The way of nearly every call: all checks in one call to C++, which takes less time than two
    # checks in Python.
    found = (
        _cpu.serve(x, parameters, function, logarithmic, scale, shape, witnesses) if last else None
    )
    if found is not None and found is not True:
        serving("cpu")
        return found
    if found is None and (traced(x) or serving(x.device.type) == "torch"):
        return None
    wants_gradient = found or _fit(x, parameters, shape, len(witnesses))
    if wants_gradient is None:
        return None
    call: Callable[..., Tensor] = _Pointwise.apply if wants_gradient else _compute
    if last:
        channels = shape[0] if len(shape) == 1 else math.prod(shape)
        form = _form(function, logarithmic, scale, channels, 1, witnesses)
        return call(form, x if x.is_contiguous() else x.contiguous(), *parameters)
    if not isinstance(dim, int):
        return None
    moved = x.movedim(dim, -1)
    # In torch's channels_last layout the channels come last in memory, whatever their axis: nothing
    # to copy.
    if moved.is_contiguous():
        form = _form(function, logarithmic, scale, shape[0], 1, witnesses)
        return call(form, moved, *parameters).movedim(-1, dim)
    if witnesses:
        return None
    inner = math.prod(x.shape[dim % x.ndim + 1 :])
    return call(_form(function, logarithmic, scale, shape[0], inner), x.contiguous(), *parameters)


def traced(*tensors: Tensor) -> bool:
    """Say whether something watches operations one by one, so that the plain definition must be what it sees.

    That is torch.compile, torch.export and torch.jit.trace; vmap, grad and the other transforms of
    torch.func; forward-mode AD; modes, such as FakeTensorMode; and subclasses of Tensor, such as
    DTensor.
    """
    return (
        watched()
        or not all(type(t) in _PLAIN_TYPES for t in tensors)
        # Zeros of autograd's that have no memory.
        or any(t._is_zerotensor() for t in tensors)
        or forward_ad._current_level >= 0
    )


def _fit(x: Tensor, parameters: Parameters, shape: tuple[int, ...], witnesses: int) -> bool | None:
    """Say whether a gradient is wanted; None where the kernels do not take these tensors.

    The plain definition then has the words for what is wrong.
    """
    # Each of these questions costs some 70 ns, so they are asked once.
    if x.dtype not in _cpu.DTYPES or x.layout is not torch.strided or x.is_neg() or not x.ndim:
        return None
    device, gradient = x.device, x.requires_grad
    for place, p in enumerate(parameters):
        if p is None:
            continue
        size = p.shape
        if type(p) not in _PLAIN_TYPES or p.dtype not in _cpu.DTYPES or not p.is_contiguous():
            return None
        if p.is_neg() or p._is_zerotensor():
            return None
        if size != (shape if place < 5 else (witnesses,)) and (place > 2 or size != (1,)):
            return None
        if p.device != device:
            raise ArgumentError(
                f"x and the parameters must be on one device, got {device} and {p.device}: move one"
            )
        gradient = gradient or p.requires_grad
    return gradient and torch.is_grad_enabled()


# Kept, because making one takes longer than to find it.
_form = lru_cache(maxsize=1024)(Form)


class _Pointwise(torch.autograd.Function):
    """The kernels with their gradients.

    Only x and the parameters are saved. The function is cheap, memory is not: computing f anew
    takes less time than reading a saved result back.
    """

    @staticmethod
    def forward(ctx: Any, form: Form, x: Tensor, *parameters: Any) -> Tensor:
        ctx.form = form
        ctx.save_for_backward(x, *parameters)
        if form.inner == 1:
            shape = (form.channels,)
            y = _cpu.serve(
                x, parameters, form.function, form.logarithmic, form.scale, shape, form.witnesses
            )
            if isinstance(y, Tensor):
                return y
        return _compute(form, x, *parameters)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        inputs, needed = ctx.saved_tensors, ctx.needs_input_grad
        if ctx.form.inner == 1:
            found = _cpu.serve_gradients(ctx.form, grad, inputs, needed)
            if found is not None:
                return found
        x, *parameters = inputs
        given = (x, tuple(parameters), needed[1:])
        # A second derivative is wanted, or something watches; is_grads_batched brings tensors
        # without memory.
        batched = torch._C._functorch.is_legacy_batchedtensor(grad)
        if torch.is_grad_enabled() or batched or traced(grad, x):
            return (None, *_plain_gradients(ctx.form, grad, *given))
        return (None, *_kernels_of(x).gradients(ctx.form, grad.contiguous(), *given))


def _compute(form: Form, x: Tensor, *parameters: Any) -> Tensor:
    """Compute y of contiguous x, with no gradient."""
    y: Tensor = _kernels_of(x).forward(form, x, parameters)
    return y


def _kernels_of(x: Tensor) -> Any:
    """Return the module whose kernels serve the device of x; Triton's is imported at the first need of it."""
    if x.is_cpu:
        return _cpu
    from dynorm.kernels import _triton

    return _triton


def plain(form: Form, x: Tensor, parameters: Parameters) -> Tensor:
    """Return y by the definition, with x seen as (outer, channels, inner)."""
    flat: Any = [None if p is None else p.reshape(-1) for p in parameters]
    witnesses = torch.tensor(form.witnesses, device=x.device) if form.witnesses else None
    return form.definition(x.reshape(-1, form.channels, form.inner), flat, 1, witnesses).reshape(
        x.shape
    )


def _plain_gradients(
    form: Form, grad: Tensor, x: Tensor, parameters: Parameters, needed: Sequence[bool]
) -> list[Tensor | None]:
    """Return the gradients by the definition, which can be differentiated again."""
    again = torch.is_grad_enabled()
    tensors = (x, *parameters)
    with torch.enable_grad():
        wanted = [t for t, need in zip(tensors, needed, strict=True) if need and t is not None]
        y = plain(form, x, parameters)
        found = iter(
            torch.autograd.grad(y, wanted, grad, create_graph=again, materialize_grads=True)
        )
    return [
        next(found) if need and t is not None else None
        for t, need in zip(tensors, needed, strict=True)
    ]


@lru_cache
def serving(device: str) -> str:
    """Find what serves a device, and say so once."""
    found = "torch"
    if device == "cpu":
        found = _cpu.name()
    elif device == "cuda":
        from dynorm.kernels import _triton

        found = "triton" if _triton.available() else "torch"
    if (device, found) == ("cpu", "torch"):
        _log.warning(
            "the CPU kernels are not there, so plain torch computes the point-wise layers, several "
            "times slower: "
            "install g++, then run python -m dynorm.kernels._build"
        )
    elif device in ("cpu", "cuda"):
        _log.info("point-wise layers on %s: %s", device, found)
    return found
