"""Models that cannot be folded, whatever their graph: in training mode, quantized, sharded, compiled, wrapped."""

from __future__ import annotations

from torch import Tensor, nn

from dynorm.errors import ModelError
from dynorm.guard import require_plain_model

_PLAIN = (Tensor, nn.Parameter, nn.Buffer)


def require_foldable(model: nn.Module) -> None:
    """Check that the weights are plain numbers and that the model computes as it will be used.

    Raises:
        ArgumentError: it is no module.
        ModelError: it is in training mode, quantized, sharded, compiled, wrapped or on the meta device.

    Example:
        >>> require_foldable(nn.Linear(2, 2).eval())
    """
    require_plain_model(model)
    training = next((path for path, module in model.named_modules() if module.training), None)
    if training is not None:
        place = f"{training!r} is" if training else "it is"
        raise ModelError(f"the model must be in eval mode, but {place} in training mode: call model.eval()")
    if getattr(model, "is_quantized", False) or getattr(model, "hf_quantizer", None) is not None:
        raise ModelError("the model's weights must be plain numbers, but it is quantized: fold it first, then quantize")
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        whole = type(tensor) in _PLAIN and type(tensor.data) in _PLAIN and not tensor.is_quantized
        if not whole or (tensor.is_floating_point() and tensor.element_size() < 2):
            raise ModelError(
                f"the model's weights must be plain numbers, but {name!r} is {_kind(tensor)}: fold the model before it "
                "is quantized or sharded"
            )
    for path, module in model.named_modules():
        if ".quantized" in type(module).__module__:
            raise ModelError(f"the model's weights must be plain numbers, but {path!r} is quantized: fold it before")


def _kind(tensor: Tensor) -> str:
    inner = type(tensor.data).__name__
    return f"of {tensor.dtype}" if inner in ("Tensor", "Parameter") else f"a {inner}"
