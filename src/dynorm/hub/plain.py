"""Plain torch models: ``model.safetensors`` beside ``dynorm.json``, loaded into a model that the caller built."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dynorm.errors import ArgumentError, ModelError, StorageError
from dynorm.fold.marks import added_biases, untied
from dynorm.fold.specs import give_bias_, untie_
from dynorm.hub._format import FORMAT_VERSION, is_list_of_str, read_json, read_specs, require_version, saved_specs
from dynorm.replace.specs import LayerSpec, apply_specs_, swap_

CONFIG = "dynorm.json"
WEIGHTS = "model.safetensors"


def write_plain(model: nn.Module, folder: Path) -> None:
    """Write a model into an empty directory.

    Raises:
        ModelError: the model has no point-wise layer, or a tensor that safetensors cannot hold.
    """
    from dynorm import __version__

    specs = saved_specs(model)
    tensors, aliases = _unique(model.state_dict(keep_vars=True))
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    values = {
        "format_version": FORMAT_VERSION,
        "dynorm_version": __version__,
        "model_class": class_name(type(model)),
        "weights": {"size": (folder / WEIGHTS).stat().st_size, "sha256": _digest(folder / WEIGHTS)},
        "aliases": aliases,
        "layers": [spec.to_dict() for spec in specs],
        "biases": added_biases(model),
        "untied": untied(model),
    }
    (folder / CONFIG).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def read_plain(folder: Path, model: nn.Module | None) -> nn.Module:
    """Load a directory that :func:`write_plain` wrote into ``model``, which an error leaves as it was.

    Raises:
        ArgumentError: there is no model to load into.
        ModelError: it is of another class, lacks a module, or shares tensors that the saved one does not.
        StorageError: a file is missing, truncated or malformed, or its tensors are not the model's.
    """
    values = read_json(folder / CONFIG)
    require_version(values, str(folder / CONFIG))
    _require_class(values.get("model_class"), model, folder)
    assert model is not None
    biases, free = (_names(values, key, folder) for key in ("biases", "untied"))
    specs = read_specs(values.get("layers"), str(folder / CONFIG), allow_none=bool(biases))
    tensors = _with_aliases(_read_weights(folder, values.get("weights")), values.get("aliases"), folder)
    with _undone_on_error(model):
        _put_layers_(model, specs)
        for path in biases:
            give_bias_(model, path)
        for name in free:
            untie_(model, name)
        _require_same_tensors(model, tensors, folder)
    _fill_(model, tensors)
    return model.eval()


def class_name(cls: type) -> str:
    """Return ``module:qualname``.

    Example:
        >>> class_name(nn.Sequential)
        'torch.nn.modules.container:Sequential'
    """
    return f"{cls.__module__}:{cls.__qualname__}"


def _names(values: Mapping[str, Any], key: str, folder: Path) -> list[str]:
    names = values.get(key, [])
    if not is_list_of_str(names):
        raise StorageError(f"the {key} in {folder / CONFIG} must be a list of names, got {names!s:.80}")
    return names


def _unique(state: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors to write, each once, and the other names of those that have several."""
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    kept: dict[object, str] = {}
    storages = set()
    for name, tensor in state.items():
        if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided:
            raise ModelError(
                f"the model's state must be dense tensors, but {name!r} is a {type(tensor).__name__}: "
                "it could only be pickled, which dynorm does not do"
            )
        key = _identity(tensor)
        if key in kept:
            aliases[name] = kept[key]
            continue
        kept[key] = name
        storage = tensor.untyped_storage()
        # safetensors refuses views, even of memory that nothing else uses.
        whole = storage.nbytes() == tensor.numel() * tensor.element_size() and storage.data_ptr() not in storages
        storages.add(storage.data_ptr())
        tensors[name] = tensor.detach().contiguous() if whole else tensor.detach().clone().contiguous()
    return tensors, aliases


def _identity(tensor: Tensor) -> object:
    if not tensor.numel():
        return id(tensor)
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _require_class(saved: object, model: nn.Module | None, folder: Path) -> None:
    if not isinstance(saved, str) or ":" not in saved:
        raise StorageError(f"the model_class in {folder / CONFIG} must be 'module:class', got {saved!r}")
    if model is None:
        raise ArgumentError(
            f"a model must be given to load {folder} into, for dynorm imports no code that a file names: build a "
            f"{saved.replace(':', '.')} as it was before its conversion, and call dynorm.load(directory, model)"
        )
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"the model must be a torch.nn.Module, not {type(model).__name__}")
    (module, name), (own_module, own_name) = saved.split(":", 1), class_name(type(model)).split(":", 1)
    # A class may be saved by the script that defines it and be imported from there later.
    if name != own_name or (module != own_module and "__main__" not in (module, own_module)):
        raise ModelError(
            f"the model must be of the class that was saved, {saved.replace(':', '.')}, got a {own_module}.{own_name}"
        )


def _read_weights(folder: Path, expected: object) -> dict[str, Tensor]:
    path = folder / WEIGHTS
    if not isinstance(expected, Mapping) or not {"size", "sha256"} <= expected.keys():
        raise StorageError(f"the weights in {folder / CONFIG} must have a size and a sha256, got {expected!r}")
    try:
        size = path.stat().st_size
        if size != expected["size"]:
            raise StorageError(
                f"{path} must have {expected['size']} bytes, got {size}: it is truncated, or not its own"
            )
        if _digest(path) != expected["sha256"]:
            raise StorageError(f"{path} must have the sha256 that {CONFIG} names, but has not: it was changed since")
        return load_file(path)
    except StorageError:
        raise
    except (OSError, SafetensorError) as error:
        raise StorageError(f"{path} must be a readable safetensors file, but {error}") from error


def _with_aliases(tensors: dict[str, Tensor], aliases: object, folder: Path) -> dict[str, Tensor]:
    """The tensors under all their names; one of several names comes as the same object."""
    if not isinstance(aliases, dict):
        raise StorageError(f"the aliases in {folder / CONFIG} must be an object, got {aliases!r}")
    for alias, name in aliases.items():
        if not isinstance(name, str) or name not in tensors:
            raise StorageError(f"{alias!r} must share a tensor of {folder / WEIGHTS}, but {name!r} is not there")
    return tensors | {alias: tensors[name] for alias, name in aliases.items()}


@contextmanager
def _undone_on_error(model: nn.Module) -> Iterator[None]:
    modules = list(model.modules())
    before = [(m, dict(m._modules), dict(m._parameters), dict(m.__dict__)) for m in modules]
    try:
        yield
    except BaseException:
        for module, children, parameters, state in before:
            module.__dict__.clear()
            module.__dict__.update(state)
            for table, values in ((module._modules, children), (module._parameters, parameters)):
                table.clear()
                table.update(values)  # type: ignore[arg-type]
        swap_(model, {})
        raise


def _put_layers_(model: nn.Module, specs: list[LayerSpec]) -> None:
    before = dict(model.named_modules(remove_duplicate=False))
    apply_specs_(model, specs)
    for spec in specs:
        replaced = list(before[spec.paths[0]].parameters())
        trained = not replaced or any(parameter.requires_grad for parameter in replaced)
        model.get_submodule(spec.paths[0]).requires_grad_(trained)


def _require_same_tensors(model: nn.Module, tensors: Mapping[str, Tensor], folder: Path) -> None:
    own = model.state_dict(keep_vars=True)
    for names, what in ((own.keys() - tensors.keys(), "lacks"), (tensors.keys() - own.keys(), "has beyond them")):
        if names:
            listed = ", ".join(sorted(names)[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
            raise StorageError(
                f"{folder / WEIGHTS} must hold the tensors of {type(model).__name__}, but {what} {listed}"
            )
    first: dict[int, str] = {}
    for name, tensor in own.items():
        if tensor.shape != tensors[name].shape:
            raise StorageError(
                f"{name!r} in {folder / WEIGHTS} must have the model's shape {tuple(tensor.shape)}, "
                f"got {tuple(tensors[name].shape)}"
            )
        other = first.setdefault(id(tensor), name)
        if tensors[name] is not tensors[other]:
            raise ModelError(
                f"{other!r} and {name!r} must be two tensors as in the saved model, but {type(model).__name__} "
                "shares them: untie them before loading"
            )
    _require_materializable(model)


def _require_materializable(model: nn.Module) -> None:
    for path, module in model.named_modules():
        for name in module._non_persistent_buffers_set:
            buffer = module._buffers.get(name)
            if buffer is not None and buffer.is_meta:
                raise ModelError(
                    f"the buffer {'.'.join(filter(None, (path, name)))!r} must hold values, but is on the meta "
                    "device and in no checkpoint: build the model on a real device"
                )


def _fill_(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Give the model the tensors, with their dtypes and sharing; its parameters stay the objects they are."""
    own: dict[tuple[int, type], Tensor] = {}
    for name, tensor in list(model.state_dict(keep_vars=True).items()):
        source = tensors[name]
        key = (id(source), type(tensor))
        if key not in own:
            own[key] = _real(tensor)
            own[key].data = own[key].data.to(source.dtype)
        if own[key] is not tensor:
            path, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(path), leaf, own[key])
    # With the metadata of state_dict, without which modules take the tensors for those of an old version.
    state = model.state_dict()
    state.update(tensors)
    model.load_state_dict(state)


def _real(tensor: Tensor) -> Tensor:
    """The tensor, or an empty one on the CPU for a meta tensor, which has no place of its own."""
    if not tensor.is_meta:
        return tensor
    empty = torch.empty_like(tensor, device="cpu")
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
