"""Converted transformers models that load without dynorm, with ``trust_remote_code=True``.

The folder has a file of plain torch layers, :mod:`dynorm.hub.modeling_dynorm`, to which a class for
the model is added.
"""

import inspect
import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.modeling_utils import PreTrainedModel
from transformers.models.auto import modeling_auto

from dynorm import version
from dynorm.arguments import require_gathered
from dynorm.errors import ModelError, listed
from dynorm.files import write_text
from dynorm.hub import modeling_dynorm
from dynorm.hub.contents import Contents, read_json
from dynorm.hub.transformers import CONFIG, config_of, put_back, tie_aliases_
from dynorm.layers import PointwiseNorm
from dynorm.wrappers import plain_modules, plain_state

MODULE = modeling_dynorm.__name__.rpartition(".")[2]
_SAVE_INSTEAD = "or save it without remote_code, and import dynorm to load it"
_CLASS = '''

class {name}({part}, transformers.{stock}):
    """{stock}, with layers in the place of its norms."""
'''


def write_with_code(model: PreTrainedModel, changes: Contents, folder: Path) -> None:
    """Write a transformers model with the code of its layers; ModelError if that cannot be."""
    require_gathered(model)
    kinds = stock_classes(model)
    values = config_of(model, changes).to_dict()
    _require_known(model, changes, values)
    layers = []
    for entry in values["layers"]:
        layers.append({key: entry[key] for key in entry if key != "dtypes"})
    described = {
        "dynorm_version": version.__version__,
        "model": _name(kinds[0]),
        "layers": layers,
        "biases": values["biases"],
        "biases_outside": values["biases_outside"],
    }
    tensors = plain_state(model, model.state_dict())
    for path, layer in plain_modules(model, remove_duplicate=False).items():
        # The positions of the witnesses are in config.json: some programs accept no tensor that is
        # not a parameter.
        if isinstance(layer, PointwiseNorm):
            tensors.pop(f"{path}.witnesses", None)
    # Without the change that names the layers as a quantization method.
    decorated: Any = PreTrainedModel.save_pretrained
    save_pretrained = getattr(decorated, "_without_dynorm", decorated)
    with ExitStack() as stack:
        stack.enter_context(put_back(model.config, "quantization_config"))
        stack.enter_context(put_back(model, "_tied_weights_keys"))
        vars(model.config).pop("quantization_config", None)
        tie_aliases_(model, changes)
        # The names of the modules, because transformers renames no tensors for code that it does
        # not know.
        save_pretrained(model, folder, state_dict=tensors, save_original_format=False)
    config = read_json(folder / CONFIG)
    # Programs with models of their own must not take theirs for this architecture.
    config["architectures"] = [_name(kinds[0])]
    config["auto_map"] = _auto_map(model, kinds)
    config["dynorm"] = described
    config[modeling_dynorm.BARRIER] = modeling_dynorm.ADVICE
    if changes.untied and not getattr(model.config, "is_encoder_decoder", False):
        # transformers ties no tensors that were saved apart. Other programs ask this key.
        config["tie_word_embeddings"] = False
    write_text(folder / CONFIG, json.dumps(config, indent=2, sort_keys=True) + "\n")
    write_text(folder / f"{MODULE}.py", _source(model, kinds))


def stock_classes(model: PreTrainedModel) -> list[type]:
    """Return the class of the model, and that of its base model if it has a head.

    A class that is not one of transformers' is refused.
    """
    kinds = []
    for part in (model, model.base_model):
        kind = type(part)
        if getattr(transformers, kind.__name__, None) is not kind:
            raise ModelError(
                "the class of the model must be one of transformers' to be saved with code, but "
                f"{kind.__module__}.{kind.__name__} is not: save it without remote_code, and import "
                "dynorm to load it"
            )
        # The base model of some classes has another configuration.
        if kind not in kinds and type(part.config) is type(model.config):
            kinds.append(kind)
    return kinds


def _require_known(model: PreTrainedModel, changes: Contents, values: Mapping[str, object]) -> None:
    """Refuse layers and dtypes that the code does not know."""
    if getattr(model.config, "quantization_config", None) is not None:
        method = model.config.quantization_config
        if not isinstance(method, Mapping) or method.get("quant_method") != "dynorm":
            raise ModelError(
                "a model to save with code must not be quantized: save it before quantizing"
            )
    unknown = {spec.layer for spec in changes.layers} - modeling_dynorm.LAYERS.keys()
    if unknown:
        raise ModelError(
            f"a model to save with code must have final layers, but has {listed(unknown)}: call "
            "dynorm.finalize_ first"
        )
    require_one_dtype(model)


def require_one_dtype(model: PreTrainedModel) -> None:
    """Refuse a model whose parameters have several dtypes."""
    others = []
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and parameter.dtype != model.dtype:
            others.append(name)
    if others and model.dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise ModelError(
            f"a model to save with code must have one dtype, but not all parameters are "
            f"{model.dtype}: {listed(others)}; cast the model, {_SAVE_INSTEAD}"
        )


def _name(stock: type) -> str:
    """Return the name of the class that takes the place of one of transformers."""
    return f"Dynorm{stock.__name__}"


def _auto_map(model: PreTrainedModel, kinds: list[type]) -> dict[str, str]:
    """Return the class that each Auto class of transformers must load, as module and name."""
    auto_map = {"AutoConfig": f"{MODULE}.{_name(type(model.config))}"}
    # The base model.
    auto_map["AutoModel"] = f"{MODULE}.{_name(kinds[-1])}"
    for name, auto in vars(modeling_auto).items():
        mapping = getattr(auto, "_model_mapping", None)
        if not name.startswith("AutoModelFor") or mapping is None:
            continue
        if mapping.get(type(model.config), None) is kinds[0]:
            auto_map[name] = f"{MODULE}.{_name(kinds[0])}"
    return auto_map


def _source(model: PreTrainedModel, kinds: list[type]) -> str:
    """Return the code: the layers, and a class of the configuration and of each model."""
    config = type(model.config)
    source = inspect.getsource(modeling_dynorm)
    source = source.replace("import torch\n", "import torch\nimport transformers\n", 1)
    # A directive to the type checker of this repository.
    source = source.replace("  # type: ignore[call-arg]", "").replace("  # type: ignore[misc]", "")
    source += _CLASS.format(name=_name(config), part="PointwiseConfig", stock=config.__name__)
    for kind in kinds:
        source += _CLASS.format(name=_name(kind), part="PointwiseModel", stock=kind.__name__)
        source += f"\n    config_class = {_name(config)}\n"
    if len(kinds) > 1:
        # Some heads make their base model by AutoModel, which would ask for trust again.
        base = _name(kinds[-1])
        source += f"\n\ntransformers.AutoModel.register({_name(config)}, {base}, exist_ok=True)\n"
    return source
