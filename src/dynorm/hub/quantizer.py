"""The layers that config.json names, put into a model before transformers loads the weights.

To transformers this is a quantization method.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from dynorm.errors import ModelError, StorageError, listed
from dynorm.hub import contents
from dynorm.layers import PointwiseNorm
from dynorm.layers.rmsnorm import RMSNorm
from dynorm.replace.converted import dynorm_layers
from dynorm.replace.edits import give_bias_
from dynorm.replace.specs import LayerSpec, apply_specs_
from dynorm.wrappers import plain_modules, without_wrappers

if TYPE_CHECKING:
    from transformers.modeling_utils import PreTrainedModel

METHOD = "dynorm"
# Key and value in config.json. Without dynorm, transformers takes the value for a file name, and
# quotes it in its error.
BARRIER = "transformers_weights"
ADVICE = (
    "import dynorm before you load this model: its norms are replaced by layers that only dynorm "
    "(pip) knows"
)
# The alignment of torch's own allocations on the CPU, in bytes.
_ALIGNMENT = 64
_AFFINE = ("weight", "bias")
# Whether the running call of from_pretrained has a dtype argument.
DTYPE_GIVEN: ContextVar[bool] = ContextVar("DTYPE_GIVEN", default=False)


class DynormConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """The ``quantization_config`` of a config.json: the point-wise layers and their paths.

    A path is relative to the base model, which may then have any head. The paths of layers in the
    head are under ``outside``.
    """

    def __init__(
        self,
        # One dict per layer: that of its spec, with ``outside``, and with the ``dtypes`` of
        # parameters that differ from the model's.
        layers: Any = (),
        model_dtype: str | None = None,
        format_version: int | None = None,  # of this dict
        dynorm_version: str | None = None,  # of the version that wrote it
        biases: object = (),  # paths of linear layers that were given a bias
        biases_outside: object = (),
        weights: object = None,  # size and checksum of each file of weights, to know them by
        layers_sha256: str | None = None,  # of the lists above; computed if None
        # By path of any other module: the dtypes of its tensors that differ from the model's.
        dtypes: object = None,
        dtypes_outside: object = None,
        # Ignored, such as the keys that transformers adds.
        **unknown: object,
    ) -> None:
        self.quant_method = METHOD
        self.format_version = format_version
        self.dynorm_version = dynorm_version
        self.model_dtype = model_dtype
        self.layers = layers
        self.biases = list(biases) if isinstance(biases, tuple) else biases
        self.biases_outside = (
            list(biases_outside) if isinstance(biases_outside, tuple) else biases_outside
        )
        if not (
            contents.is_list_of_str(self.biases) and contents.is_list_of_str(self.biases_outside)
        ):
            raise StorageError(
                f"the biases in the quantization_config must be paths, got {biases!s:.80}"
            )
        self.dtypes = dtypes or {}
        self.dtypes_outside = dtypes_outside or {}
        for by_path in (self.dtypes, self.dtypes_outside):
            if not isinstance(by_path, dict) or not all(map(_are_dtypes, by_path.values())):
                raise StorageError(
                    "the dtypes in the quantization_config must name dtypes of tensors by path, "
                    f"got {by_path!s:.80}"
                )
        contents.require_version(vars(self), "the quantization_config")
        self.specs()
        self.weights = weights
        described: list[object] = [list(layers), self.biases, self.biases_outside]
        if self.dtypes or self.dtypes_outside:
            described += [self.dtypes, self.dtypes_outside]
        self.layers_sha256 = contents.checksum(described)
        if layers_sha256 not in (None, self.layers_sha256):
            raise StorageError(
                "the layers in the quantization_config must be as dynorm wrote them, but were "
                "changed"
            )

    def specs(self) -> list[tuple[LayerSpec, list[str], dict[str, str]]]:
        """Return each layer's spec, its paths outside of the base model, and its own dtypes."""
        where = "the quantization_config"
        specs = contents.read_layers(
            self.layers, where, allow_none=bool(self.biases or self.biases_outside)
        )
        layers = []
        for spec, entry in zip(specs, self.layers, strict=True):
            outside = entry.get("outside", [])
            dtypes = entry.get("dtypes", {})
            if not contents.is_list_of_str(outside) or not _are_dtypes(dtypes):
                raise StorageError(
                    f"{where}: outside must be a list, dtypes name dtypes; got {outside!r}, "
                    f"{dtypes!r}"
                )
            # Earlier versions saved the names of wrappers too.
            layers.append((spec, [without_wrappers(path) for path in outside], dtypes))
        return layers


class DynormQuantizer(HfQuantizer):  # type: ignore[misc]
    """Put the layers into a model that ``from_pretrained`` has built on the meta device."""

    # So transformers raises an error for an unconverted model. Otherwise it would try to quantize it
    # on the fly.
    requires_calibration = True
    # The layers are ordinary parameters of plain torch, which train without adapters.
    is_trainable = is_qat_trainable = is_compileable = True

    def is_serializable(self) -> bool:
        """Return True: the weights are ordinary tensors."""
        return True

    def update_attn_implementation(self, config: object) -> Any:
        """Remove the key that keeps transformers without dynorm from loading the config.

        This is the first hook that gets the config.
        """
        vars(config).pop(BARRIER, None)
        return config

    # The name of the first hook in transformers 5.0.
    update_tp_plan = update_attn_implementation

    def _process_model_before_weight_loading(
        self,
        model: "PreTrainedModel",
        checkpoint_files: Iterable[str] | None = None,
        **kwargs: object,
    ) -> object:
        config = self.quantization_config
        for file in map(Path, checkpoint_files or ()):
            if isinstance(config.weights, Mapping) and file.name in config.weights:
                contents.require_weights(file, config.weights[file.name], "the quantization_config")
        specs = []
        # Paths in this model, and the dtypes of their tensors that differ from the model's.
        casts: list[tuple[str, Mapping[str, str]]] = []
        for spec, outside, dtypes in config.specs():
            paths = _places(model, spec.paths, outside)
            if paths:
                specs.append(replace(spec, paths=tuple(paths)))
                casts.append((paths[0], dtypes))
        if config.layers and not specs:
            saved = ", ".join(_architectures(model.config, checkpoint_files)) or "unknown"
            raise ModelError(
                f"the saved layers must have a place in {type(model).__name__}, but none has: load "
                f"the class that was saved ({saved}), its base model, or another head on that"
            )
        apply_specs_(model, specs)
        # If the caller asks for a dtype, or the model gets another one than it had, it is for all.
        if not DTYPE_GIVEN.get() and _dtype(config.model_dtype) == model.dtype:
            for path, dtypes in config.dtypes.items():
                casts += [(place, dtypes) for place in _places(model, [path], [])]
            for path, dtypes in config.dtypes_outside.items():
                casts += [(place, dtypes) for place in _places(model, [], [path])]
            for path, dtypes in casts:
                _cast_(model.get_submodule(path), dtypes)
        modules = plain_modules(model, remove_duplicate=False)
        for path in _places(model, config.biases, config.biases_outside):
            give_bias_(modules, path)
        state = model.state_dict()
        self._shapes = {name: tensor.shape for name, tensor in state.items()}
        self._dtypes = {name: tensor.dtype for name, tensor in state.items()}
        _stand_in_(model)
        tied = model.all_tied_weights_keys | aliases_of(model, specs)
        model.all_tied_weights_keys = {
            a: b for a, b in tied.items() if {a, b} <= self._shapes.keys()
        }
        return model

    def _process_model_after_weight_loading(
        self, model: "PreTrainedModel", **kwargs: object
    ) -> object:
        for layer in dynorm_layers(model).values():
            for name in _AFFINE:
                vars(layer).pop(name, None)
        _require_loaded(model, self._shapes)
        # Versions of transformers without this hook take the dtype of the checkpoint for tensors
        # that a head renames.
        if not hasattr(HfQuantizer, "get_new_dtype"):
            _restore_dtypes_(model, self._dtypes)
        # transformers leaves tensors in the mapped file, at any address, and the address decides
        # how a product with a vector is rounded. Copies are aligned as torch aligns them.
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.device.type == "cpu" and tensor.data_ptr() % _ALIGNMENT:
                tensor.data = tensor.data.clone()
        # The model is an ordinary one now. Otherwise `.half()` would raise an error, and the
        # Trainer would ask for adapters.
        del model.hf_quantizer, model.quantization_method
        model.is_quantized = False
        # The model may change before it is written again.
        self.quantization_config.weights = None
        # A dict, because transformers cannot load again with a config that holds the object.
        model.config.quantization_config = self.quantization_config.to_dict()
        for module in model.modules():
            # transformers marks the config of each part that is a model.
            config = getattr(module, "config", None)
            if config is not None and hasattr(config, "_is_quantized"):
                del config._is_quantized
        return model


def register(auto: Any) -> None:
    """Add the method to transformers' lists; a reload of dynorm replaces it."""
    auto.AUTO_QUANTIZATION_CONFIG_MAPPING.pop(METHOD, None)
    auto.AUTO_QUANTIZER_MAPPING.pop(METHOD, None)
    auto.register_quantization_config(METHOD)(DynormConfig)
    auto.register_quantizer(METHOD)(DynormQuantizer)


def _cast_(module: nn.Module, dtypes: Mapping[str, str]) -> None:
    """Cast the named tensors of a module, so that the weights are read in these dtypes."""
    for name, dtype in dtypes.items():
        tensor = {**module._buffers, **module._parameters}.get(name)
        # Another head may not have it.
        if tensor is not None:
            tensor.data = tensor.data.to(_dtype(dtype))


def _restore_dtypes_(model: "PreTrainedModel", dtypes: Mapping[str, torch.dtype]) -> None:
    """Cast the loaded tensors to the dtypes that the model had before, by name."""
    # Modules that transformers keeps in float32, in a model of 16 bits.
    in_float32: list[str] = []
    for attribute in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"):
        in_float32 += getattr(model, attribute, None) or ()
    patterns = [part.replace("*", ".*") for part in in_float32]
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name in dtypes and not any(re.search(pattern, name) for pattern in patterns):
            tensor.data = tensor.data.to(dtypes[name])


def base_prefix(model: "PreTrainedModel") -> str:
    """Return the prefix of the base model's paths: ``""``, or such as ``"bert."`` below a head."""
    if model.base_model is model:
        return ""
    return f"{model.base_model_prefix}."


def aliases_of(model: nn.Module, specs: list[LayerSpec]) -> dict[str, str]:
    """Map all but the first name of each parameter of layers with several paths to the first."""
    modules = plain_modules(model, remove_duplicate=False)
    aliases = {}
    for spec in specs:
        first = spec.paths[0]
        for name, _ in modules[first].named_parameters():
            for path in spec.paths[1:]:
                aliases[f"{path}.{name}"] = f"{first}.{name}"
    return aliases


def _places(model: "PreTrainedModel", paths: Iterable[str], outside: Iterable[str]) -> list[str]:
    """Return the paths in this model, which may have another head or none, for saved paths."""
    prefix = base_prefix(model)
    if type(model).__name__ in (getattr(model.config, "architectures", None) or []):
        return [prefix + path for path in paths] + list(outside)
    known = {path for path, _ in model.named_modules(remove_duplicate=False)}
    renamed = _renaming(model)
    places = []
    for path in paths:
        # Some base models have a part with the name that others give to the base model.
        without_base = path.removeprefix(f"{model.base_model_prefix}.")
        if prefix + path.split(".")[0] in known:
            places.append(prefix + path)
        elif without_base.split(".")[0] in known:
            places.append(without_base)
        # The text model of a larger one renames the tensors of the checkpoint, and so the modules.
        # A model may also lack the branch, such as a decoder.
        elif (in_part := renamed(prefix + path)) in known:
            places.append(in_part)
    # A base model has no module outside of itself, even if one has the same name.
    if prefix:
        places += [path for path in outside if path in known]
    return places


def _renaming(model: "PreTrainedModel") -> Callable[[str], str]:
    """Return the function by which this model's class renames the modules of a checkpoint."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightRenaming
    # The first versions of transformers 5 have no such classes that are built from a part.
    except ImportError:
        return lambda path: path
    conversions = get_model_conversion_mapping(model, add_legacy=False)

    def renamed(path: str) -> str:
        name = f"{path}.weight"
        for conversion in conversions:
            if isinstance(conversion, WeightRenaming):
                name, _ = conversion.rename_source_key(name)
        return name.removesuffix(".weight")

    return renamed


def _architectures(config: Any, checkpoint_files: Iterable[str] | None) -> list[str]:
    """Return the classes that a config names; the config of a part may leave them to the file."""
    if config.architectures:
        return list(config.architectures)
    for folder in {Path(file).parent for file in checkpoint_files or ()}:
        if (folder / "config.json").is_file():
            names = contents.read_json(folder / "config.json").get("architectures")
            if contents.is_list_of_str(names):
                return names
            return []
    return []


def _stand_in_(model: nn.Module) -> None:
    """Give layers without a weight or bias an empty one while the model is loaded.

    A model may initialise the weight of a norm without checking that there is one: Falcon-Mamba
    does.
    """
    for layer in dynorm_layers(model).values():
        for name in _AFFINE:
            if getattr(layer, name) is None:
                empty = torch.empty(0, dtype=torch.float32, device="cpu")
                # The mark of a tensor that transformers must not initialise.
                empty._is_hf_initialized = True  # type: ignore[attr-defined]
                # Read before the parameter that is None, and not in the state dict.
                vars(layer)[name] = empty


def _require_loaded(model: nn.Module, shapes: Mapping[str, torch.Size]) -> None:
    # Not every transformers 5 compares the shapes if there is a quantizer.
    for name, tensor in model.state_dict().items():
        shape = shapes.get(name, tensor.shape)
        if tensor.shape != shape:
            raise StorageError(
                "the tensors in the checkpoint must be the model's, but have in another shape "
                f"{name}: {tuple(tensor.shape)} instead of {tuple(shape)}"
            )
    missing = []
    for path, layer in model.named_modules():
        if not isinstance(layer, (PointwiseNorm, RMSNorm)):
            continue
        for name, tensor in layer.state_dict(keep_vars=True).items():
            # transformers marks the tensors that it read. It only warns of those that it had to
            # initialise.
            if not tensor.is_meta and not getattr(tensor, "_is_hf_initialized", False):
                missing.append(f"{path}.{name}")
    if missing:
        raise StorageError(
            "the parameters of the point-wise layers must be in the checkpoint, in their shape, "
            f"but it lacks {listed(missing)}"
        )
    contents.require_witnesses(model, model.state_dict(), "the checkpoint", "config.json")


def _are_dtypes(dtypes: object) -> bool:
    """Return whether a value maps names to names of dtypes."""
    return isinstance(dtypes, dict) and all(_dtype(name) for name in dtypes.values())


def _dtype(name: object) -> torch.dtype | None:
    """Return the dtype of torch with this name, or None."""
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if isinstance(dtype, torch.dtype):
        return dtype
    return None
