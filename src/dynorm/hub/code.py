"""Converted transformers models that load without dynorm, with ``trust_remote_code=True``.

The folder has copies of the layers' own files and of :mod:`dynorm.hub.remote`, and a file with a
class for the model.
"""

import importlib
import inspect
import json
import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import transformers
from transformers.modeling_utils import PreTrainedModel
from transformers.models.auto import modeling_auto

from dynorm import version
from dynorm.arguments import require_gathered
from dynorm.errors import ModelError, listed
from dynorm.hub.contents import Contents, read_json
from dynorm.hub.quantizer import base_prefix
from dynorm.hub.remote import ADVICE, BARRIER, LAYERS
from dynorm.hub.transformers import CONFIG, put_back, tie_aliases_
from dynorm.wrappers import plain_state

MODULE = "modeling_dynorm"
# Plain torch computes the layers: these take the place of the modules of these names.
_WITHOUT_KERNELS = {
    "kernels": '''"""Without kernels."""


class FunctionCode:
    """The number of each layer's kernel."""

    DYISRU = DYT = DERF = LINEAR = 0


def traced(*tensors):
    """Return whether a tensor may have no value."""
    return True
''',
    "layers.by_kernel": '''"""Without kernels."""


def by_kernel(layer, x):
    """Return None: no kernel serves."""
    return None
''',
}
_CLASS = '''

class {name}({part}, transformers.{stock}):
    """{stock}, with layers in the place of its norms."""
'''


def write_with_code(model: PreTrainedModel, changes: Contents, folder: Path) -> None:
    """Write a transformers model with the code of its layers; ModelError if that cannot be."""
    require_gathered(model)
    kinds = stock_classes(model)
    unknown = {spec.layer for spec in changes.layers} - LAYERS.keys()
    if unknown:
        raise ModelError(
            f"a model to save with code must have final layers, but has {listed(unknown)}: call "
            "dynorm.finalize_ first"
        )
    require_one_dtype(model)
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
        tensors = plain_state(model, model.state_dict())
        save_pretrained(model, folder, state_dict=tensors, save_original_format=False)
    config = read_json(folder / CONFIG)
    # Programs with models of their own must not take theirs for this architecture.
    config["architectures"] = [_name(kinds[0])]
    config["auto_map"] = _auto_map(model, kinds)
    config["dynorm"] = {
        "dynorm_version": version.__version__,
        "model": _name(kinds[0]),
        "base": base_prefix(model),
        "layers": [spec.to_dict() for spec in changes.layers],
        "biases": changes.biases,
    }
    config[BARRIER] = ADVICE
    if changes.untied and not getattr(model.config, "is_encoder_decoder", False):
        # transformers ties no tensors that were saved apart. Other programs ask this key.
        config["tie_word_embeddings"] = False
    (folder / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", "utf-8")
    files = layer_files()
    for name, source in files.items():
        (folder / f"{name}.py").write_text(source, "utf-8")
    (folder / f"{MODULE}.py").write_text(_modeling(model, kinds, list(files)), "utf-8")


def layer_files() -> dict[str, str]:
    """Return the source of :mod:`dynorm.hub.remote` and all that it needs, by the name of the copy.

    All are in one folder, and import each other from there.
    """
    files: dict[str, str] = {}
    waiting = ["hub.remote"]

    def copied(name: str) -> str:
        waiting.append(name)
        return "dynorm_" + name.replace(".", "_")

    def from_module(match: re.Match[str]) -> str:
        return f"from .{copied(match[1])} import"

    def of_modules(match: re.Match[str]) -> str:
        lines = []
        for name in match[1].split(", "):
            lines.append(f"from . import {copied(name)} as {name}")
        return "\n".join(lines)

    while waiting:
        name = waiting.pop()
        flat = "dynorm_" + name.replace(".", "_")
        if flat in files:
            continue
        source = _WITHOUT_KERNELS.get(name)
        if source is None:
            source = inspect.getsource(importlib.import_module(f"dynorm.{name}"))
        source = re.sub(r"^from dynorm\.([\w.]+) import", from_module, source, flags=re.MULTILINE)
        files[flat] = re.sub(r"^from dynorm import (.+)$", of_modules, source, flags=re.MULTILINE)
    return files


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


def require_one_dtype(model: PreTrainedModel) -> None:
    """Refuse a model whose parameters have several dtypes."""
    others = []
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and parameter.dtype != model.dtype:
            others.append(name)
    if others:
        raise ModelError(
            f"a model to save with code must have one dtype, but not all parameters are "
            f"{model.dtype}: {listed(others)}; cast the model, or save it without remote_code"
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


def _modeling(model: PreTrainedModel, kinds: list[type], files: list[str]) -> str:
    """Return the code with a class of the configuration and of each model."""
    lines = ['"""A model of transformers with point-wise layers; written by dynorm."""', ""]
    lines += ["import transformers", ""]
    lines.append("from .dynorm_hub_remote import PointwiseConfig, PointwiseModel")
    lines.append("")
    lines.append("# transformers copies the files that it sees imported so.")
    for name in sorted(files):
        lines.append(f"from .{name} import __doc__ as _")
    source = "\n".join(lines) + "\n"
    config = type(model.config)
    source += _CLASS.format(name=_name(config), part="PointwiseConfig", stock=config.__name__)
    for kind in kinds:
        source += _CLASS.format(name=_name(kind), part="PointwiseModel", stock=kind.__name__)
        source += f"\n    config_class = {_name(config)}\n"
    if len(kinds) > 1:
        # Some heads make their base model by AutoModel, which would ask for trust again.
        base = _name(kinds[-1])
        source += f"\n\ntransformers.AutoModel.register({_name(config)}, {base}, exist_ok=True)\n"
    return source
