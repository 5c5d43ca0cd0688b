"""The layers of a model as plain values, for saving, and building them again."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dynorm.errors import ArgumentError, ModelError
from dynorm.family import layer_class
from dynorm.find.tokens import tensor_like
from dynorm.layers.rmsnorm import RMSNorm
from dynorm.plain import Plain
from dynorm.replace.converted import LAYER_NAMES, identity, is_ours
from dynorm.replace.swap import swap_
from dynorm.wrappers import plain_modules


@dataclass(frozen=True)
class LayerSpec(Plain):
    """One point-wise layer of a model, or a module that a fold left, as plain values."""

    layer: str  # a name of dynorm.family.LAYERS, "rmsnorm" or "identity"
    config: Mapping[str, Any]  # the constructor's arguments
    paths: tuple[str, ...] = ()  # every path of the layer, the main one first

    def layer_class(self) -> type[nn.Module]:
        """Return the class of the layer."""
        for kind in (RMSNorm, nn.Identity):
            if self.layer == LAYER_NAMES[kind]:
                return kind
        return layer_class(self.layer)

    def build(
        self,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> nn.Module:
        """Build the layer with default constants."""
        if self.layer == LAYER_NAMES[nn.Identity]:
            return identity()
        try:
            return self.layer_class()(**self.config, device=device, dtype=dtype)
        except TypeError as error:
            raise ArgumentError(
                f"{self.layer} cannot be built from {dict(self.config)!r}: {error}"
            ) from error


def specs_of(model: nn.Module) -> list[LayerSpec]:
    """Return the specs of a model's point-wise layers, and of modules that a fold left.

    A shared one is listed once, with all its paths.
    """
    paths: dict[Any, list[str]] = {}
    for path, module in plain_modules(model, remove_duplicate=False).items():
        if is_ours(module):
            paths.setdefault(module, []).append(path)
    specs = []
    for layer, layer_paths in paths.items():
        config = {} if isinstance(layer, nn.Identity) else layer.config()
        specs.append(LayerSpec(LAYER_NAMES[type(layer)], config, tuple(layer_paths)))
    return specs


def apply_specs_(model: nn.Module, specs: list[LayerSpec]) -> None:
    """Put default layers at the paths of the specs, into a model of their class; all or none."""
    new: dict[nn.Module, nn.Module] = {}
    modules = plain_modules(model, remove_duplicate=False)
    for spec in specs:
        for path in spec.paths:
            if path not in modules:
                raise ModelError(
                    f"the model must have a norm at {path!r}, where the saved model has a "
                    f"{spec.layer} layer, but {type(model).__name__} has no such module: load it "
                    "into the class of model that was saved"
                )
        first = modules[spec.paths[0]]
        like = tensor_like(first, model)
        layer = spec.build(like.device, like.dtype).train(first.training)
        for path in spec.paths:
            new[modules[path]] = layer
    swap_(model, new)
