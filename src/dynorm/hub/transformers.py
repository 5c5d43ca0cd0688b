"""transformers models: config.json names the layers, and ``from_pretrained`` puts them in again.

To transformers, dynorm is a quantization method: the one extension point that changes modules
before the weights are loaded. Afterwards the model is an ordinary one, which may be cast, trained
and saved as any other.
"""

import inspect
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from pathlib import Path
from typing import Any

import transformers
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers.modeling_utils import PreTrainedModel
from transformers.quantizers import auto

from dynorm.errors import ModelError, StorageError
from dynorm.family import LAYERS
from dynorm.files import write_text
from dynorm.hub import contents
from dynorm.hub.quantizer import (
    ADVICE,
    BARRIER,
    METHOD,
    DynormConfig,
    DynormQuantizer,
    aliases_of,
    base_prefix,
)
from dynorm.replace.edits import is_changed
from dynorm.replace.specs import dynorm_layers, replaced_by

CONFIG = "config.json"
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")


def register() -> None:
    """Make ``from_pretrained`` read, and ``save_pretrained`` write, converted models."""
    if int(transformers.__version__.split(".")[0]) < 5:
        raise ImportError(f"transformers must be 5.0 or newer, got {transformers.__version__}")
    # A reload of dynorm registers anew.
    auto.AUTO_QUANTIZATION_CONFIG_MAPPING.pop(METHOD, None)
    auto.AUTO_QUANTIZER_MAPPING.pop(METHOD, None)
    auto.register_quantization_config(METHOD)(DynormConfig)
    auto.register_quantizer(METHOD)(DynormQuantizer)
    # transformers has no hook for this, and without the layers' names a load would put norms in
    # their place.
    save_pretrained = getattr(
        PreTrainedModel.save_pretrained, "_without_dynorm", PreTrainedModel.save_pretrained
    )

    @wraps(save_pretrained)
    def described_save_pretrained(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Looked up each time: it makes no difference what was converted, restored or loaded before.
        changes = contents.contents_of(self) if is_changed(self) else None
        with described(self, changes):
            written = save_pretrained(self, *args, **kwargs)
        if changes is not None:
            _seal(Path(kwargs["save_directory"] if "save_directory" in kwargs else args[0]))
        return written

    described_save_pretrained._without_dynorm = save_pretrained  # type: ignore[attr-defined]
    PreTrainedModel.save_pretrained = described_save_pretrained
    bound = PreTrainedModel.from_pretrained
    from_pretrained = getattr(bound, "_without_dynorm", bound.__func__)

    @wraps(from_pretrained)
    def checked_from_pretrained(
        cls: Any, *args: Any, output_loading_info: bool = False, **kwargs: Any
    ) -> Any:
        model, info = from_pretrained(cls, *args, output_loading_info=True, **kwargs)
        _require_no_leftovers(model, info["unexpected_keys"])
        return (model, info) if output_loading_info else model

    checked_from_pretrained._without_dynorm = from_pretrained  # type: ignore[attr-defined]
    PreTrainedModel.from_pretrained = classmethod(checked_from_pretrained)  # type: ignore[arg-type]


def _require_no_leftovers(model: nn.Module, unexpected: Iterable[str]) -> None:
    """Refuse a norm that took the place of a layer: the config was another folder's, and does not name the layers."""
    constants = {name for layer in LAYERS.values() for name in layer.constants}
    places = {
        place for place, _, name in (key.rpartition(".") for key in unexpected) if name in constants
    }
    norms = [
        f".{path}"
        for path, m in model.named_modules()
        if places and "norm" in type(m).__name__.lower()
    ]
    # A head has a prefix that its base has not.
    lost = [
        p for p in places if any(f".{p}".endswith(norm) or norm.endswith(f".{p}") for norm in norms)
    ]
    if lost:
        raise StorageError(
            "the config must name the point-wise layers of the checkpoint, but it leaves norms at "
            f"{contents.listed(lost)}: load without config=, or with the config that stands beside "
            "the weights"
        )


@contextmanager
def described(model: Any, changes: contents.Contents | None) -> Iterator[None]:
    """Let the model's config name its contents, for as long as it is written."""
    config = getattr(model.config, "quantization_config", None)
    method = (
        config.get("quant_method")
        if isinstance(config, Mapping)
        else getattr(config, "quant_method", None)
    )
    method = getattr(method, "value", method)
    if method not in (None, METHOD):
        if any(replaced_by(layer) is not None for layer in dynorm_layers(model).values()):
            raise ModelError(
                f"the model must be converted or quantized, but is both ({method}): config.json "
                "names one"
            )
        changes = None
    shared = (
        [model.get_submodule(spec.paths[0]) for spec in changes.layers if spec.paths[1:]]
        if changes
        else []
    )
    with ExitStack() as stack:
        stack.enter_context(_put_back(model.config, "quantization_config"))
        stack.enter_context(_put_back(model.config, "to_json_file"))
        stack.enter_context(_put_back(model, "_tied_weights_keys"))
        for layer in shared:
            # Under each name: transformers ties parameters only.
            stack.callback(layer.register_state_dict_post_hook(_copy_buffers).remove)
        if changes is not None:
            # A dict, as in a file: transformers cannot load with a config that holds the object.
            model.config.quantization_config = _config_of(model, changes).to_dict()
            vars(model.config)["to_json_file"] = partial(_write_with_barrier, model.config)
            # transformers writes a tensor of two names only if the model declares one of them to be
            # tied.
            aliases = {
                f"^{re.escape(a)}$": name for a, name in aliases_of(model, changes.layers).items()
            }
            if aliases:
                model._tied_weights_keys = dict(model._tied_weights_keys or {}) | aliases
        elif method == METHOD:
            del model.config.quantization_config
        yield


def _write_with_barrier(config: Any, path: str, **options: Any) -> None:
    """Write config.json so that it loads with dynorm only; transformers takes the key off just before it writes."""
    with _put_back(config, "to_json_file"), _put_back(config, BARRIER):
        del vars(config)["to_json_file"]
        vars(config)[BARRIER] = ADVICE
        config.to_json_file(path, **options)


def _seal(folder: Path) -> None:
    """Note the checksums of the weights and of all else in config.json, where this process wrote them."""
    files = _weight_files(folder)
    if not (files and (folder / CONFIG).is_file()):
        return
    config = contents.read_json(folder / CONFIG)
    described = config["quantization_config"]
    described["weights"] = {file.name: contents.weights_entry(file) for file in files}
    described["sha256"] = contents.checksum(config)
    write_text(folder / CONFIG, json.dumps(config, indent=2, sort_keys=True) + "\n")


def _copy_buffers(layer: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    state.update({prefix + name: buffer.clone() for name, buffer in layer.named_buffers()})


def read_transformers(folder: Path) -> nn.Module:
    """Load a directory into the class that its config.json names, or raise as :func:`dynorm.load` does."""
    config = contents.read_json(folder / CONFIG)
    quantization = config.get("quantization_config")
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
            f"{names[0]} is not: "
            f"call {names[0]}.from_pretrained({str(folder)!r})"
        )
    # The checksum stands in a part of what it is of.
    parts = {name: part for name, part in quantization.items() if name != "sha256"}
    sealed = config | {"quantization_config": parts, "sha256": quantization.get("sha256")}
    contents.require_checksum(sealed, f"{folder / CONFIG} (which from_pretrained takes as it is)")
    require_whole_weights(folder)
    options = {"use_safetensors": True, "local_files_only": True, "trust_remote_code": False}
    options |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
    with contents.readable(f"{folder} must hold a {cls.__name__}"):
        model, info = cls.from_pretrained(folder, dtype="auto", **options)  # type: ignore[attr-defined]
    kinds = {
        "missing": "lack",
        "unexpected": "have beyond them",
        "mismatched": "have in another shape",
    }
    for kind, what in kinds.items():
        found = [
            name if isinstance(name, str) else name[0] for name in info.get(f"{kind}_keys") or ()
        ]
        if found:
            raise StorageError(
                f"the weights in {folder} must be the tensors of {cls.__name__}, but {what} "
                f"{contents.listed(found)}"
            )
    assert isinstance(model, nn.Module)
    return model


def _config_of(model: Any, changes: contents.Contents) -> DynormConfig:
    from dynorm import __version__

    prefix = base_prefix(model)

    def split(paths: Iterable[str]) -> tuple[list[str], list[str]]:
        inside = [path.removeprefix(prefix) for path in paths if path.startswith(prefix)]
        return inside, [path for path in paths if not path.startswith(prefix)]

    entries = []
    for spec in changes.layers:
        inside, outside = split(spec.paths)
        parameters = model.get_submodule(spec.paths[0]).named_parameters()
        entry = spec.to_dict() | {
            "paths": inside,
            "outside": outside,
            "dtypes": {
                name: str(p.dtype).removeprefix("torch.")
                for name, p in parameters
                if p.dtype != model.dtype
            },
        }
        entries.append(
            {
                key: value
                for key, value in entry.items()
                if value or key in ("layer", "paths", "config")
            }
        )
    versions = contents.FORMAT_VERSION, __version__
    return DynormConfig(
        entries, str(model.dtype).removeprefix("torch."), *versions, *split(changes.biases)
    )


def _weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a model, in order; none where there are none."""
    found = next((folder / name for name in _WEIGHTS if (folder / name).is_file()), None)
    if found is None or found.suffix != ".json":
        return [found] if found else []
    shards = contents.read_json(found).get("weight_map")
    if not isinstance(shards, dict) or not contents.is_list_of_str(list(shards.values())):
        raise StorageError(
            f"the weight_map in {found} must name a file per tensor, got {json.dumps(shards):.80}"
        )
    return sorted({folder / Path(name).name for name in shards.values()})


def require_whole_weights(folder: Path) -> None:
    """Refuse a folder whose safetensors files are not all there and whole, by their headers."""
    files = _weight_files(folder)
    if not files:
        raise StorageError(f"{folder} must hold {_WEIGHTS[0]}, but does not")
    for file in files:
        try:
            # Reads the header, which says how long the file must be.
            with safe_open(file, framework="pt"):
                pass
        except (OSError, SafetensorError) as error:
            raise StorageError(
                f"{file} must be a whole safetensors file, but {error}: it is cut or damaged"
            ) from error


@contextmanager
def _put_back(holder: Any, name: str) -> Iterator[None]:
    """Let an instance's attribute be changed, and put it back in the end, or take it off where there was none."""
    before = {name: vars(holder)[name]} if name in vars(holder) else {}
    try:
        yield
    finally:
        vars(holder).pop(name, None)
        vars(holder).update(before)


register()
