"""The part of a saved model that its class does not know: the layers, added biases and untied tensors."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from torch import Tensor, nn

from dynorm.errors import ArgumentError, ModelError, StorageError, listed
from dynorm.family import LAYERS, NAMES
from dynorm.layers import PointwiseNorm
from dynorm.replace.converted import dynorm_layers
from dynorm.replace.edits import added_biases, is_changed, untied
from dynorm.replace.specs import LayerSpec, specs_of
from dynorm.wrappers import plain_modules

FORMAT_VERSION = 1
# Elements of all layers together: no model has as many, and a damaged size must not fill the
# memory.
_MOST_ELEMENTS = 1 << 28


@dataclass(frozen=True)
class Contents:
    """The changes to a model that its class does not know."""

    layers: list[LayerSpec]  # point-wise layers, and the RMSNorms and identities of a fold
    biases: list[str]  # paths of the linear layers that were given a bias
    untied: list[str]  # names of the parameters that were tied to others


def contents_of(model: nn.Module) -> Contents:
    """Return the contents of a model that is to be saved, or raise ModelError where a load could not build it again."""
    changed = is_changed(model)
    changes = Contents(biases=added_biases(model), untied=untied(model), layers=specs_of(model))
    layers = dynorm_layers(model)
    if not (layers or changed):
        raise ModelError(
            "the model must have point-wise layers, but has none: call dynorm.convert_(model, "
            "sites). (One whose fold "
            "changed only values is of its own class: save it with that class's own means.)"
        )
    if "" in layers:
        raise ModelError(
            "the model must hold its point-wise layers, but is one itself: wrap it in nn.Sequential"
        )
    for path, layer in layers.items():
        if type(layer) not in NAMES:
            raise ModelError(
                f"the layer {path!r} must be one of dynorm's ({', '.join(LAYERS)}), but is a "
                f"{type(layer).__name__}: "
                "save such a model with torch's own means"
            )
    for name, parameter in model.named_parameters():
        if type(parameter).__module__.startswith("torchao."):
            raise ModelError(
                f"the model must be converted or quantized to be saved, but {name!r} is a "
                f"{type(parameter).__name__}: "
                "save it before quantizing, and quantize what was loaded"
            )
    return changes


def read_layers(values: object, where: str, *, allow_none: bool = False) -> list[LayerSpec]:
    """Read specs, each kind built once on the meta device to see that it can be; StorageError where one cannot."""
    if not isinstance(values, (list, tuple)) or not (values or allow_none):
        raise StorageError(
            f"the layers in {where} must be a list with at least one entry, got {values!s:.80}"
        )
    specs: list[LayerSpec] = []
    seen: set[str] = set()
    elements, sizes = 0, dict[str, int]()
    for i, entry in enumerate(values):
        try:
            if not isinstance(entry, Mapping) or not is_list_of_str(entry.get("paths")):
                raise ArgumentError(f"a layer needs a list of paths, got {entry!s:.80}")
            if not entry["paths"] and not entry.get("outside"):
                raise ArgumentError("a layer needs at least one path")
            if again := seen.intersection(entry["paths"]):
                raise ArgumentError(
                    f"a layer needs paths of its own, but {listed(again)} stands in another entry "
                    "too"
                )
            seen.update(entry["paths"])
            spec = LayerSpec.from_dict(entry)
            # Few layers of a model differ in more than their paths.
            if (kind := repr((spec.layer, spec.config))) not in sizes:
                sizes[kind] = sum(p.numel() for p in spec.build("meta", None).parameters())
            elements += sizes[kind]
            if elements > _MOST_ELEMENTS:
                raise ArgumentError(
                    f"the layers may have {_MOST_ELEMENTS:,} parameters together, got {elements:,}"
                )
        # A config may hold anything: whatever a constructor says of it is the reason.
        except (ArgumentError, TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise StorageError(f"{where}, layer {i}: {error}") from error
        specs.append(spec)
    return specs


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object, or raise StorageError where there is none in the file."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise StorageError(f"{path} must be readable, but {error}") from error
    # Of a file that is nested too deep.
    except (ValueError, RecursionError) as error:
        raise StorageError(f"{path} must be JSON, but {error}") from error
    if not isinstance(values, dict):
        raise StorageError(f"{path} must hold a JSON object, got {type(values).__name__}")
    return values


def require_version(values: Mapping[str, Any], where: str) -> None:
    """Refuse a file that was written in a format that is not known here."""
    version = values.get("format_version")
    if version != FORMAT_VERSION:
        written = (
            f", written by dynorm {values['dynorm_version']}" if "dynorm_version" in values else ""
        )
        raise StorageError(
            f"the format_version of {where} must be {FORMAT_VERSION}, got {version!r}{written}"
        )


def checksum(values: object) -> str:
    """Return the sha256 of values that JSON knows, whatever the order of their keys."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def require_checksum(values: Mapping[str, Any], where: str) -> None:
    """Refuse a JSON object that was changed since, by its own checksum: those of earlier versions hold none."""
    rest = {key: value for key, value in values.items() if key != "sha256"}
    if values.get("sha256") not in (None, checksum(rest)):
        raise StorageError(
            f"{where} must be as dynorm wrote it, but was changed since: save the model again"
        )


def weights_entry(path: Path) -> dict[str, Any]:
    """Return the size and checksum by which a load knows the weights as its own."""
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
        found = weights_entry(path)
    except OSError as error:
        raise StorageError(f"{path} must be a readable safetensors file, but {error}") from error
    if found["size"] != expected["size"]:
        raise StorageError(
            f"{path} must have {expected['size']} bytes, got {found['size']}: it is truncated, or "
            "not its own"
        )
    if found["sha256"] != expected["sha256"]:
        raise StorageError(
            f"{path} must have the sha256 that {where} names, but has not: it was changed since"
        )


def require_witnesses(
    model: nn.Module, tensors: Mapping[str, Tensor], where: object, config: str
) -> None:
    """Refuse tensors that name other witnesses than the layers' configs do; meta tensors name none."""
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
                f"{list(layer.witness_channels)}, "
                f"got {tensors[name].tolist()}"
            )


def is_list_of_str(value: object) -> TypeGuard[list[str]]:
    """Tell whether a value is a list of strings."""
    return isinstance(value, list) and all(isinstance(item, str) for item in value)
