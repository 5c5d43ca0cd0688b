"""Plain torch models: ``model.safetensors`` and ``dynorm.json``, loaded into the caller's model."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from dynorm.arguments import require_gathered
from dynorm.errors import ArgumentError, ModelError, StorageError, listed
from dynorm.guard import unchanged_on_error
from dynorm.hub import contents
from dynorm.replace.edits import give_bias_, untie_
from dynorm.replace.specs import apply_specs_
from dynorm.wrappers import plain_modules, plain_name, plain_state, unwrapped, without_wrappers

CONFIG = "dynorm.json"
WEIGHTS = "model.safetensors"


def write_plain(model: nn.Module, changes: contents.Contents, folder: Path) -> None:
    """Write a model into an empty directory; ModelError if safetensors cannot hold a tensor."""
    tensors, aliases = _unique(plain_state(model, model.state_dict(keep_vars=True)))
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    values = {
        "model_class": f"{type(model).__module__}:{type(model).__qualname__}",
        "weights": contents.weights_entry(folder / WEIGHTS),
        "aliases": aliases,
        "layers": [spec.to_dict() for spec in changes.layers],
        "biases": changes.biases,
        "untied": changes.untied,
    }
    contents.write_sealed(folder / CONFIG, values)


def read_plain(folder: Path, model: nn.Module | None) -> nn.Module:
    """Load a directory of :func:`write_plain` into ``model``; an error leaves that as it was."""
    where = str(folder / CONFIG)
    values = contents.read_sealed(folder / CONFIG)
    model, inside = _require_class(model, values.get("model_class"), folder)
    biases = values.get("biases", [])
    untied = values.get("untied", [])
    for key, names in (("biases", biases), ("untied", untied)):
        if not contents.is_list_of_str(names):
            raise StorageError(f"the {key} in {where} must be a list of names, got {names!s:.80}")
    require_gathered(model)
    specs = contents.read_layers(values.get("layers"), where, allow_none=bool(biases or untied))
    tensors = _read_weights(folder, values)
    with unchanged_on_error(model.modules(), tensors=()):
        before = plain_modules(inside, remove_duplicate=False)
        apply_specs_(inside, specs)
        after = plain_modules(inside, remove_duplicate=False)
        for spec in specs:
            replaced = list(before[spec.paths[0]].parameters())
            trained = not replaced or any(parameter.requires_grad for parameter in replaced)
            after[spec.paths[0]].requires_grad_(trained)
        for path in biases:
            give_bias_(after, without_wrappers(path))
        for name in untied:
            untie_(after, without_wrappers(name))
        _require_same_tensors(inside, tensors, folder)
    _fill_(inside, tensors)
    return model.eval()


def _unique(state: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors to write, each once, and the other names of those that have several."""
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first_name: dict[object, str] = {}
    storages = set()
    for name, tensor in state.items():
        if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided:
            raise ModelError(
                f"the model's state must be dense tensors, but {name!r} is a "
                f"{type(tensor).__name__}: it could only be pickled, which dynorm does not do"
            )
        # Tensors are the same if they are in the same memory. Empty ones are in none.
        key: object = id(tensor)
        if tensor.numel():
            key = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if key in first_name:
            aliases[name] = first_name[key]
            continue
        first_name[key] = name
        # safetensors refuses views, even of memory that nothing else uses.
        storage = tensor.untyped_storage()
        is_view = storage.nbytes() != tensor.numel() * tensor.element_size()
        value = tensor.detach()
        if is_view or storage.data_ptr() in storages:
            value = value.clone()
        storages.add(storage.data_ptr())
        tensors[name] = value.contiguous()
    return tensors, aliases


def _require_class(
    model: nn.Module | None, saved: object, folder: Path
) -> tuple[nn.Module, nn.Module]:
    """Return the model, and the one inside its wrappers, which must be of the saved class."""
    if not isinstance(saved, str) or ":" not in saved:
        raise StorageError(
            f"the model_class in {folder / CONFIG} must be 'module:class', got {saved!r}"
        )
    if model is None:
        raise ArgumentError(
            f"{folder} must be loaded into a model, because dynorm imports no code that a file "
            f"names: build a {saved.replace(':', '.')} as it was before its conversion, and call "
            "dynorm.load(directory, model)"
        )
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"the model must be a torch.nn.Module, not {type(model).__name__}")
    inside = unwrapped(model)
    module, name = saved.split(":", 1)
    own_module = type(inside).__module__
    own_name = type(inside).__qualname__
    # A class may be saved by the script that defines it and be imported from there later.
    if name != own_name or (module != own_module and "__main__" not in (module, own_module)):
        raise ModelError(
            f"the model must be of the class that was saved, {saved.replace(':', '.')}, got a "
            f"{own_module}.{own_name}"
        )
    return model, inside


def _read_weights(folder: Path, values: Mapping[str, object]) -> dict[str, Tensor]:
    """Return the tensors by all their names; the names of one tensor have the same object."""
    path = folder / WEIGHTS
    aliases = values.get("aliases")
    if not isinstance(aliases, dict):
        raise StorageError(f"the aliases in {folder / CONFIG} must be an object, got {aliases!r}")
    tensors = contents.read_weights(path, values.get("weights"), folder / CONFIG)
    for alias, name in aliases.items():
        if not isinstance(name, str) or name not in tensors:
            raise StorageError(
                f"{alias!r} must share a tensor of {path}, but {name!r} is not there"
            )
    return tensors | {alias: tensors[name] for alias, name in aliases.items()}


def _require_same_tensors(model: nn.Module, tensors: Mapping[str, Tensor], folder: Path) -> None:
    expected = plain_state(model, model.state_dict(keep_vars=True))
    missing = expected.keys() - tensors.keys()
    unexpected = tensors.keys() - expected.keys()
    for names, what in ((missing, "lacks"), (unexpected, "has beyond them")):
        if names:
            raise StorageError(
                f"{folder / WEIGHTS} must hold the tensors of {type(model).__name__}, "
                f"but {what} {listed(names)}"
            )
    first_name: dict[int, str] = {}
    for name, tensor in expected.items():
        saved = tensors[name]
        place = f"{name!r} in {folder / WEIGHTS}"
        if tensor.shape != saved.shape:
            raise StorageError(
                f"{place} must have the model's shape {tuple(tensor.shape)}, got "
                f"{tuple(saved.shape)}"
            )
        if tensor.is_floating_point() and not saved.is_floating_point():
            raise StorageError(f"{place} must be of a dtype like {tensor.dtype}, got {saved.dtype}")
        other = first_name.setdefault(id(tensor), name)
        if saved is not tensors[other]:
            raise ModelError(
                f"{other!r} and {name!r} must be two tensors as in the saved model, but "
                f"{type(model).__name__} shares them: untie them before loading"
            )
    contents.require_witnesses(model, tensors, folder / WEIGHTS, CONFIG)
    for path, module in model.named_modules():
        for name in module._non_persistent_buffers_set:
            buffer = module._buffers.get(name)
            if buffer is not None and buffer.is_meta:
                raise ModelError(
                    f"the buffer {'.'.join(filter(None, (path, name)))!r} must hold values, but is "
                    "on the meta device and in no checkpoint: build the model on a real device"
                )


def _fill_(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Give the model the tensors, with their dtypes and sharing; parameters stay the same objects.

    A meta tensor, or one made in inference mode, is replaced.
    """
    targets: dict[tuple[int, type], Tensor] = {}
    modules = plain_modules(model, remove_duplicate=False)
    for name, tensor in plain_state(model, model.state_dict(keep_vars=True)).items():
        source = tensors[name]
        key = (id(source), type(tensor))
        if key not in targets:
            target = tensor
            # Neither can be written into, and the second cannot be trained.
            if tensor.is_meta or tensor.is_inference():
                device = "cpu" if tensor.is_meta else tensor.device
                target = torch.empty_like(tensor, device=device)
                if isinstance(tensor, nn.Parameter):
                    target = nn.Parameter(target, tensor.requires_grad)
            target.data = target.data.to(source.dtype)
            targets[key] = target
        if targets[key] is not tensor:
            path, _, leaf = name.rpartition(".")
            setattr(modules[path], leaf, targets[key])
    # Update the model's own state_dict, because it has the versions of its modules: without them
    # modules take the tensors for those of an old version.
    state = model.state_dict()
    state.update({name: tensors[plain_name(model, name)] for name in state})
    model.load_state_dict(state)
