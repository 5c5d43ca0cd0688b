"""Modules that wrap another one, and the names of a model's parts without wrappers, as saved."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

# By the name of the wrapper's class, the name of the module inside.
_INSIDE = {
    "ActivationWrapper": "_checkpoint_wrapped_module",
    "OptimizedModule": "_orig_mod",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "DeepSpeedEngine": "module",
}
# Names that no part of a model has, where "module" may be one.
_UNMISTAKABLE = {name for name in _INSIDE.values() if name.startswith("_")}


def torch_classes(module: nn.Module) -> list[str]:
    """Return the names of a module's classes that are defined by torch or DeepSpeed."""
    names = []
    for cls in type(module).__mro__:
        if cls.__module__.startswith(("torch.", "deepspeed.")):
            names.append(cls.__name__)
    return names


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the module inside of all wrappers, or the model itself."""
    classes = torch_classes(model)
    for class_name, name in _INSIDE.items():
        if class_name in classes and name in model._modules:
            return unwrapped(model.get_submodule(name))
    return model


def plain_name(name: str) -> str:
    """Return a name of a module, parameter, buffer or entry of a state dict without wrapped parts."""
    return ".".join(part for part in name.split(".") if part not in _UNMISTAKABLE)


def plain_modules(
    model: nn.Module,
    *,
    remove_duplicate: bool = True,
) -> dict[str, nn.Module]:
    """Return a model's modules as ``named_modules`` does, with wrapped modules for wrappers."""
    modules: dict[str, nn.Module] = {}
    for path, module in model.named_modules(remove_duplicate=remove_duplicate):
        # A wrapped module comes after its wrapper, and takes its place.
        modules[plain_name(path)] = module
    return modules


def plain_state(state: Mapping[str, object]) -> dict[str, Any]:
    """Return a state dict under the names without wrapped parts."""
    return {plain_name(name): value for name, value in state.items()}


def gathered(value: Tensor) -> Tensor:
    """Return the full tensor of a DTensor, by a collective of all ranks; another one as it is."""
    if hasattr(value, "full_tensor"):
        full: Tensor = value.full_tensor()
        return full
    return value
