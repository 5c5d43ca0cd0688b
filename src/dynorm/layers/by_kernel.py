"""A layer's call by a fused kernel, which knows one number per token and no witness."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dynorm import functional, kernels
from dynorm.arguments import upcast
from dynorm.layers.module import PointwiseModule


def by_kernel(
    layer: PointwiseModule, x: Tensor, residual: Tensor | None = None
) -> Sequence[Tensor] | None:
    """Return a layer's function of x, or of ``x + residual`` and that sum, by a kernel.

    A residual has the shape and dtype of x. None if only the definition serves.
    """
    is_last = layer.dim == -1 or layer.dim == x.ndim - 1
    if not is_last:
        x = x.movedim(layer.dim, -1)
        residual = None if residual is None else residual.movedim(layer.dim, -1)
    if not x.is_contiguous():
        if not (layer.keep_order and is_last):
            x = x.contiguous()
        elif x.stride(-1) != 1 or layer.witness_channels:
            return None
        else:
            # Dense in the same order, whatever it was.
            x = x.clone()
    # Plain tuples, and parameters from the dictionary of nn.Module: a kernel is done in a few
    # microseconds, and attributes and named tuples take as long.
    form = (layer.kernel, layer.logarithmic, layer.scale)
    stored: Any = layer._parameters
    if layer._modules:
        # A parametrization keeps a parameter elsewhere.
        stored = {name: getattr(layer, name, None) for name in layer.numbers}
    *parameters, log_gain = map(stored.get, layer.numbers)
    if layer.weight_offset:
        parameters[3] = layer.factor()
    if log_gain is None:
        results = kernels.pointwise(form, x, residual, parameters)
    elif residual is None:
        results = _with_witnesses(layer, x, form, parameters)
    else:
        return None
    if is_last or results is None:
        return results
    return [result.movedim(-1, layer.dim) for result in results]


def _with_witnesses(
    layer: PointwiseModule, x: Tensor, form: Sequence[Any], parameters: Sequence[Tensor | None]
) -> Sequence[Tensor] | None:
    """Return y of x with its channels last, by a kernel that takes one number per token.

    It adds ``T = sum_k gain_k u_k^2`` to the beta of each token. A witness of DyISRU is not in its
    own sum, so its channel is computed by the definition and written over.
    """
    # A line has no bound, and where tokens grow its constant, the definition clamps x.
    if kernels.traced(x) or layer.kernel == kernels.FunctionCode.LINEAR:
        return None
    index, gain = layer.witnesses_and_gains()
    center = _chosen(layer.center, index)
    shown = x.index_select(-1, index)
    u = upcast(shown)
    if center is not None:
        u = u - center
    # So far from the largest number that a sum of 16 squares with large gains stays finite.
    limit = torch.finfo(u.dtype).max ** 0.5 / 2**14
    total = (u.clamp(-limit, limit).square() * gain).sum(-1)
    results = kernels.pointwise(form, x, None, parameters, total)
    if results is None or layer.kernel != kernels.FunctionCode.DYISRU:
        return results
    beta = layer.constant()
    columns = functional.dyisru_general(
        shown,
        beta if beta.numel() == 1 else beta.index_select(0, index),
        center,
        _chosen(layer.factor(), index),
        _chosen(layer.bias, index),
        scale=layer.scale,
        witnesses=torch.arange(shown.shape[-1], device=x.device),
        gain=gain,
    )
    return [results[0].index_copy_(-1, index, columns)]


def _chosen(parameter: Tensor | None, witnesses: Tensor) -> Tensor | None:
    """Return the part of a parameter that belongs to the witnesses."""
    if parameter is None or parameter.numel() == 1:
        return parameter
    return parameter.index_select(0, witnesses)
