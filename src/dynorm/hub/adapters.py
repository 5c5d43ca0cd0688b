"""Adapters of peft: one that was trained on a converted model needs a converted base."""

from collections.abc import Iterable
from functools import wraps
from types import ModuleType
from typing import Any

from torch import nn

from dynorm.errors import StorageError
from dynorm.family import LAYERS
from dynorm.hub.contents import listed
from dynorm.layers import PointwiseNorm

PEFT_MODEL = "peft.peft_model"

_CONSTANTS = {name for layer in LAYERS.values() for name in layer.constants}


def check_loaded_adapters(peft_model: ModuleType) -> None:
    """Let peft refuse an adapter that holds layers where the model has norms: it would drop their constants."""
    kind = peft_model.PeftModel
    load_adapter = getattr(kind.load_adapter, "_without_dynorm", kind.load_adapter)

    @wraps(load_adapter)
    def checked_load_adapter(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = load_adapter(self, *args, **kwargs)
        _require_converted(self, result.unexpected_keys)
        return result

    checked_load_adapter._without_dynorm = load_adapter  # type: ignore[attr-defined]
    kind.load_adapter = checked_load_adapter


def _require_converted(model: nn.Module, unexpected: Iterable[str]) -> None:
    modules = dict(model.named_modules())
    lost = set()
    for key in unexpected:
        path, _, name = key.rpartition(".")
        is_constant = name in _CONSTANTS and path in modules
        if is_constant and not isinstance(modules[path], PointwiseNorm):
            lost.add(path)
    if lost:
        raise StorageError(
            "the adapter must be loaded on the converted model that it was trained on, but it "
            f"holds point-wise layers where this model has others: {listed(lost)}. Load the "
            "converted base with dynorm.load or from_pretrained; if it was not saved, convert "
            "the base, and train the adapter on that"
        )
