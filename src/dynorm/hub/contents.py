"""The changes to a saved model's class: the layers, added biases and untied tensors."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeGuard

from torch import nn

from dynorm.errors import ArgumentError, ModelError, StorageError
from dynorm.family import LAYERS, NAMES
from dynorm.replace.converted import dynorm_layers
from dynorm.replace.edits import edits_of, is_changed
from dynorm.replace.specs import LayerSpec, specs_of

FORMAT_VERSION = 1
# Elements of a layer. No layer has this number, and a damaged size must not fill the memory.
_MOST_ELEMENTS = 1 << 24


@dataclass(frozen=True)
class Contents:
    """The changes to a model that its class does not know."""

    layers: list[LayerSpec]  # point-wise layers, and the RMSNorms and identities of a fold
    biases: list[str]  # paths of the linear layers that were given a bias
    untied: list[str]  # names of the parameters that were tied to others


def contents_of(model: nn.Module) -> Contents:
    """Return the contents of a model to save; ModelError if a load could not build it again."""
    edits = edits_of(model)
    layers = dynorm_layers(model)
    if not (layers or is_changed(model)):
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
    return Contents(specs_of(model), edits.biases, edits.untied)


def read_layers(values: object, where: str) -> list[LayerSpec]:
    """Read specs and check that each can be built; StorageError if one cannot."""
    if not isinstance(values, list):
        raise StorageError(f"the layers in {where} must be a list, got {values!s:.80}")
    specs: list[LayerSpec] = []
    seen: set[str] = set()
    for i, entry in enumerate(values):
        try:
            paths = entry["paths"]
            if not is_list_of_str(paths) or not paths or seen.intersection(paths):
                raise ArgumentError(f"a layer needs a list of its paths, got {paths!s:.80}")
            seen.update(paths)
            spec = LayerSpec(entry["layer"], dict(entry["config"]), tuple(paths))
            elements = sum(p.numel() for p in spec.build("meta", None).parameters())
            if elements > _MOST_ELEMENTS:
                raise ArgumentError(f"a layer may have {_MOST_ELEMENTS} elements, got {elements}")
        except KeyError as error:
            raise StorageError(f"{where}, layer {i}: it must have a {error}") from error
        # A config may hold anything, so a constructor may raise any of these.
        except (ArgumentError, TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise StorageError(f"{where}, layer {i}: {error}") from error
        specs.append(spec)
    return specs


def read_names(values: Mapping[str, object], key: str, where: str) -> list[str]:
    """Return a list of names in a JSON object; an empty one if the key is missing."""
    names = values.get(key, [])
    if not is_list_of_str(names):
        raise StorageError(f"the {key} in {where} must be a list of names, got {names!s:.80}")
    return names


def require_version(values: Mapping[str, object], where: str) -> None:
    """Refuse a format that this version does not know."""
    saved = values.get("format_version")
    if saved != FORMAT_VERSION:
        raise StorageError(
            f"the format_version of {where} must be {FORMAT_VERSION}, got {saved!r}, written by "
            f"dynorm {values.get('dynorm_version')}"
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
