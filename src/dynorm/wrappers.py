"""Modules that wrap another one, and the names of a model's parts without wrappers, as saved."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

# By the name of the wrapper's class, the name of the module inside. That name is not enough: a
# model may have a part that is called "module".
_INSIDE = {
    "ActivationWrapper": "_checkpoint_wrapped_module",
    "OptimizedModule": "_orig_mod",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "DeepSpeedEngine": "module",
}
# Names that no part of a model has.
_UNMISTAKABLE = {name for name in _INSIDE.values() if name.startswith("_")}


def torch_classes(module: nn.Module) -> list[str]:
    """Return the names of a module's classes that are defined by torch or DeepSpeed."""
    names = []
    for cls in type(module).__mro__:
        if cls.__module__.startswith(("torch.", "deepspeed.")):
            names.append(cls.__name__)
    return names


def name_inside(module: nn.Module) -> str | None:
    """Return the name of the module that a wrapper wraps, or None for any other module."""
    for class_name in torch_classes(module):
        if class_name in _INSIDE:
            name = _INSIDE[class_name]
            if name in module._modules:
                return name
            return None
    return None


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the module inside of all wrappers, or the model itself."""
    while (name := name_inside(model)) is not None:
        model = model.get_submodule(name)
    return model


def has_wrappers(model: nn.Module) -> bool:
    """Return whether a model, or a part of it, is wrapped."""
    return any(name_inside(module) is not None for module in model.modules())


def plain_name(model: nn.Module, name: str) -> str:
    """Return a name of a module, parameter, buffer or entry of the state dict without wrappers.

    A wrapper may have left itself out of the name already.
    """
    module: nn.Module | None = model
    parts = []
    for part in name.split("."):
        if module is not None:
            if part == name_inside(module):
                module = module._modules[part]
                continue
            module = unwrapped(module)._modules.get(part)
        parts.append(part)
    return ".".join(parts)


def plain_modules(
    model: nn.Module,
    *,
    remove_duplicate: bool = True,
) -> dict[str, nn.Module]:
    """Return a model's modules as ``named_modules`` does, with wrapped modules for wrappers."""
    modules: dict[str, nn.Module] = {}
    for path, module in model.named_modules(remove_duplicate=remove_duplicate):
        if name_inside(module) is None:
            modules[plain_name(model, path)] = module
    return modules


def plain_state(
    model: nn.Module,
    state: Mapping[str, object],
) -> dict[str, Any]:
    """Return a state dict under the names without wrappers."""
    return {plain_name(model, name): value for name, value in state.items()}


def without_wrappers(path: str) -> str:
    """Return a path without the names that only wrappers use, when the model is not at hand."""
    return ".".join(part for part in path.split(".") if part not in _UNMISTAKABLE)


def gathered(value: Tensor) -> Tensor:
    """Return the full tensor of a DTensor, by a collective of all ranks; another one as it is."""
    if hasattr(value, "full_tensor"):
        full: Tensor = value.full_tensor()
        return full
    return value
