"""Swap modules of a model, and use the norm that a layer replaced."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from dynorm.arguments import writes_of
from dynorm.errors import ModelError
from dynorm.find.affine import affine_parts
from dynorm.find.tokens import tensor_like
from dynorm.guard import HOOK_TABLES
from dynorm.layers import PointwiseNorm
from dynorm.replace.converted import Replaced, is_ours, replaced_by

_NESTED = "_dynorm_use_nested_tensor"


def swap_(model: nn.Module, new: Mapping[Any, Any]) -> None:
    """Replace each module, then each parameter, that is a key of ``new``, at every path."""
    for kind in ("_modules", "_parameters"):
        for parent in list(model.modules()):
            table = vars(parent)[kind]
            for name, child in table.items():
                if child is not None and child in new:
                    table[name] = new[child]
    # nn.TransformerEncoder packs padded batches into nested tensors, which only the fused layers
    # know.
    for encoder in model.modules():
        if not isinstance(encoder, nn.TransformerEncoder):
            continue
        if not any(is_ours(part) or isinstance(part, PointwiseNorm) for part in encoder.modules()):
            encoder.use_nested_tensor = encoder.__dict__.pop(_NESTED, encoder.use_nested_tensor)
        elif not hasattr(encoder, _NESTED):
            setattr(encoder, _NESTED, encoder.use_nested_tensor)
            encoder.use_nested_tensor = False


def take_over_(layer: nn.Module, before: nn.Module, replaced: Replaced | None) -> None:
    """Give ``layer`` the hooks and mode of the module ``before``, and the norm to restore."""
    for name in (*HOOK_TABLES, "_is_full_backward_hook"):
        # The same dict, not a copy, so that the user's handle removes its hook here too.
        setattr(layer, name, getattr(before, name))
    layer.train(before.training)
    if replaced is not None:
        # Not in the state dict, but copied and pickled with the layer.
        layer.__dict__["replaced"] = replaced


def original_(layer: PointwiseNorm) -> nn.Module:
    """Return the norm that ``layer`` replaced, on the layer's device and in its dtypes."""
    replaced = replaced_by(layer)
    assert replaced is not None
    norm = replaced.module
    # The constants may be kept in another dtype than the weight, whose dtype is the norm's.
    like = next(layer.parameters()) if layer.weight is None else layer.weight
    norm_tensor = tensor_like(norm, layer)
    if (norm_tensor.device, norm_tensor.dtype) != (like.device, like.dtype):
        norm.to(device=like.device, dtype=like.dtype)
    part = affine_parts(norm, replaced.site).get("bias")
    if part is not None and layer.bias is not None and part.tensor.dtype != layer.bias.dtype:
        part.tensor.data = part.tensor.data.to(layer.bias.dtype)
    return norm


def original_forward(layer: PointwiseNorm, *args: Tensor) -> Tensor:
    """Return the output of the norm that ``layer`` replaced."""
    writes = [writes_of(arg) for arg in args]
    # forward, not a call: layer and norm share their hooks, those of dynorm among them.
    output: Tensor = original_(layer).forward(*args)
    # Such a norm may have been found in bfloat16, and cast to float32 since.
    if [writes_of(arg) for arg in args] != writes:
        raise ModelError(
            f"a norm must not modify its input, but the {type(original_(layer)).__name__} that a "
            f"layer replaced does in {args[0].dtype}, to which the model was cast: convert the "
            "original model in that dtype, in which find_norms refuses this norm"
        )
    return output
