"""Run a model and leave it as it was; refuse models that dynorm cannot work on."""

import itertools
import random
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from dynorm.arguments import check_module, require_gathered
from dynorm.errors import CalibrationWarning, ModelError
from dynorm.wrappers import torch_classes

# The attributes in which a module keeps its hooks on calls.
HOOK_TABLES = tuple(
    name for name in vars(nn.Module()) if name.startswith(("_forward_", "_backward_"))
)


# Pairs of a setter and the state for it.
RandomStates = list[tuple[Callable[[Any], object], Any]]


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Put a model in eval mode, and afterwards its modules back in theirs."""
    training = []
    paths = set()
    for path, module in model.named_modules(remove_duplicate=False):
        if module.training:
            training.append(module)
            paths.add(path)
    try:
        model.eval()
        yield
    finally:
        # A Trainer turns on all modules.
        model.eval()
        # A module that was replaced meanwhile, and the one in its place.
        for module in training:
            module.training = True
        for path, module in model.named_modules(remove_duplicate=False):
            if path in paths:
                module.training = True


def random_states(on_gpu: bool) -> RandomStates:
    """Return the random states of Python, numpy, and torch on the CPU, or also on all GPUs."""
    states: RandomStates = [
        (random.setstate, random.getstate()),
        (np.random.set_state, np.random.get_state()),
        (torch.set_rng_state, torch.get_rng_state()),
    ]
    if on_gpu:
        states.append((torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all()))
    return states


def set_random_states(states: RandomStates) -> None:
    """Put random states back."""
    for set_state, state in states:
        set_state(state)


@contextmanager
def kept_random_states(on_gpu: bool) -> Iterator[None]:
    """Put the random states back at the end."""
    states = random_states(on_gpu)
    try:
        yield
    finally:
        set_random_states(states)


@contextmanager
def undisturbed(
    model: nn.Module,
    inputs: object = (),
    *,
    evaluate: bool = False,
    attributes: bool = False,
) -> Iterator[Callable[[], None]]:
    """Run a model without gradient, then put back its random states, buffers and modes.

    The context is a function that puts back the buffers, and with ``attributes`` the attributes,
    between two runs inside.

    The fused path of ``nn.TransformerEncoder`` is disabled, because it computes norms without
    calling them. The random states are those of the CPU, and of all GPUs if the model or ``inputs``,
    nested tensors, are on one. ``evaluate`` puts the model in eval mode. ``attributes`` also puts
    back the attributes of all modules, in case a forward sets one.
    """
    # Both the tables and the values: a model may write into a buffer, or replace it by another
    # tensor. A run does not change the layers of dynorm, but calibration may give them witnesses,
    # which are buffers, during the run.
    tables = []
    buffers = []
    for module in model.modules():
        if attributes:
            tables += _tables_of(module)
        if not getattr(module, "_dynorm_layer", False):
            tables.append(module._buffers)
            buffers += [buffer for buffer in module._buffers.values() if buffer is not None]
    put_back = _way_back(tables, copies_of(buffers))
    is_fused = torch.backends.mha.get_fastpath_enabled()
    tensors = [*model.parameters(), *model.buffers(), *tree_leaves(inputs)]
    on_gpu = any(isinstance(tensor, Tensor) and tensor.is_cuda for tensor in tensors)
    mode = in_eval_mode(model) if evaluate else nullcontext()
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        with mode, kept_random_states(on_gpu), torch.no_grad():
            yield put_back
    finally:
        torch.backends.mha.set_fastpath_enabled(is_fused)
        put_back()


@contextmanager
def unchanged_on_error(
    parts: Iterable[Any], values: Mapping[Tensor, Tensor] | None = None
) -> Iterator[Callable[[], None]]:
    """Give modules their attributes and tensors their values back if an error is raised inside.

    The context is a function that does so without an error.

    Args:
        parts: modules, and a model's config.
        values: the tensors that may be written into, with a copy of each; None means all tensors of
            the modules.
    """
    tables = []
    tensors: set[Tensor] = set()
    for part in parts:
        tables += _tables_of(part, *HOOK_TABLES)
        if values is None:
            tensors.update(part.parameters(), part.buffers())
    if values is None:
        values = copies_of(tensors)
    put_back = _way_back(tables, values)
    try:
        yield put_back
    except BaseException:
        put_back()
        raise


def copies_of(tensors: Iterable[Tensor]) -> dict[Tensor, Tensor]:
    """Return a copy of each tensor, by the tensor."""
    return {tensor: tensor.detach().clone() for tensor in tensors}


def _tables_of(part: Any, *more: str) -> list[dict[str, Any]]:
    """Return the dictionaries that hold a module's attributes and parts; a config has only the first."""
    attributes = vars(part)
    names = ("_modules", "_parameters", "_buffers", *more)
    return [attributes, *(attributes[name] for name in names if name in attributes)]


def _way_back(
    tables: Iterable[dict[str, Any]], values: Mapping[Tensor, Tensor]
) -> Callable[[], None]:
    """Return a function that gives dictionaries the entries of now, and tensors these values."""
    entries = [(table, dict(table)) for table in tables]

    @torch.no_grad()
    def put_back() -> None:
        for table, before in entries:
            table.clear()
            table.update(before)
        for tensor, value in values.items():
            # Some are expanded, or were made in inference mode, and cannot be written into.
            if not torch.equal(tensor, value):
                tensor.copy_(value)

    return put_back


def edited_parts(model: nn.Module) -> list[Any]:
    """Return the objects whose attributes an edit of a model's weights may change.

    They are its modules, and the config of a model of transformers, which lists tied weights.
    """
    parts: list[Any] = list(model.modules())
    config = getattr(model, "config", None)
    if hasattr(config, "to_dict"):
        parts.append(config)
    return parts


Function = Callable[..., Any]


class FunctionMode(TorchFunctionMode):
    """Run all functions of torch through the method ``call``, which a subclass overrides."""

    def __torch_function__(
        self,
        func: Function,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return self.call(func, args, kwargs or {})

    def call(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of one call."""
        return func(*args, **kwargs)


@contextmanager
def hooked(
    layers: Iterable[nn.Module], hook: Callable[..., object], **options: bool
) -> Iterator[None]:
    """Give every layer a forward hook that runs first, and remove it when the context ends."""
    with ExitStack() as stack:
        for layer in layers:
            stack.callback(layer.register_forward_hook(hook, prepend=True, **options).remove)
        yield


# By the name of the class, because torch.distributed is slow to import: the state of a model of
# this class, and the remedy.
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


def require_plain_model(model: nn.Module, *, allowed: Collection[str] = ()) -> None:
    """Refuse a model that is not plain modules with real tensors, as hooks and replacement need.

    ``allowed`` are the classes of wrappers that may be there, because their tensors can be read.
    """
    if type(model).__name__ == "ExportedProgram":
        raise ModelError(
            "the model must be a plain module, but is exported: pass the module that was exported"
        )
    check_module(model)
    for path, module in model.named_modules():
        place = f"the part {path!r} of the model" if path else "the model"
        for name in torch_classes(module):
            if name not in _WRAPPERS or name in allowed:
                continue
            state, remedy = _WRAPPERS[name]
            raise ModelError(f"{place} must be a plain module, but is {state}: {remedy}")
        if module._compiled_call_impl is not None and "OptimizedModule" not in allowed:
            raise ModelError(
                f"{place} must be a plain module, but is compiled: call .compile() afterwards"
            )
    require_values(model)
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        # By name, because DTensor is slow to import; no other tensor has this name.
        if type(tensor).__name__ == "DTensor":
            raise ModelError(
                f"the model's tensors must be whole, but {name!r} is a DTensor: shard it afterwards"
            )


def require_values(model: nn.Module) -> None:
    """Refuse a model with tensors whose values are elsewhere, or not there yet."""
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        if isinstance(tensor, (nn.UninitializedParameter, nn.UninitializedBuffer)):
            raise ModelError(
                f"the model's tensors must hold values, but {name!r} is lazy: run the model once "
                "first"
            )
        if not tensor.is_meta:
            continue
        remedy = "call model.to_empty(device=...) and load its weights first"
        if any(hasattr(module, "_hf_hook") for module in model.modules()):
            remedy = (
                "accelerate has offloaded it: load the model without offloading, or spread it over "
                "devices that hold all of it"
            )
        raise ModelError(
            f"the model's tensors must hold values, but {name!r} is on the meta device: {remedy}"
        )
    require_gathered(model)


def require_trainable(module: nn.Module, path: str = "") -> None:
    """Refuse tensors made in inference mode, which can never be written into or trained."""
    tensors = itertools.chain(module.named_parameters(), module.named_buffers())
    for name, tensor in tensors:
        if tensor.is_inference():
            full_name = f"{path}.{name}".lstrip(".")
            raise ModelError(
                f"the model's tensors must be trainable, but {full_name!r} was made in "
                "torch.inference_mode: load or copy the model outside of it"
            )


def autocast(model: nn.Module, bf16: bool) -> torch.autocast:
    """Return bfloat16 autocast, or otherwise the caller's, in both cases without its cache.

    A cached cast of a weight would be out of date after the weight changes.
    """
    kind = next(model.parameters()).device.type
    if bf16:
        return torch.autocast(kind, torch.bfloat16, cache_enabled=False)
    enabled = torch.is_autocast_enabled(kind)
    return torch.autocast(kind, enabled=enabled, cache_enabled=False)


def usable_bf16(model: nn.Module) -> bool:
    """Return whether bfloat16 is at least as fast as float32 on the model's device; warn if not."""
    is_cpu = next(model.parameters()).device.type == "cpu"
    # The first versions of torch that dynorm takes cannot say.
    capabilities = getattr(torch.cpu, "get_capabilities", None)
    if not is_cpu or capabilities is None:
        return True
    features = capabilities()
    if any(features.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16")):
        return True
    warnings.warn(
        "this processor has no bfloat16 instructions, with which bf16=True would be several times "
        "slower: float32 is used",
        CalibrationWarning,
        stacklevel=3,
    )
    return False


@contextmanager
def recomputing(model: nn.Module) -> Iterator[None]:
    """Recompute a model's layers if it has activation checkpointing enabled, even in eval mode.

    transformers does so only in training mode. Only the layers are put into it, and leave it again
    before they drop any activation.
    """
    layers: list[Any] = []
    for module in model.modules():
        class_names = [cls.__name__ for cls in type(module).__mro__]
        is_enabled = getattr(module, "gradient_checkpointing", False)
        if is_enabled and "GradientCheckpointingLayer" in class_names:
            layers.append(module)
    adapter = getattr(model, "active_peft_config", None)
    if layers and getattr(adapter, "is_prompt_learning", False):
        raise ModelError(
            "gradient checkpointing must be off for a model with a prefix, because it drops the cache that "
            "holds the prefix: turn it off"
        )

    def checkpointed(layer: nn.Module, forward: Any, *args: object) -> Any:
        layer.training = False
        # Without a cache of keys, which would grow once more.
        args = tuple(None if hasattr(arg, "get_seq_length") else arg for arg in args)
        # Reentrant, outputs recorded inside would have no gradient.
        return checkpoint(forward, *args, use_reentrant=False)

    with ExitStack() as after:
        for layer in layers:
            after.callback(setattr, layer, "training", False)
            after.callback(
                setattr, layer, "_gradient_checkpointing_func", layer._gradient_checkpointing_func
            )
            layer.training = True
            layer._gradient_checkpointing_func = partial(checkpointed, layer)
        yield
