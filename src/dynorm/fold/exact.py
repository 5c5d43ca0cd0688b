"""Whether a norm is, to the last digits, what a rewrite takes it for: tried on tokens of our own, in float64."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dynorm.find.affine import channel_axes
from dynorm.find.recover import NotANormError
from dynorm.find.tokens import CannotProbeError, plain_arithmetic, plain_copy
from dynorm.fold.check import Wide, relative_error
from dynorm.fold.places import Place, fill_neutral
from dynorm.layers.rmsnorm import RMSNorm

_EXACT = 1e-11
# Small tokens show what stands beside the variance, and where.
_SCALES = (1e-3, 1.0, 1e3)


def affine_is_exact(place: Place) -> bool:
    """Whether a norm is its neutral form times its weight plus its bias."""
    module = _wide_copy(place.module)
    neutral = _wide_copy(place.module)
    if module is None or neutral is None:
        return False
    tensors = {**dict(neutral.named_parameters()), **dict(neutral.named_buffers())}
    originals = {**dict(place.module.named_parameters()), **dict(place.module.named_buffers())}
    names = {id(tensor): name for name, tensor in originals.items()}
    with torch.no_grad():
        for tensor, value in fill_neutral(place):
            tensors[names[id(tensor)]].fill_(value)
    for x in _tokens(place):
        core = _run(neutral, x)
        expected = core if place.weight is None else core * _along(place, place.weight, x)
        expected = expected if place.bias is None else expected + _along(place, place.bias, x)
        if not relative_error([_run(module, x)], [expected]) <= _EXACT:
            return False
    return True


def center_is_exact(place: Place) -> bool:
    """Whether a LayerNorm is an RMSNorm of the same eps on what has no mean."""
    module = _wide_copy(place.module)
    if module is None:
        return False
    assert isinstance(place.site.dim, int)
    norm = RMSNorm(place.site.normalized_shape, place.site.eps, False, dim=place.site.dim, dtype=torch.float64)
    for x in _tokens(place):
        expected = _run(norm, x - x.mean(place.axis(x.ndim), keepdim=True))
        expected = expected if place.weight is None else expected * _along(place, place.weight, x)
        expected = expected if place.bias is None else expected + _along(place, place.bias, x)
        if not relative_error([_run(module, x)], [expected]) <= _EXACT:
            return False
    return True


def _wide_copy(module: nn.Module) -> nn.Module | None:
    try:
        return plain_copy(module, torch.float64)
    except (CannotProbeError, NotANormError, RuntimeError, TypeError):
        return None


def _tokens(place: Place) -> list[Tensor]:
    rank = len(place.site.input_shape)
    sizes = [2] * rank
    sizes[channel_axes(place.site)[0]] = place.site.normalized_shape[0]
    generator = torch.Generator().manual_seed(0)
    return [scale * (torch.randn(sizes, generator=generator, dtype=torch.float64) + 0.5) for scale in _SCALES]


def _run(module: nn.Module, x: Tensor) -> Tensor:
    device = next((t.device for t in (*module.parameters(), *module.buffers())), x.device)
    with plain_arithmetic(module), Wide():
        y: Tensor = module(x.to(device)).to(x.device, x.dtype)
    return y


def _along(place: Place, vector: Tensor, x: Tensor) -> Tensor:
    view = [1] * x.ndim
    view[place.axis(x.ndim)] = -1
    return vector.view(view)
