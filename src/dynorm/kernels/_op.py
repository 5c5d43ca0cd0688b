"""The op ``dynorm::pointwise``: the kernels of a layer as one operator of torch, with its gradients.

``y = weight * scale * f(x + residual) + bias``, with f by its :class:`FunctionCode`. The
layers call :func:`pointwise`. In eager mode that goes straight to the kernel, because a trip through
torch's dispatcher takes longer than the arithmetic of a small input. Training on a CPU under
torch.compile calls the op; on a GPU it calls only the op of the gradients, and only if x is large.
Everything else that is compiled or watches operations sees the layer's definition, which Inductor
fuses. Second derivatives are always those of the definition in ``dynorm.functional``.
"""

import logging
import os
from collections.abc import Sequence
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor, is_legacy_batchedtensor
from torch.autograd import forward_ad

from dynorm.arguments import is_exporting, watched_eagerly
from dynorm.errors import ArgumentError
from dynorm.kernels import _cpu
from dynorm.kernels._form import (
    FORM,
    NAMESPACE,
    PLAIN_TYPES,
    TENSORS,
    Fields,
    Form,
    Numbers,
    UnfitError,
    require_dyisru,
)
from dynorm.kernels._traced import definition

ENABLED = os.environ.get("DYNORM_KERNELS", "1") != "0"
# From so many elements on a model keeps a GPU so busy that the host has the time to call kernels from
# Python, and the definition's gradients take the GPU longer.
_LARGE = 1 << 24
_log = logging.getLogger("dynorm")

# T, one number per token, is added to DyISRU's beta.
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
backward_op = getattr(torch.ops, NAMESPACE).pointwise_backward.default


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
        known = torch.device(device)
    # A TypeError if the value is not a device at all.
    except (RuntimeError, TypeError) as error:
        raise ArgumentError(
            f"device must be one that torch knows, as 'cpu' or 'cuda', got {device!r}"
        ) from error
    kernels = _kernels_of(known) if ENABLED else None
    if kernels is None:
        return "torch"
    return _cpu.name() if kernels is _cpu else "triton"


def pointwise(
    form: Fields,
    x: Tensor,
    residual: Tensor | None,
    parameters: Numbers,
    token_constant: Tensor | None = None,
) -> Sequence[Tensor] | None:
    """Return y, and ``x + residual`` if there is a residual; None if only the definition can serve.

    y has the shape, dtype and memory order of x. The channels of x come last, also in memory. A
    residual has its shape and dtype. An x on another device than its parameters is an ArgumentError.

    Args:
        form: the fields of :class:`Form`.
        x: the input.
        residual: added to it first.
        parameters: the fields of :class:`Parameters`.
        token_constant: one number T per token, which is added to DyISRU's beta; in float32 or
            float64 and in the order of x in memory.
    """
    if token_constant is not None:
        require_dyisru(form[0])
    # Integers have the definition, so that it raises the error.
    if not (ENABLED and x.is_floating_point() and _has_kernels(x.device)):
        return None
    others = (residual, *parameters, token_constant)
    is_trained = torch.is_grad_enabled() and wants_gradient(x, *others)
    results: Sequence[Tensor] | None = None
    if torch.compiler.is_compiling():
        # The transforms of torch.func cannot look into the op.
        looks_inside = is_exporting() or torch._C._are_functorch_transforms_active()
        are_plain = all(t is None or type(t) in PLAIN_TYPES for t in (x, *others))
        if is_trained and are_plain and not looks_inside and trains_by_op(x):
            results = _op(x, *others, *form)
    elif _is_plain(x, *others):
        if is_trained:
            results = _record(False, form, x, *others)
        else:
            results = _by_kernel(form, x, residual, parameters, token_constant)
    return results


def trains_by_op(x: Tensor) -> bool:
    """Return whether compiled training takes the gradients by x from the kernels."""
    if not (ENABLED and _has_kernels(x.device)):
        return False
    if not is_on_gpu(x):
        return True
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    # One graph serves all sizes that are not known.
    return statically_known_true(x.numel() >= _LARGE)


def is_on_gpu(x: Tensor) -> bool:
    """Return whether x is on a GPU, which runs behind the host."""
    return x.device.type != "cpu"


def traced(*tensors: Tensor | None) -> bool:
    """Return whether something watches operations one by one, and so must see the definition.

    That is torch.compile, torch.export and torch.jit.trace; vmap, grad and the other transforms of
    torch.func; forward-mode AD; modes, such as FakeTensorMode; and subclasses of Tensor, such as
    DTensor.
    """
    return torch.compiler.is_compiling() or not _is_plain(*tensors)


def _is_plain(*tensors: Tensor | None) -> bool:
    """Return whether nothing watches these tensors in eager mode."""
    if watched_eagerly() or forward_ad._current_level >= 0:
        return False
    for tensor in tensors:
        if tensor is None:
            continue
        # A tensor that has left a transform of torch.func is still wrapped.
        if type(tensor) not in PLAIN_TYPES or is_functorch_wrapped_tensor(tensor):
            return False
        # Zeros of autograd have no memory, and neither have the tensors of is_grads_batched.
        if tensor._is_zerotensor() or is_legacy_batchedtensor(tensor):
            return False
    return True


def wants_gradient(*tensors: Tensor | None) -> bool:
    """Return whether any of these tensors requires a gradient."""
    for tensor in tensors:  # noqa: SIM110 (a generator takes twice its time)
        if tensor is not None and tensor.requires_grad:
            return True
    return False


def _has_kernels(device: torch.device) -> bool:
    return _kernels_of(device) is not None


# As torch.compiler.assume_constant_result does, which imports the whole compiler.
_has_kernels._dynamo_marked_constant = True  # type: ignore[attr-defined]


@lru_cache
def _kernels_of(device: torch.device) -> ModuleType | None:
    """Return the module with the kernels for a device, and log it once.

    Triton is imported when needed.
    """
    if device.type == "cpu" and _cpu.name() != "torch":
        return _cpu
    if device.type == "cuda":
        from dynorm.kernels import _triton

        if _triton.available():
            _log.info("point-wise layers on %s: triton", device)
            return _triton
    return None


class _Pointwise(torch.autograd.Function):
    """The kernels with their gradients, called directly or ``by_op``.

    Only x (or the sum), the parameters and the tokens' numbers are saved. The function is cheap,
    memory is not: computing f again takes less time than reading a saved result back.
    """

    @staticmethod
    def forward(
        ctx: Any, by_op: bool, form: Fields, x: Tensor, residual: Tensor | None, *others: Any
    ) -> tuple[Tensor, ...]:
        ctx.by_op = by_op
        ctx.form = form
        results = None
        if not by_op:
            *parameters, token_constant = others
            results = _by_kernel(form, x, residual, parameters, token_constant)
        elif not is_on_gpu(x):
            with torch._C._AutoDispatchBelowAutograd():
                results = _op(x, residual, *others, *form)
        if results is None:
            # On a GPU Inductor fuses it with the sum before it.
            results = _defined(x, residual, *others, *form)
        ctx.save_for_backward(x if residual is None else results[1], *others)
        ctx.set_materialize_grads(False)
        if residual is not None and not any(ctx.needs_input_grad[2:4]):
            ctx.mark_non_differentiable(results[1])
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_sum: Tensor | None = None) -> Any:
        tensors = ctx.saved_tensors
        _, _, need_x, need_residual, *need_others = ctx.needs_input_grad
        needed = [need_x or need_residual, *need_others]
        if grad is None:
            grad = torch.zeros_like(tensors[0])
        # A second derivative is that of the definition.
        again = torch.is_grad_enabled()
        found = None
        if not (again or ctx.by_op or traced(grad, grad_sum)):
            found = _gradients_by_kernel(ctx.form, grad, grad_sum, tensors, needed)
        if found is None:
            gradients = backward_op if ctx.by_op and not again else plain_gradients
            in_order = iter(gradients(grad, grad_sum, *tensors, *ctx.form, needed))
            found = [next(in_order) if need else None for need in needed]
        of_x, *of_others = found
        of_residual = of_x if need_residual else None
        return None, None, of_x if need_x else None, of_residual, *of_others


# torch gives this method no types.
_record_op: Any = _Pointwise.apply
# Without its search for transforms and for tensors that have left one, of which there are none.
_record: Any = super(torch.autograd.Function, _Pointwise).apply


def _by_kernel(
    form: Fields,
    x: Tensor,
    residual: Tensor | None,
    parameters: Numbers,
    token_constant: Tensor | None,
) -> list[Tensor] | None:
    """Return the results of the op; None if no kernel takes these tensors."""
    total = None
    if residual is not None:
        total = torch.empty_like(x)
        residual = _laid_like(x, residual)
    kernels = _kernels_of(x.device)
    if kernels is not None:
        try:
            y = kernels.forward(form, x, parameters, token_constant, residual, total)
        except UnfitError:
            require_one_device(x, *parameters)
        else:
            return [y] if total is None else [y, total]
    return None


def _laid_like(x: Tensor, other: Tensor) -> Tensor:
    """Return a tensor in the memory order of x, with its own sign and not that of a view."""
    if other.stride() == x.stride() and not other.is_neg():
        return other
    return torch.empty_like(x).copy_(other)


def require_one_device(x: Tensor, *parameters: Tensor | None) -> None:
    """Refuse parameters on another device than x."""
    for parameter in parameters:
        if parameter is not None and parameter.device != x.device:
            raise ArgumentError(
                f"x and the parameters must be on one device, got {x.device} and "
                f"{parameter.device}: move one"
            )


def _values(*arguments: Any) -> list[Tensor]:
    """Return the results of the op, by a kernel if one serves."""
    x, residual, *parameters, token_constant, function, logarithmic, scale = arguments
    form = function, logarithmic, scale
    results = _by_kernel(form, x, residual, parameters, token_constant)
    return _defined(*arguments) if results is None else results


def _defined(*arguments: Any) -> list[Tensor]:
    """Return the results of the op by the definition."""
    x, residual, *parameters, token_constant, function, logarithmic, scale = arguments
    form = Form(function, logarithmic, scale)
    total = x if residual is None else x + residual
    defined = form.definition(total, parameters, token_constant)
    y = torch.empty_like(total).copy_(defined)
    return [y] if residual is None else [y, total]


def _gradients_by_kernel(
    form: Fields,
    grad: Tensor,
    grad_sum: Tensor | None,
    tensors: Sequence[Any],
    needed: Sequence[bool],
) -> list[Tensor | None] | None:
    """Return the gradients of x, of the parameters and of the tokens' numbers, None for what is not needed.

    None if no kernel takes these tensors.
    """
    x, *parameters, token_constant = tensors
    kernels = _kernels_of(x.device)
    if kernels is None:
        return None
    grad = _laid_like(x, grad)
    if grad_sum is not None:
        grad_sum = _laid_like(x, grad_sum)
    found: list[Tensor | None]
    try:
        found = kernels.gradients(form, grad, x, parameters, token_constant, needed, grad_sum)
    except UnfitError:
        return None
    return found


def _gradients(*arguments: Any) -> list[Tensor]:
    """Return the results of the op's backward pass, by a kernel if one serves.

    They are the gradients that are needed, of x, of the parameters and of the tokens' numbers.
    """
    grad, grad_sum, *tensors, function, logarithmic, scale, needed = arguments
    form = function, logarithmic, scale
    found = _gradients_by_kernel(form, grad, grad_sum, tensors, needed)
    if found is None:
        return plain_gradients(*arguments)
    return [gradient for gradient in found if gradient is not None]


def plain_gradients(*arguments: Any) -> list[Tensor]:
    """Return the same by the definition, which can be differentiated again."""
    grad, grad_sum, *tensors, function, logarithmic, scale, needed = arguments
    form = Form(function, logarithmic, scale)
    again = torch.is_grad_enabled()
    inputs: list[Tensor] = []
    with torch.enable_grad():
        for place, tensor in enumerate(tensors):
            if needed[place]:
                # A view, so that a gradient is that of the call alone: T may itself depend on x.
                tensors[place] = tensor.view_as(tensor)
                # Compiled code does not record anything.
                if not tensor.requires_grad:
                    tensors[place].requires_grad_()
                inputs.append(tensors[place])
        x, *parameters, token_constant = tensors
        # The operator, which has no numbers of tokens, lets Inductor sum a constant's gradient by rows.
        if token_constant is None:
            y = definition(x, *parameters, *form)
        else:
            y = form.definition(x, parameters, token_constant)
        found = torch.autograd.grad(y, inputs, grad, create_graph=again, materialize_grads=True)
    gradients = list(found)
    if grad_sum is not None and needed[0]:
        gradients[0] = gradients[0] + grad_sum
    return gradients


def _recorded(*arguments: Any) -> list[Tensor]:
    """Return the results of the op, which autograd follows."""
    *tensors, function, logarithmic, scale = arguments
    form = function, logarithmic, scale
    return list(_record_op(True, form, *tensors))


def _fake_values(*arguments: Any) -> list[Tensor]:
    """Return empty results, by which compilers know their shapes."""
    x, residual, *_ = arguments
    return [torch.empty_like(x) for given in (x, residual) if given is not None]


def _fake_gradients(*arguments: Any) -> list[Tensor]:
    """Return empty gradients."""
    _, _, *tensors, _, _, _, needed = arguments
    return [torch.empty_like(t) for t, need in zip(tensors, needed, strict=True) if need]


for _device in ("CPU", "CUDA"):
    _library.impl("pointwise", _values, _device)
    _library.impl("pointwise_backward", _gradients, _device)
_library.impl("pointwise", _recorded, "Autograd")
torch.library.register_fake(f"{NAMESPACE}::pointwise", _fake_values, lib=_library)
torch.library.register_fake(f"{NAMESPACE}::pointwise_backward", _fake_gradients, lib=_library)
