"""Leave no trace: run a model so that nothing of the run stays, and refuse models that cannot be worked on."""

import copy
import itertools
import random
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from dynorm.arguments import check_module, require_gathered
from dynorm.errors import ModelError
from dynorm.wrappers import torch_classes

# The attributes in which a module keeps its hooks on calls.
HOOK_TABLES = tuple(
    name for name in vars(nn.Module()) if name.startswith(("_forward_", "_backward_"))
)


def writes_of(tensor: Tensor) -> int | None:
    """Return how often torch has noted a write into a tensor, or None if it keeps no count."""
    return None if tensor.is_inference() else tensor._version


@contextmanager
def undisturbed(
    model: nn.Module, inputs: Any = (), *, evaluate: bool = False, attributes: bool = False
) -> Iterator[None]:
    """Run a model, without gradient, so that nothing stays: random states, buffers and modes are put back in the end.

    ``nn.TransformerEncoder`` is kept from its fused path, which computes its norms without calling
    them. The devices of ``inputs``, nested tensors, count too. ``evaluate`` puts the model in eval
    mode, and ``attributes`` puts back whatever else the modules hold: no forward may leave
    something on ``self``.
    """
    # Both the tables and the values: a model may write into a buffer, or put another tensor in its
    # place. A run leaves our own layers alone; their witnesses are buffers that calibration gives
    # them meanwhile.
    others = [module for module in model.modules() if not getattr(module, "_dynorm_layer", False)]
    tables: list[tuple[Any, Any]] = [(module._buffers, dict(module._buffers)) for module in others]
    buffers = [buffer for _, table in tables for buffer in table.values() if buffer is not None]
    values = [buffer.detach().clone() for buffer in buffers]
    if attributes:
        tables += [
            (t, dict(t)) for m in model.modules() for t in (vars(m), m._parameters, m._buffers)
        ]
    training = [module for module in model.modules() if module.training]
    python, numpy, fast = (
        random.getstate(),
        np.random.get_state(),
        torch.backends.mha.get_fastpath_enabled(),
    )
    tensors = [*model.parameters(), *model.buffers(), *tree_leaves(inputs)]
    cuda = {
        tensor.get_device() for tensor in tensors if isinstance(tensor, Tensor) and tensor.is_cuda
    }
    try:
        if evaluate:
            model.eval()
        torch.backends.mha.set_fastpath_enabled(False)
        with torch.random.fork_rng(devices=sorted(cuda)), torch.no_grad():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        random.setstate(python)
        np.random.set_state(numpy)
        for table, before in tables:
            table.clear()
            table.update(before)
        with torch.no_grad():
            for buffer, value in zip(buffers, values, strict=True):
                if not torch.equal(buffer, value):
                    buffer.copy_(value)
        if evaluate:
            for module in training:
                module.training = True


@contextmanager
def unchanged_on_error(
    modules: Iterable[nn.Module], tensors: Iterable[Tensor] | None = None
) -> Iterator[None]:
    """Give modules their state back where an error is raised inside: what they hold, and the tensors' values.

    ``tensors`` are those that are written into and must be copied; None means all that the modules
    have.
    """
    tables = ("_modules", "_parameters", "_buffers")
    held = [
        (m, {name: copy.copy(v) if name in tables else v for name, v in vars(m).items()})
        for m in modules
    ]
    own = (t for module, _ in held for t in (*module.parameters(), *module.buffers()))
    before = {
        tensor: tensor.detach().clone() for tensor in set(own if tensors is None else tensors)
    }
    try:
        yield
    except BaseException:
        for module, state in held:
            vars(module).clear()
            vars(module).update(state)
        with torch.no_grad():
            for tensor, value in before.items():
                tensor.copy_(value)
        raise


@contextmanager
def hooked(layers: Iterable[nn.Module], hook: Any, **options: bool) -> Iterator[None]:
    """Give every layer a forward hook that runs before any other, for as long as the context lasts."""
    with ExitStack() as stack:
        for layer in layers:
            stack.callback(layer.register_forward_hook(hook, prepend=True, **options).remove)
        yield


# By the name of a class, because torch.distributed takes its time to import: the state it means, and
# the remedy.
_WRAPPERS = {
    "OptimizedModule": ("compiled", "pass model._orig_mod, compile afterwards"),
    "DistributedDataParallel": ("wrapped in DDP", "pass model.module, wrap afterwards"),
    "DataParallel": ("wrapped in DataParallel", "pass model.module, wrap afterwards"),
    "FullyShardedDataParallel": ("wrapped in FSDP", "wrap it afterwards"),
    "FSDPModule": ("sharded", "call fully_shard afterwards"),
    "DeepSpeedEngine": ("wrapped in DeepSpeed", "pass engine.module"),
    "_StatefulGraphModule": ("exported", "pass the module that was exported"),
    "UnflattenedModule": ("exported", "pass the module that was exported"),
    "ScriptModule": ("a ScriptModule", "pass the module that was scripted or traced"),
}


# Those that hold all of a model's tensors, whole: it can be saved from inside of them.
_TRANSPARENT = ("OptimizedModule", "DistributedDataParallel", "DataParallel", "DeepSpeedEngine")


def require_plain_model(model: nn.Module, *, wrapped: bool = False) -> None:
    """Refuse a model that is not plain modules with real tensors: no other can be watched and replaced.

    ``wrapped`` allows it to be compiled, or wrapped with all tensors whole: such a one can be read.
    """
    if type(model).__name__ == "ExportedProgram":
        raise ModelError(
            "the model must be a plain module, but is exported: pass the module that was exported"
        )
    check_module(model)
    for path, module in model.named_modules():
        place = f"the part {path!r} of the model" if path else "the model"
        classes = [name for name in torch_classes(module) if name in _WRAPPERS]
        if wrapped:
            classes = [name for name in classes if name not in _TRANSPARENT]
        if classes:
            raise ModelError(
                f"{place} must be a plain module, but is {': '.join(_WRAPPERS[classes[0]])}"
            )
        if getattr(module, "_compiled_call_impl", None) is not None and not wrapped:
            raise ModelError(
                f"{place} must be a plain module, but is compiled: call .compile() afterwards"
            )
    require_gathered(model)
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        if isinstance(tensor, (nn.UninitializedParameter, nn.UninitializedBuffer)):
            raise ModelError(
                f"the model's tensors must hold values, but {name!r} is lazy: run the model once "
                "first"
            )
        if tensor.is_meta:
            raise ModelError(
                f"the model's tensors must hold values, but {name!r} is on the meta device: "
                "call model.to_empty(device=...) and load its weights first"
            )
        # By name, for importing DTensor takes time, and no other tensor is called so.
        if type(tensor).__name__ == "DTensor":
            raise ModelError(
                f"the model's tensors must be whole, but {name!r} is a DTensor: shard it afterwards"
            )


def require_trainable(module: nn.Module, path: str = "") -> None:
    """Refuse tensors that can never be written into or trained, as those made in inference mode."""
    tensors = itertools.chain(module.named_parameters(), module.named_buffers())
    for name, tensor in tensors:
        if tensor.is_inference():
            full_name = f"{path}.{name}".lstrip(".")
            raise ModelError(
                f"the model's tensors must be trainable, but {full_name!r} was made in "
                "torch.inference_mode: load or copy the model outside of it"
            )


def autocast(model: nn.Module, bf16: bool) -> torch.autocast:
    """Return bfloat16 autocast, or else the caller's, without its cache: a weight that moves is to be cast anew."""
    kind, dtype = next(model.parameters()).device.type, torch.bfloat16 if bf16 else None
    return torch.autocast(
        kind, dtype, bool(bf16 or torch.is_autocast_enabled(kind)), cache_enabled=False
    )


@contextmanager
def recomputing(model: nn.Module) -> Iterator[None]:
    """Have a model's layers recomputed where activation checkpointing is enabled, though it is in eval mode.

    transformers does so in training mode only. The layers alone get it, and lose it again before
    they drop anything.
    """
    layers: list[Any] = [
        module
        for module in model.modules()
        if getattr(module, "gradient_checkpointing", False)
        and "GradientCheckpointingLayer" in (cls.__name__ for cls in type(module).__mro__)
    ]

    def checkpointed(layer: nn.Module, forward: Any, *args: Any) -> Any:
        layer.training = False
        args = tuple(
            None if hasattr(arg, "get_seq_length") else arg for arg in args
        )  # a cache of keys grows once more
        # Reentrant, what is recorded inside would have no gradient.
        return checkpoint(forward, *args, use_reentrant=False)

    with ExitStack() as after:
        for layer in layers:
            after.callback(setattr, layer, "training", False)
            after.callback(
                setattr, layer, "_gradient_checkpointing_func", layer._gradient_checkpointing_func
            )
            layer.training, layer._gradient_checkpointing_func = True, partial(checkpointed, layer)
        yield
