"""Choose the tensor of a model's output to compare, and make one vector of it per sample."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from dynorm.batches import Batch, token_masks
from dynorm.errors import DataError


def output_tensor(
    output: Any,
    batch: Batch | None = None,
) -> tuple[str | None, Tensor]:
    """Return the tensor of a model's output that is compared, with its name.

    The first that exists of: "logits"; "class_token" if ``batch`` has images;
    "last_hidden_state"; the first tensor that is not a single number, else that number.
    """
    entries = output
    if not isinstance(output, Mapping):
        names = ("logits", "pooler_output", "last_hidden_state")
        entries = {name: getattr(output, name, None) for name in names}
    hidden = entries.get("last_hidden_state")
    class_token = None
    pixels = batch.get("pixel_values") if isinstance(batch, Mapping) else None
    if isinstance(pixels, Tensor) and pixels.ndim == 4:
        # As the model pools it, or else its first token.
        pooled = entries.get("pooler_output")
        if isinstance(pooled, Tensor):
            class_token = pooled.flatten(1)
        elif isinstance(hidden, Tensor) and hidden.ndim == 3:
            class_token = hidden[:, 0]
    candidates = [
        ("logits", entries.get("logits")),
        ("class_token", class_token),
        ("last_hidden_state", hidden),
    ]
    for name, tensor in candidates:
        if isinstance(tensor, Tensor):
            return name, require_floating(tensor)
    others: Iterable[object] = ()
    if isinstance(output, Mapping):
        others = output.values()
    elif isinstance(output, (tuple, list)):
        others = output
    # A loss in front of the others has no samples: it is the last choice.
    for tensor in sorted(others, key=lambda part: isinstance(part, Tensor) and part.ndim == 0):
        if isinstance(tensor, Tensor):
            return None, require_floating(tensor)
    return None, require_floating(output)


def require_floating(tensor: object) -> Tensor:
    """Return the tensor, a single number as (1, 1); refuse anything but floating point tensors."""
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        got = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
        raise DataError(
            f"the output must hold a floating point tensor to compare, got {got}: let "
            "the model return one"
        )
    if tensor.ndim == 0:
        return tensor.reshape(1, 1)
    return tensor


def predicted_ids(batch: Mapping[str, object]) -> str:
    """Return the key of the token ids that a model's logits predict."""
    if "decoder_input_ids" in batch:
        return "decoder_input_ids"
    return "input_ids"


def unpadded(tensor: Tensor, batch: Batch) -> Tensor:
    """Return which entries of the first two axes are tokens, by the last mask that fits.

    The decoder's mask comes after the encoder's. Without a mask all are tokens.
    """
    shape = tensor.shape[:2]
    valid = torch.ones(shape, dtype=torch.bool, device="cpu")
    for mask in token_masks(batch):
        if mask.shape == shape:
            valid = mask
    return valid.to(tensor.device)


def sample_vectors(tensor: Tensor, batch: Batch, *, pooled: bool) -> Tensor:
    """Return one vector per sample, (B, D), without padding.

    Samples that are only padding are left out.
    """
    if tensor.dtype != torch.float64:
        tensor = tensor.float()
    if tensor.ndim != 3:
        if pooled:
            return normalize(tensor, dim=-1)
        # The size and not -1, which torch cannot infer for a batch without samples.
        return tensor.reshape(len(tensor), math.prod(tensor.shape[1:]))
    valid = unpadded(tensor, batch)
    has_tokens = valid.any(1)
    tensor = torch.where(valid[:, :, None], tensor, 0)[has_tokens]
    if not pooled:
        return tensor.flatten(1)
    counts = valid[has_tokens].sum(1, keepdim=True)
    return normalize(tensor.sum(1) / counts, dim=-1)


def relative_error(tensors: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """Return the largest of :func:`relative_errors`."""
    return max(relative_errors(tensors, exact), default=0.0)


def relative_errors(tensors: Sequence[Tensor], exact: Sequence[Tensor]) -> list[float]:
    """Return |tensor - exact| / |exact| of each pair, in the Euclidean norm; infinite if shapes differ."""
    if [tensor.shape for tensor in tensors] != [tensor.shape for tensor in exact]:
        return [math.inf]
    return [_relative_error(a, b) for a, b in zip(tensors, exact, strict=True)]


def _relative_error(tensor: Tensor, exact: Tensor) -> float:
    finite = exact.isfinite()
    # Infinities and NaN must be the same in both, else the error is infinite.
    if not torch.equal(finite, tensor.isfinite()):
        return math.inf
    if not torch.equal(tensor[~finite].nan_to_num(), exact[~finite].nan_to_num()):
        return math.inf
    size = float(exact[finite].norm())
    difference = float((tensor[finite] - exact[finite]).norm())
    if size:
        return difference / size
    return math.inf if difference else 0.0
