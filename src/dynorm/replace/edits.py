"""How a model differs from its class: layers of dynorm, added biases, untied weights."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dynorm.errors import ModelError
from dynorm.replace.converted import is_ours
from dynorm.wrappers import plain_modules

# Attributes of the modules that a fold gave a new parameter.
ADDED_BIAS = "_dynorm_added_bias"
UNTIED = "_dynorm_untied"


@dataclass(frozen=True)
class Edits:
    """The parameters of a model that its class would not make so."""

    biases: list[str]  # the paths of the modules that got a bias
    untied: list[str]  # the names of the parameters that were tied to others


def edits_of(model: nn.Module) -> Edits:
    """Return the edits of a model's parameters."""
    biases = []
    untied = []
    for path, module in plain_modules(model).items():
        if module.__dict__.get(ADDED_BIAS):
            biases.append(path)
        for name in module.__dict__.get(UNTIED, ()):
            untied.append(f"{path}.{name}" if path else name)
    return Edits(biases, untied)


def is_changed(model: nn.Module) -> bool:
    """Return whether a saved model loads only if these edits are made again."""
    edits = edits_of(model)
    if edits.biases or any(map(is_ours, model.modules())):
        return True
    # transformers does not tie tensors that were saved apart; other classes do.
    return bool(edits.untied) and not hasattr(model, "save_pretrained")


def give_bias_(modules: Mapping[str, nn.Module], path: str) -> None:
    """Give the linear layer at a path a bias that a state dict can fill, unless it has one."""
    module = modules.get(path)
    if not isinstance(module, (nn.Linear, nn.modules.conv._ConvNd)):
        raise ModelError(
            f"the model must have a linear layer at {path!r}, to which the saved model added a bias"
        )
    if module.bias is None:
        out = module.out_features if isinstance(module, nn.Linear) else module.out_channels
        module.bias = parameter_like(module.weight.new_zeros(out), module.weight)
    module.__dict__[ADDED_BIAS] = True


def untie_(modules: Mapping[str, nn.Module], name: str) -> None:
    """Give the parameter of a name a tensor that it does not share."""
    path, _, leaf = name.rpartition(".")
    module = modules.get(path)
    tensor = None if module is None else module._parameters.get(leaf)
    if module is None or tensor is None:
        raise ModelError(f"the model must have a parameter {name!r}, as the saved one has")
    set_untied_(module, leaf, parameter_like(tensor.detach().clone(), tensor))


def set_untied_(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Give a module an unshared parameter, and remember that it was tied."""
    module._parameters[name] = parameter
    module.__dict__[UNTIED] = (*module.__dict__.get(UNTIED, ()), name)


# Parameters that are made in inference mode can never be trained.
@torch.inference_mode(False)
def parameter_like(value: Tensor, like: Tensor) -> nn.Parameter:
    """Return a value as a parameter with another tensor's device, dtype and ``requires_grad``."""
    value = value.to(like.device, like.dtype)
    if value.is_inference():
        value = value.clone()
    return nn.Parameter(value, requires_grad=like.requires_grad)
