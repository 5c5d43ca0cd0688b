"""What a batch is: how a model is called on it, and which of its tokens count."""

import copy
import itertools
import math
from collections import UserDict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from dynorm.arguments import upcast
from dynorm.errors import DataError, ModelError
from dynorm.layers import PointwiseNorm
from dynorm.site import NormSite

# The forms of a batch: one argument, several, or arguments by name.
Batch = Tensor | tuple[Any, ...] | list[Any] | Mapping[str, Any]
# Common names of two-dimensional masks: those whose ones are tokens, and those whose ones are
# padding.
_TOKENS = ("attention_mask", "decoder_attention_mask")
_PADDING = ("src_key_padding_mask", "tgt_key_padding_mask")


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
