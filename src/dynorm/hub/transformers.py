"""transformers models: config.json names the layers, and ``from_pretrained`` builds them again.

To transformers, dynorm is a quantization method, because that is its only extension point that
changes modules before the weights are loaded. The loaded model is an ordinary one, which may be
cast, trained and saved like any other.
"""

import inspect
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers.modeling_utils import PreTrainedModel
from transformers.quantizers import auto

from dynorm import version
from dynorm.arguments import require_gathered
from dynorm.errors import ModelError, StorageError, listed, readable
from dynorm.files import write_text
from dynorm.hub import contents, quantizer
from dynorm.hub.quantizer import (
    ADVICE,
    BARRIER,
    DTYPE_GIVEN,
    METHOD,
    DynormConfig,
    aliases_of,
    base_prefix,
)
from dynorm.replace.converted import dynorm_layers, is_ours, replaced_by
from dynorm.replace.edits import is_changed
from dynorm.wrappers import has_wrappers, plain_modules, plain_state

CONFIG = "config.json"
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")


def register() -> None:
    """Make ``from_pretrained`` read, and ``save_pretrained`` write, converted models."""
    if int(transformers.__version__.split(".")[0]) < 5:
        raise ImportError(f"transformers must be 5.0 or newer, got {transformers.__version__}")
    # A reload of dynorm registers its new classes.
    quantizer.register(auto)
    # transformers has no hook for this, and without the layers' names a load would build norms
    # instead.
    save_pretrained = getattr(
        PreTrainedModel.save_pretrained, "_without_dynorm", PreTrainedModel.save_pretrained
    )

    @wraps(save_pretrained)
    def described_save_pretrained(self: PreTrainedModel, *args: object, **kwargs: object) -> Any:
        # Looked up at each call, because models may be converted or restored in between.
        changes = contents.contents_of(self) if is_changed(self) else None
        if changes is None:
            with described(self, changes):
                return save_pretrained(self, *args, **kwargs)
        bound = inspect.signature(save_pretrained).bind(self, *args, **kwargs)
        tensors = bound.arguments.get("state_dict")
        if tensors is None:
            require_gathered(self)
        with described(self, changes):
            if has_wrappers(self):
                # The class that loads it has no wrappers.
                tensors = self.state_dict() if tensors is None else tensors
                bound.arguments["state_dict"] = plain_state(self, tensors)
            written = save_pretrained(*bound.args, **bound.kwargs)
        _seal(Path(bound.arguments["save_directory"]))
        return written

    described_save_pretrained._without_dynorm = save_pretrained  # type: ignore[attr-defined]
    PreTrainedModel.save_pretrained = described_save_pretrained
    bound = PreTrainedModel.from_pretrained
    from_pretrained = getattr(bound, "_without_dynorm", bound.__func__)

    @wraps(from_pretrained)
    def checked_from_pretrained(
        cls: object, *args: object, output_loading_info: bool = False, **kwargs: object
    ) -> Any:
        if args and kwargs.get("config") is None:
            config = _config_of_part(cls, args[0])
            if config is not None:
                kwargs["config"] = config
        asked = [kwargs.get(name) for name in ("dtype", "torch_dtype")]
        token = DTYPE_GIVEN.set(any(dtype not in (None, "auto") for dtype in asked))
        try:
            model, info = from_pretrained(cls, *args, output_loading_info=True, **kwargs)
        finally:
            DTYPE_GIVEN.reset(token)
        _require_no_leftovers(model, info["unexpected_keys"])
        if output_loading_info:
            return (model, info)
        return model

    checked_from_pretrained._without_dynorm = from_pretrained  # type: ignore[attr-defined]
    PreTrainedModel.from_pretrained = classmethod(checked_from_pretrained)  # type: ignore[arg-type]


def _config_of_part(cls: object, folder: object) -> object:
    """Return the config for a class that takes a part of a larger one, such as its text_config.

    It gets the layers' names, which are in the larger one. None if the class takes all of the
    config, or the folder was not saved by dynorm.
    """
    kind: Any = getattr(cls, "config_class", None)
    is_part = bool(getattr(kind, "base_config_key", ""))
    if not is_part or not isinstance(folder, (str, Path)) or not (Path(folder) / CONFIG).is_file():
        return None
    values = contents.read_json(Path(folder) / CONFIG)
    quantization = values.get("quantization_config")
    is_ours = isinstance(quantization, Mapping) and quantization.get("quant_method") == METHOD
    if not is_ours or kind.base_config_key not in values:
        return None
    config = kind.from_pretrained(folder)
    config.quantization_config = quantization
    return config


def _require_no_leftovers(model: nn.Module, unexpected: Iterable[str]) -> None:
    """Refuse a model with norms where the checkpoint has layers: its config does not name them."""
    layers = contents.layers_named_by(unexpected)
    lost = set()
    for path, module in model.named_modules():
        if "norm" not in type(module).__name__.lower():
            continue
        for layer in layers:
            # A model with a head has a prefix before the paths of its base model.
            if f".{layer}".endswith(f".{path}") or f".{path}".endswith(f".{layer}"):
                lost.add(layer)
    if lost:
        raise StorageError(
            "the config must name the point-wise layers of the checkpoint, but it leaves norms at "
            f"{listed(lost)}: load without config=, or with the config next to the weights; from a "
            "hub, load a class that takes only a part of that config by AutoModelForCausalLM"
        )


@contextmanager
def described(model: PreTrainedModel, changes: contents.Contents | None) -> Iterator[None]:
    """Let the model's config name its contents while the model is written."""
    config = getattr(model.config, "quantization_config", None)
    if isinstance(config, Mapping):
        method = config.get("quant_method")
    else:
        method = getattr(config, "quant_method", None)
    # transformers has an enum of its methods.
    method = getattr(method, "value", method)
    if method not in (None, METHOD):
        if any(replaced_by(layer) is not None for layer in dynorm_layers(model).values()):
            raise ModelError(
                f"the model must be converted or quantized, but is both ({method}): config.json "
                "names one; save it before quantizing, and quantize what you load"
            )
        changes = None
    with ExitStack() as stack:
        stack.enter_context(put_back(model.config, "quantization_config"))
        stack.enter_context(put_back(model.config, "to_json_file"))
        stack.enter_context(put_back(model, "_tied_weights_keys"))
        if changes is not None:
            modules = plain_modules(model, remove_duplicate=False)
            for spec in changes.layers:
                if len(spec.paths) > 1:
                    # transformers ties parameters only, so each path gets a copy of the buffers.
                    hook: Any = modules[spec.paths[0]].register_state_dict_post_hook
                    stack.callback(hook(_copy_buffers).remove)
            # A dict, because transformers cannot load with a config that holds the object.
            model.config.quantization_config = config_of(model, changes).to_dict()
            vars(model.config)["to_json_file"] = partial(_write_with_barrier, model.config)
            tie_aliases_(model, changes)
        elif method == METHOD:
            del model.config.quantization_config
        yield


def tie_aliases_(model: PreTrainedModel, changes: contents.Contents) -> None:
    """Declare the parameters of layers with several paths as tied: otherwise they are not saved."""
    tied = {}
    for alias, name in aliases_of(model, changes.layers).items():
        tied[f"^{re.escape(alias)}$"] = name
    if tied:
        model._tied_weights_keys = dict(model._tied_weights_keys or {}) | tied


def _write_with_barrier(config: Any, path: str, **options: object) -> None:
    """Write config.json with the key that keeps transformers without dynorm from loading it."""
    # transformers removes the key from the config just before it calls this function.
    with put_back(config, "to_json_file"), put_back(config, BARRIER):
        del vars(config)["to_json_file"]
        vars(config)[BARRIER] = ADVICE
        config.to_json_file(path, **options)


def _seal(folder: Path) -> None:
    """Add checksums of the weights and of the config to config.json, if this process wrote it."""
    files = _weight_files(folder)
    if not (files and (folder / CONFIG).is_file()):
        return
    config = contents.read_json(folder / CONFIG)
    described = config["quantization_config"]
    described["weights"] = {file.name: contents.weights_entry(file) for file in files}
    described["sha256"] = contents.checksum(config)
    write_text(folder / CONFIG, json.dumps(config, indent=2, sort_keys=True) + "\n")


def _copy_buffers(layer: nn.Module, state: dict[str, object], prefix: str, metadata: Any) -> None:
    state.update({prefix + name: buffer.clone() for name, buffer in layer.named_buffers()})


def read_transformers(folder: Path) -> nn.Module:
    """Load a directory into the class that its config.json names; errors as :func:`dynorm.load`."""
    config = contents.read_json(folder / CONFIG)
    quantization = config.get("quantization_config")
    if "dynorm" in config:
        raise StorageError(
            f"{folder} must be loaded by from_pretrained, because it was saved with "
            "remote_code=True: pass trust_remote_code=True to it"
        )
    if not isinstance(quantization, dict) or quantization.get("quant_method") != METHOD:
        raise StorageError(
            f"{folder / CONFIG} must name dynorm's layers, but does not: use from_pretrained for it"
        )
    DynormConfig(**quantization)
    names = config.get("architectures")
    if not contents.is_list_of_str(names) or len(names) != 1:
        raise StorageError(
            f"the architectures in {folder / CONFIG} must name one class, got {names!r}"
        )
    cls = getattr(transformers, names[0], None)
    if not (inspect.isclass(cls) and issubclass(cls, PreTrainedModel)):
        raise ModelError(
            "the class of the model must be one of transformers' to be found by its name, but "
            f"{names[0]} is not: call {names[0]}.from_pretrained({str(folder)!r})"
        )
    # The checksum covers the config without the checksum itself.
    parts = {name: part for name, part in quantization.items() if name != "sha256"}
    sealed = config | {"quantization_config": parts, "sha256": quantization.get("sha256")}
    contents.require_checksum(sealed, f"{folder / CONFIG} (which from_pretrained takes as it is)")
    require_whole_weights(folder)
    options = {"use_safetensors": True, "local_files_only": True, "trust_remote_code": False}
    options |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
    with readable(f"{folder} must hold a {cls.__name__}"):
        model, info = cls.from_pretrained(folder, dtype="auto", **options)  # type: ignore[attr-defined]
    kinds = {
        "missing": "lack",
        "unexpected": "have beyond them",
        "mismatched": "have in another shape",
    }
    for kind, what in kinds.items():
        keys = info.get(f"{kind}_keys")
        if keys:
            # Mismatched ones come with their shapes.
            names = [key if isinstance(key, str) else key[0] for key in keys]
            raise StorageError(
                f"the weights in {folder} must be the tensors of {cls.__name__}, but {what} "
                f"{listed(names)}"
            )
    assert isinstance(model, nn.Module)
    return model


def config_of(model: PreTrainedModel, changes: contents.Contents) -> DynormConfig:
    """Return the description of a model's layers, by paths of its base model."""
    prefix = base_prefix(model)

    def split(paths: Iterable[str]) -> tuple[list[str], list[str]]:
        inside = [path.removeprefix(prefix) for path in paths if path.startswith(prefix)]
        return inside, [path for path in paths if not path.startswith(prefix)]

    entries = []
    modules = plain_modules(model, remove_duplicate=False)
    for spec in changes.layers:
        inside, outside = split(spec.paths)
        layer = modules[spec.paths[0]]
        entry = spec.to_dict() | {
            "paths": inside,
            "outside": outside,
            "dtypes": _other_dtypes(layer, model.dtype),
        }
        for key in entry.keys() - {"layer", "paths", "config"}:
            if not entry[key]:
                del entry[key]
        entries.append(entry)
    dtypes: dict[str, dict[str, str]] = {}
    for path, module in modules.items():
        if path and not is_ours(module):
            dtypes[path] = _other_dtypes(module, model.dtype)
    inside, outside = split([path for path, names in dtypes.items() if names])
    biases, biases_outside = split(changes.biases)
    return DynormConfig(
        layers=entries,
        model_dtype=str(model.dtype).removeprefix("torch."),
        format_version=contents.FORMAT_VERSION,
        dynorm_version=version.__version__,
        biases=biases,
        biases_outside=biases_outside,
        dtypes={path: dtypes[prefix + path] for path in inside},
        dtypes_outside={path: dtypes[path] for path in outside},
    )


def _other_dtypes(module: nn.Module, dtype: torch.dtype) -> dict[str, str]:
    """Return the dtypes of a module's own floating point tensors that a load would change, by name.

    A load gives ``dtype`` to those in the checkpoint. The others are computed, mostly in float32.
    """
    dtypes: dict[str, str] = {}
    for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
        is_computed = name in module._non_persistent_buffers_set
        usual = torch.float32 if is_computed else dtype
        if tensor is not None and tensor.is_floating_point() and tensor.dtype != usual:
            dtypes[name] = str(tensor.dtype).removeprefix("torch.")
    return dtypes


def _weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a model, in order; an empty list if there are none."""
    single = folder / _WEIGHTS[0]
    index = folder / _WEIGHTS[1]
    if single.is_file():
        return [single]
    if not index.is_file():
        return []
    shards = contents.read_json(index).get("weight_map")
    if not isinstance(shards, dict) or not contents.is_list_of_str(list(shards.values())):
        raise StorageError(
            f"the weight_map in {index} must name a file per tensor, got {json.dumps(shards):.80}"
        )
    return sorted({folder / Path(name).name for name in shards.values()})


def require_whole_weights(folder: Path) -> None:
    """Refuse a folder if a safetensors file is missing or, by its header, cut."""
    files = _weight_files(folder)
    if not files:
        raise StorageError(f"{folder} must hold {_WEIGHTS[0]}, but does not")
    for file in files:
        try:
            # Reads the header, which has the length of the file.
            with safe_open(file, framework="pt"):
                pass
        except (OSError, SafetensorError) as error:
            raise StorageError(
                f"{file} must be a whole safetensors file, but {error}: it is cut or damaged"
            ) from error


@contextmanager
def put_back(holder: object, name: str) -> Iterator[None]:
    """Restore an instance's attribute at the end; delete it if there was none."""
    before = {name: vars(holder)[name]} if name in vars(holder) else {}
    try:
        yield
    finally:
        vars(holder).pop(name, None)
        vars(holder).update(before)


register()
