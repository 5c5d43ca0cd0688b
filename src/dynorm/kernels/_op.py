"""The op ``dynorm::pointwise``: the kernels of a layer as one operator of torch, with its gradients.

``y = weight * scale * f(x + residual - center) + bias``, with f by its :class:`FunctionCode`. The
layers call :func:`pointwise`. In eager mode that goes straight to the kernel, because a trip through
torch's dispatcher takes longer than the arithmetic of a small input. Training under torch.compile
calls the op. Everything else that watches operations sees the layer's definition, and so does
compiled inference, so that Inductor can fuse it. Second derivatives are those of the definition in
``dynorm.functional`` in every case.
"""

import logging
import os
from collections.abc import Sequence
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from dynorm.arguments import watched_eagerly
from dynorm.errors import ArgumentError
from dynorm.kernels import _cpu
from dynorm.kernels._form import FORM, NAMESPACE, TENSORS, Form, Parameters

ENABLED = os.environ.get("DYNORM_KERNELS", "1") != "0"
_log = logging.getLogger("dynorm")
_PLAIN_TYPES = (Tensor, Parameter)

# T, one number per token, makes the constant ``constant + T`` for DyISRU, and ``constant / sqrt(1 +
# ratio constant^2 T)`` for the functions of a slope.
_PARAMETERS = f"{TENSORS}, Tensor? token_constant, {FORM}"
_library: Any = torch.library.Library(NAMESPACE, "DEF")  # type: ignore[no-untyped-call]
# y, of the shape, dtype and memory order of x; then the sum, if there is a residual.
_library.define(f"pointwise(Tensor x, Tensor? residual, {_PARAMETERS}) -> Tensor[]")
# The gradients that are needed, of x (and residual), of the parameters and of the tokens' numbers.
_library.define(
    f"pointwise_backward(Tensor grad, Tensor? grad_sum, Tensor x, {_PARAMETERS}, bool[] needed) "
    "-> Tensor[]"
)
_op = getattr(torch.ops, NAMESPACE).pointwise.default
_op_backward = getattr(torch.ops, NAMESPACE).pointwise_backward.default


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
    kernels = _kernels_of(kind) if ENABLED else None
    if kernels is None:
        return "torch"
    return _cpu.name() if kernels is _cpu else "triton"


def pointwise(
    form: Sequence[Any],
    x: Tensor,
    residual: Tensor | None,
    parameters: Sequence[Tensor | None],
    token_constant: Tensor | None = None,
) -> Sequence[Tensor] | None:
    """Return y, and ``x + residual`` if there is a residual; None if only the definition can serve.

    y has the shape, dtype and memory order of x. The channels of x come last, also in memory. A
    residual has its shape and dtype. The definition serves under a tracer, a transform or a mode,
    for subclasses of Tensor, for dtypes and layouts without a kernel, and for invalid input, so
    that it raises the error. An x on another device than its parameters is an ArgumentError.

    Args:
        form: the fields of :class:`Form`.
        x: the input.
        residual: added to it first.
        parameters: the fields of :class:`Parameters`.
        token_constant: one number T per token, in float32 or float64 and in the order of x in
            memory.
    """
    others = (residual, *parameters, token_constant)
    if not may_serve(x, *others):
        return None
    if torch.is_grad_enabled() and wants_gradient(x, *others):
        return _recorded(form, x, *others)
    return _by_kernel(form, x, residual, parameters, token_constant)


def may_serve(x: Tensor, *others: Tensor | None) -> bool:
    """Return whether a kernel may serve a call with these tensors: nothing watches, or it trains."""
    if not torch.compiler.is_compiling():
        return ENABLED and _is_plain(x)
    is_trained = torch.is_grad_enabled() and wants_gradient(x, *others)
    return ENABLED and is_trained and not torch.compiler.is_exporting()


def traced(*tensors: Tensor) -> bool:
    """Return whether something watches operations one by one, and so must see the definition.

    That is torch.compile, torch.export and torch.jit.trace; vmap, grad and the other transforms of
    torch.func; forward-mode AD; modes, such as FakeTensorMode; and subclasses of Tensor, such as
    DTensor.
    """
    return torch.compiler.is_compiling() or not all(map(_is_plain, tensors))


def _is_plain(tensor: Tensor) -> bool:
    """Return whether nothing watches this tensor in eager mode."""
    if watched_eagerly() or forward_ad._current_level >= 0:
        return False
    # Zeros of autograd have no memory.
    return type(tensor) in _PLAIN_TYPES and not tensor._is_zerotensor()


def wants_gradient(*tensors: Tensor | None) -> bool:
    """Return whether any of these tensors requires a gradient."""
    for tensor in tensors:  # noqa: SIM110 (a generator takes twice its time)
        if tensor is not None and tensor.requires_grad:
            return True
    return False


def _recorded(form: Sequence[Any], x: Tensor, *others: Tensor | None) -> Sequence[Tensor] | None:
    """Return the results of a call that autograd records; None if only the definition can serve."""
    if not x.is_floating_point() or not _has_kernels(x.device.type):
        return None
    for tensor in (x, *others):
        if tensor is not None and type(tensor) not in _PLAIN_TYPES:
            return None
    results: Sequence[Tensor]
    if torch.compiler.is_compiling():
        results = _op(x, *others, *form)
    else:
        results = _record(False, x, *others, *form)
    return results


def _has_kernels(device: str) -> bool:
    return _kernels_of(device) is not None


# As torch.compiler.assume_constant_result does, which imports the whole compiler.
_has_kernels._dynamo_marked_constant = True  # type: ignore[attr-defined]


@lru_cache
def _kernels_of(device: str) -> ModuleType | None:
    """Return the module with the kernels for a type of device, and log it once.

    Triton is imported when needed.
    """
    if device == "cpu" and _cpu.name() != "torch":
        return _cpu
    if device == "cuda":
        from dynorm.kernels import _triton

        if _triton.available():
            _log.info("point-wise layers on cuda: triton")
            return _triton
    return None


class _Pointwise(torch.autograd.Function):
    """The kernels with their gradients; its arguments are those of the op, behind ``by_op``.

    Only x (or the sum), the parameters and the tokens' numbers are saved. The function is cheap,
    memory is not: computing f again takes less time than reading a saved result back.
    """

    @staticmethod
    def forward(ctx: Any, by_op: bool, *arguments: Any) -> tuple[Tensor, ...]:
        x, residual, *others = arguments[:8]
        ctx.by_op = by_op
        ctx.form = arguments[8:]
        if by_op:
            with torch._C._AutoDispatchBelowAutograd():
                results = _op(*arguments)
        else:
            results = _values(*arguments)
        ctx.save_for_backward(x if residual is None else results[1], *others)
        ctx.set_materialize_grads(False)
        _, need_x, need_residual, *_ = ctx.needs_input_grad
        if residual is not None and not (need_x or need_residual):
            ctx.mark_non_differentiable(results[1])
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_sum: Tensor | None = None) -> Any:
        tensors = ctx.saved_tensors
        x = tensors[0]
        # Of `by_op`, x, the residual and the others.
        _, need_x, need_residual, *need_others = ctx.needs_input_grad[:9]
        needed = [need_x or need_residual, *need_others]
        if grad is None:
            grad = torch.zeros_like(x)
        arguments = (grad, grad_sum, *tensors, *ctx.form, needed)
        # A second derivative is wanted, or something watches; is_grads_batched brings tensors
        # without memory.
        is_batched = is_legacy_batchedtensor(grad) or (
            grad_sum is not None and is_legacy_batchedtensor(grad_sum)
        )
        if torch.is_grad_enabled() or is_batched or (traced(grad, x) and not ctx.by_op):
            found = _plain_gradients(*arguments)
        elif ctx.by_op:
            found = _op_backward(*arguments)
        else:
            found = _gradients(*arguments)
        in_order = iter(found)
        of_x, *of_others = [next(in_order) if need else None for need in needed]
        of_residual = of_x if need_residual else None
        return (None, of_x if need_x else None, of_residual, *of_others, None, None, None)


# torch gives this method no types.
_record: Any = _Pointwise.apply


def _by_kernel(
    form: Sequence[Any],
    x: Tensor,
    residual: Tensor | None,
    parameters: Sequence[Tensor | None],
    token_constant: Tensor | None,
) -> list[Tensor] | None:
    """Return the results of the op; None if no kernel takes these tensors."""
    if x.is_cpu:
        total = x if residual is None else x + residual
        try:
            y = _cpu.forward(form, total, parameters, token_constant)
        except _cpu.UnfitError:
            require_one_device(x, *parameters)
            return None
        return [y] if residual is None else [y, total]
    kernels = _kernels_of(x.device.type)
    named: Any = Parameters(*parameters)  # type: ignore[arg-type]
    if kernels is None or not fits(x, named, token_constant):
        require_one_device(x, *parameters)
        return None
    total = x
    given: list[Tensor | None] = [None, None]
    if residual is not None:
        total = torch.empty_like(x)
        given = [_laid_like(x, residual), total]
    y = kernels.forward(Form(*form), x, named, token_constant, None, *given)
    return [y] if residual is None else [y, total]


def _gradients_by_kernel(
    form: Form,
    grad: Tensor,
    grad_sum: Tensor | None,
    tensors: Sequence[Any],
    needed: Sequence[bool],
) -> list[Tensor | None] | None:
    """Return the gradients of x, the parameters and the tokens' numbers; None as above."""
    x, *parameters, token_constant = tensors
    call = (x, Parameters(*parameters), token_constant)
    # The kernels read x and its gradients in one order; a view may have another sign.
    grad = _laid_like(x, grad)
    if grad_sum is not None:
        grad_sum = _laid_like(x, grad_sum)
    if x.is_cpu:
        try:
            return _cpu.gradients(form, grad, *call, needed, grad_sum)
        except _cpu.UnfitError:
            return None
    kernels = _kernels_of(x.device.type)
    if kernels is None or not fits(*call):
        return None
    found: list[Tensor | None] = kernels.gradients(form, grad, *call, needed, grad_sum)
    return found


def _laid_like(x: Tensor, grad: Tensor) -> Tensor:
    """Return a gradient in the memory order of x."""
    if grad.stride() == x.stride() and not grad.is_neg():
        return grad
    return torch.empty_like(x).copy_(grad)


def require_one_device(x: Tensor, *parameters: Tensor | None) -> None:
    """Refuse parameters on another device than x."""
    for parameter in parameters:
        if parameter is not None and parameter.device != x.device:
            raise ArgumentError(
                f"x and the parameters must be on one device, got {x.device} and "
                f"{parameter.device}: move one"
            )


def fits(x: Tensor, parameters: Parameters, token_constant: Tensor | None) -> bool:
    """Return whether the Triton kernels take these tensors; the C++ kernels say so themselves."""
    tensors = [tensor for tensor in (x, *parameters) if tensor is not None]
    for tensor in tensors:
        is_plain = type(tensor) in _PLAIN_TYPES and tensor.layout is torch.strided
        if not is_plain or tensor.dtype not in _cpu.DTYPES or tensor.is_neg():
            return False
    if not x.ndim or not x.shape[-1] or not _is_dense(x):
        return False
    each_channel = x.shape[-1:]
    for name, parameter in parameters._asdict().items():
        if parameter is None:
            continue
        one_in_all = parameter.shape == (1,) and name not in ("weight", "bias")
        if not one_in_all and (parameter.shape != each_channel or not parameter.is_contiguous()):
            return False
        if parameter.device != x.device:
            return False
    if token_constant is None:
        return True
    strides = tuple(stride // x.shape[-1] for stride in x.stride()[:-1])
    return (
        type(token_constant) is Tensor
        and token_constant.dtype in (torch.float32, torch.float64)
        and token_constant.shape == x.shape[:-1]
        and token_constant.stride() == strides
        and token_constant.device == x.device
    )


def _is_dense(x: Tensor) -> bool:
    """Return whether x fills its memory in some order of its axes, with the channels innermost."""
    if x.is_contiguous():
        return True
    return x.stride(-1) == 1 and torch.empty_like(x, device="meta").stride() == x.stride()


def _values(*arguments: Any) -> list[Tensor]:
    """Return the results of the op, by a kernel if one serves."""
    x, residual, *numbers, token_constant = arguments[:8]
    form, parameters = Form(*arguments[8:]), Parameters(*numbers)
    results = _by_kernel(form, x, residual, parameters, token_constant)
    if results is not None:
        return results
    total = x if residual is None else x + residual
    y = torch.empty_like(total).copy_(form.definition(total, parameters, token_constant))
    return [y] if residual is None else [y, total]


def _gradients(*arguments: Any) -> list[Tensor]:
    """Return the results of the op's backward pass, by a kernel if one serves."""
    grad, grad_sum, *tensors = arguments[:9]
    form, needed = Form(*arguments[9:12]), arguments[12]
    found = _gradients_by_kernel(form, grad, grad_sum, tensors, needed)
    if found is None:
        leaves = [None if t is None else t.detach().requires_grad_() for t in tensors]
        return _plain_gradients(grad, grad_sum, *leaves, *arguments[9:])
    return [gradient for gradient in found if gradient is not None]


def _plain_gradients(*arguments: Any) -> list[Tensor]:
    """Return the gradients by the definition, which can be differentiated again."""
    grad, grad_sum, x, *numbers, token_constant = arguments[:9]
    form, needed = Form(*arguments[9:12]), arguments[12]
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        # Views, so that a gradient is that of the call alone: T may itself depend on x.
        tensors: list[Any] = []
        for tensor in (x, *numbers, token_constant):
            tensors.append(None if tensor is None else tensor.view_as(tensor))
        inputs = [tensor for tensor, need in zip(tensors, needed, strict=True) if need]
        y = form.definition(tensors[0], Parameters(*tensors[1:6]), tensors[6])
        found = torch.autograd.grad(y, inputs, grad, create_graph=again, materialize_grads=True)
    gradients = list(found)
    if grad_sum is not None and needed[0]:
        gradients[0] = gradients[0] + grad_sum
    return gradients


def _fake_values(*arguments: Any) -> list[Tensor]:
    """Return empty results, by which compilers know their shapes."""
    x, residual = arguments[:2]
    return [torch.empty_like(x) for given in (x, residual) if given is not None]


def _fake_gradients(*arguments: Any) -> list[Tensor]:
    """Return empty gradients."""
    tensors, needed = arguments[2:9], arguments[12]
    return [torch.empty_like(t) for t, need in zip(tensors, needed, strict=True) if need]


for _device in ("CPU", "CUDA"):
    _library.impl("pointwise", _values, _device)
    _library.impl("pointwise_backward", _gradients, _device)
_library.impl("pointwise", lambda *arguments: list(_record(True, *arguments)), "Autograd")
torch.library.register_fake(f"{NAMESPACE}::pointwise", _fake_values, lib=_library)
torch.library.register_fake(f"{NAMESPACE}::pointwise_backward", _fake_gradients, lib=_library)
