"""The tensors in a model's inputs and outputs, and fresh inputs like an example."""

import enum
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dynorm.batches import Inputs, deep_copy
from dynorm.errors import ModelError

_Value = TypeVar("_Value")
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
# Objects of these classes hold no tensor that a model computes.
_WITHOUT_TENSORS = (
    *(type(None), bool, int, float, complex, str, bytes, type, range, slice, enum.Enum, nn.Module),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Generator),
    *(torch.SymInt, torch.SymFloat, torch.SymBool),
)


def tensors_in(value: object) -> list[Tensor]:
    """Return the tensors in torch's pytrees and in the attributes of plain objects, once each.

    Raises:
        ModelError: an object may hide tensors, as an iterator, a closure or a set does.
    """
    tensors: list[Tensor] = []
    seen: dict[int, object] = {}
    todo = [value]
    while todo:
        for leaf in tree_leaves(todo.pop(0)):
            if isinstance(leaf, _WITHOUT_TENSORS) or id(leaf) in seen:
                continue
            # Holding the leaf keeps its id from being used again.
            seen[id(leaf)] = leaf
            if isinstance(leaf, Tensor):
                tensors.append(leaf)
            elif _is_plain_object(leaf):
                todo.append(vars(leaf))
            else:
                raise ModelError(
                    "inputs and outputs must be tensors in tuples, lists, dicts or plain objects, "
                    f"but hold a {type(leaf).__qualname__}, in which tensors cannot be seen: use "
                    "one of these instead"
                )
    return tensors


def _is_plain_object(value: object) -> bool:
    """Return whether all that an object holds is in its ``__dict__``."""
    kind = type(value)
    if any(vars(base).get("__slots__") for base in kind.__mro__):
        return False
    try:
        # Python refuses this for a class whose objects have hidden fields of C.
        object.__new__(kind)
    except TypeError:
        return False
    return hasattr(value, "__dict__")


def mapped(value: _Value, function: Callable[[Tensor], Tensor]) -> _Value:
    """Return a deep copy with a function applied to each tensor; classes and aliases are kept."""
    return deep_copy(value, {id(tensor): function(tensor) for tensor in tensors_in(value)})


def is_dense(tensor: Tensor) -> bool:
    """Return whether a tensor is an array of numbers."""
    return tensor.layout == torch.strided and not tensor.is_nested


def are_equal(inputs: Inputs, example: Inputs) -> bool:
    """Return whether the tensors are equal; those of other layouts are never drawn at random."""
    for a, b in zip(tensors_in(inputs), tensors_in(example), strict=True):
        if is_dense(a) and not a.nan_to_num().equal(b.nan_to_num()):
            return False
    return True


def fresh(inputs: Inputs, seed: int, all_random: bool = True) -> Inputs:
    """Return random inputs like an example.

    If not ``all_random``, tensors of integers or of one number stay as they are.
    """
    generator = torch.Generator(device="cpu").manual_seed(seed)

    def renewed(value: Tensor) -> Tensor:
        same = value.detach().clone()
        if not is_dense(value) or not value.numel():
            return same
        if value.is_floating_point():
            drawn = _fresh_floats(same, generator, all_random)
        elif all_random and value.dtype in _INTEGERS:
            drawn = _fresh_integers(same, generator)
        else:
            return same
        return drawn.to(value.device, value.dtype)

    return mapped(inputs, renewed)


def _fresh_integers(value: Tensor, generator: torch.Generator) -> Tensor:
    low = int(value.min())
    high = int(value.max())
    # Zeros and ones are a mask.
    if low >= 0 and high <= 1:
        return value
    return torch.randint(low, high + 1, value.shape, generator=generator, device="cpu")


def _fresh_floats(value: Tensor, generator: torch.Generator, constants: bool) -> Tensor:
    values = value.to("cpu", torch.float64)
    low = float(values.min())
    high = float(values.max())
    is_constant = low == high
    # A mask of zeros and minus infinities is not an activation.
    if not bool(values.isfinite().all()) or (is_constant and not constants):
        return value
    if low < 0 < high or low == high == 0:
        normal = torch.randn(values.shape, generator=generator, dtype=torch.float64, device="cpu")
        size = 1.0 if is_constant else float(values.std())
        return values.mean() + size * normal
    # Numbers of one sign may need it, as under a logarithm.
    if is_constant:
        low *= 0.5
        high *= 1.5
    uniform = torch.rand(values.shape, generator=generator, dtype=torch.float64, device="cpu")
    return low + (high - low) * uniform
