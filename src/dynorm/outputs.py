"""The tensor of a model's output that counts, and one vector of it per sample."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from dynorm.batches import token_masks
from dynorm.errors import DataError


def output_tensor(output: Any, batch: Any = None) -> tuple[str | None, Tensor]:
    """Return the tensor of a model's output that is compared, with its name.

    It is the "logits", else of a ``batch`` of images the "class_token", else the
    "last_hidden_state", or first tensor.
    """
    names = ("logits", "pooler_output", "last_hidden_state")
    known = (
        output
        if isinstance(output, Mapping)
        else {name: getattr(output, name, None) for name in names}
    )
    logits, pooled, hidden = map(known.get, names)
    pixels = batch.get("pixel_values") if isinstance(batch, Mapping) else None
    token = None
    if isinstance(pixels, Tensor) and pixels.ndim == 4:
        # As the model pools it, or else its first token.
        first = hidden[:, 0] if isinstance(hidden, Tensor) and hidden.ndim == 3 else None
        token = pooled.flatten(1) if isinstance(pooled, Tensor) else first
    values = output.values() if isinstance(output, Mapping) else output
    rest = values if isinstance(output, (Mapping, tuple, list)) else [output]
    found = [("logits", logits), ("class_token", token), ("last_hidden_state", hidden)]
    for name, tensor in [*found, *((None, value) for value in rest)]:
        if isinstance(tensor, Tensor):
            return name, require_floating(tensor)
    return None, require_floating(output)


def require_floating(tensor: Any) -> Tensor:
    """Return the tensor, a single number as (1, 1), or refuse what is not a floating point tensor."""
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        got = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
        raise DataError(
            f"the output must hold a floating point tensor to compare, got {got}: pass output="
        )
    return tensor.reshape(1, 1) if tensor.ndim == 0 else tensor


def predicted_ids(batch: Mapping[str, Any]) -> str:
    """Return the key of the token ids that a model's logits predict."""
    return "decoder_input_ids" if "decoder_input_ids" in batch else "input_ids"


def unpadded(tensor: Tensor, batch: Any) -> Tensor:
    """Return where the first two axes hold a token: everywhere where no mask fits; the decoder's mask goes first."""
    masks = [mask for mask in token_masks(batch) if mask.shape == tensor.shape[:2]]
    return (masks or [torch.ones(tensor.shape[:2], dtype=torch.bool, device="cpu")])[-1].to(
        tensor.device
    )


def sample_vectors(tensor: Tensor, batch: Any, *, pooled: bool) -> Tensor:
    """Return one vector per sample, (B, D), without padding; samples of nothing but padding are left out."""
    tensor = tensor if tensor.dtype == torch.float64 else tensor.float()
    if tensor.ndim != 3:
        return normalize(tensor, dim=-1) if pooled else tensor.reshape(len(tensor), -1)
    valid = unpadded(tensor, batch)
    tensor = torch.where(valid[:, :, None], tensor, 0)[valid.any(1)]
    if not pooled:
        return tensor.flatten(1)
    return normalize(tensor.sum(1) / valid[valid.any(1)].sum(1, keepdim=True), dim=-1)
