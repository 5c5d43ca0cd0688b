"""The weight and the bias of a site, read from the tensors that hold them or else measured from its outputs."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from dynorm.errors import ModelError
from dynorm.find.recover import NotANormError, measured_affine
from dynorm.find.tokens import Packing, TokenFunction, named_tensors, plain_arithmetic
from dynorm.site import NormSite


def affine_of(module: nn.Module, site: NormSite) -> tuple[Tensor | None, Tensor | None]:
    """Return the weight and the bias that a norm applies to its normalized channels.

    A named parameter is copied as it is. 1 + w comes in float32 at least: layers that scale so add in float32,
    and rounded to bfloat16 1 + w would lose most digits of a small w. A factor that no tensor of the module holds,
    such as the 1/sqrt(C) of a division by the L2 norm, is measured.

    Args:
        module: The module at the site's path.
        site: The site, as `find_norms` returned it.

    Returns:
        Detached copies of shape `site.normalized_shape` on the module's device; None for a missing one.

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
    weight, bias = (_held(module, site, name) for name in (site.weight_name, site.bias_name))
    if weight is not None and site.weight_offset:
        weight = weight.to(torch.promote_types(weight.dtype, torch.float32)) + site.weight_offset
    if (site.has_weight and weight is None) or (site.has_bias and bias is None):
        measured = _measured(module, site)
        weight = measured[0] if site.has_weight and weight is None else weight
        bias = measured[1] if site.has_bias and bias is None else bias
    return weight, bias


def channel_axes(site: NormSite) -> tuple[int, ...]:
    """Return the axes of the site's channels in its input, counted from the front.

    Example:
        >>> channel_axes(NormSite("norm", dim=-1, input_shape=(2, 5, 8)))
        (2,)
    """
    dims = site.dim if isinstance(site.dim, tuple) else (site.dim,)
    return tuple(dim % len(site.input_shape) for dim in dims)


def _held(module: nn.Module, site: NormSite, name: str | None) -> Tensor | None:
    if name is None:
        return None
    tensor = named_tensors(module).get(name)
    if tensor is None:
        raise ModelError(f"the module at {site.path!r} must hold {name!r}, as when it was found, but does not")
    if tensor.numel() != math.prod(site.normalized_shape):
        raise ModelError(
            f"the sites must be this model's, but {name!r} of {site.path!r} has shape {tuple(tensor.shape)} and not "
            f"{site.normalized_shape}: call find_norms again"
        )
    return tensor.detach().clone().reshape(site.normalized_shape)


def _measured(module: nn.Module, site: NormSite) -> tuple[Tensor, Tensor]:
    tensors = [*named_tensors(module).values(), torch.empty(0)]
    like = next(tensor for tensor in tensors if tensor.is_floating_point())
    given = TokenFunction(module, Packing(site.input_shape, channel_axes(site)), like.dtype, like.device)
    try:
        with plain_arithmetic(module):
            flat = measured_affine(given, site.kind)
    except NotANormError as error:
        raise ModelError(f"the module at {site.path!r} must be the norm found there, but: {error}") from error
    weight, bias = (part.reshape(site.normalized_shape).to(like.device, like.dtype) for part in flat)
    return weight, bias
