"""Random inputs like an example, for a check on what the model has not seen."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dynorm.fold.nested import held_tensors, mapped

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def fresh(inputs: Inputs, seed: int, integers: bool = True, constants: bool = True) -> Inputs:
    """Return random inputs like an example: of its classes, shapes and dtypes, numbers in its range, masks as they are.

    Args:
        inputs: the example.
        seed: of the random numbers.
        integers: draw integers anew.
        constants: draw tensors anew in which all floating-point numbers are the same.

    Example:
        >>> fresh(((torch.tensor([3, 9, 5]), torch.tensor([1, 0, 1])), {}), seed=1)[0][1]
        tensor([1, 0, 1])
    """
    generator = torch.Generator().manual_seed(seed)
    return mapped(inputs, lambda tensor: _renewed(tensor, generator, integers, constants))


def is_same(inputs: Inputs, others: Inputs) -> bool:
    """Whether two inputs of one structure hold the same numbers.

    Example:
        >>> is_same(((torch.ones(2),), {}), ((torch.zeros(2),), {}))
        False
    """
    pairs = zip(held_tensors(inputs), held_tensors(others), strict=True)
    # Other layouts are never drawn anew.
    plain = ((a, b) for a, b in pairs if a.layout == torch.strided and not a.is_nested)
    return all(a.nan_to_num().equal(b.nan_to_num()) for a, b in plain)


def _renewed(value: Tensor, generator: torch.Generator, integers: bool, constants: bool) -> Tensor:
    same = value.detach().clone()
    if value.is_nested or value.layout != torch.strided or value.is_quantized or not value.numel():
        return same
    if value.is_floating_point():
        return _renewed_floats(same, generator, constants).to(value.device, value.dtype)
    if not integers or value.dtype not in _INTEGERS:
        return same
    low, high = int(value.min()), int(value.max())
    # Zeros and ones are a mask.
    if low >= 0 and high <= 1:
        return same
    return torch.randint(low, high + 1, value.shape, generator=generator).to(value.device, value.dtype)


def _renewed_floats(value: Tensor, generator: torch.Generator, constants: bool) -> Tensor:
    wide = value.to("cpu", torch.float64)
    low, high = float(wide.min()), float(wide.max())
    # A mask of zeros and minus infinities is no activation.
    if not bool(wide.isfinite().all()) or (low == high and not constants):
        return value
    if low < high and low < 0:
        return wide.mean() + wide.std() * torch.randn(wide.shape, generator=generator, dtype=torch.float64)
    if low == high == 0:
        return torch.randn(wide.shape, generator=generator, dtype=torch.float64)
    # What has one sign may need it, as under a logarithm.
    low, high = (low, high) if low < high else (0.5 * low, 1.5 * high)
    return low + (high - low) * torch.rand(wide.shape, generator=generator, dtype=torch.float64)
