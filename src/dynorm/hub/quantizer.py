"""The layers that config.json names, put into a model before transformers loads the weights.

To transformers this is a quantization method.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.quantizers import auto
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from dynorm.errors import ModelError, StorageError
from dynorm.hub import contents
from dynorm.layers import DyISRU
from dynorm.plain import JsonObject
from dynorm.replace.converted import dynorm_layers
from dynorm.replace.edits import give_bias_
from dynorm.replace.specs import apply_specs_
from dynorm.wrappers import plain_modules

if TYPE_CHECKING:
    from transformers.modeling_utils import PreTrainedModel

METHOD = "dynorm"
# Key and value in config.json. Without dynorm, transformers takes the value for a file name, and
# quotes it in its error.
BARRIER = "transformers_weights"
ADVICE = (
    "install dynorm and import it before you load this model, or pass trust_remote_code=True to an Auto "
    "class: its norms are replaced by layers that only this Python library knows"
)
# The file that programs import if they trust the code of a folder, and its entry in config.json.
CODE_FILE = "modeling_dynorm.py"
CODE = '''"""Imports dynorm, which must be installed and knows the layers of this model."""

from dynorm.hub.transformers import ConfigReader
'''
CODE_ENTRY = {"AutoConfig": "modeling_dynorm.ConfigReader"}
_AFFINE = ("weight", "bias")


class DynormConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """The ``quantization_config`` of a config.json: the point-wise layers and their paths.

    The paths are those of the saved model. Those that begin with ``base`` are in its base model,
    which may be loaded with any head.
    """

    def __init__(
        self,
        base: str = "",
        layers: object = None,
        biases: object = None,
        format_version: int | None = None,
        dynorm_version: str | None = None,
        # Ignored, such as the keys that transformers adds.
        **unknown: object,
    ) -> None:
        self.quant_method = METHOD
        self.format_version = format_version
        self.dynorm_version = dynorm_version
        self.base = base
        self.layers = layers or []
        self.biases = biases or []
        where = "the quantization_config"
        contents.require_version(vars(self), where)
        contents.read_names(vars(self), "biases", where)
        self.specs = contents.read_layers(self.layers, where)

    def to_dict(self) -> JsonObject:
        """Return the values for JSON."""
        values = dict(vars(self))
        del values["specs"]
        return values


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
        """Remove the keys that were for a transformers without dynorm.

        This is the first hook that gets the config.
        """
        for name in added_keys(config):
            vars(config).pop(name, None)
        return config

    def _process_model_before_weight_loading(
        self, model: "PreTrainedModel", **kwargs: object
    ) -> object:
        config = self.quantization_config
        place = place_in(model, config.base)
        specs = []
        for spec in config.specs:
            paths = [found for path in spec.paths if (found := place(path)) is not None]
            if paths:
                specs.append(replace(spec, paths=tuple(paths)))
        if config.layers and not specs:
            raise ModelError(
                f"the saved layers must have a place in {type(model).__name__}, but none has: load "
                "the class that was saved, its base model, or another head on that"
            )
        apply_specs_(model, specs)
        modules = plain_modules(model, remove_duplicate=False)
        for path in config.biases:
            found = place(path)
            if found is not None:
                give_bias_(modules, found)
        _stand_in_(model)
        names = model.state_dict().keys()
        tied = model.all_tied_weights_keys
        model.all_tied_weights_keys = {a: b for a, b in tied.items() if {a, b} <= names}
        return model

    def _process_model_after_weight_loading(
        self, model: "PreTrainedModel", **kwargs: object
    ) -> object:
        for path, layer in dynorm_layers(model).items():
            for name in _AFFINE:
                vars(layer).pop(name, None)
            if not isinstance(layer, DyISRU) or layer.witnesses is None:
                continue
            if not layer.has_witnesses(layer.witnesses):
                raise StorageError(
                    f"the witnesses of {path!r} in the checkpoint must be those in config.json, "
                    f"{list(layer.witness_channels)}, got {layer.witnesses.tolist()}"
                )
        # The model is an ordinary one now. Otherwise `.half()` would raise an error, and the
        # Trainer would ask for adapters.
        del model.hf_quantizer, model.quantization_method
        model.is_quantized = False
        # A dict, because transformers cannot load again with a config that holds the object.
        model.config.quantization_config = self.quantization_config.to_dict()
        for module in model.modules():
            # transformers marks the config of each part that is a model.
            config = getattr(module, "config", None)
            if config is not None and hasattr(config, "_is_quantized"):
                del config._is_quantized
        return model


def register(auto: Any = auto) -> None:
    """Add the method to transformers' lists; a reload of dynorm replaces it."""
    auto.AUTO_QUANTIZATION_CONFIG_MAPPING.pop(METHOD, None)
    auto.AUTO_QUANTIZER_MAPPING.pop(METHOD, None)
    auto.register_quantization_config(METHOD)(DynormConfig)
    auto.register_quantizer(METHOD)(DynormQuantizer)


def added_keys(config: object) -> dict[str, object]:
    """Return the keys of config.json for a transformers without dynorm.

    One keeps it from loading the model with norms, the other imports dynorm if the program trusts
    the code of the folder. A class that is itself such code has its own entry.
    """
    if type(config).__module__.startswith("transformers."):
        return {BARRIER: ADVICE, "auto_map": CODE_ENTRY}
    return {BARRIER: ADVICE}


def base_prefix(model: "PreTrainedModel") -> str:
    """Return the prefix of the base model's paths: ``""``, or such as ``"bert."`` below a head."""
    if model.base_model is model:
        return ""
    return f"{model.base_model_prefix}."


def place_in(model: "PreTrainedModel", saved_base: str) -> Callable[[str], str | None]:
    """Return the function from paths of the saved model to those of a model with another head.

    It returns None for a path that this model does not have.
    """
    is_saved_class = type(model).__name__ in (getattr(model.config, "architectures", None) or [])
    known = {path for path, _ in model.named_modules(remove_duplicate=False)}

    def place(path: str) -> str | None:
        if is_saved_class:
            return path
        inside = path.removeprefix(saved_base)
        if not path.startswith(saved_base):
            # A base model has no module outside of itself, even if one has the same name.
            return path if path in known and base_prefix(model) else None
        # Some base models have a part with the name that others give to the base model.
        without_base = inside.removeprefix(f"{model.base_model_prefix}.")
        for found in (base_prefix(model) + inside, without_base):
            if found in known:
                return found
        return None

    return place


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


register()
