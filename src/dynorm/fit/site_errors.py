"""The error of each layer against its norm, which refinement and distillation make smaller."""

import torch
from torch import Tensor, nn

from dynorm.batches import site_tokens
from dynorm.errors import DataError, ModelError
from dynorm.replace.converted import require_layers
from dynorm.replace.original import Outputs


def site_errors(targets: Outputs, outputs: Outputs, masks: list[Tensor]) -> Tensor:
    """Return the ``|f - y|^2 / |y - mean y|^2`` of each site, with targets y and outputs f, padding left out.

    A call without tokens has no error: an expert to which nothing is routed does not count.
    """
    errors = []
    for layer, layer_targets in targets.items():
        for target, output in zip(layer_targets, outputs[layer], strict=False):
            if target.shape != output.shape:
                continue
            y = site_tokens(layer, target, masks)
            f = site_tokens(layer, output, masks)
            if len(y):
                errors.append(unexplained_share(f, y))
    if not errors:
        raise DataError(
            "a batch must reach at least one point-wise layer with tokens, of the original's "
            "shape, but reached none: check both, and whether all of the batch is padding"
        )
    return torch.stack(errors)


def unexplained_share(f: Tensor, y: Tensor) -> Tensor:
    """Return ``|f - y|^2 / |y - mean y|^2`` of values f and the right ones y, both (tokens, C)."""
    size = y.square().sum()
    spread = (y - y.mean(0)).square().sum()
    # A single token has no spread: a hundredth of its size is used instead.
    least = (0.01 * size).clamp_min(torch.finfo(y.dtype).tiny)
    # If all is 0 no error counts.
    least = torch.where(size > 0, least, torch.inf)
    return (f - y).square().sum() / torch.maximum(spread, least)


def require_gradients(model: nn.Module, outputs: Outputs) -> None:
    """Refuse a model that computes a layer with trainable parameters without gradient."""
    if not torch.is_grad_enabled():
        return
    for path, layer in require_layers(model).items():
        is_trained = any(parameter.requires_grad for parameter in layer.parameters())
        if is_trained and not all(output.requires_grad for output in outputs.get(layer, [])):
            raise ModelError(
                "the model's forward must record gradients for every layer that is trained, but "
                f"does not for {path!r}: remove torch.no_grad around it, checkpoint it with "
                "use_reentrant=False, or keep its norm"
            )
