"""Run a model on batches and watch it: nothing of the run stays. Models that cannot be worked on are refused first."""

import copy
import itertools
import math
import random
from collections import UserDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from dynorm.arguments import check_module, require_gathered, upcast
from dynorm.errors import DataError, ModelError
from dynorm.layers import PointwiseNorm
from dynorm.site import NormSite
from dynorm.wrappers import torch_classes

# Common names of two-dimensional masks: those whose ones are tokens, and those whose ones are
# padding.
_TOKENS = ("attention_mask", "decoder_attention_mask")
_PADDING = ("src_key_padding_mask", "tgt_key_padding_mask")

# The attributes in which a module keeps its hooks on calls.
HOOK_TABLES = tuple(
    name for name in vars(nn.Module()) if name.startswith(("_forward_", "_backward_"))
)


def iterate(batches: Iterable[Any], what: str = "batches") -> Iterator[Any]:
    """Yield the batches, or raise DataError where they are no iterable of tensors, tuples or dicts, or empty."""
    if isinstance(batches, (Tensor, Mapping, str, bytes)) or not isinstance(batches, Iterable):
        raise DataError(
            f"{what} must be an iterable of tensors, tuples or dicts, got a "
            f"{type(batches).__name__}: "
            "for a single batch, pass a list of it"
        )
    count = 0
    for count, batch in enumerate(batches, start=1):
        require_batch(batch, f"each of {what}", f" at {count - 1}")
        yield batch
    if not count:
        raise DataError(
            f"{what} must hold at least one batch, got none: an exhausted generator, or no texts?"
        )


def require_batch(batch: Any, what: str = "the batch", place: str = "") -> None:
    """Refuse a batch that is no tensor, and no tuple or dict with one."""
    values = tuple(batch.values()) if isinstance(batch, Mapping) else batch
    if not any(
        isinstance(value, Tensor)
        for value in (values if isinstance(values, (tuple, list)) else [batch])
    ):
        raise DataError(
            f"{what} must be a tensor, or a tuple or dict with tensors, "
            f"got {type(batch).__name__}{place}: make one of numbers with torch.tensor(rows)"
        )


def cycled(batches: Iterable[Any], steps: int) -> Iterator[Any]:
    """Yield the batches, from the start again until there were ``steps``; DataError where an iterator has fewer."""
    count = 0
    while count < steps:
        for batch in itertools.islice(iterate(batches), steps - count):
            yield batch
            count += 1
        if count < steps and isinstance(batches, Iterator):
            raise DataError(
                f"a one-shot iterator must hold a batch for each step, got {count} for {steps} "
                "steps: pass a list"
            )


def call(model: nn.Module, batch: Any) -> Any:
    """Call the model as the batch's form says, on its own device; DataError where it raises.

    The model gets copies of the tensors: its first operation may write into them.
    """
    args, kwargs = copied_tensors(arguments(model, batch))
    try:
        return model(*args, **kwargs)
    except (DataError, ModelError):
        raise
    # The model's code may raise anything: it was given the batch.
    except Exception as error:
        raise DataError(
            f"the model must run on each batch, but {type(error).__name__}: "
            f"{error}{call_hint(args)}"
        ) from error


def call_hint(args: tuple[Any, ...]) -> str:
    """Return what to try where a model does not take these arguments."""
    if args and isinstance(args[0], list):
        return " (it takes one batch, not a list of them)"
    return (
        ""
        if len(args) < 2
        else " (a tuple holds a call's arguments: leave labels out, [x for x, y in loader])"
    )


def arguments(model: nn.Module, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments for calling a model on a batch, their tensors where the model's parameters are."""
    device = next((p.device for p in model.parameters()), None)

    def moved(value: Any) -> Any:
        if not isinstance(value, Tensor) or device is None:
            return value
        value = value.to(device)
        # A gradient cannot be taken through a tensor that was made in inference mode.
        return value.clone() if value.is_inference() and torch.is_grad_enabled() else value

    if isinstance(batch, Mapping):
        return (), {name: moved(value) for name, value in batch.items()}
    return tuple(
        moved(value) for value in (batch if isinstance(batch, (tuple, list)) else (batch,))
    ), {}


def copied_tensors(value: Any) -> Any:
    """Return the value with a copy of each tensor in it, so that a model can write into them.

    Lists, tuples, dicts and what torch knows as such are copied too. Other objects, such as a cache
    that a call fills, stay the same. A tensor that occurs twice stays one tensor.
    """
    copies: dict[int, Tensor] = {}

    def copied(leaf: Any) -> Any:
        if isinstance(leaf, UserDict):
            other = copy.copy(leaf)
            other.data = copied_tensors(leaf.data)
            return other
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) not in copies:
            new = leaf.clone()
            if leaf.requires_grad and not new.requires_grad:
                new.requires_grad_()
            copies[id(leaf)] = new
        return copies[id(leaf)]

    return tree_map(copied, value)


def writes_of(tensor: Tensor) -> int | None:
    """Return how often torch has noted a write into a tensor, or None if it keeps no count."""
    return None if tensor.is_inference() else tensor._version


def token_masks(batch: Any) -> list[Tensor]:
    """Return the batch's padding masks, True where there is a token."""
    found = (
        {name: batch.get(name) for name in _TOKENS + _PADDING} if isinstance(batch, Mapping) else {}
    )
    masks = {
        name: mask for name, mask in found.items() if isinstance(mask, Tensor) and mask.dim() == 2
    }
    return [(mask != 0) == (name in _TOKENS) for name, mask in masks.items()]


def valid_tokens(shape: torch.Size, dims: tuple[int, ...], masks: list[Tensor]) -> Tensor | None:
    """Return which tokens of an input of ``shape`` are no padding, flat, or None where no mask fits.

    A mask (B, T) fits an input whose axes, without the channels ``dims``, are (B, T), (T, B), (B,
    T, H), (B, H, T), (B * T) or (B * T, H). Where sizes agree by chance, so that several masks or
    axes fit, a token counts if all of them say so: that may leave out a token, but never takes
    padding in.
    """
    rest = tuple(
        size for axis, size in enumerate(shape) if axis not in {d % len(shape) for d in dims}
    )
    found = [fit.expand(rest).flatten() for mask in masks for fit in _fits(rest, mask)]
    return torch.stack(found).all(0) if found else None


def site_tokens(site: PointwiseNorm | NormSite, x: Tensor, masks: list[Tensor]) -> Tensor:
    """Return a norm's or layer's input or output as (tokens, C), without padding, in at least float32."""
    dims = (site.dim,) if isinstance(site.dim, int) else tuple(site.dim)
    last = torch.movedim(x, dims, tuple(range(-len(dims), 0)))
    tokens = upcast(last.reshape(-1, math.prod(last.shape[-len(dims) :])))
    valid = valid_tokens(x.shape, dims, masks)
    return tokens if valid is None else tokens[valid.to(tokens.device)]


def require_finite(path: str, *tokens: Tensor, where: str = "") -> None:
    """Refuse inputs or outputs of the norm at ``path``, (tokens, C), that are not finite or whose squares are not."""
    # One number at the end: a GPU is waited for once.
    if not torch.stack([each.square().sum(-1).isfinite().all() for each in tokens]).all():
        raise DataError(
            f"activations must be finite, but the norm at {path!r} saw NaN, inf or values whose "
            "squares overflow"
            f"{where}: look for an overflow (float16?) or bad inputs"
        )


def _fits(rest: tuple[int, ...], mask: Tensor) -> Iterator[Tensor]:
    """Yield the mask in every form that broadcasts to a layout of ``rest``."""
    batch, length = mask.shape
    ones = (1,) * (len(rest) - 2)
    if rest[:2] == (batch, length):
        yield mask.reshape(batch, length, *ones)
    if rest[:2] == (length, batch):
        yield mask.t().reshape(length, batch, *ones)
    if len(rest) == 3 and rest[::2] == (batch, length):
        yield mask[:, None, :]
    if rest[:1] == (batch * length,) and len(rest) <= 2:
        yield mask.reshape(-1, *(1,) * (len(rest) - 1))


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
