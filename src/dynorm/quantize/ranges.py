"""The ranges of the point-wise layers' outputs on some batches, which int8 has to cover."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from dynorm.arguments import upcast
from dynorm.errors import DataError
from dynorm.layers import PointwiseNorm
from dynorm.quantize.bounds import Range
from dynorm.replace.specs import require_layers
from dynorm.watch import (
    call,
    hooked,
    iterate,
    require_finite,
    require_plain_model,
    site_tokens,
    token_masks,
    undisturbed,
)


def observed_ranges(model: nn.Module, batches: Iterable[Any]) -> dict[str, Range]:
    """Return the least and largest value that each channel of each point-wise layer gave, for :func:`quantize_`.

    The model runs in eval mode and is left as it was. Padding is left out, as in ``calibrate_``. A layer that no batch
    reaches is left out.

    Args:
        model: a converted model.
        batches: tensors, tuples or dicts, for ``model(x)``, ``model(*x)`` or ``model(**x)``.

    Returns:
        By the layer's path, two tensors of shape (C,) in at least float32.

    Raises:
        ModelError: the model has no point-wise layer, or is wrapped or compiled.
        DataError: a batch is of the wrong kind, the model cannot run it, a layer gives what is not finite, or no layer
            is reached at all.

    Example:
        >>> model = nn.Sequential(dynorm.DyISRU(4), nn.Linear(4, 4))
        >>> low, high = observed_ranges(model, [torch.zeros(1, 4), torch.tensor([[1.0, -1.0, 100.0, 0.0]])])["0"]
        >>> high.round(decimals=2)
        tensor([0.8900, 0.0000, 2.0000, 0.0000])
    """
    require_plain_model(model)
    paths = {layer: path for path, layer in require_layers(model).items()}
    found: dict[str, Range] = {}
    for batch in iterate(batches):
        masks = token_masks(batch)

        def widen(layer: nn.Module, args: tuple[Any, ...], output: Tensor, masks: list[Tensor] = masks) -> None:
            assert isinstance(layer, PointwiseNorm)
            tokens, path = upcast(site_tokens(layer, output, masks)), paths[layer]
            require_finite(path, tokens)
            if len(tokens):
                low, high = tokens.aminmax(dim=0)
                before = found.get(path, (low, high))
                found[path] = low.minimum(before[0]), high.maximum(before[1])

        with undisturbed(model, batch, evaluate=True), hooked(paths, widen):
            call(model, batch)
    if not found:
        raise DataError("the batches must reach at least one point-wise layer, but reached none: give others")
    return found
