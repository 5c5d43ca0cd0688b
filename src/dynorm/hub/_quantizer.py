"""What transformers takes for a quantization method: the layers named in config.json, put in before weights load."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from dynorm.errors import ModelError, StorageError
from dynorm.fold.specs import give_bias_
from dynorm.hub._format import is_list_of_str, read_specs, require_version
from dynorm.layers.rmsnorm import RMSNorm
from dynorm.replace.specs import LayerSpec, apply_specs_, dynorm_layers

METHOD = "dynorm"
# Of torch's own allocations on the CPU, in bytes.
_ALIGNMENT = 64
_AFFINE = ("weight", "bias")


class DynormConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """The ``quantization_config`` of a config.json: which point-wise layers stand where.

    Args:
        layers: a dict a layer: what :meth:`LayerSpec.to_dict` returns, with ``paths`` relative to the base model,
            so that any head may be put on it; ``outside``, the paths that are not in the base model; and
            ``dtypes``, those of the parameters that have another dtype than the model.
        biases: the paths of linear layers that were given a bias, relative to the base model; and
        biases_outside: those that are not in the base model.
        model_dtype: the model's dtype when it was saved.
        format_version: of this dict.
        dynorm_version: that wrote it.
        quant_method: always "dynorm".
        **unknown: ignored; transformers adds keys of its own.
    """

    def __init__(
        self,
        layers: Any = (),
        model_dtype: str | None = None,
        format_version: int | None = None,
        dynorm_version: str | None = None,
        quant_method: str = METHOD,
        biases: Any = (),
        biases_outside: Any = (),
        **unknown: Any,
    ) -> None:
        self.quant_method = METHOD
        self.format_version = format_version
        self.dynorm_version = dynorm_version
        self.model_dtype = model_dtype
        self.layers = layers
        self.biases, self.biases_outside = list(biases), list(biases_outside)
        if not (is_list_of_str(self.biases) and is_list_of_str(self.biases_outside)):
            raise StorageError(f"the biases in the quantization_config must be paths, got {biases!s:.80}")
        require_version(vars(self), "the quantization_config")
        self.specs()

    def specs(self) -> list[tuple[LayerSpec, list[str], dict[str, str]]]:
        """Return each layer's spec, its paths outside of the base model, and its parameters' own dtypes."""
        where = "the quantization_config"
        specs = read_specs(self.layers, where, allow_none=bool(self.biases or self.biases_outside))
        found = []
        for spec, entry in zip(specs, self.layers, strict=True):
            outside, dtypes = entry.get("outside", []), entry.get("dtypes", {})
            known = isinstance(dtypes, dict) and all(_dtype(name) for name in dtypes.values())
            if not is_list_of_str(outside) or not known:
                raise StorageError(f"{where}: outside must be a list, dtypes name dtypes; got {outside!r}, {dtypes!r}")
            found.append((spec, outside, dtypes))
        return found


class DynormQuantizer(HfQuantizer):  # type: ignore[misc]
    """Puts the layers into a model that ``from_pretrained`` is building, on the meta device."""

    # Only what was converted before can be loaded: transformers says so to who asks for more.
    requires_calibration = True

    @property
    def is_trainable(self) -> bool:
        """True: the layers are ordinary parameters."""
        return True

    @property
    def is_qat_trainable(self) -> bool:
        """True: no adapters are needed."""
        return True

    @property
    def is_compileable(self) -> bool:
        """True: the layers are plain torch."""
        return True

    def is_serializable(self) -> bool:
        """Return True: the weights are ordinary tensors."""
        return True

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        resolved = _resolve(model, self.quantization_config)
        apply_specs_(model, [spec for spec, _ in resolved])
        for spec, dtypes in resolved:
            if _dtype(self.quantization_config.model_dtype) == model.dtype:
                _cast(model.get_submodule(spec.paths[0]), dtypes)
        for path in _bias_paths(model, self.quantization_config):
            give_bias_(model, path)
        self._shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
        _stand_in_(model)
        tied = model.all_tied_weights_keys | aliases_of(model, [spec for spec, _ in resolved])
        model.all_tied_weights_keys = {a: b for a, b in tied.items() if {a, b} <= self._shapes.keys()}
        return model

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        _stand_out_(model)
        _require_shapes(model, self._shapes)
        _require_loaded(model)
        _align_(model)
        # From here on nothing is special about the model: no `.half()` that raises, no Trainer that wants adapters.
        del model.hf_quantizer, model.quantization_method
        model.is_quantized = False
        # A dict, as in a file: transformers cannot load again with a config that holds the object.
        model.config.quantization_config = self.quantization_config.to_dict()
        for module in model.modules():
            # transformers marks the config of each part that is a model.
            config = getattr(module, "config", None)
            if config is not None and hasattr(config, "_is_quantized"):
                del config._is_quantized
        return model


def base_prefix(model: Any) -> str:
    """Return what stands before the paths of the base model: ``"bert."`` in a head's model, ``""`` in a base model."""
    return "" if model.base_model is model else f"{model.base_model_prefix}."


def aliases_of(model: nn.Module, specs: list[LayerSpec]) -> dict[str, str]:
    """Return the parameters' further names, where a layer has several paths, each with the first name."""
    return {
        f"{alias}.{name}": f"{spec.paths[0]}.{name}"
        for spec in specs
        for name, _ in model.get_submodule(spec.paths[0]).named_parameters()
        for alias in spec.paths[1:]
    }


def _resolve(model: Any, config: DynormConfig) -> list[tuple[LayerSpec, dict[str, str]]]:
    """The specs with the paths that they have in this model, which may have another head, or none."""
    prefix = base_prefix(model)
    saved = getattr(model.config, "architectures", None) or []
    resolved = []
    for spec, outside, dtypes in config.specs():
        paths = [prefix + path for path in spec.paths] + outside
        if type(model).__name__ not in saved:
            paths = [place for path in spec.paths for place in _place(model, prefix, path)]
            # A base model has nothing outside of itself, even under the same name.
            paths += [path for path in outside if prefix and _has(model, path)]
        if paths:
            resolved.append((replace(spec, paths=tuple(paths)), dtypes))
    if not resolved and config.layers:
        raise ModelError(
            f"the saved layers must have a place in {type(model).__name__}, but none has: load the class that was "
            f"saved ({', '.join(saved) or 'unknown'}), its base model, or another head on that"
        )
    return resolved


def _bias_paths(model: Any, config: DynormConfig) -> list[str]:
    """Where the added biases are in this model, which may have another head, or none."""
    prefix = base_prefix(model)
    if type(model).__name__ in (getattr(model.config, "architectures", None) or []):
        return [prefix + path for path in config.biases] + config.biases_outside
    paths = [place for path in config.biases for place in _place(model, prefix, path)]
    return paths + [path for path in config.biases_outside if prefix and _has(model, path)]


def _place(model: Any, prefix: str, path: str) -> list[str]:
    """Where a layer stands in another class of model; nowhere if that lacks the whole branch, such as a decoder."""
    # Some base models are known to their heads by the prefix that others give to their base.
    for start, rest in ((prefix, path), ("", path.removeprefix(f"{model.base_model_prefix}."))):
        if _has(model, start + rest.split(".")[0]):
            return [start + rest]
    return []


def _has(model: nn.Module, path: str) -> bool:
    try:
        model.get_submodule(path)
    except AttributeError:
        return False
    return True


def _cast(layer: nn.Module, dtypes: Mapping[str, str]) -> None:
    for name, parameter in layer.named_parameters():
        if name in dtypes:
            parameter.data = parameter.data.to(_dtype(dtypes[name]))


def _stand_in_(model: nn.Module) -> None:
    """Give layers without a weight or bias an empty one, for as long as the model is being loaded.

    A model may initialise the weight of a norm without looking whether there is one: Falcon-Mamba does.
    """
    for layer in dynorm_layers(model).values():
        for name in _AFFINE:
            if getattr(layer, name) is None:
                empty = torch.empty(0)
                # What transformers does not initialise, in its own words.
                empty._is_hf_initialized = True  # type: ignore[attr-defined]
                # Before the parameter that is None, and not in the state dict.
                vars(layer)[name] = empty


def _stand_out_(model: nn.Module) -> None:
    for layer in dynorm_layers(model).values():
        for name in _AFFINE:
            vars(layer).pop(name, None)


def _require_shapes(model: nn.Module, shapes: Mapping[str, torch.Size]) -> None:
    # Not every transformers 5 compares them where there is a quantizer.
    for name, tensor in model.state_dict().items():
        shape = shapes.get(name, tensor.shape)
        if tensor.shape != shape:
            raise StorageError(
                f"the tensors in the checkpoint must be the model's, but have in another shape {name}: "
                f"{tuple(tensor.shape)} instead of {tuple(shape)}"
            )


def _require_loaded(model: nn.Module) -> None:
    # transformers marks what it read so; what it had to invent, and only warns of, is not marked.
    missing = [
        f"{path}.{name}"
        for path, layer in [*dynorm_layers(model).items(), *_rms_norms(model)]
        for name, parameter in layer.named_parameters()
        if not parameter.is_meta and not getattr(parameter, "_is_hf_initialized", False)
    ]
    if missing:
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        raise StorageError(
            "the parameters of the point-wise layers must be in the checkpoint, in their shape, but it lacks "
            f"{', '.join(missing[:5])}{more}"
        )


def _rms_norms(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(path, module) for path, module in model.named_modules() if type(module) is RMSNorm]


def _align_(model: nn.Module) -> None:
    """Move tensors to where torch would have put them.

    transformers leaves them in the mapped file, at any address, and there a product with a vector is rounded otherwise.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.device.type == "cpu" and tensor.data_ptr() % _ALIGNMENT:
            tensor.data = tensor.data.clone()


def _dtype(name: object) -> torch.dtype | None:
    found = getattr(torch, name, None) if isinstance(name, str) else None
    return found if isinstance(found, torch.dtype) else None
