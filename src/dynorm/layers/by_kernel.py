"""How a layer is called by a fused kernel, where one serves."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.modules.module import _has_any_global_hook

from dynorm import kernels
from dynorm.errors import ArgumentError
from dynorm.layers.module import PointwiseModule


def call_kernel(
    layer: PointwiseModule,
    x: Tensor,
    residual: Tensor | None = None,
    token_constant: Tensor | None = None,
) -> Sequence[Tensor] | None:
    """Return a layer's function of x, or of ``x + residual`` and that sum, by a kernel.

    A residual has the shape and dtype of x; ``token_constant`` has the order of the tokens in x with
    its channels last. None if only the definition serves.
    """
    is_last = layer.dim in (-1, x.ndim - 1)
    if not is_last:
        x = x.movedim(layer.dim, -1)
        residual = None if residual is None else residual.movedim(layer.dim, -1)
    form, parameters = layer.form(), layer.kernel_parameters()
    results: Sequence[Tensor] | None
    if residual is not None:
        # The sum lies in memory as torch lays it, which is certain only here.
        if not (x.is_contiguous() and residual.is_contiguous()):
            return None
        results = kernels.pointwise(form, x, residual, parameters)
    elif x.is_contiguous() or (x.stride(-1) == 1 and token_constant is None):
        results = kernels.pointwise(form, x, None, parameters, token_constant)
    else:
        results = kernels.pointwise(form, x.contiguous(), None, parameters, token_constant)
        if results is not None:
            # In the memory order of x.
            results = [torch.empty_like(x).copy_(results[0])]
    if is_last or results is None:
        return results
    return [result.movedim(-1, layer.dim) for result in results]


def may_add(layer: PointwiseModule, x: Tensor, residual: Tensor) -> bool:
    """Return whether one kernel may add the residual, because nobody has to see the sum first."""
    if "forward" in vars(layer):
        return False
    # As torch decides whether a call needs more than forward, by a function that has no types.
    own_hooks = (
        layer._forward_pre_hooks,
        layer._forward_hooks,
        layer._backward_pre_hooks,
        layer._backward_hooks,
    )
    global_hooks: bool = _has_any_global_hook()  # type: ignore[no-untyped-call]
    if any(own_hooks) or global_hooks or not has_channels(layer, x):
        return False
    return x.dtype == residual.dtype == layer.returned_dtype(x.dtype)


def has_channels(layer: PointwiseModule, x: Tensor) -> bool:
    """Return whether x has the size of the layer at its ``dim``."""
    return -x.ndim <= layer.dim < x.ndim and x.shape[layer.dim] == layer.channels


def check_input(layer: PointwiseModule, x: object) -> None:
    """Refuse anything but a tensor with the layer's channels."""
    if not isinstance(x, Tensor):
        raise ArgumentError(
            f"x must be a tensor, got {type(x).__name__}: make the layer a leaf for a Proxy of fx"
        )
    if not has_channels(layer, x):
        raise ArgumentError(
            f"x must have {layer.channels} channels at dim {layer.dim}, got shape "
            f"{tuple(x.shape)}: pass the dim that holds the channels"
        )


def check_residual(x: Tensor, residual: Tensor) -> None:
    """Refuse a residual that is not like x."""
    if not isinstance(residual, Tensor):
        raise ArgumentError(
            f"residual must be a tensor like x, got {type(residual).__name__}: give a tensor"
        )
    if residual.shape != x.shape:
        raise ArgumentError(
            f"residual must have the shape of x, {tuple(x.shape)}, got {tuple(residual.shape)}: "
            "expand it first"
        )
