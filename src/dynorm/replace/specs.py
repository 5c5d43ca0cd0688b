"""What stands where in a converted model: the layer of a site, its serial form, and the swap itself."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from dynorm.errors import ArgumentError, ModelError
from dynorm.layers import (
    AnnealedDerf,
    AnnealedDyISRU,
    AnnealedDyT,
    AnnealedLinear,
    AnnealedNorm,
    Derf,
    DyISRU,
    DyT,
    LinearControl,
    PointwiseNorm,
)
from dynorm.site import NormSite

LAYERS: dict[str, type[PointwiseNorm]] = {
    "dyisru": DyISRU,
    "dyt": DyT,
    "derf": Derf,
    "linear": LinearControl,
    "annealed": AnnealedDyISRU,
    "annealed_dyt": AnnealedDyT,
    "annealed_derf": AnnealedDerf,
    "annealed_linear": AnnealedLinear,
}
_NAMES = {layer: name for name, layer in LAYERS.items()}
_NESTED = "_dynorm_use_nested_tensor"


@dataclass(frozen=True)
class Replaced:
    """The norm that a layer stands for, kept on the layer (out of the state dict) so that it can come back.

    Args:
        module: the original norm, untouched.
        site: what was known of it.
    """

    module: nn.Module
    site: NormSite


@dataclass(frozen=True)
class LayerSpec:
    """One point-wise layer of a model as plain values: where it stands and how to build it empty.

    Args:
        layer: a name of :data:`LAYERS`.
        config: the constructor's arguments.
        paths: every path of the layer, the first one leading.
    """

    layer: str
    config: Mapping[str, Any]
    paths: tuple[str, ...] = field(default_factory=tuple)

    def to_dict(self) -> dict[str, Any]:
        """Return the spec as plain values that JSON knows."""
        return {"layer": self.layer, "paths": list(self.paths), "config": dict(self.config)}

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> LayerSpec:
        """Read what :meth:`to_dict` wrote.

        Raises:
            ArgumentError: a key is missing or the layer is unknown.
        """
        try:
            spec = LayerSpec(values["layer"], dict(values["config"]), tuple(values["paths"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ArgumentError(f"a layer needs the keys layer, paths and config, got {values!r}") from error
        layer_class(spec.layer)
        return spec

    def build(self, device: torch.device | str | None, dtype: torch.dtype | None) -> PointwiseNorm:
        """Build the layer with default constants."""
        try:
            return layer_class(self.layer)(**self.config, device=device, dtype=dtype)
        except TypeError as error:
            raise ArgumentError(f"{self.layer} cannot be built from {dict(self.config)!r}: {error}") from error


def layer_class(name: str) -> type[PointwiseNorm]:
    """Return the layer of a name.

    Raises:
        ArgumentError: no layer has that name.
    """
    if name not in LAYERS:
        raise ArgumentError(f"the layer must be one of {', '.join(LAYERS)}, got {name!r}")
    return LAYERS[name]


def dynorm_layers(model: nn.Module) -> dict[str, PointwiseNorm]:
    """Return the point-wise layers of a model by their first path, each once, in module order."""
    return {path: module for path, module in model.named_modules() if isinstance(module, PointwiseNorm)}


def require_layers(model: nn.Module) -> dict[str, PointwiseNorm]:
    """Return what :func:`dynorm_layers` does.

    Raises:
        ModelError: there is none.
    """
    layers = dynorm_layers(model)
    if not layers:
        raise ModelError(
            "the model must have point-wise layers, but has none: build it with dynorm.DyISRU, or call dynorm.convert_"
        )
    return layers


def specs_of(model: nn.Module) -> list[LayerSpec]:
    """Return the spec of every point-wise layer of a model, shared ones once with all their paths."""
    paths: dict[PointwiseNorm, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, PointwiseNorm):
            paths.setdefault(module, []).append(path)
    return [LayerSpec(_NAMES[type(layer)], layer.config(), tuple(found)) for layer, found in paths.items()]


def layer_for(site: NormSite, to: str, *, per_channel: bool, center: bool) -> LayerSpec:
    """Return the layer that a site becomes: its shape, axis and affine map, and the bound of its norm.

    The bound is sqrt(C - 1) for LayerNorm (closed form 2, eq. 13) and sqrt(C) for RMSNorm (closed form 3).
    """
    channels = math.prod(site.normalized_shape)
    config = {
        "normalized_shape": list(site.normalized_shape),
        "elementwise_affine": site.has_weight or site.has_bias,
        "bias": site.has_bias,
        "per_channel": per_channel,
        "center": center,
        "scale": math.sqrt(channels if site.kind == "rmsnorm" else max(channels - 1, 1)),
        "dim": site.dim if isinstance(site.dim, int) else list(site.dim),
    }
    if issubclass(layer_class(to), AnnealedNorm):
        config |= {"kind": site.kind, "norm_eps": site.eps, "place": site.order}
    return LayerSpec(to, config, (site.path, *site.aliases))


def swap_(model: nn.Module, new: Mapping[Any, nn.Module]) -> None:
    """Put each value where its key stands, at every path, keeping the order of the children.

    nn.TransformerEncoder packs padded batches into nested tensors for the fused layers only, so it is told not
    to as long as it holds a point-wise layer.
    """
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child is not None and child in new:
                parent._modules[name] = new[child]
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder):
            _allow_nested_tensor(module, not any(isinstance(m, PointwiseNorm) for m in module.modules()))


def _allow_nested_tensor(encoder: nn.TransformerEncoder, allow: bool) -> None:
    if not allow and not hasattr(encoder, _NESTED):
        setattr(encoder, _NESTED, encoder.use_nested_tensor)
        encoder.use_nested_tensor = False
    elif allow and hasattr(encoder, _NESTED):
        encoder.use_nested_tensor = getattr(encoder, _NESTED)
        delattr(encoder, _NESTED)


def apply_specs_(model: nn.Module, specs: list[LayerSpec]) -> None:
    """Put empty point-wise layers where the specs say, for a state dict to fill; all of them or none.

    Args:
        model: an unconverted model of the class that the specs were made from; meta tensors are fine.
        specs: what :func:`specs_of` returned.

    Raises:
        ModelError: the model has no module at a path.
    """
    new: dict[nn.Module, nn.Module] = {}
    for spec in specs:
        modules = list(_at(model, spec))
        like = tensor_like(modules[0], model)
        layer = spec.build(like.device, like.dtype)
        layer.train(modules[0].training)
        new.update(dict.fromkeys(modules, layer))
    swap_(model, new)


def tensor_like(module: nn.Module, model: nn.Module) -> Tensor:
    """Return a tensor whose device and dtype suit a layer in place of ``module``: its own, or the model's first."""
    tensors = (t for m in (module, model) for t in (*m.parameters(), *m.buffers()))
    # One byte is a weight quantized to float8: no dtype to compute in.
    return next((t for t in tensors if t.is_floating_point() and t.element_size() > 1), torch.empty(0))


def _at(model: nn.Module, spec: LayerSpec) -> Iterator[nn.Module]:
    for path in spec.paths:
        try:
            yield model.get_submodule(path)
        except AttributeError as error:
            raise ModelError(
                f"the model must have a norm at {path!r}, where the saved model has a {spec.layer} layer, but "
                f"{type(model).__name__} has no such module: load it into the class of model that was saved"
            ) from error


def remember_(layer: PointwiseNorm, replaced: Replaced) -> None:
    """Keep the norm on the layer that replaces it; out of the state dict, but copied and pickled with it."""
    layer.__dict__["replaced"] = replaced


def replaced_by(layer: PointwiseNorm) -> Replaced | None:
    """Return the norm that ``convert_`` replaced by ``layer``, or None for a layer made otherwise."""
    return cast("Replaced | None", layer.__dict__.get("replaced"))


def original_(layer: PointwiseNorm) -> nn.Module:
    """Return the norm that ``layer`` replaced, moved to where the model, and the layer with it, was moved since."""
    replaced = replaced_by(layer)
    assert replaced is not None
    like = next(layer.parameters())
    own = tensor_like(replaced.module, layer)
    if (own.device, own.dtype) != (like.device, like.dtype):
        replaced.module.to(device=like.device, dtype=like.dtype)
    return replaced.module
