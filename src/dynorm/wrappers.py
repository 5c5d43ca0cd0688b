"""Modules that wrap another one, and the names of a model's parts without them: those that are saved."""

from collections.abc import Mapping
from typing import Any

from torch import nn

# By the name of the wrapper's class: the name of the module inside. The name by itself is not
# enough: a model may have a part that is called "module".
_INSIDE = {
    "ActivationWrapper": "_checkpoint_wrapped_module",
    "OptimizedModule": "_orig_mod",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "DeepSpeedEngine": "module",
}
# Those that no part of a model is called.
_UNMISTAKABLE = {name for name in _INSIDE.values() if name.startswith("_")}


def torch_classes(module: nn.Module) -> list[str]:
    """Return the names of the classes of torch, and of DeepSpeed, that a module is of."""
    return [
        cls.__name__
        for cls in type(module).__mro__
        if cls.__module__.startswith(("torch.", "deepspeed."))
    ]


def name_inside(module: nn.Module) -> str | None:
    """Return the name under which a wrapper has the module that it wraps, or None for any other module."""
    names = [_INSIDE[name] for name in torch_classes(module) if name in _INSIDE]
    return names[0] if names and names[0] in module._modules else None


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the module inside of all wrappers, or the model itself."""
    while (name := name_inside(model)) is not None:
        model = model.get_submodule(name)
    return model


def has_wrappers(model: nn.Module) -> bool:
    """Return whether a model, or a part of it, is wrapped."""
    return any(name_inside(module) is not None for module in model.modules())


def plain_name(model: nn.Module, name: str) -> str:
    """Return the name of a module, parameter or buffer, or a key of the state dict, without wrappers.

    A wrapper may have left itself out of a key already.
    """
    module: nn.Module | None = model
    kept = []
    for part in name.split("."):
        inside = None if module is None else name_inside(module)
        if module is not None and part == inside:
            module = module._modules[part]
            continue
        module = None if module is None else unwrapped(module)._modules.get(part)
        kept.append(part)
    return ".".join(kept)


def plain_modules(model: nn.Module, *, remove_duplicate: bool = True) -> dict[str, nn.Module]:
    """Return a model's modules as ``named_modules`` does, each wrapped one in the place of its wrapper."""
    modules: dict[str, nn.Module] = {}
    for path, module in model.named_modules(remove_duplicate=remove_duplicate):
        if name_inside(module) is None:
            modules[plain_name(model, path)] = module
    return modules


def plain_state(model: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict under the names without wrappers."""
    return {plain_name(model, name): value for name, value in state.items()}


def without_wrappers(path: str) -> str:
    """Return a path without the names that only wrappers use, where the model itself is not at hand."""
    return ".".join(part for part in path.split(".") if part not in _UNMISTAKABLE)
