"""The norms and point-wise layers of a model as a fold sees them: axis, weight and bias in float64."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from dynorm.errors import ModelError
from dynorm.find.probe import find_norms
from dynorm.layers import AnnealedNorm, PointwiseNorm
from dynorm.replace.specs import dynorm_layers
from dynorm.site import NormSite, select_sites


@dataclass(eq=False)
class Place:
    """One norm or point-wise layer.

    Args:
        site: its path and what is known of it; of a point-wise layer too.
        module: the module.
        weight: what scales each channel, in float64, or None.
        bias: what shifts it, in float64, or None.
        scale: the fixed factor of a point-wise layer.
        chosen: whether the caller wants it folded.
        problem: why it cannot be folded at all, or None.
    """

    site: NormSite
    module: nn.Module
    weight: Tensor | None = None
    bias: Tensor | None = None
    scale: float = 1.0
    chosen: bool = True
    problem: str | None = None

    @property
    def path(self) -> str:
        """The path in the model."""
        return self.site.path

    @property
    def pointwise(self) -> bool:
        """Whether it is a layer of ours."""
        return isinstance(self.module, PointwiseNorm)

    def axis(self, rank: int) -> int:
        """Return the channel axis of an input with so many axes."""
        assert isinstance(self.site.dim, int)
        return self.site.dim % rank

    def vectors(self, affine: bool, constants: bool) -> tuple[Tensor | None, Tensor | None]:
        """Return the factor and the constant that a fold moves into the readers, None for 1 and 0."""
        factor, shift = (self.weight, self.bias) if affine else (None, None)
        if self.pointwise and self.scale != 1 and (constants or affine):
            # A weight without its scale would leave the multiplication where it is.
            ones = torch.ones(self.site.normalized_shape, dtype=torch.float64)
            factor = self.scale * (ones if factor is None else factor)
        return factor, shift

    def parameters(self) -> list[Tensor]:
        """Return the tensors that hold weight and bias."""
        names = (self.site.weight_name, self.site.bias_name)
        found = [tensor_of(self.module, name) for name in names if name is not None]
        return [tensor for tensor in found if tensor is not None]


def find_places(model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any], only: Any, skip: Any) -> list[Place]:
    """Return all norms and point-wise layers of a model, in call order the norms, then the layers.

    Raises:
        ArgumentError: a glob matches none.
        ModelError: the model has none.
    """
    sites = find_norms(model, *args, **kwargs)
    layers = {path: layer for path, layer in dynorm_layers(model).items() if path}
    sites += [_layer_site(path, layer, len(sites) + i) for i, (path, layer) in enumerate(layers.items())]
    if not sites:
        raise ModelError("the model must have norms or point-wise layers, but none was found: nothing can be folded")
    chosen = {site.path for site in select_sites(sites, only, skip)}
    return [_place(model, site, site.path in chosen) for site in sites]


def fill_neutral(place: Place) -> Iterable[tuple[Tensor, float]]:
    """Yield the tensors of a norm whose affine map was folded, with what makes it the identity."""
    weight, bias = tensor_of(place.module, place.site.weight_name), tensor_of(place.module, place.site.bias_name)
    if weight is not None:
        yield weight, 1 - place.site.weight_offset
    if bias is not None:
        yield bias, 0.0


def _layer_site(path: str, layer: PointwiseNorm, order: int) -> NormSite:
    refused = None
    if isinstance(layer, AnnealedNorm):
        refused = "on a path from a norm to a point-wise function: call dynorm.finalize_(model) first"
    return NormSite(
        path,
        kind=type(layer).__name__.lower(),
        dim=layer.dim,
        normalized_shape=layer.normalized_shape,
        has_weight=layer.weight is not None,
        has_bias=layer.bias is not None,
        weight_name=None if layer.weight is None else "weight",
        bias_name=None if layer.bias is None else "bias",
        class_name=type(layer).__qualname__,
        refused=refused,
        order=order,
    )


def _place(model: nn.Module, site: NormSite, chosen: bool) -> Place:
    module = model.get_submodule(site.path)
    place = Place(site, module, chosen=chosen, problem=site.refused)
    if place.problem is None:
        place.problem = _problem(site, module)
    if place.problem is not None:
        return place
    place = replace(place, weight=_vector(module, site.weight_name, site.weight_offset))
    place = replace(place, bias=_vector(module, site.bias_name, 0.0))
    return replace(place, scale=module.scale) if isinstance(module, PointwiseNorm) else place


def _problem(site: NormSite, module: nn.Module) -> str | None:
    if not site.path:
        return "the model is the norm itself: nothing reads it"
    if not isinstance(site.dim, int):
        return f"it normalizes several axes together, {site.dim}"
    if math.prod(site.normalized_shape) < 2:
        return "it has a single channel"
    for has, name, what in ((site.has_weight, site.weight_name, "weight"), (site.has_bias, site.bias_name, "bias")):
        if has and name is None:
            return f"no tensor of it holds its {what}"
    if "forward" in module.__dict__:
        return "an instance attribute stands for its forward"
    return None


def _vector(module: nn.Module, name: str | None, offset: float) -> Tensor | None:
    tensor = tensor_of(module, name)
    return None if tensor is None else tensor.detach().to("cpu", torch.float64).flatten() + offset


def tensor_of(module: nn.Module, name: str | None) -> Tensor | None:
    """Return the parameter or buffer of a dotted name, or None."""
    if name is None:
        return None
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}.get(name)
