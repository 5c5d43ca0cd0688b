"""The weight and the bias of a site, read from the tensors that hold them or else from its outputs."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from dynorm.errors import ModelError
from dynorm.find.recover import NotANormError, measured_affine
from dynorm.find.tokens import Packing
from dynorm.site import NormSite
from dynorm.watch import undisturbed


def affine_of(module: nn.Module, site: NormSite) -> tuple[Tensor | None, Tensor | None]:
    """The weight and the bias that a norm applies to its normalized channels.

    A named parameter is copied as it is. 1 + w comes in float32 at least: layers that scale so add in float32,
    and rounded to bfloat16 1 + w would lose most digits of a small w; whoever wants fewer can round. What no
    tensor of the module holds, such as the 1/sqrt(C) of a division by the L2 norm, is measured.

    Args:
        module: The module at the site's path.
        site: What `find_norms` said of it.

    Returns:
        Detached copies of shape `site.normalized_shape` on the module's device, or None for what it has not.

    Raises:
        ModelError: If the site was refused, or the module is not the norm that was found.

    Example:
        >>> from dynorm.find.probe import find_norms
        >>> model = nn.Sequential(nn.LayerNorm(3, bias=False))
        >>> affine_of(model[0], find_norms(model, torch.randn(2, 3))[0])
        (tensor([1., 1., 1.]), None)
    """
    if site.refused is not None:
        raise ModelError(f"the site {site.path!r} must be a norm, but was refused: {site.refused}")
    weight = _held(module, site, site.weight_name)
    if weight is not None and site.weight_offset:
        weight = weight.to(torch.promote_types(weight.dtype, torch.float32)) + site.weight_offset
    bias = _held(module, site, site.bias_name)
    if (site.has_weight and weight is None) or (site.has_bias and bias is None):
        measured = _measured(module, site)
        weight = measured[0] if site.has_weight and weight is None else weight
        bias = measured[1] if site.has_bias and bias is None else bias
    return weight, bias


def channel_axes(site: NormSite) -> tuple[int, ...]:
    """The axes of the site's channels in its input, counted from the front.

    Example:
        >>> channel_axes(NormSite("norm", dim=-1, input_shape=(2, 5, 8)))
        (2,)
    """
    dims = site.dim if isinstance(site.dim, tuple) else (site.dim,)
    return tuple(dim % len(site.input_shape) for dim in dims)


@contextmanager
def plain_arithmetic() -> Iterator[None]:
    """No gradients, no autocast, and no warnings about the odd inputs that copies are tried with.

    Example:
        >>> with plain_arithmetic():
        ...     torch.is_grad_enabled()
        False
    """
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    before = [torch.is_autocast_enabled(device) for device in devices]
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        try:
            for device in devices:
                torch.set_autocast_enabled(device, False)
            yield
        finally:
            for device, enabled in zip(devices, before, strict=True):
                torch.set_autocast_enabled(device, enabled)


def _held(module: nn.Module, site: NormSite, name: str | None) -> Tensor | None:
    if name is None:
        return None
    tensor = {**dict(module.named_parameters()), **dict(module.named_buffers())}.get(name)
    if tensor is None:
        raise ModelError(f"the module at {site.path!r} must hold {name!r}, as when it was found, but does not")
    if tensor.numel() != math.prod(site.normalized_shape):
        raise ModelError(
            f"the sites must be this model's, but {name!r} of {site.path!r} has shape {tuple(tensor.shape)} and not "
            f"{site.normalized_shape}: call find_norms again"
        )
    return tensor.detach().clone().reshape(site.normalized_shape)


def _measured(module: nn.Module, site: NormSite) -> tuple[Tensor, Tensor]:
    tensors = [*module.parameters(), *module.buffers(), torch.empty(0)]
    like = next(tensor for tensor in tensors if tensor.is_floating_point())
    packing = Packing(site.input_shape, channel_axes(site))
    try:
        with undisturbed(module), plain_arithmetic():
            flat = measured_affine(module, packing, site.kind, like.dtype, like.device)
    except NotANormError as error:
        raise ModelError(f"the module at {site.path!r} must be the norm found there, but: {error}") from error
    weight, bias = (part.reshape(site.normalized_shape).to(like.device, like.dtype) for part in flat)
    return weight, bias
