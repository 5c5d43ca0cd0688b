"""The op ``dynorm::product``: a matrix product with its residual and a layer in one kernel, with its gradients.

Forward is one kernel on a GPU, else a product, a sum and the layer. Backward is that of the layer,
then that of the product.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F  # noqa: N812

from dynorm.kernels import _triton
from dynorm.kernels._form import FORM, NAMESPACE, TENSORS
from dynorm.kernels._op import backward_op, plain_gradients, trains_by_op, wants_gradient
from dynorm.kernels._traced import definition

_library: Any = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]
# The total, (x @ weight.T + product_bias) * factor + residual, empty unless it is kept; then y.
_library.define(
    "product(Tensor x, Tensor weight_of_product, bool transposed, Tensor? product_bias, "
    f"Tensor? factor, Tensor? residual, bool keep_total, {TENSORS}, {FORM}) -> (Tensor, Tensor)"
)
product_op = getattr(torch.ops, NAMESPACE).product.default


class _Product(torch.autograd.Function):
    """The op with its gradients. The total is saved: the slope of the layer is computed from it."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        x, weight, transposed, product_bias, factor, residual, _, *layer = arguments
        with torch._C._AutoDispatchBelowAutograd():
            total, y = product_op(
                x, weight, transposed, product_bias, factor, residual, True, *layer
            )
        *parameters, function, logarithmic, scale = layer
        ctx.transposed = transposed
        ctx.form = function, logarithmic, scale
        ctx.save_for_backward(x, weight, product_bias, factor, total, *parameters)
        ctx.set_materialize_grads(False)
        return total, y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: Tensor | None, grad: Tensor | None) -> Any:
        x, weight, product_bias, factor, total, *parameters = ctx.saved_tensors
        need_x, need_weight, _, need_bias, need_factor, need_residual, _, *need_layer = (
            ctx.needs_input_grad
        )
        *need_parameters, _, _, _ = need_layer
        if grad is None:
            grad = torch.zeros_like(total)
        # Of the total, of the parameters, and of numbers of tokens, which there are none of.
        needed = [True, *need_parameters, False]
        gradients = backward_op if trains_by_op(total) else plain_gradients
        found = iter(gradients(grad, grad_total, total, *parameters, None, *ctx.form, needed))
        of_total = next(found)
        of_layer = [next(found) if need else None for need in need_parameters]

        rows = of_total.reshape(-1, total.shape[-1])
        inputs = x.reshape(-1, x.shape[-1])
        by_channel = weight.t() if ctx.transposed else weight
        of_factor = None
        if need_factor:
            of_factor = (rows * F.linear(inputs, by_channel, product_bias)).sum(0)
        if factor is not None:
            rows = rows * factor
        of_x = (rows @ by_channel).view_as(x) if need_x else None
        of_bias = rows.sum(0) if need_bias else None
        of_weight = None
        if need_weight:
            of_weight = inputs.t() @ rows if ctx.transposed else rows.t() @ inputs
        of_residual = of_total if need_residual else None
        of_product = (of_x, of_weight, None, of_bias, of_factor, of_residual, None)
        return *of_product, *of_layer, None, None, None


# torch gives this method no types.
_record: Any = _Product.apply


def _with_gradients(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Return the results of the op, and record how to differentiate them if that is wanted."""
    results: tuple[Tensor, Tensor]
    tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
    if torch.is_grad_enabled() and wants_gradient(*tensors):
        results = _record(*arguments)
    else:
        with torch._C._AutoDispatchBelowAutograd():
            results = product_op(*arguments)
    return results


def _compute(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Return the results of the op: by one kernel on a GPU, else by a product, a sum and the layer."""
    x, weight, transposed, product_bias, factor, residual, keep_total, *layer = arguments
    total, y = _empty(*arguments)
    if x.is_cuda and _triton.available():
        from dynorm.kernels import _triton_product

        x = x.contiguous()
        pointers = []
        for tensor in (product_bias, factor, residual):
            pointers.append(None if tensor is None else tensor.contiguous())
        if _triton_product.can_multiply(x, weight, pointers[-1]):
            kept = total if keep_total else None
            *parameters, function, logarithmic, scale = layer
            form = function, logarithmic, scale
            _triton_product.product(x, weight, transposed, pointers, parameters, form, kept, y)
            return total, y
    result = F.linear(x, weight.t() if transposed else weight, product_bias)
    if factor is not None:
        result = result * factor
    if residual is not None:
        result = result.view(residual.shape) + residual
    if keep_total:
        total.copy_(result)
    return total, y.copy_(definition(result, *layer))


def _empty(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Return empty results, by which compilers know their shapes."""
    x, weight, transposed, _, _, residual, keep_total, *_ = arguments
    shape = (*x.shape[:-1], weight.shape[int(transposed)]) if residual is None else residual.shape
    return x.new_empty(shape if keep_total else 0), x.new_empty(shape)


for _device in ("CPU", "CUDA"):
    _library.impl("product", _compute, _device)
_library.impl("product", _with_gradients, "Autograd")
torch.library.register_fake(f"{NAMESPACE}::product", _empty, lib=_library)
