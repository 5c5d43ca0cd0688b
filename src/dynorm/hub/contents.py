"""The changes to a saved model's class: the layers, added biases and untied tensors."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from dynorm import version
from dynorm.errors import ArgumentError, ModelError, StorageError, listed
from dynorm.family import LAYERS, NAMES
from dynorm.layers import PointwiseNorm
from dynorm.plain import JsonObject
from dynorm.replace.converted import dynorm_layers
from dynorm.replace.edits import edits_of, is_changed
from dynorm.replace.specs import LayerSpec, specs_of
from dynorm.wrappers import plain_modules

FORMAT_VERSION = 1
# Elements of all layers together. No model has this number, and a damaged size must not fill the
# memory.
_MOST_ELEMENTS = 1 << 28


@dataclass(frozen=True)
class Contents:
    """The changes to a model that its class does not know."""

    layers: list[LayerSpec]  # point-wise layers, and the RMSNorms and identities of a fold
    biases: list[str]  # paths of the linear layers that were given a bias
    untied: list[str]  # names of the parameters that were tied to others


def contents_of(model: nn.Module) -> Contents:
    """Return the contents of a model to save; ModelError if a load could not build it again."""
    changed = is_changed(model)
    edits = edits_of(model)
    changes = Contents(specs_of(model), edits.biases, edits.untied)
    layers = dynorm_layers(model)
    if not (layers or changed):
        raise ModelError(
            "the model must have point-wise layers, but has none: call dynorm.convert_(model, "
            "sites). (If a fold changed only values, save the model as its class is saved.)"
        )
    if "" in layers:
        raise ModelError(
            "the model must hold its point-wise layers, but is one itself: wrap it in nn.Sequential"
        )
    for path, layer in layers.items():
        if type(layer) not in NAMES:
            raise ModelError(
                f"the layer {path!r} must be one of dynorm's ({', '.join(LAYERS)}), but is a "
                f"{type(layer).__name__}: save such a model with torch.save"
            )
    for name, parameter in model.named_parameters():
        if type(parameter).__module__.startswith("torchao."):
            raise ModelError(
                f"a model to save must not be quantized, but {name!r} is a "
                f"{type(parameter).__name__}: save it before quantizing, and quantize the loaded "
                "model"
            )
    return changes


def read_layers(values: object, where: str, *, allow_none: bool = False) -> list[LayerSpec]:
    """Read specs and check that each can be built; StorageError if one cannot."""
    if not isinstance(values, (list, tuple)) or not (values or allow_none):
        raise StorageError(
            f"the layers in {where} must be a list with at least one entry, got {values!s:.80}"
        )
    specs: list[LayerSpec] = []
    seen: set[str] = set()
    elements = 0
    # The elements of a layer, by its spec without the paths: most layers of a model have the same.
    sizes: dict[str, int] = {}
    for i, entry in enumerate(values):
        try:
            if not isinstance(entry, Mapping) or not is_list_of_str(entry.get("paths")):
                raise ArgumentError(f"a layer needs a list of paths, got {entry!s:.80}")
            if not entry["paths"] and not entry.get("outside"):
                raise ArgumentError("a layer needs at least one path")
            if again := seen.intersection(entry["paths"]):
                raise ArgumentError(
                    f"a path must be in one entry only, but {listed(again)} is in another entry too"
                )
            seen.update(entry["paths"])
            spec = LayerSpec.from_dict(entry)
            kind = repr((spec.layer, spec.config))
            if kind not in sizes:
                sizes[kind] = sum(p.numel() for p in spec.build("meta", None).parameters())
            elements += sizes[kind]
            if elements > _MOST_ELEMENTS:
                raise ArgumentError(
                    f"the layers may have {_MOST_ELEMENTS:,} parameters together, got {elements:,}"
                )
        # A config may hold anything, so a constructor may raise any of these.
        except (ArgumentError, TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise StorageError(f"{where}, layer {i}: {error}") from error
        specs.append(spec)
    return specs


def read_json(path: Path) -> JsonObject:
    """Read a JSON object, or raise StorageError if the file does not hold one."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise StorageError(f"{path} must be readable, but {error}") from error
    # A file that is nested too deep raises RecursionError.
    except (ValueError, RecursionError) as error:
        raise StorageError(f"{path} must be JSON, but {error}") from error
    if not isinstance(values, dict):
        raise StorageError(f"{path} must hold a JSON object, got {type(values).__name__}")
    return values


def require_version(values: Mapping[str, Any], where: str) -> None:
    """Refuse a file in a format that this version does not know."""
    saved_version = values.get("format_version")
    if saved_version != FORMAT_VERSION:
        written = ""
        if "dynorm_version" in values:
            written = f", written by dynorm {values['dynorm_version']}"
        raise StorageError(
            f"the format_version of {where} must be {FORMAT_VERSION}, got {saved_version!r}{written}"
        )


def checksum(values: object) -> str:
    """Return the sha256 of values as JSON; the order of keys does not matter."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def require_checksum(values: Mapping[str, object], where: str) -> None:
    """Refuse a JSON object that does not match the checksum in it."""
    # Objects of earlier versions hold none.
    rest = {key: value for key, value in values.items() if key != "sha256"}
    if values.get("sha256") not in (None, checksum(rest)):
        raise StorageError(
            f"{where} must be as dynorm wrote it, but was changed since: save the model again"
        )


def write_sealed(path: Path, values: Mapping[str, object]) -> None:
    """Write a JSON object with its format, the version of dynorm, and a checksum of all of it."""
    sealed = {"format_version": FORMAT_VERSION, "dynorm_version": version.__version__, **values}
    sealed["sha256"] = checksum(sealed)
    path.write_text(json.dumps(sealed, indent=2) + "\n", encoding="utf-8")


def read_sealed(path: Path) -> JsonObject:
    """Read a file of :func:`write_sealed`; StorageError if it is of another format or changed."""
    values = read_json(path)
    require_version(values, str(path))
    require_checksum(values, str(path))
    return values


def weights_entry(path: Path) -> JsonObject:
    """Return the size and checksum by which a load recognises a file of weights."""
    with path.open("rb") as file:
        return {
            "size": path.stat().st_size,
            "sha256": hashlib.file_digest(file, "sha256").hexdigest(),
        }


def require_weights(path: Path, expected: object, where: object) -> None:
    """Refuse a file of weights that is not the one whose size and checksum were saved."""
    if not isinstance(expected, Mapping) or not {"size", "sha256"} <= expected.keys():
        raise StorageError(
            f"the weights in {where} must have a size and a sha256, got {expected!r}"
        )
    try:
        actual = weights_entry(path)
    except OSError as error:
        raise StorageError(f"{path} must be a readable safetensors file, but {error}") from error
    if actual["size"] != expected["size"]:
        raise StorageError(
            f"{path} must have {expected['size']} bytes, got {actual['size']}: it is truncated, or "
            "of another model"
        )
    if actual["sha256"] != expected["sha256"]:
        raise StorageError(
            f"{path} must have the sha256 that {where} names, but has not: it was changed since"
        )


def read_weights(path: Path, expected: object, where: object) -> dict[str, Tensor]:
    """Return the tensors of a file of weights, which :func:`require_weights` checks."""
    require_weights(path, expected, where)
    try:
        # Older versions of safetensors would read to another default device.
        with torch.device("cpu"):
            return load_file(path)
    except (OSError, SafetensorError) as error:
        raise StorageError(f"{path} must be a readable safetensors file, but {error}") from error


def require_witnesses(
    model: nn.Module, tensors: Mapping[str, Tensor], where: object, config: str
) -> None:
    """Refuse tensors that name other witnesses than the layers' configs; meta tensors pass."""
    for path, layer in plain_modules(model).items():
        if not isinstance(layer, PointwiseNorm):
            continue
        name = f"{path}.witnesses"
        if (
            layer.witnesses is not None
            and not tensors[name].is_meta
            and not layer.has_witnesses(tensors[name])
        ):
            raise StorageError(
                f"{name!r} in {where} must be the channels that {config} names, "
                f"{list(layer.witness_channels)}, got {tensors[name].tolist()}"
            )


def layers_named_by(keys: Iterable[str]) -> set[str]:
    """Return the paths of the point-wise layers whose constants are among some keys of weights."""
    constants = {name for layer in LAYERS.values() for name in layer.constants}
    layers = set()
    for key in keys:
        path, _, name = key.rpartition(".")
        if name in constants:
            layers.add(path)
    return layers


def is_list_of_str(value: object) -> TypeGuard[list[str]]:
    """Return whether a value is a list of strings."""
    return isinstance(value, list) and all(isinstance(item, str) for item in value)
