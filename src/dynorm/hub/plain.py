"""Plain torch models: ``model.safetensors`` and ``dynorm.json``, loaded into the caller's model."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dynorm import version
from dynorm.arguments import require_gathered
from dynorm.errors import ArgumentError, ModelError, StorageError
from dynorm.files import read_json
from dynorm.guard import unchanged_on_error
from dynorm.hub import contents
from dynorm.replace.edits import give_bias_, untie_
from dynorm.replace.specs import apply_specs_
from dynorm.wrappers import plain_modules, plain_name, plain_state, unwrapped

CONFIG = "dynorm.json"
WEIGHTS = "model.safetensors"


def write_plain(model: nn.Module, changes: contents.Contents, folder: Path) -> None:
    """Write a model into an empty directory; ModelError if safetensors cannot hold a tensor."""
    tensors, aliases = _unique(plain_state(model.state_dict(keep_vars=True)))
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    values = {
        "format_version": contents.FORMAT_VERSION,
        "dynorm_version": version.__version__,
        "model_class": f"{type(model).__module__}.{type(model).__qualname__}",
        "aliases": aliases,
        "layers": [spec.to_dict() for spec in changes.layers],
        "biases": changes.biases,
        "untied": changes.untied,
    }
    (folder / CONFIG).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def read_plain(folder: Path, model: nn.Module | None) -> nn.Module:
    """Load a directory of :func:`write_plain` into ``model``; an error leaves that as it was."""
    where = str(folder / CONFIG)
    values = read_json(folder / CONFIG)
    contents.require_version(values, where)
    if not isinstance(model, nn.Module):
        raise ArgumentError(
            f"{folder} must be loaded into a model, because dynorm imports no code that a file "
            f"names, but got {type(model).__name__}: build a {values.get('model_class')} as it was "
            "before its conversion, and call dynorm.load(directory, model)"
        )
    inside = unwrapped(model)
    require_gathered(model)
    specs = contents.read_layers(values.get("layers"), where)
    biases = contents.read_names(values, "biases", where)
    untied = contents.read_names(values, "untied", where)
    tensors = _read_weights(folder, values.get("aliases"))
    with unchanged_on_error(model.modules(), {}):
        before = plain_modules(inside, remove_duplicate=False)
        apply_specs_(inside, specs)
        after = plain_modules(inside, remove_duplicate=False)
        for spec in specs:
            replaced = list(before[spec.paths[0]].parameters())
            trained = not replaced or any(parameter.requires_grad for parameter in replaced)
            after[spec.paths[0]].requires_grad_(trained)
        for path in biases:
            give_bias_(after, path)
        for name in untied:
            untie_(after, name)
        try:
            _assign_(inside, tensors)
        # torch names all tensors that are missing, unexpected, or of another shape.
        except RuntimeError as error:
            raise StorageError(
                f"{folder / WEIGHTS} must hold the tensors of {type(inside).__name__}, but {error!s:.600}: "
                "give a new model of the same class and sizes that has all its norms"
            ) from error
    return model.eval()


def _unique(state: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors to write, each once, and the other names of those that have several."""
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first_name: dict[Tensor, str] = {}
    for name, tensor in state.items():
        if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided:
            raise ModelError(
                f"the model's state must be dense tensors, but {name!r} is a "
                f"{type(tensor).__name__}: it could only be pickled, which dynorm does not do"
            )
        if tensor in first_name:
            aliases[name] = first_name[tensor]
            continue
        first_name[tensor] = name
        # A copy, because safetensors refuses parts of a larger tensor, and two views of one.
        copied = tensor.detach().to("cpu", copy=True)
        tensors[name] = copied.contiguous()
    return tensors, aliases


def _read_weights(folder: Path, aliases: object) -> dict[str, Tensor]:
    """Return the tensors by all their names; the names of one tensor have the same object."""
    path = folder / WEIGHTS
    if not isinstance(aliases, dict):
        raise StorageError(f"the aliases in {folder / CONFIG} must be an object, got {aliases!r}")
    try:
        tensors = load_file(path, device="cpu")
        return tensors | {alias: tensors[name] for alias, name in aliases.items()}
    except (OSError, SafetensorError) as error:
        raise StorageError(
            f"{path} must be a whole safetensors file, but {error}: it is cut or damaged"
        ) from error
    except (KeyError, TypeError) as error:
        raise StorageError(f"an alias names a tensor that {path} lacks: {error}") from error


def _assign_(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Give the model the tensors, with their dtypes and sharing, on the model's devices.

    A parameter becomes a new one, which is trained if the old one was.
    """
    made: dict[tuple[int, bool], Tensor] = {}
    state = dict(tensors)
    assigned = {}
    for name, old in model.state_dict(keep_vars=True).items():
        source = state.pop(plain_name(name), None)
        if source is None:
            continue
        is_parameter = isinstance(old, nn.Parameter)
        key = (id(source), is_parameter)
        if key not in made:
            new = source if old.is_meta else source.to(old.device)
            made[key] = nn.Parameter(new, old.requires_grad) if is_parameter else new
        assigned[name] = made[key]
    # Whatever is left is not in the model, as torch says then.
    model.load_state_dict(assigned | state, assign=True)
