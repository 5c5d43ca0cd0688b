"""Adapters of peft: one that was trained on a converted model needs a converted base."""

import json
import warnings
from collections.abc import Iterable
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from dynorm.errors import StorageError, listed
from dynorm.files import write_text
from dynorm.hub.contents import layers_named_by, read_json
from dynorm.layers import PointwiseNorm
from dynorm.replace.converted import dynorm_layers

PEFT_MODEL = "peft.peft_model"

# Written next to an adapter's own files if its base was converted.
NOTE = "dynorm_base.json"
_PEFT_CONFIG = "adapter_config.json"


def check_adapters(peft_model: ModuleType) -> None:
    """Let peft record in an adapter's folder that its base was converted, and check it on load.

    An adapter that holds layers where the model has norms is refused, because peft would drop their
    constants. An adapter of other weights only, such as LoRA's, loads with a warning.
    """
    kind = peft_model.PeftModel
    save_pretrained = getattr(kind.save_pretrained, "_without_dynorm", kind.save_pretrained)
    load_adapter = getattr(kind.load_adapter, "_without_dynorm", kind.load_adapter)

    @wraps(save_pretrained)
    def noted_save_pretrained(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = save_pretrained(self, *args, **kwargs)
        folder = Path(args[0] if args else kwargs["save_directory"])
        count = len(dynorm_layers(self))
        for name in self.peft_config:
            adapter = folder if name == "default" else folder / name
            if count and (adapter / _PEFT_CONFIG).is_file():
                write_text(adapter / NOTE, json.dumps({"layers": count}) + "\n")
            else:
                # An earlier adapter in this folder may have left one.
                (adapter / NOTE).unlink(missing_ok=True)
        return result

    @wraps(load_adapter)
    def checked_load_adapter(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = load_adapter(self, *args, **kwargs)
        _require_converted(self, result.unexpected_keys)
        folder = args[0] if args else kwargs["model_id"]
        _warn_of_other_base(self, Path(folder) / NOTE)
        return result

    checked_load_adapter._without_dynorm = load_adapter  # type: ignore[attr-defined]
    kind.load_adapter = checked_load_adapter
    noted_save_pretrained._without_dynorm = save_pretrained  # type: ignore[attr-defined]
    kind.save_pretrained = noted_save_pretrained


def _warn_of_other_base(model: nn.Module, note: Path) -> None:
    if not note.is_file():
        return
    trained = read_json(note).get("layers")
    present = len(dynorm_layers(model))
    if isinstance(trained, int) and present < trained:
        warnings.warn(
            f"the adapter was trained on a converted model with {trained} point-wise layers, but "
            f"this one has {present}: load it on the converted base, or its outputs differ",
            UserWarning,
            stacklevel=3,
        )


def _require_converted(model: nn.Module, unexpected: Iterable[str]) -> None:
    modules = dict(model.named_modules())
    lost = []
    for path in layers_named_by(unexpected):
        if path in modules and not isinstance(modules[path], PointwiseNorm):
            lost.append(path)
    if lost:
        raise StorageError(
            "the adapter must be loaded on the converted model that it was trained on, but it "
            f"holds point-wise layers where this model has others: {listed(lost)}. Load the "
            "converted base with dynorm.load or from_pretrained; if it was not saved, convert "
            "the base, and train the adapter on that"
        )
