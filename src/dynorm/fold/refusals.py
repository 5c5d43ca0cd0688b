"""Refuse a model that cannot be folded, and a norm whose readers cannot take its weight and bias.

All other refusals are raised where the operator or the rewrite is: see ``RefusedError``.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dynorm.errors import ModelError
from dynorm.fold.site import SiteFold
from dynorm.guard import require_plain_model
from dynorm.stream.graph import Leaf
from dynorm.stream.operators import Reader, RefusedError, refuse_for, require_new_bias
from dynorm.stream.readers import shared_readers

_PLAIN = (Tensor, nn.Parameter, nn.Buffer)

Uses = dict[Leaf, tuple[SiteFold, Reader]]
"""The readers of all sites, by their use of a weight."""


def require_model(model: nn.Module) -> None:
    """Check that the weights are plain numbers and that the model computes as it will be used."""
    require_plain_model(model)
    for path, module in model.named_modules():
        if module.training:
            place = f"{path!r} is" if path else "it is"
            raise ModelError(
                f"the model must be in eval mode, but {place} in training mode: call model.eval()"
            )
        if ".quantized" in type(module).__module__:
            raise _not_plain(f"{path!r} is quantized: fold it before")
    if getattr(model, "is_quantized", False) or getattr(model, "hf_quantizer", None) is not None:
        raise _not_plain("it is quantized: fold it first, then quantize")
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        is_plain = type(tensor) in _PLAIN and type(tensor.data) in _PLAIN
        is_narrow = tensor.is_floating_point() and tensor.element_size() < 2
        if not is_plain or tensor.is_quantized or is_narrow:
            inner = type(tensor.data).__name__
            kind = f"of {tensor.dtype}" if inner in ("Tensor", "Parameter") else f"a {inner}"
            raise _not_plain(
                f"{name!r} is {kind}: fold the model before it is quantized or sharded"
            )


def _not_plain(what: str) -> ModelError:
    return ModelError(f"the model's weights must be plain numbers, but {what}")


def require_readers(fold: SiteFold, uses: Uses, add_bias: bool) -> None:
    """Check that the readers' weights and biases, and the norm's own, are used for nothing else."""
    refuse_for(shared_readers(fold.readers, {leaf: reader for leaf, (_, reader) in uses.items()}))
    for reader in fold.readers:
        for leaf in reader.weight.leaves:
            other, _ = uses[leaf]
            if not (_same(fold.factor, other.factor) and _same(fold.shift, other.shift)):
                raise RefusedError(
                    f"{reader.weight.name}, which reads it, also reads {other.path}, whose weight "
                    "or bias differs"
                )
    if not fold.is_pointwise:
        refuse_for(fold.tensors_refused)
    if fold.shift is not None:
        for reader in fold.readers:
            _require_bias(fold.readers, reader, uses, add_bias)
    if not fold.is_pointwise and not fold.is_exact:
        raise RefusedError("it is not a norm times its weight plus its bias to the last digits")


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return torch.equal(a, b)


def _require_bias(
    readers: Sequence[Reader],
    reader: Reader,
    uses: Uses,
    add_bias: bool,
) -> None:
    """Check that a reader can take a norm's bias into its own, or can be given one."""
    slot = reader.weight
    for leaf in slot.leaves:
        # A bias that is added to the layer would also reach the use that has a bias already.
        if (uses[leaf][1].bias is None) != (reader.bias is None):
            raise RefusedError(
                f"{slot.name}, which reads it, has a bias in one use and none in another"
            )
    if reader.shift_refused is not None:
        raise RefusedError(f"its bias cannot be folded: {reader.shift_refused}")
    bias = reader.bias
    if bias is None:
        if not add_bias:
            raise RefusedError(f"{slot.name} has no bias to take its bias: pass add_bias=True")
        require_new_bias(slot, reader.node)
        return
    refuse_for(bias.refused)
    ours = {other.bias_leaf for other in readers if other.weight is slot}
    for leaf in bias.leaves - ours:
        raise RefusedError(f"{bias.name} is also used by {leaf.place}")
