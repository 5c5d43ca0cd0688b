"""A layer's call by a fused kernel, which knows one number per token and no witness."""

from typing import Any

import torch
from torch import Tensor

from dynorm import functional, kernels
from dynorm.arguments import upcast
from dynorm.layers.module import PointwiseModule


def by_kernel(layer: PointwiseModule, x: Tensor) -> Tensor | None:
    """Return a layer's function of x by a kernel; None if only the definition serves."""
    is_last = layer.dim in (-1, x.ndim - 1)
    moved = x if is_last else x.movedim(layer.dim, -1)
    parameters = _parameters(layer)
    if layer.witness_channels:
        y = _with_witnesses(layer, moved, parameters)
    else:
        y = kernels.pointwise(layer.kernel, moved, parameters, layer.scale, layer.logarithmic)
    if y is None or is_last:
        return y
    return y.movedim(-1, layer.dim)


def _parameters(layer: PointwiseModule) -> kernels.Parameters:
    """Return the parameters in the order of the kernels.

    They are read from the dictionary of nn.Module, at a tenth of the time of its attributes: this
    runs at every call, and a kernel is done in a few microseconds.
    """
    names = (layer.constants[0], "shift", "center", "weight", "bias")
    stored: Any = layer._parameters
    if layer._modules:
        # A parametrization keeps a parameter elsewhere.
        stored = {name: getattr(layer, name, None) for name in names}
    constant, shift, center, weight, bias = [stored.get(name) for name in names]
    if layer.weight_offset:
        weight = layer.factor()
    return kernels.Parameters(constant, shift, center, weight, bias)


def _with_witnesses(
    layer: PointwiseModule, x: Tensor, parameters: kernels.Parameters
) -> Tensor | None:
    """Return y of x with its channels last, by a kernel that takes one number per token.

    It adds ``T = sum_k gain_k u_k^2`` to the beta of each token. A witness of DyISRU is not in its
    own sum, so its channel is computed by the definition and written over.
    """
    if kernels.traced(x):
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
    y = kernels.pointwise(
        layer.kernel, x, parameters, layer.scale, layer.logarithmic, token_constant=total
    )
    if y is None or layer.kernel != kernels.FunctionCode.DYISRU:
        return y
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
    return y.index_copy_(-1, index, columns)


def _chosen(parameter: Tensor | None, witnesses: Tensor) -> Tensor | None:
    """Return the part of a parameter that belongs to the witnesses."""
    if parameter is None or parameter.numel() == 1:
        return parameter
    return parameter.index_select(0, witnesses)
