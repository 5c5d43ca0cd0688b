"""How a folded model differs from its class, for saving and loading: RMSNorms, added biases, untied tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dynorm.errors import ArgumentError, ModelError
from dynorm.layers.rmsnorm import RMSNorm
from dynorm.replace.specs import LayerSpec

RMSNORM = "rmsnorm"
# Attributes of the modules that a fold gave a parameter of their own.
ADDED_BIAS = "_dynorm_added_bias"
UNTIED = "_dynorm_untied"


def added_biases(model: nn.Module) -> list[str]:
    """Return the paths of the modules that got a bias."""
    return [path for path, module in model.named_modules() if module.__dict__.get(ADDED_BIAS)]


def untied(model: nn.Module) -> list[str]:
    """Return the names of the parameters that were tied to others."""
    names = ((path, name) for path, module in model.named_modules() for name in module.__dict__.get(UNTIED, ()))
    return [f"{path}.{name}" if path else name for path, name in names]


@dataclass(frozen=True)
class RMSNormSpec(LayerSpec):
    """The spec of an :class:`RMSNorm` that stands where the model's class has a LayerNorm."""

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> RMSNormSpec:
        """Read what :meth:`to_dict` wrote.

        Raises:
            ArgumentError: a key is missing.
        """
        try:
            return RMSNormSpec(RMSNORM, dict(values["config"]), tuple(values["paths"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ArgumentError(f"a layer needs the keys layer, paths and config, got {values!r}") from error

    def build(self, device: torch.device | str | None, dtype: torch.dtype | None) -> RMSNorm:  # type: ignore[override]
        """Build the layer."""
        try:
            return RMSNorm(**self.config, device=device, dtype=dtype)
        except TypeError as error:
            raise ArgumentError(f"an RMSNorm cannot be built from {dict(self.config)!r}: {error}") from error


def rms_specs(model: nn.Module) -> list[LayerSpec]:
    """Return the spec of every RMSNorm of ours in a model, shared ones once with all their paths."""
    paths: dict[RMSNorm, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if type(module) is RMSNorm:
            paths.setdefault(module, []).append(path)
    return [RMSNormSpec(RMSNORM, layer.config(), tuple(found)) for layer, found in paths.items()]


def give_bias_(model: nn.Module, path: str) -> None:
    """Give the linear layer at a path a bias for a state dict to fill; one that it has already stays.

    Raises:
        ModelError: there is no such layer.
    """
    try:
        module = model.get_submodule(path)
    except AttributeError:
        module = None
    if not isinstance(module, (nn.Linear, nn.modules.conv._ConvNd)):
        raise ModelError(f"the model must have a linear layer at {path!r}, where the saved model has a bias added")
    if module.bias is None:
        out = module.out_features if isinstance(module, nn.Linear) else module.out_channels
        module.bias = nn.Parameter(module.weight.new_zeros(out), requires_grad=module.weight.requires_grad)
    module.__dict__[ADDED_BIAS] = True


def untie_(model: nn.Module, name: str) -> None:
    """Give a name a parameter of its own, where it shares one.

    Raises:
        ModelError: there is no such parameter.
    """
    path, _, leaf = name.rpartition(".")
    try:
        module = model.get_submodule(path)
        tensor = module._parameters[leaf]
        assert tensor is not None
    except (AttributeError, KeyError, AssertionError) as error:
        raise ModelError(f"the model must have a parameter {name!r}, as the saved one has") from error
    module._parameters[leaf] = nn.Parameter(tensor.detach().clone(), requires_grad=tensor.requires_grad)
    module.__dict__[UNTIED] = (*module.__dict__.get(UNTIED, ()), leaf)
