"""transformers models: config.json names the layers, and ``from_pretrained`` builds them again.

To transformers, dynorm is a quantization method, because that is its only extension point that
changes modules before the weights are loaded. The loaded model is an ordinary one, which may be
cast, trained and saved like any other.
"""

import inspect
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from pathlib import Path
from typing import Any

import transformers
from torch import nn
from transformers.modeling_utils import PreTrainedModel
from transformers.quantizers import auto

from dynorm import version
from dynorm.arguments import require_gathered
from dynorm.errors import ModelError, StorageError, listed, readable
from dynorm.files import read_json
from dynorm.hub import contents, quantizer
from dynorm.hub.quantizer import (
    CODE,
    CODE_FILE,
    METHOD,
    DynormConfig,
    added_keys,
    base_prefix,
)
from dynorm.replace.converted import is_ours
from dynorm.replace.edits import is_changed
from dynorm.wrappers import plain_name, plain_state

CONFIG = "config.json"


def register() -> None:
    """Make ``from_pretrained`` read, and ``save_pretrained`` write, converted models.

    transformers has no hook for these: without the layers' names a load would build norms instead.
    """
    if int(transformers.__version__.split(".")[0]) < 5:
        raise ImportError(f"transformers must be 5.0 or newer, got {transformers.__version__}")
    # A reload of dynorm registers its new classes.
    quantizer.register(auto)
    kind = PreTrainedModel
    kind.save_pretrained = _describing(_original(kind.save_pretrained))
    kind.from_pretrained = classmethod(_checked(_original(kind.from_pretrained)))


def _original(method: Any) -> Any:
    """Return a method of transformers as it was before dynorm wrapped it."""
    function = getattr(method, "__func__", method)
    return getattr(function, "_without_dynorm", function)


def _describing(save_pretrained: Any) -> Any:
    """Return ``save_pretrained`` with the layers' names in config.json."""

    @wraps(save_pretrained)
    def describing_save_pretrained(self: PreTrainedModel, *args: object, **kwargs: object) -> Any:
        # Looked up at each call, because models may be converted or restored in between.
        changes = contents.contents_of(self) if is_changed(self) else None
        bound = inspect.signature(save_pretrained).bind(self, *args, **kwargs)
        with described(self, changes):
            if changes is not None:
                _give_state_(self, bound.arguments)
            return save_pretrained(*bound.args, **bound.kwargs)

    describing_save_pretrained._without_dynorm = save_pretrained  # type: ignore[attr-defined]
    return describing_save_pretrained


def _give_state_(model: PreTrainedModel, arguments: dict[str, Any]) -> None:
    """Let ``save_pretrained`` write the state of a model without wrappers."""
    tensors = arguments.get("state_dict")
    if tensors is None:
        require_gathered(model)
    if any(plain_name(path) != path for path, _ in model.named_modules()):
        arguments["state_dict"] = plain_state(model.state_dict() if tensors is None else tensors)


def _checked(from_pretrained: Any) -> Any:
    """Return ``from_pretrained`` that refuses a checkpoint whose layers do not fit the model."""

    @wraps(from_pretrained)
    def checked_from_pretrained(
        cls: object, *args: object, output_loading_info: bool = False, **kwargs: object
    ) -> Any:
        model, info = from_pretrained(cls, *args, output_loading_info=True, **kwargs)
        _require_all_layers(model, info["missing_keys"], info["unexpected_keys"])
        return (model, info) if output_loading_info else model

    checked_from_pretrained._without_dynorm = from_pretrained  # type: ignore[attr-defined]
    return checked_from_pretrained


def _method(config: Any) -> object:
    """Return the quantization method that a config names, or None."""
    quantization = getattr(config, "quantization_config", None)
    if isinstance(quantization, Mapping):
        method = quantization.get("quant_method")
    else:
        method = getattr(quantization, "quant_method", None)
    # transformers has an enum of its methods.
    return getattr(method, "value", method)


def _require_all_layers(
    model: nn.Module, missing: Collection[str], unexpected: Collection[str]
) -> None:
    """Refuse a model with norms where the checkpoint has layers, or the other way round."""
    modules = dict(model.named_modules())
    absent = [name for name in missing if is_ours(modules.get(name.rpartition(".")[0], model))]
    if absent:
        raise StorageError(
            "the parameters of the point-wise layers must be in the checkpoint, but it lacks "
            f"{listed(absent)}"
        )
    lost = set()
    for layer in contents.layers_named_by(unexpected):
        for path, module in modules.items():
            # A model with a head has a prefix before the paths of its base model.
            is_same = f".{layer}".endswith(f".{path}") or f".{path}".endswith(f".{layer}")
            if is_same and "norm" in type(module).__name__.lower():
                lost.add(layer)
    if lost:
        raise StorageError(
            "the config must name the point-wise layers of the checkpoint, but it leaves norms at "
            f"{listed(lost)}: load without config=; load the class that was saved, and take a part "
            "of it"
        )


@contextmanager
def described(model: PreTrainedModel, changes: contents.Contents | None) -> Iterator[None]:
    """Let the model's config name its contents while the model is written."""
    method = _method(model.config)
    if changes is not None and method not in (None, METHOD):
        raise ModelError(
            f"the model must be converted or quantized, but is both ({method}): config.json names "
            "one; save it before quantizing, and quantize what you load"
        )
    with ExitStack() as stack:
        for name in ("quantization_config", "to_json_file"):
            stack.enter_context(put_back(model.config, name))
        if method == METHOD:
            del model.config.quantization_config
        if changes is not None:
            # A dict, because transformers cannot load with a config that holds the object.
            model.config.quantization_config = config_of(model, changes).to_dict()
            vars(model.config)["to_json_file"] = partial(_write_with_keys, model.config)
        yield


def _write_with_keys(config: Any, path: str, **options: object) -> None:
    """Write config.json with the keys for a transformers without dynorm, and the file they name."""
    keys = added_keys(config)
    # transformers removes one from the config just before it calls this function.
    with ExitStack() as stack:
        for name in ("to_json_file", *keys):
            stack.enter_context(put_back(config, name))
        del vars(config)["to_json_file"]
        vars(config).update(keys)
        config.to_json_file(path, **options)
    if "auto_map" in keys:
        Path(path).with_name(CODE_FILE).write_text(CODE, encoding="utf-8")


class ConfigReader:
    """Reads the config of a folder whose code a program trusts: by then dynorm is imported."""

    @staticmethod
    def from_pretrained(folder: str, **options: object) -> object:
        """Return the config in the class of transformers."""
        return transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False, **options)

    @staticmethod
    def register_for_auto_class() -> None:
        """Do nothing: transformers would copy the code of a class that is registered."""


def read_transformers(folder: Path) -> nn.Module:
    """Load a directory into the class that its config.json names; errors as :func:`dynorm.load`."""
    config = read_json(folder / CONFIG)
    quantization = config.get("quantization_config")
    if not isinstance(quantization, dict) or quantization.get("quant_method") != METHOD:
        raise StorageError(
            f"{folder / CONFIG} must name dynorm's layers, but does not: use from_pretrained for it"
        )
    names = config.get("architectures")
    if not contents.is_list_of_str(names) or len(names) != 1:
        raise StorageError(
            f"the architectures in {folder / CONFIG} must name one class, got {names!r}"
        )
    cls: Any = getattr(transformers, names[0], None)
    is_model = inspect.isclass(cls) and issubclass(cls, PreTrainedModel)
    if not is_model:
        raise ModelError(
            "the class of the model must be one of transformers' to be found by its name, but "
            f"{names[0]} is not: call {names[0]}.from_pretrained({str(folder)!r})"
        )
    options = {"use_safetensors": True, "local_files_only": True, "trust_remote_code": False}
    options |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
    with readable(f"{folder} must hold a {cls.__name__}"):
        model, info = cls.from_pretrained(folder, dtype="auto", **options)
    for kind in ("missing", "unexpected", "mismatched"):
        keys = info[f"{kind}_keys"]
        # Mismatched ones come with their shapes.
        names = [key if isinstance(key, str) else key[0] for key in keys]
        if names:
            raise StorageError(
                f"the weights in {folder} must be the tensors of {cls.__name__}, but these are "
                f"{kind}: {listed(names)}: call its from_pretrained, with the arguments that the model "
                "was made with"
            )
    assert isinstance(model, nn.Module)
    return model


def config_of(model: PreTrainedModel, changes: contents.Contents) -> DynormConfig:
    """Return the description of a model's layers, of which each must have one path."""
    for spec in changes.layers:
        # An identity has nothing that two paths could share.
        if spec.config and len(spec.paths) > 1:
            raise ModelError(
                "to be saved as a transformers model, a layer must have one path, but one has "
                f"{listed(spec.paths)}: give each a copy of the norm before the conversion"
            )
    return DynormConfig(
        base=base_prefix(model),
        layers=[spec.to_dict() for spec in changes.layers],
        biases=changes.biases,
        format_version=contents.FORMAT_VERSION,
        dynorm_version=version.__version__,
    )


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
