"""A layer's call by a fused kernel, which knows no witness."""

import torch
from torch import Tensor

from dynorm import kernels
from dynorm.layers.module import PointwiseModule


def by_kernel(layer: PointwiseModule, x: Tensor) -> Tensor | None:
    """Return a layer's function of x by a kernel, or None if only the definition serves."""
    parameters, log_gain = layer.kernel_parameters()
    if log_gain is not None:
        return None
    is_last = layer.dim in (-1, x.ndim - 1)
    last = x if is_last else x.movedim(layer.dim, -1)
    # A kernel needs the channels side by side in memory, and reads x in the order of its other axes.
    is_laid = last.is_contiguous() or last.stride(-1) == 1
    laid = last if is_laid else last.contiguous()
    y = kernels.pointwise(layer.form(), laid, parameters)
    if y is None:
        return None
    if not is_laid:
        y = torch.empty_like(last).copy_(y)
    return y if is_last else y.movedim(-1, layer.dim)
