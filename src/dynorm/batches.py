"""Batches: check them, call a model on them, and find the tokens that are not padding."""

import copy
import itertools
from collections import UserDict
from collections.abc import Iterable, Iterator, Mapping
from inspect import signature
from operator import length_hint
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dynorm.arguments import upcast
from dynorm.errors import DataError, ModelError
from dynorm.layers import PointwiseNorm
from dynorm.site import NormSite

# The arguments of one call of a model: a tensor, several by position, or several by name.
Batch = Tensor | tuple[Any, ...] | list[Any] | Mapping[str, Any]

# The same as a call takes them: by position and by name.
Inputs = tuple[tuple[Any, ...], dict[str, Any]]
Item = TypeVar("Item")

# More batches of an iterable without a length count as one without an end.
_MOST_BATCHES = 500

# Common names of two-dimensional masks, and whether their ones are tokens; otherwise they are
# padding.
_ONES_ARE_TOKENS = {
    "attention_mask": True,
    "decoder_attention_mask": True,
    "src_key_padding_mask": False,
    "tgt_key_padding_mask": False,
}


def has_length(batches: object) -> bool:
    """Return whether it is known how many batches there are, so that they have an end."""
    return length_hint(batches, -1) >= 0


def iterate(
    batches: Iterable[Item], what: str = "batches", most: int = _MOST_BATCHES
) -> Iterator[Item]:
    """Yield the batches; DataError if there are none, or one is not a tensor, tuple or dict.

    Of an iterable without a length, more than ``most`` are an error too.
    """
    if isinstance(batches, (Tensor, Mapping, str, bytes)) or not isinstance(batches, Iterable):
        raise DataError(
            f"{what} must be an iterable of tensors, tuples or dicts, got a "
            f"{type(batches).__name__}: for a single batch, pass a list of it"
        )
    is_endless = not has_length(batches)
    count = 0
    for batch in batches:
        if is_endless and count == most:
            raise DataError(
                f"{what} must have an end, got more than {most} of an iterable without a length: "
                f"pass a list, or the first ones, itertools.islice({what}, 100)"
            )
        require_batch(batch, f"each of {what}", f" at {count}")
        count += 1
        yield batch
    if count == 0:
        raise DataError(
            f"{what} must hold at least one batch, got none: an exhausted generator, or no texts?"
        )


def require_batch(batch: object, what: str = "the batch", place: str = "") -> None:
    """Refuse a batch that is not a tensor, nor a tuple, list or dict with one."""
    values: Iterable[object] = [batch]
    if isinstance(batch, Mapping):
        values = batch.values()
    elif isinstance(batch, (tuple, list)):
        values = batch
    if not any(isinstance(value, Tensor) for value in values):
        raise DataError(
            f"{what} must be a tensor, or a tuple or dict with tensors, "
            f"got {type(batch).__name__}{place}: make one of numbers with torch.tensor(rows)"
        )


def cycled(batches: Iterable[Item], steps: int) -> Iterator[Item]:
    """Yield ``steps`` batches, starting over as often as needed; DataError if an iterator ends."""
    count = 0
    while count < steps:
        for batch in itertools.islice(iterate(batches, most=steps), steps - count):
            yield batch
            count += 1
        if count < steps and isinstance(batches, Iterator):
            raise DataError(
                f"a one-shot iterator must hold a batch for each step, got {count} for {steps} "
                "steps: pass a list"
            )


def call(model: nn.Module, batch: Batch) -> Any:
    """Call the model with the arguments of a batch, on the model's device; DataError if it raises.

    The model gets copies of the tensors: its first operation may write into them.
    """
    args, kwargs = copied_tensors(arguments(model, batch))
    try:
        return model(*args, **kwargs)
    except (DataError, ModelError):
        raise
    # The model's code may raise anything for a batch that it does not take.
    except Exception as error:
        raise DataError(
            f"the model must run on each batch, but {type(error).__name__}: "
            f"{error}{call_hint(args)}"
        ) from error


def call_hint(args: tuple[object, ...]) -> str:
    """Return a hint for the error of a model that does not take these arguments."""
    first = args[0] if args else None
    if isinstance(first, list) and first:
        first = first[0]
    if isinstance(first, str):
        return " (it takes tensors: turn texts into tokens with the model's tokenizer first)"
    if args and isinstance(args[0], list):
        return " (it takes one batch, not a list of them: a list that is one batch goes as tuple(batch))"
    if len(args) >= 2 or isinstance(first, tuple):
        return " (a tuple holds a call's arguments: leave labels out, [x for x, y in loader])"
    return ""


def arguments(model: nn.Module, batch: Batch) -> Inputs:
    """Return the arguments for calling a model on a batch, on the device of its parameters."""
    parameter = next(model.parameters(), None)

    def moved(value: object) -> object:
        if not isinstance(value, Tensor) or parameter is None:
            return value
        if value.is_meta and not parameter.is_meta:
            raise DataError(
                "the tensors of a batch must hold values, but one is on the meta device: make the "
                "batch outside of `with torch.device('meta')`"
            )
        value = value.to(parameter.device)
        # A gradient cannot be taken through a tensor that was made in inference mode.
        if value.is_inference() and torch.is_grad_enabled():
            return value.clone()
        return value

    if isinstance(batch, Mapping):
        return (), {name: moved(value) for name, value in batch.items()}
    values = batch if isinstance(batch, (tuple, list)) else (batch,)
    return tuple(moved(value) for value in values), {}


def example_arguments(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, object],
) -> Inputs:
    """Return the arguments of one call of a model, which may be given as one batch.

    A single tuple or dict is taken apart as a batch is, unless its parts do not fit the forward:
    the model then takes the tuple or dict itself.
    """
    # A tokenizer returns a UserDict. An object of the user's class is one argument.
    if len(args) != 1 or kwargs:
        return args, kwargs
    (batch,) = args
    if type(batch) not in (tuple, dict) and not isinstance(batch, UserDict):
        return args, kwargs
    batch_args, batch_kwargs = arguments(model, batch)
    try:
        signature(model.forward).bind(*batch_args, **batch_kwargs)
    except TypeError:
        return args, kwargs
    return batch_args, batch_kwargs


def copied_tensors(value: Item) -> Item:
    """Return a deep copy of arguments, so that a model cannot write into them or grow a cache.

    A tensor that occurs twice stays one tensor.
    """
    copies: dict[int, object] = {}
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            new = leaf.clone()
            copies[id(leaf)] = new.requires_grad_() if leaf.requires_grad else new
    return deep_copy(value, copies)


def deep_copy(value: Item, copies: dict[int, object]) -> Item:
    """Return a deep copy, with the copies that are given, by the ids of their originals."""
    try:
        return copy.deepcopy(value, copies)
    # Any exception may come from the __deepcopy__ of a foreign class.
    except Exception as error:
        raise DataError(
            "the model's arguments must be something that copy.deepcopy can copy, because a run "
            f"may write into them, but that raised {type(error).__name__}: {error}"
        ) from error


def token_masks(batch: Batch) -> list[Tensor]:
    """Return the batch's padding masks, True at each token."""
    masks: list[Tensor] = []
    if not isinstance(batch, Mapping):
        return masks
    for name, ones_are_tokens in _ONES_ARE_TOKENS.items():
        mask = batch.get(name)
        if not isinstance(mask, Tensor) or mask.dim() != 2:
            continue
        if ones_are_tokens:
            masks.append(mask != 0)
        else:
            masks.append(mask == 0)
    return masks


def valid_tokens(shape: torch.Size, dim: int, masks: list[Tensor]) -> Tensor | None:
    """Return which tokens of an input are not padding, flat, or None if no mask fits its ``shape``.

    A mask (B, T) fits an input whose axes, without the channels ``dim``, are (B, T), (T, B), (B,
    T, H), (B, H, T), (B * T) or (B * T, H). If sizes agree by chance, so that several masks or axes
    fit, a token counts only if it counts for each of them: that may leave out a token, but never
    includes padding.
    """
    sizes = list(shape)
    del sizes[dim]
    layouts = []
    for mask in masks:
        for layout in _layouts(tuple(sizes), mask):
            layouts.append(layout.expand(sizes).flatten())
    if not layouts:
        return None
    return torch.stack(layouts).all(0)


def site_tokens(site: PointwiseNorm | NormSite, x: Tensor, masks: list[Tensor]) -> Tensor:
    """Return a norm's input or output as (tokens, C), without padding, in float32 or float64."""
    last = x.movedim(site.dim, -1)
    tokens = upcast(last.reshape(-1, last.shape[-1]))
    valid = valid_tokens(x.shape, site.dim, masks)
    if valid is None:
        return tokens
    return tokens[valid.to(tokens.device)]


def require_finite(path: str, *tokens: Tensor, where: str = "") -> None:
    """Refuse tokens (tokens, C) of the norm at ``path`` if their squares are not finite."""
    are_finite = [part.square().sum(-1).isfinite().all() for part in tokens]
    # One number for all of them, so that a GPU is synchronized only once.
    if not torch.stack(are_finite).all():
        raise DataError(
            f"activations must be finite, but the norm at {path!r} saw NaN, inf or values whose "
            f"squares overflow{where}: look for an overflow (float16?) or bad inputs"
        )


def _layouts(sizes: tuple[int, ...], mask: Tensor) -> Iterator[Tensor]:
    """Yield the mask in each form that broadcasts to an input of ``sizes``, without channels."""
    batch, length = mask.shape
    ones = (1,) * (len(sizes) - 2)
    if sizes[:2] == (batch, length):
        yield mask.reshape(batch, length, *ones)
    if sizes[:2] == (length, batch):
        yield mask.t().reshape(length, batch, *ones)
    if len(sizes) == 3 and sizes[::2] == (batch, length):
        yield mask[:, None, :]
    if sizes[:1] == (batch * length,) and len(sizes) <= 2:
        yield mask.reshape(-1, *(1,) * (len(sizes) - 1))
