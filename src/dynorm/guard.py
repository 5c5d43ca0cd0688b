"""Refuse models that cannot be worked on: compiled, exported, wrapped, scripted, or without values."""

from __future__ import annotations

import itertools
import sys

from torch import nn

from dynorm.errors import ArgumentError, ModelError

# Module and name of a class, the state it means, and the remedy. Looked up only among modules that are
# loaded already: a model cannot be of a class that nobody imported, and torch.distributed takes its time.
_WRAPPERS = (
    ("torch._dynamo.eval_frame", "OptimizedModule", "compiled", "pass model._orig_mod, compile afterwards"),
    ("torch.nn.parallel", "DistributedDataParallel", "wrapped in DDP", "pass model.module, wrap afterwards"),
    ("torch.nn.parallel", "DataParallel", "wrapped in DataParallel", "pass model.module, wrap afterwards"),
    ("torch.distributed.fsdp", "FullyShardedDataParallel", "wrapped in FSDP", "wrap it afterwards"),
    ("torch.distributed.fsdp", "FSDPModule", "sharded", "call fully_shard afterwards"),
    ("torch.export._unlift", "_StatefulGraphModule", "exported", "pass the module that was exported"),
    ("torch.export.unflatten", "UnflattenedModule", "exported", "pass the module that was exported"),
    ("torch.jit", "ScriptModule", "a ScriptModule", "pass the module that was scripted or traced"),
)


def require_plain_model(model: nn.Module) -> None:
    """Check that a model is plain modules with real tensors, so that its parts can be watched and replaced.

    Args:
        model: Any module.

    Raises:
        ArgumentError: If it is no module at all.
        ModelError: If it, or a part of it, is compiled, exported, wrapped, scripted, sharded, lazy or on the meta
            device. The message says which call to make first.

    Example:
        >>> require_plain_model(nn.LayerNorm(4))
        >>> from dynorm.errors import DynormError
        >>> try:
        ...     require_plain_model(nn.Linear(2, 2, device="meta"))
        ... except DynormError as error:
        ...     print(type(error).__name__)
        ModelError
    """
    if not isinstance(model, nn.Module):
        if type(model).__name__ == "ExportedProgram":
            raise ModelError("the model must be a plain module, but is exported: pass the module that was exported")
        raise ArgumentError(f"the model must be a torch.nn.Module, not {type(model).__name__}")
    for path, module in model.named_modules():
        place = f"the part {path!r} of the model" if path else "the model"
        for origin, name, state, remedy in _WRAPPERS:
            if _is_a(module, origin, name):
                raise ModelError(f"{place} must be a plain module, but is {state}: {remedy}")
        if getattr(module, "_compiled_call_impl", None) is not None:
            raise ModelError(f"{place} must be a plain module, but is compiled: call .compile() afterwards")
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        if isinstance(tensor, (nn.UninitializedParameter, nn.UninitializedBuffer)):
            raise ModelError(f"the model's tensors must hold values, but {name!r} is lazy: run the model once first")
        if tensor.is_meta:
            raise ModelError(
                f"the model's tensors must hold values, but {name!r} is on the meta device: "
                "call model.to_empty(device=...) and load its weights first"
            )
        # By name, for importing DTensor takes time, and no other tensor is called so.
        if type(tensor).__name__ == "DTensor":
            raise ModelError(f"the model's tensors must be whole, but {name!r} is a DTensor: shard it afterwards")


def is_fully_sharded(module: nn.Module) -> bool:
    """Return whether ``fully_shard``, FSDP2, has sharded a module."""
    return _is_a(module, "torch.distributed.fsdp", "FSDPModule")


def _is_a(module: nn.Module, origin: str, name: str) -> bool:
    wrapper = getattr(sys.modules.get(origin), name, None)
    return wrapper is not None and isinstance(module, wrapper)
