"""The layers of a converted model without the rest, which is loaded from its base model.

The file has checksums of the base's weights: the layers of one model are of no use in another.
"""

import importlib
import os
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from dynorm.errors import ArgumentError, ModelError, StorageError, listed
from dynorm.guard import unchanged_on_error
from dynorm.hub import contents
from dynorm.layers.rmsnorm import RMSNorm
from dynorm.plain import JsonObject
from dynorm.replace.converted import dynorm_layers, is_ours, replaced_by
from dynorm.replace.specs import apply_specs_
from dynorm.replace.weights import changed_weights, checksums, differs
from dynorm.wrappers import plain_modules, unwrapped

CONFIG = "dynorm_delta.json"
WEIGHTS = "dynorm_delta.safetensors"


def write_delta(model: nn.Module, changes: contents.Contents, folder: Path, base: str) -> None:
    """Write the layers of a model that was converted from ``base``, a name with @revision."""
    _require_only_layers(model, changes)
    layers = plain_modules(model)
    tensors = {}
    for spec in changes.layers:
        for name, tensor in layers[spec.paths[0]].state_dict().items():
            tensors[f"{spec.paths[0]}.{name}"] = tensor.contiguous()
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    name, revision = _split(base)
    values = {
        "base": name,
        "revision": revision or None,
        "model_class": type(model).__name__,
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
        "layers": [spec.to_dict() for spec in changes.layers],
        "base_weights": _fingerprint(model),
        "weights": contents.weights_entry(folder / WEIGHTS),
    }
    contents.write_sealed(folder / CONFIG, values)


def _split(base: str | os.PathLike[str]) -> tuple[str, str]:
    """Return the name of a base model and its revision, which may be empty."""
    if not isinstance(base, str | os.PathLike) or not os.fspath(base):
        raise ArgumentError(
            f"base must be the folder or hub name of the model before its conversion, got {base!r}"
        )
    name = os.fspath(base)
    if Path(name).exists():
        return name, ""
    name, _, revision = name.partition("@")
    return name, revision


def read_delta(folder: Path, model: nn.Module | None) -> nn.Module:
    """Put the layers of a folder into their base model, which is loaded if it is None."""
    where = str(folder / CONFIG)
    values = contents.read_sealed(folder / CONFIG)
    specs = contents.read_layers(values.get("layers"), where)
    fingerprint = values.get("base_weights")
    if not isinstance(fingerprint, dict):
        raise StorageError(
            f"the base_weights in {where} must be an object, got {fingerprint!s:.80}"
        )
    tensors = contents.read_weights(folder / WEIGHTS, values.get("weights"), where)
    if model is None:
        model = _load_base(values, where)
    inside = unwrapped(model)
    _require_base(inside, fingerprint, values)
    with unchanged_on_error(inside.modules(), tensors=()):
        apply_specs_(inside, specs)
        modules = plain_modules(inside, remove_duplicate=False)
        for spec in specs:
            prefix = f"{spec.paths[0]}."
            state = {}
            for name, tensor in tensors.items():
                if name.startswith(prefix):
                    state[name.removeprefix(prefix)] = tensor
            try:
                modules[spec.paths[0]].load_state_dict(state)
            except RuntimeError as error:
                raise StorageError(f"{folder / WEIGHTS} must hold the layers: {error}") from error
    return model.eval()


def _require_only_layers(model: nn.Module, changes: contents.Contents) -> None:
    """Refuse a model that differs from its base in more than its layers."""
    remedy = "save the model with all of its weights: leave base= out"
    others = [spec.layer for spec in changes.layers if spec.layer in ("rmsnorm", "identity")]
    is_edited = bool(others or changes.biases or changes.untied)
    for layer in dynorm_layers(model).values():
        replaced = replaced_by(layer)
        if replaced is None:
            # It was loaded, or folded. A fold leaves no weight.
            is_edited |= layer.weight is None
            continue
        has_no_affine = layer.weight is None and any(True for _ in replaced.module.parameters())
        has_no_mean = isinstance(replaced.module, RMSNorm)
        is_edited |= has_no_affine or has_no_mean
    if is_edited:
        raise ModelError(
            "a model to save as a change of its base must differ in its layers only, but it was "
            f"folded: {remedy}"
        )
    changed = changed_weights(model)
    if changed:
        raise ModelError(
            "a model to save as a change of its base must have its other weights, but "
            f"{listed(changed)} were changed since convert_: {remedy}"
        )


def _fingerprint(model: nn.Module) -> dict[str, list[int]]:
    """Return the checksums of all parameters outside the layers, by name."""
    fingerprint = {}
    for path, module in plain_modules(model).items():
        if is_ours(module):
            continue
        for name, parameter in module.named_parameters(recurse=False):
            values = checksums(parameter, complete=True)
            if values is not None:
                fingerprint[f"{path}.{name}".lstrip(".")] = sorted(values)
    return fingerprint


def _require_base(model: nn.Module, fingerprint: JsonObject, values: JsonObject) -> None:
    """Refuse a model that is not the base, or that is converted already."""
    must = f"the model must be {_title(values)}, as it was before its conversion, but"
    if dynorm_layers(model):
        raise ModelError(f"{must} it is converted already: load it again")
    parameters = dict(model.named_parameters(remove_duplicate=False))
    missing = fingerprint.keys() - parameters.keys()
    if missing:
        raise ModelError(f"{must} it lacks {listed(sorted(missing))}: pass a model of its class")
    others = []
    for name, expected in fingerprint.items():
        if differs(parameters[name], expected, complete=True):
            others.append(name)
    if others:
        raise ModelError(
            f"{must} its weights are others ({len(others)} of {len(fingerprint)} parameters: "
            f"{listed(others)}): load the revision that was converted, without training, or convert "
            "and calibrate this model"
        )


def _load_base(values: JsonObject, where: str) -> nn.Module:
    """Load the base model by its name."""
    kind = values.get("model_class")
    cls = None
    try:
        transformers = importlib.import_module("transformers")
        cls = getattr(transformers, str(kind), None)
    except ImportError:
        pass
    dtype = getattr(torch, str(values.get("dtype")), None)
    from_pretrained = getattr(cls, "from_pretrained", None)
    if from_pretrained is None or not isinstance(dtype, torch.dtype):
        raise ArgumentError(
            f"{where} must be loaded into its base model, {_title(values)}, because {kind} is not a "
            "class of transformers: call dynorm.load(directory, model)"
        )
    try:
        model = from_pretrained(
            values["base"], revision=values.get("revision") or "main", dtype=dtype
        )
    except (OSError, ValueError) as error:
        raise StorageError(
            f"the base model {_title(values)} must be a folder, or on the hub and within reach, "
            f"but {error!s:.300}: load it yourself, and call dynorm.load(directory, model)"
        ) from error
    assert isinstance(model, nn.Module)
    return model


def _title(values: dict[str, str]) -> str:
    revision = values.get("revision")
    if revision:
        return f"{values.get('base')} at revision {revision}"
    return str(values.get("base"))
