"""A quantization method to transformers: it puts the layers that config.json names into a model before weights load."""

from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any

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

METHOD = "dynorm"
# Key and value in config.json that transformers alone takes for a bad file name, which its error
# quotes.
BARRIER = "transformers_weights"
ADVICE = "import dynorm before you load this model: its norms are replaced by layers that only dynorm (pip) knows"
# Of torch's own allocations on the CPU, in bytes.
_ALIGNMENT = 64
_AFFINE = ("weight", "bias")
# Whether the call of from_pretrained that is running was given a dtype.
DTYPE_GIVEN: ContextVar[bool] = ContextVar("DTYPE_GIVEN", default=False)


class DynormConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """The ``quantization_config`` of a config.json: which point-wise layers stand where.

    A path is relative to the base model, so that any head may be put on it, or ``outside`` of it.
    """

    def __init__(
        self,
        # One dict per layer: that of its spec, with ``outside``, and ``dtypes`` of parameters that
        # are not the model's.
        layers: Any = (),
        model_dtype: str | None = None,
        format_version: int | None = None,  # of this dict
        dynorm_version: str | None = None,  # of the version that wrote it
        biases: Any = (),  # paths of linear layers that were given a bias
        biases_outside: Any = (),
        weights: Any = None,  # size and checksum of each file of weights, to know them by
        layers_sha256: str | None = None,  # of the lists above; made where there is none
        # By path of a module that is no layer: the dtypes of its tensors that are not the model's.
        dtypes: Any = None,
        dtypes_outside: Any = None,
        # Ignored, such as the keys that transformers adds.
        **unknown: Any,
    ) -> None:
        self.quant_method = METHOD
        self.format_version = format_version
        self.dynorm_version = dynorm_version
        self.model_dtype = model_dtype
        self.layers = layers
        self.biases, self.biases_outside = (
            list(b) if isinstance(b, tuple) else b for b in (biases, biases_outside)
        )
        if not (
            contents.is_list_of_str(self.biases) and contents.is_list_of_str(self.biases_outside)
        ):
            raise StorageError(
                f"the biases in the quantization_config must be paths, got {biases!s:.80}"
            )
        self.dtypes, self.dtypes_outside = dtypes or {}, dtypes_outside or {}
        for by_path in (self.dtypes, self.dtypes_outside):
            known = isinstance(by_path, dict) and all(map(_are_dtypes, by_path.values()))
            if not known:
                raise StorageError(
                    "the dtypes in the quantization_config must name dtypes of tensors by path, "
                    f"got {by_path!s:.80}"
                )
        contents.require_version(vars(self), "the quantization_config")
        self.specs()
        self.weights = weights
        described: list[Any] = [list(layers), self.biases, self.biases_outside]
        if self.dtypes or self.dtypes_outside:
            described += [self.dtypes, self.dtypes_outside]
        self.layers_sha256 = contents.checksum(described)
        if layers_sha256 not in (None, self.layers_sha256):
            raise StorageError(
                "the layers in the quantization_config must be as dynorm wrote them, but were "
                "changed"
            )

    def specs(self) -> list[tuple[LayerSpec, list[str], dict[str, str]]]:
        """Return each layer's spec, its paths outside of the base model, and its parameters' own dtypes."""
        where = "the quantization_config"
        specs = contents.read_layers(
            self.layers, where, allow_none=bool(self.biases or self.biases_outside)
        )
        found = []
        for spec, entry in zip(specs, self.layers, strict=True):
            outside, dtypes = entry.get("outside", []), entry.get("dtypes", {})
            if not contents.is_list_of_str(outside) or not _are_dtypes(dtypes):
                raise StorageError(
                    f"{where}: outside must be a list, dtypes name dtypes; got {outside!r}, "
                    f"{dtypes!r}"
                )
            # Earlier versions saved the names of wrappers too.
            found.append((spec, [without_wrappers(path) for path in outside], dtypes))
        return found


class DynormQuantizer(HfQuantizer):  # type: ignore[misc]
    """The quantizer that puts the layers into a model while ``from_pretrained`` builds it on the meta device."""

    # Without it transformers would quantize an unconverted model on the fly; now it says that this
    # cannot be done.
    requires_calibration = True
    # The layers are ordinary parameters of plain torch, which train without adapters.
    is_trainable = is_qat_trainable = is_compileable = True

    def is_serializable(self) -> bool:
        """Return True: the weights are ordinary tensors."""
        return True

    def update_attn_implementation(self, config: Any) -> Any:
        """Take the line off the config that keeps transformers alone from loading it: the first hook that sees it."""
        vars(config).pop(BARRIER, None)
        return config

    # The name of the first hook in transformers 5.0.
    update_tp_plan = update_attn_implementation

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: Iterable[str] | None = None, **kwargs: Any
    ) -> Any:
        config = self.quantization_config
        for file in map(Path, checkpoint_files or ()):
            if isinstance(config.weights, Mapping) and file.name in config.weights:
                contents.require_weights(file, config.weights[file.name], "the quantization_config")
        layers = [
            (spec, _places(model, spec.paths, outside), dtypes)
            for spec, outside, dtypes in config.specs()
        ]
        found = [
            (replace(spec, paths=tuple(paths)), dtypes) for spec, paths, dtypes in layers if paths
        ]
        if config.layers and not found:
            saved = ", ".join(_architectures(model.config, checkpoint_files)) or "unknown"
            raise ModelError(
                f"the saved layers must have a place in {type(model).__name__}, but none has: load "
                "the class that was "
                f"saved ({saved}), its base model, or another head on that"
            )
        specs = [spec for spec, _ in found]
        apply_specs_(model, specs)
        # Where the caller asks for a dtype, or the model gets another one than its own, all follow.
        if not DTYPE_GIVEN.get() and _dtype(config.model_dtype) == model.dtype:
            for spec, dtypes in found:
                _cast_(model.get_submodule(spec.paths[0]), dtypes)
            for path, dtypes in config.dtypes.items():
                for place in _places(model, [path], []):
                    _cast_(model.get_submodule(place), dtypes)
            for path, dtypes in config.dtypes_outside.items():
                for place in _places(model, [], [path]):
                    _cast_(model.get_submodule(place), dtypes)
        for path in _places(model, config.biases, config.biases_outside):
            give_bias_(model, path)
        self._shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
        _stand_in_(model)
        tied = model.all_tied_weights_keys | aliases_of(model, specs)
        model.all_tied_weights_keys = {
            a: b for a, b in tied.items() if {a, b} <= self._shapes.keys()
        }
        return model

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        for layer in dynorm_layers(model).values():
            for name in _AFFINE:
                vars(layer).pop(name, None)
        _require_loaded(model, self._shapes)
        # transformers leaves tensors in the mapped file, at any address, where a product with a
        # vector is rounded otherwise: move them to where torch would have put them.
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.device.type == "cpu" and tensor.data_ptr() % _ALIGNMENT:
                tensor.data = tensor.data.clone()
        # From here on nothing is special about the model: no `.half()` that raises, no Trainer that
        # wants adapters.
        del model.hf_quantizer, model.quantization_method
        model.is_quantized = False
        # The model may change before it is written again.
        self.quantization_config.weights = None
        # A dict, as in a file: transformers cannot load again with a config that holds the object.
        model.config.quantization_config = self.quantization_config.to_dict()
        for module in model.modules():
            # transformers marks the config of each part that is a model.
            config = getattr(module, "config", None)
            if config is not None and hasattr(config, "_is_quantized"):
                del config._is_quantized
        return model


def register(auto: Any) -> None:
    """Enter the method into transformers' lists, again after a reload of dynorm."""
    auto.AUTO_QUANTIZATION_CONFIG_MAPPING.pop(METHOD, None)
    auto.AUTO_QUANTIZER_MAPPING.pop(METHOD, None)
    auto.register_quantization_config(METHOD)(DynormConfig)
    auto.register_quantizer(METHOD)(DynormQuantizer)


def _cast_(module: nn.Module, dtypes: Mapping[str, str]) -> None:
    """Give a module's own tensors the dtypes that are named; the weights are then read in these."""
    for name, dtype in dtypes.items():
        tensor = {**module._buffers, **module._parameters}.get(name)
        # Another head may lack it.
        if tensor is not None:
            tensor.data = tensor.data.to(_dtype(dtype))


def base_prefix(model: Any) -> str:
    """Return the prefix of the base model's paths: ``"bert."`` in a model with a head, ``""`` in a base model."""
    return "" if model.base_model is model else f"{model.base_model_prefix}."


def aliases_of(model: nn.Module, specs: list[LayerSpec]) -> dict[str, str]:
    """Map the further names of parameters, where a layer has several paths, to the first name of each."""
    modules = plain_modules(model, remove_duplicate=False)
    return {
        f"{alias}.{name}": f"{spec.paths[0]}.{name}"
        for spec in specs
        for name, _ in modules[spec.paths[0]].named_parameters()
        for alias in spec.paths[1:]
    }


def _places(model: Any, paths: Iterable[str], outside: Iterable[str]) -> list[str]:
    """Return saved paths as they are in this model, which may have another head, or none."""
    prefix = base_prefix(model)
    if type(model).__name__ in (getattr(model.config, "architectures", None) or []):
        return [*(prefix + path for path in paths), *outside]
    known = {path for path, _ in model.named_modules(remove_duplicate=False)}
    renamed = _renaming(model)
    found = []
    for path in paths:
        # Some base models are known to their heads by the prefix that others give to their base.
        choices = ((prefix, path), ("", path.removeprefix(f"{model.base_model_prefix}.")))
        places = [start + rest for start, rest in choices if start + rest.split(".")[0] in known]
        # The text model of a larger one renames the tensors of the checkpoint, and so their places.
        if not places:
            places = [place for place in [renamed(prefix + path)] if place in known]
        # Nowhere in a model that lacks the whole branch, as a decoder.
        found += places[:1]
    # A base model has nothing outside of itself, even under the same name.
    return found + [path for path in outside if prefix and path in known]


def _renaming(model: Any) -> Callable[[str], str]:
    """Return how this model's class renames the modules of a checkpoint, by its tensors' names."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightRenaming
    # The first versions of transformers 5 have no such classes that are built from a part.
    except ImportError:
        return lambda path: path
    renamings = [
        renaming
        for renaming in get_model_conversion_mapping(model, add_legacy=False)
        if isinstance(renaming, WeightRenaming)
    ]

    def renamed(path: str) -> str:
        name = f"{path}.weight"
        for renaming in renamings:
            name, _ = renaming.rename_source_key(name)
        return name.removesuffix(".weight")

    return renamed


def _architectures(config: Any, checkpoint_files: Iterable[str] | None) -> list[str]:
    """Return the classes that a config names; that of a part may leave it to the file."""
    if config.architectures:
        return list(config.architectures)
    for folder in {Path(file).parent for file in checkpoint_files or ()}:
        if (folder / "config.json").is_file():
            names = contents.read_json(folder / "config.json").get("architectures")
            return names if contents.is_list_of_str(names) else []
    return []


def _stand_in_(model: nn.Module) -> None:
    """Give layers without a weight or bias an empty one, for as long as the model is being loaded.

    A model may initialise the weight of a norm without checking that there is one: Falcon-Mamba
    does.
    """
    for layer in dynorm_layers(model).values():
        for name in _AFFINE:
            if getattr(layer, name) is None:
                empty = torch.empty(0, dtype=torch.float32, device="cpu")
                # The mark of a tensor that transformers must not initialise.
                empty._is_hf_initialized = True  # type: ignore[attr-defined]
                # Before the parameter that is None, and not in the state dict.
                vars(layer)[name] = empty


def _require_loaded(model: nn.Module, shapes: Mapping[str, torch.Size]) -> None:
    # Not every transformers 5 compares them where there is a quantizer.
    for name, tensor in model.state_dict().items():
        shape = shapes.get(name, tensor.shape)
        if tensor.shape != shape:
            raise StorageError(
                "the tensors in the checkpoint must be the model's, but have in another shape "
                f"{name}: "
                f"{tuple(tensor.shape)} instead of {tuple(shape)}"
            )
    # transformers marks the tensors that it read. Those that it had to invent, and only warns of,
    # are not marked.
    missing = [
        f"{path}.{name}"
        for path, layer in model.named_modules()
        if isinstance(layer, (PointwiseNorm, RMSNorm))
        for name, tensor in layer.state_dict(keep_vars=True).items()
        if not tensor.is_meta and not getattr(tensor, "_is_hf_initialized", False)
    ]
    if missing:
        raise StorageError(
            "the parameters of the point-wise layers must be in the checkpoint, in their shape, "
            "but it lacks "
            f"{listed(missing)}"
        )
    contents.require_witnesses(model, model.state_dict(), "the checkpoint", "config.json")


def _are_dtypes(dtypes: object) -> bool:
    """Return whether a value maps names to names of dtypes."""
    return isinstance(dtypes, dict) and all(_dtype(name) for name in dtypes.values())


def _dtype(name: object) -> torch.dtype | None:
    found = getattr(torch, name, None) if isinstance(name, str) else None
    return found if isinstance(found, torch.dtype) else None
