"""How a model differs from its class: the layers of dynorm, biases that were added, weights that were untied."""

from torch import Tensor, nn

from dynorm.errors import ModelError
from dynorm.replace.specs import is_ours

# Attributes of the modules that a fold gave a parameter of their own.
ADDED_BIAS = "_dynorm_added_bias"
UNTIED = "_dynorm_untied"


def added_biases(model: nn.Module) -> list[str]:
    """Return the paths of the modules that got a bias."""
    return [path for path, module in model.named_modules() if module.__dict__.get(ADDED_BIAS)]


def untied(model: nn.Module) -> list[str]:
    """Return the names of the parameters that were tied to others."""
    return [
        f"{path}.{name}".lstrip(".")
        for path, m in model.named_modules()
        for name in m.__dict__.get(UNTIED, ())
    ]


def is_changed(model: nn.Module) -> bool:
    """Tell whether a load needs to know what was done; a class that builds layers of its own needs no help."""
    # transformers does not tie tensors that were saved apart; other classes do.
    apart = bool(untied(model)) and not hasattr(model, "save_pretrained")
    return apart or bool(added_biases(model)) or any(map(is_ours, model.modules()))


def give_bias_(model: nn.Module, path: str) -> None:
    """Give the linear layer at a path, which must be there, a bias for a state dict to fill; one that it has stays."""
    module = dict(model.named_modules(remove_duplicate=False)).get(path)
    if not isinstance(module, (nn.Linear, nn.modules.conv._ConvNd)):
        raise ModelError(
            f"the model must have a linear layer at {path!r}, where the saved model has a bias "
            "added"
        )
    if module.bias is None:
        out = module.out_features if isinstance(module, nn.Linear) else module.out_channels
        module.bias = nn.Parameter(
            module.weight.new_zeros(out), requires_grad=module.weight.requires_grad
        )
    module.__dict__[ADDED_BIAS] = True


def untie_(model: nn.Module, name: str) -> None:
    """Give the parameter of a name, which must be there, a tensor of its own, where it shares one."""
    tensor = dict(model.named_parameters(remove_duplicate=False)).get(name)
    if tensor is None:
        raise ModelError(f"the model must have a parameter {name!r}, as the saved one has")
    path, _, leaf = name.rpartition(".")
    set_own_(model.get_submodule(path), leaf, tensor, tensor)


def set_own_(module: nn.Module, name: str, value: Tensor, like: Tensor) -> None:
    """Give a module a parameter that it shares with no other, and remember that it was tied."""
    module._parameters[name] = parameter_like(value.detach().clone(), like)
    module.__dict__[UNTIED] = (*module.__dict__.get(UNTIED, ()), name)


def parameter_like(value: Tensor, like: Tensor) -> nn.Parameter:
    """Return a value as a parameter of another tensor's device, dtype and need of a gradient."""
    return nn.Parameter(value.to(like.device, like.dtype), requires_grad=like.requires_grad)
